"""The native decoder gives transformers' logits for every family and option."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.loader import load_decoder, read_config
from tests.helpers.checkpoints import ONE_OF_EACH, VARIANTS, token_ids, transformers_logits, variant
from tests.helpers.usual import some_of

LENGTH = 150  # longer than the rope scalings' original length, the query chunk and every window


class DenseAttention:
    """The definition, one query head at a time, in the dtype of its input."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        distance = torch.arange(query.shape[0])[:, None] - torch.arange(query.shape[0])
        hidden = (distance < 0) | (distance >= (self.config.window(layer) or query.shape[0]))
        scale, cap = self.config.attention_scale or self.config.head_dim**-0.5, self.config.attention_softcap
        read = []
        for head in range(self.config.num_heads):
            group = head // (self.config.num_heads // self.config.num_kv_heads)
            scores = query[:, head] @ key[:, group].T * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(len(scores), 1)), dim=-1)
            read.append(scores.softmax(-1)[:, : len(key)] @ value[:, group])
        return torch.stack(read, dim=1)


def native_logits(folder: Path, ids: list[int], dtype: torch.dtype) -> Tensor:
    decoder = load_decoder(folder, dtype=dtype)
    attention = (
        DenseAttention(decoder.config) if dtype == torch.float64 else PackedAttention(decoder.config, 1, len(ids))
    )
    with torch.no_grad():
        return decoder.logits(decoder(torch.tensor(ids), torch.arange(len(ids)), attention).last)


@pytest.mark.parametrize("name", some_of(VARIANTS, ONE_OF_EACH))  # all in float64, below
def test_float32_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder, ids = variant(tmp_path, name), token_ids(LENGTH)
    expected = transformers_logits(folder, ids)
    assert expected.std() > 0.3  # the test means something
    torch.testing.assert_close(native_logits(folder, ids, torch.float32), expected, atol=1e-4, rtol=0)


class _WideNorm(nn.Module):
    """transformers' own norms compute in float32 whatever the model's dtype; this one stays in float64."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        name = type(norm).__name__
        self.weight, self.is_layer, self.offset = norm.weight, "LayerNorm" in name, float("Gemma" in name)
        self.eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.is_layer else x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


class _WideRotary(nn.Module):
    """cos and sin in float64 from the frequencies and the scale that transformers computed."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        name = type(rotary).__name__
        self.own, self.is_interleaved, self.is_half = rotary, name.startswith("Cohere"), name.startswith("GptOss")

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        prefix = "" if layer_type is None else f"{layer_type}_"
        inverse, scale = (getattr(self.own, f"{prefix}{name}") for name in ("inv_freq", "attention_scaling"))
        angles = (position_ids[..., None].float() * inverse.float()).double()
        if not self.is_half:
            angles = angles.repeat_interleave(2, dim=-1) if self.is_interleaved else torch.cat((angles, angles), dim=-1)
        return angles.cos() * scale, angles.sin() * scale


class _WideRouter(nn.Module):
    """transformers takes the softmax of a router's scores in float32 whatever the dtype."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight, self.count = router.weight, router.top_k
        self.normalises = getattr(router, "norm_topk_prob", True)  # Mixtral always does

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        best, index = scores.softmax(-1).topk(self.count, dim=-1)
        return scores, best / best.sum(-1, keepdim=True) if self.normalises else best, index


def wide_oracle(folder: Path, ids: list[int]) -> Tensor:
    """transformers in float64 all the way."""
    with torch.no_grad():
        logits: Tensor = wide_model(folder)(torch.tensor([ids])).logits[0]
    return logits


@functools.lru_cache(maxsize=4)
def wide_model(folder: Path) -> Any:
    """transformers' model of a folder that no test writes twice, with everything in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # sdpa, where it can
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # their faster one has no float64
    rotary = _WideRotary(model.model.rotary_emb)
    model = model.double()
    model.model.rotary_emb = rotary
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith(("RMSNorm", "CohereLayerNorm", "Cohere2LayerNorm")):
                setattr(parent, name, _WideNorm(child))
            elif type(child).__name__.endswith("MoeTopKRouter") or type(child).__name__ == "MixtralTopKRouter":
                setattr(parent, name, _WideRouter(child))
    return model


# transformers rotates Cohere's heads, and takes the softmax of Gemma 2's capped scores, in float32 whatever the dtype.
NARROW = ("cohere", "cohere2", "gemma2")


@pytest.mark.parametrize("name", VARIANTS)
def test_float64_logits_equal_transformers_tightly(tmp_path: Path, name: str) -> None:
    folder, ids = variant(tmp_path, name), token_ids(LENGTH)
    most = 1e-5 if name.startswith(NARROW) else 1e-9
    torch.testing.assert_close(
        native_logits(folder, ids, torch.float64), wide_oracle(folder, ids), rtol=most, atol=most
    )


@pytest.mark.parametrize("name", ["llama", "qwen2-layer-types"])
def test_first_layers_and_taps_are_the_residual_stream(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, ids = variant(tmp_path, name), token_ids(40)
    decoder = load_decoder(folder)
    with torch.no_grad():
        hidden = decoder(
            torch.tensor(ids), torch.arange(40), PackedAttention(decoder.config, 1, 40), num_layers=2, taps=(0, 1, 2)
        )
        expected = AutoModelForCausalLM.from_pretrained(folder)(
            torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
    assert sorted(hidden.taps) == [0, 1, 2]
    for layer, tap in hidden.taps.items():
        torch.testing.assert_close(tap, expected[layer][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden.last, hidden.taps[2])


def test_packed_bfloat16_is_close_to_plain(tmp_path: Path) -> None:
    folder, ids = variant(tmp_path, "qwen2-tied", dtype=torch.bfloat16), token_ids(30)
    decoders = [load_decoder(folder, pack=pack) for pack in (False, True)]
    with torch.no_grad():
        plain, packed = (
            d.logits(d(torch.tensor(ids), torch.arange(30), PackedAttention(d.config, 1, 30)).last) for d in decoders
        )
    assert plain.dtype == torch.bfloat16
    torch.testing.assert_close(packed, plain, atol=0.1, rtol=0.05)


# Families with other norms, activations, scales, rotations or sinks.
_OTHERS = (
    *("gemma2", "gemma3_text", "olmo2", "smollm3", "granite", "glm", "glm4", "starcoder2", "cohere", "cohere2"),
    "gpt_oss",
)


def test_which_layers_are_llamas(tmp_path: Path) -> None:
    """Heads have such layers, whatever their target has."""
    for name, (family, _) in VARIANTS.items():
        config = read_config(variant(tmp_path / name, name))
        assert config.has_llama_layers == (family not in _OTHERS and name != "phi3-options"), name
        assert config.llama_layers(2).has_llama_layers
