"""Captured steps over one cache: the step's numbers go into the input block in one copy, then its graph is replayed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_not
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from foretoken.errors import CapacityError
from foretoken.kernels.paged_work import ALIGNED, MERGE_FIELDS, SEGMENT_FIELDS, TILE_FIELDS, PagedWork
from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.fused import FusedAttention, WorkNumbers, max_part_rows, numbers_of
from foretoken.model.decoder import Decoder
from foretoken.model.graphs.choice import GRAPHS_VARIABLE, NotCaptured, tell_of
from foretoken.model.interface import ForwardOutput
from foretoken.model.paged_cache import ForwardInputs
from foretoken.transfer import fill

# At most a third of the rows is padding.
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

MAX_ROWS = ROW_BUCKETS[-1]


@dataclass(frozen=True)
class StepShape:
    """What is fixed when a step is captured: a bucket for each size that a launch depends on, and its switches."""

    rows: int
    parts: int  # that the longest shared text is cut into
    has_trees: bool
    taps: tuple[int, ...]

    @classmethod
    def of(cls, num_rows: int, work: WorkNumbers, taps: Sequence[int]) -> StepShape:
        """The smallest that holds a step of 1 to `MAX_ROWS` rows."""
        rows = ROW_BUCKETS[bisect_left(ROW_BUCKETS, num_rows)]
        parts = 1 << (work.num_parts - 1).bit_length()  # a power of two
        return cls(rows, parts, bool(work.distances), tuple(sorted(taps)))

    @property
    def places(self) -> Mapping[str, slice]:
        """Where each vector lies in the input block; block tables and distances of trees follow in `tail`."""
        return _places(self.rows, self.num_merged)

    @property
    def num_merged(self) -> int:
        """Rows whose columns may have several parts."""
        return self.rows if self.parts > 1 else 0

    def work(self, block: Tensor, num_heads: int) -> PagedWork:
        """The attention kernel's view of the input `block`."""
        at, tail = self.places, block[self.places["tail"]]
        return PagedWork(
            segments=block[at["segments"]],
            tiles=block[at["tiles"]],
            merged=block[at["merged"]],
            blocks=tail,
            positions=block[at["positions"]],
            distances=tail,
            num_tiles=self.rows,  # each has a row: those that a step lacks end at once
            num_parts=self.parts,
            num_merged=self.num_merged,
            num_part_rows=min(self.num_merged * self.parts, max_part_rows(num_heads)),
            has_trees=self.has_trees,
        )

    def numbers(self, inputs: ForwardInputs, work: WorkNumbers, spare_slot: int) -> list[int]:
        """What lies in the block in front of `tail`."""
        segments, num_segments = list(work.segments), len(work.segments) // SEGMENT_FIELDS
        for place in range(5, len(segments), SEGMENT_FIELDS):  # distances stand behind all block tables
            if segments[place] >= 0:
                segments[place] += len(work.blocks)
        missing = self.rows - work.num_tiles
        parts = {
            "positions": inputs.positions,
            "slots": [*inputs.slots, *([spare_slot] * (self.rows - len(inputs.slots)))],
            "wanted": inputs.wanted,
            "tapped": inputs.tapped,
            "segments": segments,
            "tiles": [*work.tiles, *((num_segments, 0) * missing)],
            "merged": work.merged,
        }
        numbers = [0] * (self.places["tail"].start)
        for name, part in parts.items():
            first = self.places[name].start
            numbers[first : first + len(part)] = part
        return numbers


@cache
def _places(rows: int, num_merged: int) -> Mapping[str, slice]:
    sizes = {
        **dict.fromkeys(("positions", "slots", "wanted", "tapped"), rows),
        "segments": (rows + 1) * SEGMENT_FIELDS,  # a tile has one segment; the last one is padding
        "tiles": rows * TILE_FIELDS,
        "merged": num_merged * MERGE_FIELDS,
    }
    found, first = dict[str, slice](), 0
    for name, size in sizes.items():
        found[name] = slice(first, first + size)
        first += -(-size // ALIGNED) * ALIGNED
    return {**found, "tail": slice(first, None)}


Step = Callable[[], None]  # reads and writes tensors that stay where they are

Capture = Callable[[Step], Step]

MAX_GRAPHS = 96

ROWS_AHEAD = tuple(rows for rows in ROW_BUCKETS if rows <= 16)  # what a request alone, or a few of them, will need

# Numbers of the input block in front of block tables, and for trees: rows by what they may see.
HEAD_NUMBERS, _TREE_NUMBERS = 32 * MAX_ROWS, 2 * MAX_ROWS * MAX_ROWS

# Why a step is not replayed.
REPLAYED, JOINED, TREES = "replayed", "rows that ran early", "trees in strict numerics"

MANY_ROWS, MANY_NUMBERS = f"more than {MAX_ROWS} rows", "block tables too long"

MANY_GRAPHS, NO_MEMORY, FAILED = f"more than {MAX_GRAPHS} shapes", "no memory", "the device did not capture it"


class CudaCapture:
    """Captures steps that share the memory of what lies between their operations: they must not run side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: tuple[Any, torch.cuda.Stream] | None = None  # handle of the memory, and its stream

    def __call__(self, step: Step) -> Step:
        """Run `step` to warm up, and capture it: what replays it.

        Raises:
            torch.OutOfMemoryError: no memory for what lies between its operations.
            NotCaptured: it ran, and the device or a library refuses to capture it.
        """
        with torch.cuda.device(self._device):
            if self._shared is None:
                self._shared = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            (pool, stream), current = self._shared, torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    step()  # what is compiled or allocated at a first run is not part of a graph
            finally:  # without memory for it the step is run as usual, behind what was begun here
                current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Memory is shared by captures on one stream. Other threads may call what a capture forbids.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    step()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # of the end of a capture, behind what broke it
                raise NotCaptured from error.__context__ or error
            finally:
                torch.cuda.set_stream(current)  # torch stays on the other one where a capture cannot be ended
        return graph.replay


def buffer_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that captured steps write into, or read.

    Raises:
        CapacityError: no memory for them.
    """
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        num_bytes = math.prod(shape) * dtype.itemsize
        raise CapacityError(
            f"no memory for {num_bytes / 2**20:,.0f} MiB beside weights and cache that captured steps write into; "
            f"give a smaller cache_tokens, or set {GRAPHS_VARIABLE}=off"
        ) from error


_Shape = TypeVar("_Shape", bound=Hashable)


class CapturedSteps(ABC, Generic[_Shape]):
    """Graphs of one kind of step by shape; `steps` counts what was replayed, and what was not by the reason."""

    max_graphs: ClassVar[int] = MAX_GRAPHS

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.capture: Capture = CudaCapture(device)
        self.steps: Counter[str] = Counter()
        self._graphs: dict[_Shape, Step] = {}
        self._refused: dict[_Shape, str] = {}  # by the reason
        self._marks: tuple[object, ...] = ()

    @property
    def shapes(self) -> Sequence[_Shape]:
        """What graphs were captured for."""
        return tuple(self._graphs)

    @abstractmethod
    def read_beside(self) -> tuple[object, ...]:
        """Weights and tables that a step reads beside its inputs, which then lie where a graph will read them."""

    @abstractmethod
    def step(self, shape: _Shape) -> None:
        """What is captured: it reads tensors that stay where they are, and writes into others that do.

        It is run several times before it is captured, each time with the same outcome.
        """

    def graph_of(self, shape: _Shape) -> tuple[Step | None, str]:
        """The graph for `shape`, captured when it is first wanted from its inputs as they lie; or why there is none."""
        marks = self.read_beside()
        if len(marks) != len(self._marks) or any(map(is_not, marks, self._marks)):
            self._graphs.clear()
            self._marks = marks
        if shape in self._graphs:
            return self._graphs[shape], REPLAYED
        if shape in self._refused:
            return None, self._refused[shape]
        if len(self._graphs) == self.max_graphs:
            return None, MANY_GRAPHS
        try:
            self._graphs[shape] = self.capture(lambda: self.step(shape))
        except torch.OutOfMemoryError:
            self._refused[shape] = NO_MEMORY
        except NotCaptured as failure:
            if FAILED not in self._refused.values():
                tell_of(failure)
            self._refused[shape] = FAILED
        return self._graphs.get(shape), self._refused.get(shape, REPLAYED)


class StepGraphs(CapturedSteps[StepShape]):
    """Graphs of `layers` over rows of `pool`, whose last slots, from `spare_slot` on, belong to no sequence."""

    def __init__(self, layers: ModelConfig, pool: KVPool, block_size: int, spare_slot: int) -> None:
        super().__init__(pool.keys[0].device)
        self.layers, self.pool, self.block_size, self.spare_slot = layers, pool, block_size, spare_slot
        self.tokens = self.buffer(dtype=torch.int64)
        # Sequences may share blocks: their tables are longer than the pool then.
        num_numbers = HEAD_NUMBERS + _TREE_NUMBERS + 2 * (spare_slot // block_size) + MAX_ROWS
        self.block = buffer_of((num_numbers,), torch.int32, self._device)

    def buffer(self, *size: int, dtype: torch.dtype) -> Tensor:
        """A row of `size` for each row of the largest bucket, which stays where it is.

        Raises:
            CapacityError: no memory for it.
        """
        return buffer_of((MAX_ROWS, *size), dtype, self._device)

    def replay(
        self, inputs: ForwardInputs, rows: Sequence[tuple[Tensor, Tensor]], taps: Sequence[int] = ()
    ) -> StepShape | None:
        """Replay the step of `inputs`: its outputs lie in their buffers. None, and nothing done, where it is to be run
        as usual. `rows` are buffers, each with what its first rows are to hold.
        """
        shape, reason = self._replayed(inputs, rows, taps)
        self.steps[reason] += 1
        return shape

    def wanted(self, shape: StepShape, inputs: ForwardInputs) -> Tensor:
        """The rows that somebody wants logits of, [R] on the device, until the next step."""
        return self.block[shape.places["wanted"]][: len(inputs.wanted)]

    def attended(self, shape: StepShape) -> tuple[Tensor, FusedAttention]:
        """Inside a step: positions of its rows, and what they read the cache by."""
        positions, slots = (self.block[shape.places[name]].long() for name in ("positions", "slots"))
        work = shape.work(self.block, self.layers.num_heads)
        return positions, FusedAttention.over(self.layers, self.pool, slots, self.block_size, work)

    def _replayed(
        self, inputs: ForwardInputs, rows: Sequence[tuple[Tensor, Tensor]], taps: Sequence[int]
    ) -> tuple[StepShape | None, str]:
        num_rows = len(inputs.positions)
        if num_rows > MAX_ROWS:
            return None, MANY_ROWS
        work = numbers_of(inputs.readers, self.layers)
        shape = StepShape.of(num_rows, work, taps)
        if shape.places["tail"].start + len(work.blocks) + work.num_distances > len(self.block):
            return None, MANY_NUMBERS
        self._fill(shape, inputs, work, rows)
        graph, reason = self.graph_of(shape)
        if graph is None:
            return None, reason
        graph()
        return shape, REPLAYED

    def _fill(
        self, shape: StepShape, inputs: ForwardInputs, work: WorkNumbers, rows: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Everything of a step that is not the same for all of its shape; rows may be known to the device alone."""
        numbers = torch.tensor([*shape.numbers(inputs, work, self.spare_slot), *work.blocks], dtype=torch.int32)
        numbers = torch.cat([numbers, *work.distances])
        fill(self.block[: len(numbers)], numbers)
        for buffer, values in rows:
            assert buffer.dtype == values.dtype
            buffer[: len(values)].copy_(values)


class GraphCache(StepGraphs):
    """Runs a decoder over rows of `pool`: from token ids to the logits."""

    def __init__(self, decoder: Decoder, pool: KVPool, block_size: int, spare_slot: int) -> None:
        super().__init__(decoder.local, pool, block_size, spare_slot)
        self.decoder, self._dtype = decoder, decoder.norm.weight.dtype
        # What a step computes for all rows of its bucket, until the next one: logits [., V], and by layer taps [., D].
        self.logits = self.buffer(decoder.config.vocab_size, dtype=self._dtype)
        self.taps: dict[int, Tensor] = {}

    def run(
        self, tokens: Tensor, inputs: ForwardInputs, taps: Sequence[int], why_not: str | None = None
    ) -> ForwardOutput | None:
        """What `PagedModel.run_pass` gives for `tokens` [T]; None, and nothing done, where they are to be run as usual.
        `why_not`: a reason for that beside those that are found here.
        """
        if why_not is not None:
            self.steps[why_not] += 1
            return None
        self._make_room(taps)
        shape = self.replay(inputs, [(self.tokens, tokens)], taps)
        if shape is None:
            return None
        tapped = self.block[shape.places["tapped"]][: len(inputs.tapped)]
        found = {layer: self.taps[layer].index_select(0, tapped) for layer in shape.taps}
        return ForwardOutput(self.logits.index_select(0, self.wanted(shape, inputs)), found)

    @torch.inference_mode()
    def capture_ahead(self, taps: Sequence[int]) -> None:
        """Capture steps of `ROWS_AHEAD` rows of short texts, and one of a row of a long text, whose parts are merged by
        a kernel of their own; they hold nothing but padding meanwhile.
        """
        self._make_room(taps)
        short = [StepShape.of(rows, WorkNumbers(), taps) for rows in ROWS_AHEAD]
        for shape in (*short, StepShape.of(1, WorkNumbers(num_parts=2), taps)):
            self._fill(shape, ForwardInputs(), WorkNumbers(), [])
            self.graph_of(shape)

    def _make_room(self, taps: Sequence[int]) -> None:
        for layer in taps:
            if layer not in self.taps:
                self.taps[layer] = self.buffer(self.decoder.config.hidden_size, dtype=self._dtype)

    def read_beside(self) -> tuple[object, ...]:
        """See `StepGraphs`; tables of positions have their full length before they are captured."""
        for table in self.decoder.rotaries:
            table.cover(min(self.decoder.config.max_context_tokens, self.spare_slot))
        return (*self.decoder.weight_marks(), *(table.cos for table in self.decoder.rotaries))

    def step(self, shape: StepShape) -> None:
        """See `StepGraphs`: all layers and the head over all rows of the bucket."""
        decoder = self.decoder
        positions, attention = self.attended(shape)
        x = decoder.embed(self.tokens[: shape.rows])
        if decoder.config.experts is not None:
            padding = self.block[shape.places["slots"]] == self.spare_slot
            x = x.masked_fill(padding[:, None], float("nan"))  # which goes to no expert, and wakes none
        hidden = decoder.run(x, positions, attention, range(decoder.config.num_layers), shape.taps)
        logits = decoder.logits(hidden.last)
        assert logits.dtype == self.logits.dtype
        self.logits[: shape.rows].copy_(logits)
        for layer, tap in hidden.taps.items():
            self.taps[layer][: shape.rows].copy_(tap)
