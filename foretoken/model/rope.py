"""Rotary position embeddings (Su et al. 2104.09864) and the scalings in use: linear, dynamic, YaRN, Llama 3,
LongRoPE within its original length, and factors for each channel.

`dynamic` equals the unscaled form up to the trained length; the context is capped there, because beyond it the
rotation of a cached key would depend on the length of the sequence that wrote it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.launches import launches_for
from foretoken.model.architecture import ModelConfig, RopeConfig
from foretoken.model.families import FAMILIES
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
        # [positions so far, head_dim]
        self.cos = self.sin = torch.empty(0, config.head_dim, device=device, dtype=dtype)
        self.cover(min(TABLE_BLOCK, self._most))
        self._covered = False

    def cover(self, num_positions: int) -> None:
        """Make the positions below `num_positions` available."""
        self._covered = True
        if len(self.cos) < num_positions:
            self._grow(num_positions)

    @torch.inference_mode(False)  # a table may be made while answering and used in training later
    def _grow(self, num_positions: int) -> None:
        while len(self.cos) < num_positions:
            start = len(self.cos)
            assert start < self._most, "a position beyond the context"
            cos, sin = self._block(start, min(start + TABLE_BLOCK, self._most))
            self.cos, self.sin = torch.cat((self.cos, cos)), torch.cat((self.sin, sin))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, 1, head_dim]` for `positions` `[T]`, see `reach`."""
        self.reach(positions)
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def reach(self, positions: Tensor) -> None:
        """Make `positions` `[T]` available.

        On a GPU, where asking for the largest position would wait for the device, whoever runs long sequences calls
        `cover`; otherwise the first call makes the whole context available.
        """
        if len(self.cos) < self._most:
            if positions.device.type == "cpu":
                self.cover(int(positions.max()) + 1 if positions.numel() else 0)
            elif not self._covered:
                self.cover(self._most)

    def _block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        # [P, rotated / 2]
        angles = torch.outer(torch.arange(start, stop, dtype=torch.float32), self._frequency).to(wide)
        cos = F.pad(angles.cos() * self._scale, (0, self._fixed), value=1.0)  # [P, head_dim / 2]
        sin = F.pad(angles.sin() * self._scale, (0, self._fixed))
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return to_device(cos, self._device, self._dtype), to_device(sin, self._device, self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[T, H, head_dim]` by its positions; pairs are channels i and i + head_dim / 2 (Hugging Face's)."""
    kernels = kernels_for(x) or launches_for(x)
    if kernels is not None and cos.dtype == x.dtype:
        rotated: Tensor = kernels.rotate(x, cos, sin)
        return rotated
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


# ---- rows of query and key matrices as the decoder's one rotation wants them
#
# A checkpoint may rotate pairs of neighbours, or only the first channels of a head. With the rows in another order
# the products of queries and keys stay what they are (`channel_order`), as llama.cpp's converter uses it too.


class RowOrders:
    """Which row of a checkpoint's tensor each row of ours is, for the tensors of queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        self._requests: dict[str, Tensor] = {}  # by the part of a layer
        order = channel_order(config.rope, config.head_dim)
        if order is None:
            return
        names, size = FAMILIES[config.model_type].names, config.head_dim
        heads, groups = config.num_heads, config.num_kv_heads

        def of_heads(count: int) -> Tensor:
            return (torch.arange(count)[:, None] * size + order).flatten()

        if len(names.qkv) == 1:
            values = torch.arange((heads + groups) * size, (heads + 2 * groups) * size)
            self._requests[names.qkv[0]] = torch.cat((of_heads(heads + groups), values))
        else:
            self._requests |= {names.qkv[0]: of_heads(heads), names.qkv[1]: of_heads(groups)}
        shared = config.qk_norm_over == "head"  # by all heads
        self._requests[names.q_norm] = order if shared else of_heads(heads)
        self._requests[names.k_norm] = order if shared else of_heads(groups)

    def of(self, name: str) -> Tensor | None:
        """The order of the rows of the tensor `name` (as in a Hugging Face checkpoint); None: as they are."""
        parts = name.split(".")
        return self._requests.get(".".join(parts[3:-1])) if parts[:2] == ["model", "layers"] else None


def in_order(tensor: Tensor, order: Tensor) -> Tensor:
    """`tensor` [N, ...], or [H, N / H], with its N rows in this order."""
    return tensor.reshape(len(order), -1)[order].reshape(tensor.shape)
