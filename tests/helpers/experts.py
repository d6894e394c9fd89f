"""Experts with random weights, held as numbers, packed, or in codes."""

from __future__ import annotations

import torch

from foretoken.model.expert_config import ClampedGate, ExpertsConfig
from foretoken.model.experts import Experts
from foretoken.model.layers import Linear
from foretoken.model.matrices.dense import DenseWeight
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.matrices.quant import grouped_codes

HIDDEN = 96
MIXTURES = {
    "mixtral": ExpertsConfig(8, 2, 64, (0,)),
    "qwen2": ExpertsConfig(10, 4, 48, (0,), normalises=False, shared_size=80),
    "qwen3": ExpertsConfig(128, 8, 32, (0,)),
    "gpt-oss": ExpertsConfig(16, 4, 64, (0,), router_bias=True, bias=True, clamped=ClampedGate(1.5, 1.702)),
    "all": ExpertsConfig(5, 5, 33, (0,)),
    "one": ExpertsConfig(3, 1, 32, (0,), normalises=False),
    "lone": ExpertsConfig(1, 1, 32, (0,)),
}


def mixture(config: ExpertsConfig, hold: str = "numbers", dtype: torch.dtype = torch.float32, seed: int = 0) -> Experts:
    """`hold`: numbers, packed (bf16 for our kernel), int8 or int4; `dtype` is that of numbers and biases."""
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(HIDDEN, config)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    for module in experts.modules():
        if isinstance(module, Linear):
            _hold(module, hold, dtype)
    return experts.requires_grad_(False)


def _hold(linear: Linear, hold: str, dtype: torch.dtype) -> None:
    if linear.bias is not None:
        linear.bias.data = linear.bias.data.to(dtype)
    assert linear.weight is not None
    weight = linear.weight.data
    if hold == "numbers":
        linear.weight.data = weight.to(dtype)
    elif hold == "packed":
        linear.hold(DenseWeight.of(weight.bfloat16()))
    else:
        held = GroupedWeight.of(grouped_codes(weight, hold), dtype, linear.in_features)
        linear.hold(held)
