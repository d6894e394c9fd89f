"""All Medusa heads over the newest states of some requests as one CUDA graph, the target's final norm before them."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor

from foretoken.heads.medusa import MedusaHead
from foretoken.model.graphs import cache
from foretoken.model.graphs.cache import MANY_ROWS
from foretoken.model.graphs.choice import PACKED, are_wanted
from foretoken.model.graphs.shape import ROW_BUCKETS
from foretoken.model.interface import SharesModules, SharesWeights
from foretoken.model.layers import Linear
from foretoken.model.paged import PagedModel

MAX_STATES = 64  # requests of a step that draft; logits of all heads are kept for so many


class MedusaGraphs(cache.CapturedSteps[tuple[int, int]]):
    """Runs `head`, whose heads do not see one another's tokens, for `target`; `matrices` are all that a step reads.

    Raises:
        CapacityError: no memory for states and logits.
    """

    max_graphs = sys.maxsize

    def __init__(self, head: MedusaHead, target: PagedModel, matrices: Sequence[Linear]) -> None:
        super().__init__(target.device)
        self.head, self.target, self._matrices = head, target, matrices
        config, weight = head.config, matrices[0].weight
        assert weight is not None
        dtype, device = weight.dtype, weight.device
        self.states = cache.buffer_of((MAX_STATES, config.hidden_size), dtype, device)
        # What a step computes for all rows of its bucket, until the next one.
        self.logits = cache.buffer_of((config.num_heads, MAX_STATES, len(head.vocabulary.ids)), dtype, device)

    def run(self, states: Tensor, num_places: int) -> Tensor | None:
        """Logits [num_places, A, V_d] of the first heads, until the next call; `states` [A, D] are in front of the
        target's final norm. None, and nothing done, where they are to be run as usual.
        """
        if len(states) > MAX_STATES:
            self.steps[MANY_ROWS] += 1
            return None
        self.states[: len(states)].copy_(states)
        graph, reason = self.graph_of((ROW_BUCKETS[bisect_left(ROW_BUCKETS, len(states))], num_places))
        self.steps[reason] += 1
        if graph is None:
            return None
        graph()
        return self.logits[:num_places, : len(states)]

    def read_beside(self) -> tuple[object, ...]:
        """See `CapturedSteps`."""
        return tuple(matrix.weight for matrix in self._matrices)

    def step(self, shape: tuple[int, int]) -> None:
        """See `CapturedSteps`: so many rows and places."""
        num_rows, num_places = shape
        normed = self.target.final_norm(self.states[:num_rows])
        for number in range(num_places):
            self.logits[number, :num_rows].copy_(self.head.predict(number, normed, None, self.target))


def medusa_graphs(head: MedusaHead, target: SharesWeights) -> MedusaGraphs | None:
    """Graphs of `head`; None where its heads are not captured, which are where the steps of its target are."""
    linears = [module for module in head.modules() if isinstance(module, Linear)]
    output = target.output_module() if isinstance(target, SharesModules) else None
    matrices = [*linears, *([] if head.config.has_own_output or output is None else [output])]
    if not isinstance(target, PagedModel) or target.graphs is None:
        reason: str | None = "the steps of its target are not"
    elif head.config.is_sequential:
        reason = "each of its heads sees the tokens before it"
    elif output is None and not head.config.has_own_output:
        reason = "its target does more than multiply by its output matrix"
    elif any(matrix.packed is not None for matrix in matrices):
        reason = PACKED
    elif any(matrix.weight is not None and matrix.weight.dtype != target.dtype for matrix in matrices):
        reason = "its matrices and its target's are of two formats"
    else:
        reason = None
    if not are_wanted("head", reason):
        return None
    assert isinstance(target, PagedModel)
    return MedusaGraphs(head, target, matrices)
