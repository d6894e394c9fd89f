"""Codes in 8 and 4 bits are the nearest, loading them stays small, and what cannot be done is refused or said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foretoken.config import QUANTISED
from foretoken.errors import ConfigError, InputError, ModelError
from foretoken.kernels import build
from foretoken.kernels.build import KernelWarning
from foretoken.model.loader import load_decoder
from foretoken.model.matrices.quant import check_quant, drafts_at_speed, group_codes, grouped_bytes, row_codes
from foretoken.model.open import open_model
from foretoken.model.saving import save_checkpoint
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.usual import some_of

# Relative rounding of a scale, times a few.
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ROUNDING)
def test_codes_are_the_nearest(dtype: torch.dtype) -> None:
    """Half a step off at most; in 4 bits a whole one at the end that has no code. The slack is the rounding of the
    scales.
    """
    torch.manual_seed(1)
    weight = (torch.randn(40, 64) * torch.logspace(-4, 2, 40)[:, None]).to(dtype)
    codes = weight.float().clone()
    scales = row_codes(codes, dtype).float()[:, None]
    off = (codes * scales - weight.float()).abs() / scales
    assert off.max() <= 0.5 + 127 * ROUNDING[dtype] / 4
    assert codes.abs().max() == 127
    codes = weight.float().clone()
    scales = group_codes(codes, 32, dtype).float().repeat_interleave(32, 1)
    off = (codes * scales - weight.float()).abs() / scales.abs()
    assert off[codes < 7].max() <= 0.5 + 8 * ROUNDING[dtype] / 4
    assert off.max() <= 1 + 8 * ROUNDING[dtype] / 4
    assert codes.min() == -8


def test_bytes_by_format(tmp_path: Path) -> None:
    """What is shared counts once; a table of embeddings of its own is not read by a step."""
    sizes = {
        "dtype": torch.bfloat16,
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 512,
        "num_hidden_layers": 2,
    }
    matrices = 2 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256)  # of the layers
    table, norms = grouped_bytes("int8", 512, 128), 5 * 128 * 2
    for tied in (False, True):
        folder = tiny_checkpoint(tmp_path / str(tied), "llama", tie_word_embeddings=tied, **sizes)
        found = {kind: open_model(folder, cache_tokens=64, weights=kind) for kind in ("auto", *QUANTISED)}
        assert len({model.num_parameters for model in found.values()}) == 1
        for kind, bits in (("int8", 8.5), ("int4", 4.5)):
            head = 0 if tied else grouped_bytes(kind, 512, 128)
            assert found[kind].weight_bytes == matrices * bits / 8 + norms + table + head
            assert found[kind].weight_bytes - found[kind].step_bytes == (0 if tied else table)
        plain = load_decoder(folder, pack=False)
        assert plain.weight_bytes == 2 * found["auto"].num_parameters
        assert plain.weight_bytes - plain.step_bytes == (0 if tied else 2 * 512 * 128)
        assert found["auto"].step_bytes == plain.step_bytes  # packed or not


_PEAK = """
import sys, torch
from pathlib import Path
from foretoken.model.loader import load_decoder

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_num_threads(1)
load_decoder(Path(sys.argv[1]), quant=sys.argv[3])  # libraries and kernels are in memory now
before = peak()
decoder = load_decoder(Path(sys.argv[2]), quant=sys.argv[3])
print(decoder.weight_bytes, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("kind", "share"), some_of([("int8", 0.54), ("int4", 0.29)], {("int4", 0.29)}))
def test_peak_memory_is_that_of_the_codes(tmp_path: Path, kind: str, share: float) -> None:
    """Some working space comes on top; the 16-bit model is never whole in memory, and no holes are left where parts of
    it were.
    """
    small = tiny_checkpoint(tmp_path / "small", "llama", dtype=torch.bfloat16)
    sizes = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "head_dim": 64}
    large = tiny_checkpoint(tmp_path / "large", "llama", dtype=torch.bfloat16, **sizes)
    stored = (large / "model.safetensors").stat().st_size
    assert stored > 150e6
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(small), str(large), kind], capture_output=True, text=True, check=True
    )
    held, peak = map(int, run.stdout.split()[-2:])
    assert held < share * stored
    assert 0.5 * held < peak < held + 0.15 * stored  # large pages scatter by a tenth


def test_what_has_no_kernel_is_refused(tmp_path: Path) -> None:
    native, other = tiny_checkpoint(tmp_path / "native", "llama"), tiny_checkpoint(tmp_path / "other", "gpt_neox")
    with pytest.raises(
        ConfigError,
        match=r"weights='int8': .*runs through transformers, which has no quantised weights here; load it in bfloat16",
    ):
        open_model(other, weights="int8")
    with pytest.raises(InputError, match="weights='int8': does not go with dtype='float64'; take bfloat16"):
        open_model(native, "float64", weights="int8")
    with pytest.raises(InputError, match="weights='int3': choose one of auto, int8, int4"):
        open_model(native, weights="int3")
    with pytest.raises(
        InputError,
        match="weights='int8': runs on the CPU only and this model goes to cuda:1; load it in bfloat16 there",
    ):
        check_quant("int8", torch.bfloat16, torch.device("cuda:1"))


def test_drafters_are_not_quantised_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning with the remedy; what no kernel takes is refused all the same, by the option's own name."""
    assert drafts_at_speed("int8", torch.bfloat16, CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(KernelWarning, match=r"a drafter in int8 .* not quantised: .*no-such-compiler.* name another"):
        assert not drafts_at_speed("int8", torch.bfloat16, CPU)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "COMPILERS", ())
    with pytest.warns(KernelWarning, match="install g"):
        assert not drafts_at_speed("int4", torch.float32, CPU)
    with pytest.raises(InputError, match="draft_dtype='int4': runs on the CPU only and this model goes to cuda"):
        drafts_at_speed("int4", torch.bfloat16, torch.device("cuda"))


def test_a_quantised_decoder_is_not_written(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_checkpoint(tmp_path, "llama"), quant="int8")
    with pytest.raises(ModelError, match="load it without quant"):
        save_checkpoint(decoder, decoder.config, tmp_path / "out")
