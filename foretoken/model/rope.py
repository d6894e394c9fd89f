"""Rotary position embeddings (Su et al. 2104.09864) and the scalings in use: linear, dynamic, YaRN, Llama 3, and
factors for each channel.

`dynamic` equals the unscaled form up to the trained length; the context is capped there, because beyond it the
rotation of a cached key would depend on the length of the sequence that wrote it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken.model.architecture import ModelConfig, RopeConfig
from foretoken.model.row_kernels import kernels_for
from foretoken.transfer import to_device

TABLE_BLOCK = 4096  # positions that a table grows by: one step for a short context, few for a long one


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of channels, `[head_dim / 2]` float32, and the factor on cos and sin."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequency = 1.0 / (rope.theta**exponent)  # [head_dim / 2]
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

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._frequency, self._scale = inverse_frequencies(config.rope, config.head_dim)
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
        )  # [P, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1)  # [P, head_dim]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return to_device(cos, self._device, self._dtype), to_device(sin, self._device, self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[T, H, head_dim]` by its positions; pairs are channel i and i + head_dim / 2 (the Hugging Face
    order).
    """
    kernels = kernels_for(x)
    if kernels is not None and cos.dtype == x.dtype:
        return kernels.rotate(x, cos, sin)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
