"""Experts on a CUDA device: Triton kernels (`kernels.experts_triton`) route, group and multiply, without the host.

They read the matrices of all experts of a layer as one tensor; those of each expert become parts of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foretoken.kernels.experts_work import StackedExperts, StackedMixture
from foretoken.kernels.launches import TRITON_DTYPES, has_triton
from foretoken.model.expert_config import ClampedGate, ExpertsConfig
from foretoken.model.layers import Linear

if TYPE_CHECKING:
    from foretoken.model.experts import Experts


@dataclass(frozen=True)
class ExpertParts:
    """Weights of one layer's experts, a shared one last; `router` [E, D], `router_bias` [E], `shared_gate` [1, D]."""

    config: ExpertsConfig
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    router: Tensor
    router_bias: Tensor | None
    shared_gate: Tensor | None


def can_launch(at: Tensor) -> bool:
    """Whether there are kernels for rows and plain matrices like `at`."""
    return at.device.type == "cuda" and at.dtype in TRITON_DTYPES and has_triton()


def launched(layer: Experts, x: Tensor) -> Tensor | None:
    """`x` [T, D] through the experts of a layer, [T, D]; None where no kernel does it: in training, and for matrices
    that are packed or of another dtype.
    """
    if not torch.is_inference_mode_enabled() or not can_launch(x):
        return None
    mixture = stacked(layer, x)
    if mixture is None:
        return None
    out: Tensor = _experts_triton().run(mixture, x)
    return out


_Kept = tuple[tuple[torch.dtype, torch.device], tuple[object, ...], StackedMixture | None]
_MIXTURES: WeakKeyDictionary[Experts, _Kept] = WeakKeyDictionary()


def stacked(layer: Experts, at: Tensor) -> StackedMixture | None:
    """The experts as the kernels read them for rows like `at`, made once for their weights."""
    kept = _MIXTURES.get(layer)
    if kept is None or kept[0] != (at.dtype, at.device) or any(map(is_not, kept[1], layer.weight_marks())):
        mixture = _mixture(layer.parts(), at)
        _MIXTURES[layer] = kept = ((at.dtype, at.device), layer.weight_marks(), mixture)
    return kept[2]


def _mixture(parts: ExpertParts, at: Tensor) -> StackedMixture | None:
    linears, num_experts = (*parts.gate_up, *parts.down), parts.config.num_experts
    if not all(_fits(linear.weight, at) and (linear.bias is None or _fits(linear.bias, at)) for linear in linears):
        return None
    has_shared, clamped = len(parts.gate_up) > num_experts, parts.config.clamped
    return StackedMixture(
        experts=_stacked(parts.gate_up[:num_experts], parts.down[:num_experts], clamped),
        router=parts.router,
        router_bias=parts.router_bias,
        num_active=parts.config.num_active,
        normalises=parts.config.normalises,
        shared=_stacked(parts.gate_up[num_experts:], parts.down[num_experts:], clamped) if has_shared else None,
        shared_gate=parts.shared_gate,
    )


def _fits(weight: Tensor | None, at: Tensor) -> bool:
    return weight is not None and weight.dtype == at.dtype and weight.device == at.device


def _stacked(gate_up: Sequence[Linear], down: Sequence[Linear], clamped: ClampedGate | None) -> StackedExperts:
    with torch.inference_mode(False), torch.no_grad():  # weights are ordinary tensors, whoever asks first
        return StackedExperts(
            gate_up=_one_of(gate_up),
            down=_one_of(down),
            gate_up_bias=_biases(gate_up),
            down_bias=_biases(down),
            clamp=None if clamped is None else (clamped.limit, clamped.alpha),
        )


def _one_of(linears: Sequence[Linear]) -> Tensor:
    """The matrices side by side, [E, N, K], where those of `linears` lie from now on."""
    weights = [linear.weight for linear in linears if linear.weight is not None]
    if len(weights) == 1 and weights[0].is_contiguous():
        return weights[0].detach()[None]
    whole = torch.stack([weight.detach() for weight in weights])
    for linear, weight, own in zip(linears, weights, whole, strict=True):
        linear.weight = nn.Parameter(own, requires_grad=weight.requires_grad)
    return whole


def _biases(linears: Sequence[Linear]) -> Tensor | None:
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.stack(biases) if biases else None


@functools.cache
def _experts_triton() -> ModuleType:
    from foretoken.kernels import experts_triton  # needs triton

    return experts_triton
