"""Rotary position embeddings (Su et al. 2104.09864) and the scalings in use: linear, dynamic, YaRN, Llama 3,
LongRoPE within its original length, and factors for each channel.

`dynamic` equals the unscaled form up to the trained length; the context is capped there, because beyond it the
rotation of a cached key would depend on the length of the sequence that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.architecture import ModelConfig, RopeConfig
from foretoken.model.families import FAMILIES, Family
from foretoken.model.fields import Fields, shown
from foretoken.model.row_kernels import kernels_for
from foretoken.transfer import to_device

TABLE_BLOCK = 4096  # positions that a table grows by: one step for a short context, few for a long one


def rotated_channels(rope: RopeConfig, head_dim: int) -> int:
    """How many channels of a head are rotated."""
    return int(head_dim * rope.partial_factor)


def channel_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Which channel of a checkpoint's head each of ours is, `[head_dim]`; None: they lie as they do there.

    Ours pairs channel i with i + head_dim / 2. A checkpoint may pair neighbours, or rotate the first channels alone:
    with the rows of q and k in this order the products of queries and keys are the same, and one rotation serves all.
    """
    rotated = rotated_channels(rope, head_dim)
    if rotated == head_dim and not rope.is_interleaved:
        return None
    half, rest = rotated // 2, torch.arange(rotated, head_dim)
    pairs = torch.arange(rotated).view(half, 2).T if rope.is_interleaved else torch.arange(rotated).view(2, half)
    firsts, seconds = rest.chunk(2) if len(rest) else (rest, rest)  # of what is not rotated
    return torch.cat((pairs[0], firsts, pairs[1], seconds))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of the rotated channels, `[head_dim / 2]` float32 where all are, and the factor
    on cos and sin.
    """
    head_dim = rotated_channels(rope, head_dim)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequency = 1.0 / (rope.theta**exponent)  # [head_dim / 2]
    if rope.kind == "longrope":  # in transformers' order of operations
        factors = torch.tensor(rope.factors, dtype=torch.float32)
        assert rope.attention_factor is not None
        return 1.0 / (factors * rope.theta**exponent), rope.attention_factor
    if rope.kind == "linear":
        return frequency / rope.factor, 1.0
    if rope.kind == "factors":
        return frequency / torch.tensor(rope.factors, dtype=torch.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequency), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, frequency, head_dim), _yarn_attention_factor(rope)
    return frequency, 1.0


def _llama3(rope: RopeConfig, frequency: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1 reference code)."""
    assert rope.original_max_tokens is not None
    wavelength = 2 * math.pi / frequency
    low, high = rope.original_max_tokens / rope.low_freq_factor, rope.original_max_tokens / rope.high_freq_factor
    smooth = (rope.original_max_tokens / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequency / rope.factor + smooth * frequency
    stretched = torch.where(wavelength > low, frequency / rope.factor, frequency)
    return torch.where((wavelength >= high) & (wavelength <= low), blended, stretched)


def _yarn(rope: RopeConfig, frequency: Tensor, head_dim: int) -> Tensor:
    """Interpolate slow channels, extrapolate fast ones, ramp between (YaRN, Peng et al. 2309.00071, section 3.2)."""
    assert rope.original_max_tokens is not None

    def channel(rotations: float) -> float:
        assert rope.original_max_tokens is not None
        return head_dim * math.log(rope.original_max_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # negative for a very short trained length, as in the reference code
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / width
    extrapolate = 1 - ramp.clamp(0, 1)
    return frequency / rope.factor * (1 - extrapolate) + frequency * extrapolate


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale()


class RotaryTable:
    """cos and sin by position, computed in float32 (float64 for a float64 model) for as many positions as were ever
    asked for.

    Positions come in blocks of one size, each computed by itself: the value of a position does not depend on when its
    block was made.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, rope: RopeConfig | None = None
    ) -> None:
        self._frequency, self._scale = inverse_frequencies(rope or config.rope, config.head_dim)
        self._fixed = config.head_dim // 2 - len(self._frequency)  # pairs of channels that are not rotated
        self._most, self._device, self._dtype = config.max_context_tokens, device, dtype
        self.cos = self.sin = torch.empty(
            0, config.head_dim, device=device, dtype=dtype
        )  # [positions so far, head_dim]
        self.cover(min(TABLE_BLOCK, self._most))
        self._covered = False

    @torch.inference_mode(False)  # a table may be made while answering and used in training later
    def cover(self, num_positions: int) -> None:
        """Make the positions below `num_positions` available."""
        self._covered = True
        while len(self.cos) < num_positions:
            start = len(self.cos)
            assert start < self._most, "a position beyond the context"
            cos, sin = self._block(start, min(start + TABLE_BLOCK, self._most))
            self.cos, self.sin = torch.cat((self.cos, cos)), torch.cat((self.sin, sin))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, 1, head_dim]` for `positions` `[T]`.

        On a GPU, where asking for the largest position would wait for the device, whoever runs long sequences calls
        `cover`; otherwise the first call makes the whole context available.
        """
        if positions.device.type == "cpu":
            self.cover(int(positions.max()) + 1 if positions.numel() else 0)
        elif not self._covered:
            self.cover(self._most)
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def _block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        angles = torch.outer(torch.arange(start, stop, dtype=torch.float32), self._frequency).to(
            wide
        )  # [P, rotated / 2]
        cos = F.pad(angles.cos() * self._scale, (0, self._fixed), value=1.0)  # [P, head_dim / 2]
        sin = F.pad(angles.sin() * self._scale, (0, self._fixed))
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return to_device(cos, self._device, self._dtype), to_device(sin, self._device, self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[T, H, head_dim]` by its positions; pairs are channels i and i + head_dim / 2 (Hugging Face's)."""
    kernels = kernels_for(x)
    if kernels is not None and cos.dtype == x.dtype:
        return kernels.rotate(x, cos, sin)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


# ---- how a `config.json` scales rotary embeddings: either spelling, and the length up to which a scaling holds

MAX_CONTEXT_TOKENS = (
    2**24
)  # the last position that the float32 arithmetic of rotary embeddings, here and in transformers, can count to
# The original length that transformers assumes where config.json names none.
_LONGROPE_TRAINED_TOKENS = {"phi3": 4096, "phi4_multimodal": 4096}


def rope_context_cap(raw: Mapping[str, Any]) -> int | None:
    """The longest sequence over which the rotation of a position never changes; None where it never does.

    `raw` is a parsed `config.json`, its text part, or what `to_dict` of a transformers configuration gives. With
    `dynamic` and `longrope` scaling the frequencies switch once a sequence is longer than a trained length. Keys that
    are in the cache by then keep their old rotation, so that an answer would depend on which tokens ran together: no
    two ways of running it agree beyond that length.

    Raises:
        CheckpointError: a base of the frequencies that is not positive, which makes them infinite.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return None
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]  # one entry per layer type
    for parameters in [scaling, *nested]:
        theta = parameters.get("rope_theta")
        if isinstance(theta, int | float) and not theta > 0:
            raise CheckpointError(f"config.json: rope_theta={shown(theta)} must be a positive number")
    caps = [_switching_length(raw, parameters) for parameters in [scaling, *nested]]
    return min((cap for cap in caps if cap is not None), default=None)


def _switching_length(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> int | None:
    kind = scaling.get("rope_type") or scaling.get("type")
    trained = raw.get("max_position_embeddings")
    # Phi reads both of its old names as longrope.
    if kind in ("longrope", "su") or (kind == "yarn" and raw.get("model_type") in _LONGROPE_TRAINED_TOKENS):
        original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        lengths = (original or _LONGROPE_TRAINED_TOKENS.get(str(raw.get("model_type"))), trained)
    elif kind == "dynamic":
        lengths = (trained, None)
    else:
        return None
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def rope_config(model_type: str, family: Family, fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """How queries and keys are rotated, and how those of layers with a window are, where that differs.

    Reads either spelling, with the precedence of transformers 5: `rope_scaling` (4) before `rope_parameters` (5), then
    `rope_theta`.

    Raises:
        UnsupportedModelError: a scaling that the native decoder lacks.
        CheckpointError: a value of the wrong type or out of bounds.
    """
    reader = _RopeReader(model_type, family, fields, head_dim)
    named = (
        found for key in ("rope_scaling", "rope_parameters") if (found := fields.fields(key)) is not None and found.raw
    )
    scaling = next(named, Fields({}, fields.where))
    by_type = [key for key, value in scaling.raw.items() if isinstance(value, Mapping) or key.endswith("_attention")]
    if not family.has_local_rope:
        if by_type:
            raise UnsupportedModelError("rope parameters by layer type have no native implementation")
        return reader.read(scaling), None
    if not by_type:
        return reader.read(scaling), RopeConfig(
            theta=fields.number("rope_local_base_freq", above=1.0), original_max_tokens=reader.trained_tokens
        )
    whole, local = (scaling.fields(key) or Fields({}, scaling.where) for key in ("full_attention", "sliding_attention"))
    return reader.read(whole), reader.read(local, "rope_local_base_freq")


_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_LONGROPE_KINDS = ("default", "longrope")  # transformers refuses Phi the others


class _RopeReader:
    """Reads one scaling of a `config.json`."""

    def __init__(self, model_type: str, family: Family, fields: Fields, head_dim: int) -> None:
        self.model_type, self.family, self.fields, self.head_dim = model_type, family, fields, head_dim
        self.trained_tokens = fields.whole("max_position_embeddings", most=MAX_CONTEXT_TOKENS)

    def read(self, scaling: Fields, base: str = "rope_theta") -> RopeConfig:
        """One scaling; `base` is the key of `config.json` for the base that it does not name."""
        fields, trained = self.fields, self.trained_tokens
        kind = scaling.text("rope_type") or scaling.text("type") or "default"
        if self.family.has_longrope and kind in ("su", "yarn"):  # old names
            kind = "longrope"
        if kind not in (_LONGROPE_KINDS if self.family.has_longrope else _KINDS):
            raise UnsupportedModelError(f"rope_type={shown(kind)} has no native implementation")
        # A base of 1 turns all channels alike, and YaRN divides by its logarithm.
        theta = (
            scaling.number("rope_theta", above=1.0)
            if scaling.has("rope_theta")
            else fields.number_or(base, 10_000.0, above=1.0)
        )
        sources = (fields, scaling)
        outer = next((source for source in sources if source.has("original_max_position_embeddings")), None)
        original = (
            trained if outer is None else outer.whole("original_max_position_embeddings", most=MAX_CONTEXT_TOKENS)
        )
        rope = RopeConfig(
            theta=theta,
            kind=kind,
            original_max_tokens=original,
            partial_factor=self._partial_factor(scaling),
            is_interleaved=self.family.is_interleaved,
        )
        if kind == "default":
            return rope
        if kind == "longrope":
            return self._longrope(rope, scaling)
        if kind == "yarn" and "factor" in scaling.raw and not scaling.has("factor"):
            rope = replace(rope, factor=trained / original)
        else:
            rope = replace(rope, factor=scaling.number("factor"))
        if kind == "llama3":
            return replace(
                rope,
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
            )
        return _yarn_config(rope, scaling) if kind == "yarn" else rope

    def _partial_factor(self, scaling: Fields) -> float:
        source = next((one for one in (scaling, self.fields) if one.has("partial_rotary_factor")), None)
        factor = 1.0 if source is None else source.number("partial_rotary_factor")
        if factor == 1.0:
            return factor
        if not self.family.is_partial:
            raise UnsupportedModelError("partial_rotary_factor other than 1 has no native implementation")
        num_rotated = int(self.head_dim * factor)
        if factor > 1.0 or num_rotated < 2 or num_rotated % 2:
            raise CheckpointError(
                f"{self.fields.where}: partial_rotary_factor={factor:g} of head_dim={self.head_dim} must be an even "
                "number of channels, at least two"
            )
        return factor

    def _longrope(self, rope: RopeConfig, scaling: Fields) -> RopeConfig:
        """The factors of short texts, which hold up to the original length (LongRoPE, Ding et al. 2402.13753)."""
        original = self.fields.whole("original_max_position_embeddings", most=MAX_CONTEXT_TOKENS)
        factors = scaling.numbers("short_factor", int(self.head_dim * rope.partial_factor) // 2)
        factor = scaling.number_or("factor", self.trained_tokens / original)
        given = scaling.number("attention_factor") if scaling.has("attention_factor") else None
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return replace(
            rope,
            original_max_tokens=original,
            factors=factors,
            factor=factor,
            attention_factor=attention if given is None else given,
        )


def _yarn_config(rope: RopeConfig, scaling: Fields) -> RopeConfig:
    def optional(key: str) -> float | None:
        return scaling.number(key, zero=True) if scaling.has(key) else None

    return replace(
        rope,
        beta_fast=optional("beta_fast") or 32.0,  # transformers takes 0 as unset too
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=scaling.flag("truncate", default="truncate" not in scaling.raw),
    )


# ---- rows of query and key matrices as the decoder's one rotation wants them
#
# A checkpoint may rotate pairs of neighbours, or only the first channels of a head. With the rows in another order
# the products of queries and keys stay what they are (`channel_order`), as llama.cpp's converter uses it too.


class RowOrders:
    """Which row of a checkpoint's tensor each row of ours is, for the tensors of queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        self._orders: dict[str, Tensor] = {}  # by the part of a layer
        order = channel_order(config.rope, config.head_dim)
        if order is None:
            return
        names, size = FAMILIES[config.model_type].names, config.head_dim
        heads, groups = config.num_heads, config.num_kv_heads

        def of_heads(count: int) -> Tensor:
            return (torch.arange(count)[:, None] * size + order).flatten()

        if len(names.qkv) == 1:
            values = torch.arange((heads + groups) * size, (heads + 2 * groups) * size)
            self._orders[names.qkv[0]] = torch.cat((of_heads(heads + groups), values))
        else:
            self._orders |= {names.qkv[0]: of_heads(heads), names.qkv[1]: of_heads(groups)}
        shared = config.qk_norm_over == "head"  # by all heads
        self._orders[names.q_norm] = order if shared else of_heads(heads)
        self._orders[names.k_norm] = order if shared else of_heads(groups)

    def of(self, name: str) -> Tensor | None:
        """The order of the rows of the tensor `name` (as in a Hugging Face checkpoint); None: as they are."""
        parts = name.split(".")
        return self._orders.get(".".join(parts[3:-1])) if parts[:2] == ["model", "layers"] else None


def in_order(tensor: Tensor, order: Tensor) -> Tensor:
    """`tensor` [N, ...], or [H, N / H], with its N rows in this order."""
    return tensor.reshape(len(order), -1)[order].reshape(tensor.shape)
