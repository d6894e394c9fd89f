"""Experts on disk: one tensor for all of a layer, codes of MXFP4, and checkpoints that are broken."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.experts import Expert, Experts
from foretoken.model.gguf.weights import GgufWeights
from foretoken.model.interface import MixtureModel, Segment
from foretoken.model.loader import load_decoder, open_weights, read_config
from foretoken.model.matrices.codes import mxfp4_codes
from foretoken.model.matrices.grouped_kernel import MergedWeight
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import token_ids, transformers_logits, variant
from tests.helpers.gguf_files import write_gguf
from tests.helpers.usual import some_of

MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss")
FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def logits_of(path: Path, weights: str = "auto", dtype: str = "float32") -> Tensor:
    model = open_model(path, dtype, "cpu", 512, weights=weights)
    ids = token_ids(40)
    model.open(0)
    assert model.reserve(0, len(ids))
    with torch.inference_mode():
        return model.forward(torch.tensor(ids), [Segment(0, len(ids), num_logits=len(ids))]).logits


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> Path:
    """The checkpoint in `folder` with other tensors and other keys."""
    state = load_file(folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in change(state).items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers 5 holds the experts of Qwen in memory."""
    found = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] for name in state if ".experts." in name}):
        numbers = range(len([name for name in state if name.startswith(f"{prefix}.experts") and "gate" in name]))
        parts = {
            part: torch.stack([state[f"{prefix}.experts.{number}.{part}_proj.weight"] for number in numbers])
            for part in ("gate", "up", "down")
        }
        found[f"{prefix}.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        found[f"{prefix}.experts.down_proj"] = parts["down"]
    return found


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe-options"])
def test_one_tensor_for_all_experts_of_a_layer(tmp_path: Path, name: str) -> None:
    folder = variant(tmp_path, name)
    expected, kinds = logits_of(folder), open_weights(folder).kinds()
    rewritten(folder, fused)
    assert torch.equal(logits_of(folder), expected)
    assert open_weights(folder).kinds()[0].num_bytes == kinds[0].num_bytes


def packed(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """gpt-oss's experts at random in MXFP4, and the numbers that the format says they are."""
    random = np.random.default_rng(0)
    codes, numbers = dict(state), dict(state)
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state[name].shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        exponents = random.integers(122, 126, (experts, outputs, inputs // 32), dtype=np.uint8)
        floats = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(experts, outputs, inputs)
        table = np.array([*FLOATS, *(-value for value in FLOATS)], np.float32)
        full = table[floats] * np.exp2(exponents.astype(np.float32) - 127).repeat(32, axis=-1)
        del codes[name]
        codes |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(exponents)}
        numbers[name] = torch.from_numpy(full).transpose(1, 2)
    return codes, numbers


@pytest.fixture
def gpt_oss(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the same numbers as float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    found = [variant(tmp_path / kind, "gpt-oss", **sizes) for kind in ("codes", "numbers")]
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    for folder, place, config in zip(found, (0, 1), (method, {}), strict=True):
        rewritten(folder, lambda state, place=place: packed(state)[place], **config)  # type: ignore[misc]
    return found[0], found[1]


def test_mxfp4_stands_for_the_numbers_of_the_format(gpt_oss: tuple[Path, Path]) -> None:
    codes, numbers = gpt_oss
    expected = load_decoder(numbers, "float32", pack=False).state_dict()
    for name, tensor in load_decoder(codes, "float32", pack=False).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert open_weights(codes).kinds()[0].name == "F32"
    assert {kind.name for kind in open_weights(codes).kinds()} == {"F32", "MXFP4"}


def test_mxfp4_is_multiplied_by_its_codes(gpt_oss: tuple[Path, Path]) -> None:
    codes, numbers = gpt_oss
    experts = load_decoder(codes, "float32").layers[0].mlp
    assert isinstance(experts, Experts)
    first = experts.experts[0]
    assert isinstance(first, Expert)
    assert isinstance(first.gate_up_proj.packed, MergedWeight)
    assert {part.bits for part in first.gate_up_proj.packed.parts} == {5}
    found, expected = logits_of(codes), transformers_logits(numbers, token_ids(40))
    assert (found - expected).norm() < 0.05 * expected.norm()  # activations have 8 bits


def test_mxfp4_codes_cover_every_float_and_exponent() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    exponents = np.array([[1, 2, 60, 127, 128, 200, 240, 250, *range(100, 108)]], np.uint8)
    packed = np.concatenate((exponents[..., None], np.empty_like(blocks)), axis=-1)
    low, high = blocks & 15, blocks >> 4
    floats = np.stack((low, high), axis=-1).reshape(1, 16, 32)
    packed[..., 1:] = floats[..., :16] | floats[..., 16:] << 4
    expected = quants.dequantize(packed.reshape(1, -1), GGMLQuantizationType.MXFP4)
    assert torch.equal(mxfp4_codes(blocks, exponents).dequantised(), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("name", "kind"),
    some_of(
        itertools.product(MIXTURES, ("Q8_0", "Q4_0", "Q4_K", "MXFP4")),
        {(name, kind) for i, name in enumerate(MIXTURES) for kind in (("Q8_0", "Q4_K"), ("Q4_0", "MXFP4"))[i % 2]},
    ),
)
def test_quantised_experts_of_a_file_are_what_the_package_makes_of_them(tmp_path: Path, name: str, kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    sizes |= {"moe_intermediate_size": 256} if name.startswith("qwen") else {}
    sizes |= {"shared_expert_intermediate_size": 256} if name == "qwen2-moe" else {}
    sizes |= {"layer_types": ["sliding_attention"]} if name == "gpt-oss" else {}
    path = write_gguf(tmp_path / "model.gguf", variant(tmp_path / "hf", name, **sizes), kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights, num_seen = GgufWeights(path), 0
    parts = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    for own in weights.names:
        if ".experts." not in own or own.endswith("bias"):
            continue
        number, part = own.split(".experts.")[1].split(".")[:2]
        tensor = stored[f"blk.0.ffn_{parts[part]}_exps.weight"]
        expected = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type)))[int(number)]
        assert torch.equal(weights.read(own, tuple(expected.shape)), expected)
        assert weights.grouped_rows(own) is not None
        num_seen += 1
    config = read_config(path).experts
    assert config is not None
    assert num_seen == 3 * config.num_experts
    logits_of(path)  # and it runs


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_quantised_at_load(tmp_path: Path, name: str, weights: str) -> None:
    """All matrices of experts, and no router."""
    folder = variant(tmp_path, name)
    experts = load_decoder(folder, "float32", quant=weights).layers[0].mlp
    assert isinstance(experts, Experts)
    assert experts.router.weight.dtype == torch.float32
    assert all(own.gate_up_proj.packed is not None for own in experts.experts if isinstance(own, Expert))
    found, expected = logits_of(folder, weights), logits_of(folder)
    assert (found - expected).norm() < (0.1 if weights == "int8" else 0.9) * expected.norm()


@pytest.mark.parametrize("name", MIXTURES)
def test_what_a_step_reads(tmp_path: Path, name: str) -> None:
    """Of experts the share that a row goes to; all else but the table of embeddings."""
    model = open_model(variant(tmp_path, name), "float32", "cpu", 512)
    assert isinstance(model, PagedModel)
    assert isinstance(model, MixtureModel)
    experts = model.config.experts
    assert experts is not None
    mixtures = [layer.mlp for layer in model.decoder.layers if isinstance(layer.mlp, Experts)]
    sizes = [4 * parameter.numel() for mixture in mixtures for parameter in mixture.experts.parameters()]
    assert model.expert_bytes == sum(sizes)
    assert model.expert_share == experts.num_active / experts.num_experts
    table = 4 * model.config.vocab_size * model.config.hidden_size
    unread = sum(sizes) * (1 - model.expert_share)
    assert model.step_bytes == pytest.approx(model.weight_bytes - table - unread, abs=1)
    assert sum(parameter.numel() for parameter in model.decoder.parameters()) == model.num_parameters
    every = replace(experts, num_active=experts.num_experts)
    assert every.step_parameters(model.config.hidden_size) == experts.layer_parameters(model.config.hidden_size)


def without(state: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not all(part in name for part in parts)}


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be a whole number from 1 to 6"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ("mixtral", {"num_local_experts": 7}, r"gate\.weight .*asks for \[7, 48\]"),
        ("mixtral", {"num_local_experts": 2**40}, "num_local_experts"),
        ("mixtral", {"num_local_experts": 5}, r"gate\.weight .*shape \[6, 48\]"),
        ("qwen3-moe", {"num_local_experts": "many"}, "num_local_experts"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3-moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"layers\.1\.mlp\.\w+_proj\.weight is missing"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ("qwen2-moe", {"moe_intermediate_size": 23}, r"experts\.0\.gate_proj\.weight .*shape \[24, 48\]"),
        ("gpt-oss", {"swiglu_limit": -1.0}, "swiglu_limit"),
        ("gpt-oss", {"num_local_experts": 6}, r"shape \[5, 48\]"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, name: str, config: dict[str, Any], words: str
) -> None:
    folder = rewritten(variant(tmp_path, name), dict, **config)
    with pytest.raises(CheckpointError, match=words):
        read_config(folder)


@pytest.mark.parametrize(
    ("name", "parts", "words"),
    [
        ("mixtral", ("layers.1.", "experts.3.w2"), r"layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight is missing"),
        ("qwen2-moe", ("layers.0.", "shared_expert_gate"), r"shared_expert_gate\.weight is missing"),
        ("qwen3-moe", ("mlp.gate.",), r"mlp\.gate\.weight is missing"),
        ("gpt-oss", ("experts.down_proj_bias",), r"experts\.0\.down_proj\.bias is missing"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, name: str, parts: tuple[str, ...], words: str) -> None:
    folder = rewritten(variant(tmp_path, name), lambda state: without(state, *parts))
    with pytest.raises(CheckpointError, match=words):
        load_decoder(folder)


@pytest.mark.parametrize("shape", [(5, 48), (5, 47, 128), (4, 48, 128), (0, 48, 128)])
def test_a_tensor_of_experts_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    def change(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(shape)}

    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\."):
        read_config(rewritten(variant(tmp_path, "gpt-oss"), change))


def test_codes_without_their_scales_are_refused(gpt_oss: tuple[Path, Path]) -> None:
    folder = rewritten(gpt_oss[0], lambda state: without(state, "layers.2", "gate_up_proj_scales"))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.0\.gate_proj\.weight is missing"):
        read_config(folder)


def test_other_ways_of_choosing_experts_in_a_file_are_refused(tmp_path: Path) -> None:
    folder = variant(tmp_path / "hf", "qwen3-moe")
    path = write_gguf(tmp_path / "model.gguf", folder, expert_weights_scale=2.5)
    with pytest.raises(UnsupportedModelError, match=r"expert_weights_scale=2\.5"):
        read_config(path)
