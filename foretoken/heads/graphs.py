"""What captured steps of trained heads have in common: the matrices that they read, and why some heads have none."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from foretoken.heads.layers import LayeredHead
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.graphs.cache import StepGraphs
from foretoken.model.graphs.choice import OTHER_ATTENTION, PACKED, are_wanted
from foretoken.model.layers import Embedding, Linear
from foretoken.model.paged_cache import PagedCache

Matrices = tuple[Embedding | Linear, ...]
_Head = TypeVar("_Head", bound=LayeredHead)


class HeadGraphs(StepGraphs, Generic[_Head]):
    """Graphs of steps of `head` over the drafter's own `cache`; `matrices` are all that a step reads."""

    def __init__(self, head: _Head, cache: PagedCache, matrices: Matrices) -> None:
        super().__init__(head.layer_shape, cache.pool, cache.block_size, cache.capacity_tokens)
        self.head, self._matrices = head, matrices

    def read_beside(self) -> tuple[object, ...]:
        """See `StepGraphs`; norms and biases keep their place."""
        self.head.rotary.cover(self.layers.max_context_tokens)
        return (*(matrix.weight for matrix in self._matrices), self.head.rotary.cos)


def captured_matrices(
    head: LayeredHead, cache: PagedCache, dtype: torch.dtype, beside: tuple[Embedding | Linear | None, ...]
) -> Matrices | None:
    """All matrices that a step of `head` reads, with those `beside` its layers; None where its steps are not captured.

    `dtype` is that of its rows; a matrix beside is None where the target does more with its own than reading rows or
    multiplying.
    """
    layers = [linear for layer in head.layer_parts() for linears in layer.matrices for linear in linears]
    matrices = (*(one for one in beside if one is not None), *layers)
    if not issubclass(cache.attention, FusedAttention):
        reason: str | None = OTHER_ATTENTION
    elif None in beside:
        reason = "its target does more than look up embeddings and multiply by its output matrix"
    elif any(matrix.packed is not None for matrix in matrices):
        reason = PACKED
    elif any(matrix.weight is not None and matrix.weight.dtype != dtype for matrix in matrices):
        reason = "its target's matrices are of another format"
    else:
        reason = None
    return matrices if are_wanted("head", reason) else None
