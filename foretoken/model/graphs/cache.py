"""Captured steps of one model over one cache: the step's numbers go into the input block in one copy, then its graph is
replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import is_not

import torch
from torch import Tensor

from foretoken.kv.pool import KVPool
from foretoken.model.attention.fused import FusedAttention, WorkNumbers, numbers_of
from foretoken.model.decoder import Decoder
from foretoken.model.graphs.capture import Capture, CudaCapture, Step
from foretoken.model.graphs.shape import MAX_ROWS, StepShape
from foretoken.model.interface import ForwardOutput
from foretoken.model.paged_cache import ForwardInputs
from foretoken.transfer import fill

MAX_GRAPHS = 96
# Numbers of the input block in front of block tables, and for trees: rows by what they may see.
HEAD_NUMBERS, _TREE_NUMBERS = 32 * MAX_ROWS, 2 * MAX_ROWS * MAX_ROWS
# Why a step is not replayed.
REPLAYED, JOINED = "replayed", "rows that ran early"
MANY_ROWS, MANY_NUMBERS = f"more than {MAX_ROWS} rows", "block tables too long"
MANY_GRAPHS, NO_MEMORY = f"more than {MAX_GRAPHS} shapes", "no memory"


class GraphCache:
    """Runs a decoder over rows of `pool`, whose last slots, from `spare_slot` on, belong to no sequence.

    `steps` counts what was replayed, and what was not by the reason.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, block_size: int, spare_slot: int) -> None:
        self.decoder, self.pool, self.block_size, self.spare_slot = decoder, pool, block_size, spare_slot
        device = pool.keys[0].device
        self.capture: Capture = CudaCapture(device)
        self.steps: Counter[str] = Counter()
        self.tokens = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        # Sequences may share blocks: their tables are longer than the pool then.
        num_numbers = HEAD_NUMBERS + _TREE_NUMBERS + 2 * (spare_slot // block_size) + MAX_ROWS
        self.block = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        # What a step computes for all rows of its bucket, until the next one: logits [., V], and by layer taps [., D].
        self.logits = self._outputs(decoder.config.vocab_size)
        self.taps: dict[int, Tensor] = {}
        self._graphs: dict[StepShape, Step] = {}
        self._without_memory: set[StepShape] = set()
        self._marks: tuple[object, ...] = ()

    @property
    def shapes(self) -> Sequence[StepShape]:
        """What graphs were captured for."""
        return tuple(self._graphs)

    def run(
        self, tokens: Tensor, inputs: ForwardInputs, taps: Sequence[int], is_joined: bool = False
    ) -> ForwardOutput | None:
        """What `PagedModel.run_pass` gives for `tokens` [T]; None, and nothing done, where they are to be run as usual.
        `is_joined`: some rows begin behind layers that they ran early.
        """
        found, reason = (None, JOINED) if is_joined else self._replayed(tokens, inputs, taps)
        self.steps[reason] += 1
        return found

    def _replayed(self, tokens: Tensor, inputs: ForwardInputs, taps: Sequence[int]) -> tuple[ForwardOutput | None, str]:
        num_rows = len(inputs.positions)
        if num_rows > MAX_ROWS:
            return None, MANY_ROWS
        work = numbers_of(inputs.readers, self.decoder.local)
        shape = StepShape.of(num_rows, work, taps)
        if shape.places["tail"].start + len(work.blocks) + work.num_distances > len(self.block):
            return None, MANY_NUMBERS
        self._fill(shape, tokens, inputs, work)
        graph, reason = self._graph(shape)
        if graph is None:
            return None, reason
        graph()
        wanted = self.block[shape.places["wanted"]][: len(inputs.wanted)]
        tapped = self.block[shape.places["tapped"]][: len(inputs.tapped)]
        found = {layer: self.taps[layer].index_select(0, tapped) for layer in shape.taps}
        return ForwardOutput(self.logits.index_select(0, wanted), found), REPLAYED

    def _fill(self, shape: StepShape, tokens: Tensor, inputs: ForwardInputs, work: WorkNumbers) -> None:
        """Everything of a step that is not the same for all of its shape; tokens may be known to the device alone."""
        numbers = torch.tensor([*shape.numbers(inputs, work, self.spare_slot), *work.blocks], dtype=torch.int32)
        numbers = torch.cat([numbers, *work.distances])
        fill(self.block[: len(numbers)], numbers)
        self.tokens[: len(tokens)].copy_(tokens)

    def _graph(self, shape: StepShape) -> tuple[Step | None, str]:
        """The graph for `shape`, captured when it is first wanted, from the step that lies in the block."""
        marks = self._weights_and_tables()
        if len(marks) != len(self._marks) or any(map(is_not, marks, self._marks)):
            self._graphs.clear()
            self._marks = marks
        if shape in self._graphs:
            return self._graphs[shape], REPLAYED
        if shape in self._without_memory:
            return None, NO_MEMORY
        if len(self._graphs) == MAX_GRAPHS:
            return None, MANY_GRAPHS
        for layer in shape.taps:
            self.taps.setdefault(layer, self._outputs(self.decoder.config.hidden_size))
        try:
            self._graphs[shape] = self.capture(lambda: self._step(shape))
        except torch.OutOfMemoryError:
            self._without_memory.add(shape)
            return None, NO_MEMORY
        return self._graphs[shape], REPLAYED

    def _weights_and_tables(self) -> tuple[object, ...]:
        """What a graph reads beside its inputs; tables of positions have their full length before it is captured."""
        for table in self.decoder.rotaries:
            table.cover(min(self.decoder.config.max_context_tokens, self.spare_slot))
        return (*self.decoder.weight_marks(), *(table.cos for table in self.decoder.rotaries))

    def _outputs(self, size: int) -> Tensor:
        weight = self.decoder.norm.weight
        return torch.zeros(MAX_ROWS, size, dtype=weight.dtype, device=weight.device)

    def _step(self, shape: StepShape) -> None:
        """What is captured: all layers and the head over all rows of the bucket."""
        decoder, at = self.decoder, shape.places
        positions, slots = self.block[at["positions"]].long(), self.block[at["slots"]].long()
        work = shape.work(self.block, decoder.local.num_heads)
        attention = FusedAttention.over(decoder.local, self.pool, slots, self.block_size, work)
        x = decoder.embed(self.tokens[: shape.rows])
        hidden = decoder.run(x, positions, attention, range(decoder.config.num_layers), shape.taps)
        logits = decoder.logits(hidden.last)
        assert logits.dtype == self.logits.dtype
        self.logits[: shape.rows].copy_(logits)
        for layer, tap in hidden.taps.items():
            self.taps[layer][: shape.rows].copy_(tap)
