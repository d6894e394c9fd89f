"""All Medusa heads over the newest states of some requests as one CUDA graph, the target's final norm before them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import is_not

import torch
from torch import Tensor

from foretoken.heads.medusa import MedusaHead
from foretoken.model.graphs import cache
from foretoken.model.graphs.cache import FAILED, MANY_ROWS, NO_MEMORY, REPLAYED, Capture, Step
from foretoken.model.graphs.choice import PACKED, NotCaptured, are_wanted, tell_of
from foretoken.model.graphs.shape import ROW_BUCKETS
from foretoken.model.interface import SharesModules, SharesWeights
from foretoken.model.layers import Linear
from foretoken.model.paged import PagedModel

MAX_STATES = 64  # requests of a step that draft; logits of all heads are kept for so many


class MedusaGraphs:
    """Runs `head`, whose heads do not see one another's tokens, for `target`; `matrices` are all that a step reads.

    `steps` counts what was replayed, and what was not by the reason.

    Raises:
        CapacityError: no memory for states and logits.
    """

    def __init__(self, head: MedusaHead, target: PagedModel, matrices: Sequence[Linear]) -> None:
        self.head, self.target, self._matrices = head, target, matrices
        self.capture: Capture = cache.CudaCapture(target.device)
        self.steps: Counter[str] = Counter()
        config, weight = head.config, matrices[0].weight
        assert weight is not None
        dtype, device = weight.dtype, weight.device
        self.states = cache.buffer_of((MAX_STATES, config.hidden_size), dtype, device)
        # What a step computes for all rows of its bucket, until the next one.
        self.logits = cache.buffer_of((config.num_heads, MAX_STATES, len(head.vocabulary.ids)), dtype, device)
        self._graphs: dict[tuple[int, int], Step] = {}
        self._refused: dict[tuple[int, int], str] = {}  # by the reason
        self._marks: tuple[object, ...] = ()

    def run(self, states: Tensor, num_places: int) -> Tensor | None:
        """Logits [num_places, A, V_d] of the first heads, until the next call; `states` [A, D] are in front of the
        target's final norm. None, and nothing done, where they are to be run as usual.
        """
        if len(states) > MAX_STATES:
            self.steps[MANY_ROWS] += 1
            return None
        self.states[: len(states)].copy_(states)
        shape = ROW_BUCKETS[bisect_left(ROW_BUCKETS, len(states))], num_places
        graph = self._graph(shape)
        self.steps[self._refused.get(shape, REPLAYED)] += 1
        if graph is None:
            return None
        graph()
        return self.logits[:num_places, : len(states)]

    def step(self, num_rows: int, num_places: int) -> None:
        """What is captured."""
        normed = self.target.final_norm(self.states[:num_rows])
        for number in range(num_places):
            self.logits[number, :num_rows].copy_(self.head.predict(number, normed, None, self.target))

    def _graph(self, shape: tuple[int, int]) -> Step | None:
        """The graph for so many rows and places, captured when it is first wanted; None where that was refused."""
        marks = tuple(matrix.weight for matrix in self._matrices)
        if len(marks) != len(self._marks) or any(map(is_not, marks, self._marks)):
            self._graphs.clear()
            self._marks = marks
        if shape not in self._graphs and shape not in self._refused:
            try:
                self._graphs[shape] = self.capture(lambda: self.step(*shape))
            except torch.OutOfMemoryError:
                self._refused[shape] = NO_MEMORY
            except NotCaptured as failure:
                if FAILED not in self._refused.values():
                    tell_of(failure)
                self._refused[shape] = FAILED
        return self._graphs.get(shape)


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
