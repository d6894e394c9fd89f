"""The weights of a head that is in use: packed or quantised for its kernels, read into a copy that can be trained, and
replaced.

Matrices of a head in use are held as their kernels want them (`model.layers`); a copy has plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from foretoken.heads.base import Head
from foretoken.model.layers import Embedding, Linear
from foretoken.model.matrices.codes import BLOCK_ROWS
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.matrices.held import format_of
from foretoken.model.matrices.quant import GroupQuantiser

HeadWeight: TypeAlias = Tensor | GroupedWeight  # numbers, or the codes of a quantised matrix
WeightFormat: TypeAlias = torch.dtype | str  # of numbers, or "int8" or "int4"
_ROWS_AT_A_TIME = 1024  # of a matrix that is turned back into numbers: they take eight times the codes on the way


@torch.no_grad()
def weights_of(head: Head) -> dict[str, HeadWeight]:
    """A head's parameters by name in its checkpoint, each in its format: numbers copied, quantised ones shared."""
    found: dict[str, HeadWeight] = {name: own.detach().clone() for name, own in head.named_parameters()}
    for name, linear in _packed(head):
        assert linear.packed is not None
        if isinstance(linear.packed, GroupedWeight):
            found[f"{name}.weight"] = linear.packed
            continue
        dtype, device = _format(head)
        identity = torch.eye(linear.in_features, dtype=dtype, device=device)
        found[f"{name}.weight"] = linear.packed.multiply(identity, None).t().contiguous()
    return found


def numbers(weight: HeadWeight) -> Tensor:
    """A weight as numbers, those of a quantised matrix in float32."""
    if not isinstance(weight, GroupedWeight):
        return weight
    starts = range(0, weight.num_rows, _ROWS_AT_A_TIME)
    pieces = [torch.arange(start, min(start + _ROWS_AT_A_TIME, weight.num_rows)) for start in starts]
    return torch.cat([weight.rows(rows) for rows in pieces])


def held_in(weight: HeadWeight) -> WeightFormat:
    """In what a weight is held."""
    return format_of(weight) if isinstance(weight, GroupedWeight) else weight.dtype


def in_format(value: Tensor, kind: WeightFormat) -> HeadWeight:
    """A copy of the numbers `value` in the format `kind`."""
    if isinstance(kind, str):
        return GroupQuantiser(kind, torch.float32).matrix([value])
    return value.to(kind, copy=True)


@torch.no_grad()
def pack(head: Head, weight_format: str = "auto") -> None:
    """Lay the matrices of a head out for the kernels of the processor that it runs on: in its own number format
    ("auto"), or quantised to "int8" or "int4".

    Tables, of which a row is read at a time, and matrices with fewer outputs than a block of the kernel stay numbers.
    """
    quantiser = None if weight_format == "auto" else GroupQuantiser(weight_format, torch.float32)
    for module in head.modules():
        if not isinstance(module, Linear):
            continue
        if quantiser is not None and module.weight is not None and module.out_features >= BLOCK_ROWS:
            module.hold(quantiser.matrix([module.weight]))
        else:
            module.pack()


def head_bytes(head: Head) -> int:
    """Memory that the weights of a head take; the target's own, which it uses too, are not among them."""
    modules = [module for module in head.modules() if isinstance(module, Linear | Embedding)]
    packed = sum(module.packed.nbytes for module in modules if module.packed is not None)
    return packed + sum(own.nbytes for own in head.parameters())


@torch.no_grad()
def plain_copy(head: Head) -> Head:
    """A head like `head` in float32, on the same device, whose parameters are plain and nobody else's."""
    found = weights_of(head)
    copied = type(head)(head.config, head.vocabulary).to(_format(head)[1], torch.float32)
    for name, own in copied.named_parameters():
        own.copy_(numbers(found[name]))
    return copied


@torch.no_grad()
def replace_weights(head: Head, weights: Mapping[str, HeadWeight]) -> None:
    """Give the named parameters of a head in use new values, as of `weights_of`; what was packed is packed again."""
    parameters, packed = dict(head.named_parameters()), dict(_packed(head))
    for name, value in weights.items():
        if isinstance(value, GroupedWeight):
            packed[name.removesuffix(".weight")].hold(value)
            continue
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
