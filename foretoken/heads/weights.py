"""The weights of a head that is in use: read into a copy that can be trained, and replaced.

Matrices of a head in use may be packed for their kernels (`model.layers`); a copy has plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from foretoken.heads.base import Head
from foretoken.model.layers import Linear


@torch.no_grad()
def weights_of(head: Head) -> dict[str, Tensor]:
    """The parameters of a head by their names in its checkpoint, each a copy in its own format; packed ones too."""
    found = {name: own.detach().clone() for name, own in head.named_parameters()}
    for name, linear in _packed(head):
        assert linear.packed is not None
        dtype, device = _format(head)
        identity = torch.eye(linear.in_features, dtype=dtype, device=device)
        found[f"{name}.weight"] = linear.packed.multiply(identity, None).t().contiguous()
    return found


def pack(head: Head) -> None:
    """Pack the matrices of a head for the kernels of the processor that it runs on."""
    for module in head.modules():
        if isinstance(module, Linear):
            module.pack()


@torch.no_grad()
def plain_copy(head: Head) -> Head:
    """A head like `head` in float32, on the same device, whose parameters are plain and nobody else's."""
    found = weights_of(head)
    copied = type(head)(head.config, head.vocabulary).to(_format(head)[1], torch.float32)
    for name, own in copied.named_parameters():
        own.copy_(found[name])
    return copied


@torch.no_grad()
def replace_weights(head: Head, weights: Mapping[str, Tensor]) -> None:
    """Give the named parameters of a head in use new values; what was packed is packed again."""
    parameters, packed = dict(head.named_parameters()), dict(_packed(head))
    for name, value in weights.items():
        if name in parameters:
            parameters[name].copy_(value)
            continue
        linear = packed[name.removesuffix(".weight")]
        dtype, device = _format(head)
        linear.packed, linear.weight = None, nn.Parameter(value.to(device, dtype), requires_grad=False)
        linear.pack()


def _packed(head: Head) -> Iterator[tuple[str, Linear]]:
    """The matrices that are packed, by the names of their modules."""
    for name, module in head.named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            yield name, module


def _format(head: Head) -> tuple[torch.dtype, torch.device]:
    """Of a parameter that is never packed: norms and biases, or any where nothing is packed."""
    some = next(head.parameters())
    return some.dtype, some.device
