"""Weights in 8 and 4 bits: the kernels equal plain arithmetic on the codes, loading stays small, and what cannot be
done is refused.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.config import QUANTISED
from foretoken.errors import ConfigError, InputError, ModelError
from foretoken.model import quant
from foretoken.model.attention.packed import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.layers import Embedding, Linear
from foretoken.model.loader import load_decoder, save_checkpoint
from foretoken.model.open import open_model
from foretoken.model.quant import Int4Weight, Int8Weight, Quantiser, QuantWeight, check_quant, group_codes, row_codes
from tests.helpers.checkpoints import tiny_checkpoint, token_ids, variant

# Relative rounding of one number, times a few: sums are kept in float32 by every kernel.
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GROUP_OF = {32: 32, 64: 64, 96: 32, 128: 64, 192: 64}


def quantise(weight: Tensor, kind: str) -> QuantWeight:
    """In three pieces, as a merged matrix comes, for activations in the weight's own dtype."""
    return Quantiser(kind, weight.dtype).matrix(weight.split(len(weight) // 3 + 1))


def numbers(weight: Tensor, kind: str) -> Tensor:
    """The float32 matrix that the codes stand for."""
    codes, width = weight.float().clone(), weight.shape[1]
    if kind == "int8" or width not in GROUP_OF:
        return row_codes(codes, weight.dtype).float()[:, None] * codes
    scales = group_codes(codes, GROUP_OF[width], weight.dtype).float()
    return scales.repeat_interleave(GROUP_OF[width], 1) * codes


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(("num_rows", "width"), [(97, 32), (64, 96), (601, 64), (1100, 192), (33, 48)])
def test_products_equal_plain_arithmetic(kind: str, num_rows: int, width: int, dtype: torch.dtype) -> None:
    """For few rows, many rows and none, a number of outputs that no kernel likes, more outputs than are converted at a
    time.
    """
    torch.manual_seed(0)
    weight, bias = torch.randn(num_rows, width).to(dtype), torch.randn(num_rows).to(dtype)
    packed, twin = quantise(weight, kind), numbers(weight, kind)
    for count in (0, 1, 2, 7, 23, 24, 65):
        x = torch.randn(count, width).to(dtype)
        expected = F.linear(x.float(), twin)
        assert packed.multiply(x, None).dtype == dtype
        torch.testing.assert_close(
            packed.multiply(x, None).float(), expected, atol=ROUNDING[dtype] * width**0.5, rtol=ROUNDING[dtype]
        )
        with_bias = packed.multiply(x, bias).float()
        torch.testing.assert_close(
            with_bias, expected + bias.float(), atol=ROUNDING[dtype] * width**0.5, rtol=ROUNDING[dtype]
        )


def test_the_layout_does_not_depend_on_how_many_rows_are_packed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(700, 64)
    pieces = quantise(weight, "int4")
    monkeypatch.setattr(quant, "_BLOCK_ROWS", 10_000)
    whole = quantise(weight, "int4")
    assert isinstance(pieces, Int4Weight)
    assert isinstance(whole, Int4Weight)
    assert torch.equal(pieces.packed, whole.packed)
    assert torch.equal(pieces.grid, whole.grid)


def test_a_matrix_that_no_group_divides_is_kept_in_int8() -> None:
    assert isinstance(quantise(torch.randn(16, 48), "int4"), Int8Weight)
    assert isinstance(quantise(torch.randn(16, 96), "int4"), Int4Weight)


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


@pytest.mark.parametrize("kind", QUANTISED)
def test_zeros_stay_zeros(kind: str) -> None:
    """Exactly, among other numbers and alone: a pruned or widened checkpoint lives on its zeros."""
    weight = torch.randn(32, 64)
    weight[::2, ::3] = 0
    weight[5] = 0
    held = numbers(weight, kind)
    assert (held[weight == 0] == 0).all()
    assert torch.isfinite(held).all()
    assert not quantise(weight, kind).multiply(torch.randn(3, 64), None)[:, 5].any()


def test_rows_of_a_table() -> None:
    weight = torch.randn(50, 24)
    table, index = Quantiser("int4", weight.dtype).table([weight]), torch.tensor([7, 0, 49, 7])
    torch.testing.assert_close(table.rows(index), numbers(weight, "int8")[index])
    assert table.rows(index[:0]).shape == (0, 24)


def as_numbers(decoder: Decoder, kind: str) -> Decoder:
    """The decoder with every matrix replaced by what its codes stand for."""
    with torch.no_grad():
        tied = decoder.lm_head.weight is decoder.embedding.weight
        for module in decoder.modules():
            if isinstance(module, Embedding) or (
                isinstance(module, Linear) and not (tied and module is decoder.lm_head)
            ):
                assert module.weight is not None
                module.weight.copy_(numbers(module.weight, "int8" if isinstance(module, Embedding) else kind))
    return decoder


def logits(decoder: Decoder, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return decoder.logits(
            decoder(torch.tensor(ids), torch.arange(len(ids)), PackedAttention(decoder.config, 1, len(ids))).last
        )


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "qwen3"])
def test_a_quantised_decoder_equals_its_float_twin(tmp_path: Path, name: str, kind: str) -> None:
    """Merged matrices, biases, a tied head; short and long runs of rows."""
    folder = variant(tmp_path, name, hidden_size=64)
    decoder, full = load_decoder(folder, quant=kind), load_decoder(folder)
    assert all(module.packed is not None for module in decoder.modules() if isinstance(module, Linear | Embedding))
    assert any(isinstance(module.packed, Int4Weight) for module in decoder.modules() if isinstance(module, Linear)) == (
        kind == "int4"
    )
    for count in (5, 40):
        ids = token_ids(count)
        before = logits(full, ids)
        expected = logits(as_numbers(load_decoder(folder), kind), ids)
        torch.testing.assert_close(logits(decoder, ids), expected, atol=1e-4, rtol=0)
        assert (expected - before).abs().max() > 1e-2  # the test means something


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
    outputs = 2 * (128 + 2 * 64 + 128 + 2 * 256 + 128)
    table, norms = 512 * 128, 5 * 128 * 2
    for tied in (False, True):
        folder = tiny_checkpoint(tmp_path / str(tied), "llama", tie_word_embeddings=tied, **sizes)
        found = {
            kind: open_model(folder, cache_tokens=64, weights=kind, as_draft=True) for kind in ("auto", *QUANTISED)
        }
        assert len({model.num_parameters for model in found.values()}) == 1
        int8_table = table + 2 * 512
        head8, head4 = (0, 0) if tied else (int8_table, table // 2 + table // 64 * 4)
        assert found["int8"].weight_bytes == matrices + 2 * outputs + norms + int8_table + head8
        assert found["int4"].weight_bytes == matrices // 2 + matrices // 64 * 4 + norms + int8_table + head4
        for kind in QUANTISED:
            assert found[kind].weight_bytes - found[kind].step_bytes == (0 if tied else int8_table)
        plain = load_decoder(folder, pack=False)
        assert plain.weight_bytes == 2 * found["auto"].num_parameters
        assert plain.weight_bytes - plain.step_bytes == (0 if tied else 2 * table)
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
def test_peak_memory_is_that_of_the_codes(tmp_path: Path) -> None:
    """Some working space comes on top; the 16-bit model is never whole in memory, and no holes are left where parts of
    it were.
    """
    small = tiny_checkpoint(tmp_path / "small", "llama", dtype=torch.bfloat16)
    sizes = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "head_dim": 64}
    large = tiny_checkpoint(tmp_path / "large", "llama", dtype=torch.bfloat16, **sizes)
    stored = (large / "model.safetensors").stat().st_size
    assert stored > 150e6
    for kind, share in (("int8", 0.51), ("int4", 0.29)):
        run = subprocess.run(
            [sys.executable, "-c", _PEAK, str(small), str(large), kind], capture_output=True, text=True, check=True
        )
        held, peak = map(int, run.stdout.split()[-2:])
        assert held < share * stored
        assert 0.5 * held < peak < held + 0.1 * stored


def test_what_has_no_kernel_is_refused(tmp_path: Path) -> None:
    native, other = tiny_checkpoint(tmp_path / "native", "llama"), tiny_checkpoint(tmp_path / "other", "gpt_neox")
    with pytest.raises(
        ConfigError,
        match=r"weights='int8': .*runs through transformers, which has no quantised weights here; load it in bfloat16",
    ):
        open_model(other, weights="int8")
    with pytest.raises(
        ConfigError, match="weights='int4': a quantised draft has no strict numerics; use numerics='default'"
    ):
        open_model(native, weights="int4", numerics="strict", as_draft=True)
    with pytest.raises(InputError, match="weights='int8': does not go with dtype='float64'; take bfloat16"):
        open_model(native, "float64", weights="int8")
    with pytest.raises(InputError, match="weights='int3': choose one of auto, int8, int4"):
        open_model(native, weights="int3")
    with pytest.raises(
        InputError,
        match="weights='int8': runs on the CPU only and this model goes to cuda:1; load it in bfloat16 there",
    ):
        check_quant("int8", torch.bfloat16, torch.device("cuda:1"))


def test_a_quantised_decoder_is_not_written(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_checkpoint(tmp_path, "llama"), quant="int8")
    with pytest.raises(ModelError, match="load it without quant"):
        save_checkpoint(decoder, decoder.config, tmp_path / "out")
