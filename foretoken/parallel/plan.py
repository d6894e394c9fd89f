"""What rank 0 tells the other ranks before all of them compute: one plan, with every decision in it.

A plan travels as whole numbers in frames of one fixed width, so that no rank ever waits for a message of another size
than was sent. The first two words of the first frame are the number of the plan and how many words it has; a rank that
gets another number than the one it expects has lost step, and ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from foretoken.model.attention.paged import KeySlots, Reader
from foretoken.model.interface import Segment
from foretoken.model.paged import Join, Pass
from foretoken.model.paged_cache import ForwardInputs

FRAME_WORDS = 2048
_HEAD_WORDS = 2

Move = tuple[Sequence[int], Sequence[int]]


class PlanKind(IntEnum):
    """What a plan asks for."""

    CACHE = 0  # make the model, with a cache of `numbers[0]` tokens
    PASS = 1  # a forward over all layers, and the head
    EARLY = 2  # some layers only
    EMBED = 3  # the residual stream in front of the first layer
    OUTPUT = 4  # logits of rows that follow the plan, which are `numbers[0]`


@dataclass(frozen=True)
class Plan:
    """One plan. Each of `moves`, in turn, copies cache slots (sources, destinations) before anything is computed: the
    accepted rows of a tree, and blocks that are shared no longer.

    A rank has no requests, block tables or drafts: `segments` say for each run of rows what it sees, `blocks` where its
    keys are. `num_rows` numbers [D] follow the plan: the streams of `joins`, or the rows of an OUTPUT.
    """

    kind: PlanKind
    moves: Sequence[Move] = ()
    numbers: Sequence[int] = ()
    tokens: Sequence[int] = ()
    positions: Sequence[int] = ()
    slots: Sequence[int] = ()
    wanted: Sequence[int] = ()
    layers: Sequence[int] = ()
    joins: Sequence[tuple[int, int, int]] = ()  # segment, number of rows, depth
    is_alone: bool = False
    segments: Sequence[Reader] = field(default=())

    @classmethod
    def of_pass(cls, kind: PlanKind, one: Pass, tokens: Sequence[int], moves: Sequence[Move]) -> Plan:
        """The plan of a PASS or EARLY over `tokens`, which those of `one` are on the host."""
        inputs = one.inputs
        joins = [(join.index, join.count, join.depth) for join in one.joins]
        return cls(
            *(kind, moves, (), tokens, inputs.positions, inputs.slots, inputs.wanted),
            layers=one.layers,
            joins=joins,
            is_alone=one.alone,
            segments=inputs.readers,
        )

    @property
    def num_rows(self) -> int:
        """Rows of numbers that follow the plan."""
        return self.numbers[0] if self.kind is PlanKind.OUTPUT else sum(count for _, count, _ in self.joins)

    def pass_of(self, block_size: int, device: torch.device, streams: Tensor) -> Pass:
        """The pass of a PASS or EARLY on this rank; `streams` [num_rows, D] are those of the joins."""
        readers, joins, first, taken = list[Reader](), list[Join](), 0, 0
        for one in self.segments:
            rows = slice(first, first + one.segment.num_rows)
            slots = KeySlots(one.slots.blocks, block_size, one.slots.num_tokens, device)
            readers.append(Reader(rows, slots, one.past, one.segment))
            first = rows.stop
        for index, count, depth in self.joins:
            start = readers[index].rows.start
            joins.append(Join(index, count, slice(start, start + count), depth, streams[taken : taken + count]))
            taken += count
        inputs = ForwardInputs(list(self.positions), list(self.slots), list(self.wanted), [], readers)
        tokens = torch.tensor(self.tokens, dtype=torch.int64, device=device)
        return Pass(tokens, inputs, joins, layers=self.layers, alone=self.is_alone)

    # ---- as whole numbers

    def words(self) -> list[int]:
        """The plan as numbers, see `from_words`."""
        parts: list[Sequence[int]] = [
            *((int(self.kind), int(self.is_alone)), _joined(self.moves), self.numbers, self.tokens, self.positions),
            *(self.slots, self.wanted, self.layers, list(itertools.chain(*self.joins))),
        ]
        for one in self.segments:
            segment = one.segment
            shape = (one.past, one.slots.num_tokens, segment.num_pending, segment.num_logits, segment.num_held)
            parts += [shape, one.slots.blocks, segment.parents]
        return [len(parts), *map(len, parts), *itertools.chain(*parts)]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Plan:
        """The plan that `words` gave; its readers know blocks and lengths, rows and devices are the rank's own."""
        count = words[0]
        parts, start = list[tuple[int, ...]](), 1 + count
        for length in words[1 : 1 + count]:
            parts.append(tuple(words[start : start + length]))
            start += length
        (kind, is_alone), moves, numbers, tokens, positions, slots, wanted, layers, joins, *rest = parts
        segments = [_reader(*rest[i : i + 3]) for i in range(0, len(rest), 3)]
        return cls(
            *(PlanKind(kind), _moves(moves), numbers, tokens, positions, slots, wanted, layers),
            joins=[(joins[i], joins[i + 1], joins[i + 2]) for i in range(0, len(joins), 3)],
            is_alone=bool(is_alone),
            segments=segments,
        )


def _joined(moves: Sequence[Move]) -> list[int]:
    """Moves as numbers: of each its length, sources and destinations."""
    return [number for move in moves for number in (len(move[0]), *move[0], *move[1])]


def _moves(numbers: Sequence[int]) -> list[Move]:
    moves, start = list[Move](), 0
    while start < len(numbers):
        first, count = start + 1, numbers[start]
        moves.append((numbers[first : first + count], numbers[first + count : first + 2 * count]))
        start = first + 2 * count
    return moves


def _reader(shape: tuple[int, ...], blocks: tuple[int, ...], parents: tuple[int, ...]) -> Reader:
    past, num_tokens, num_pending, num_logits, num_held = shape
    segment = Segment(0, num_pending, parents, num_logits, num_held)
    return Reader(slice(0), KeySlots(blocks, 1, num_tokens, torch.device("cpu")), past, segment)


def framed(words: Sequence[int], number: int) -> Tensor:
    """Plan `number` as frames [F, FRAME_WORDS]."""
    count = -(-(len(words) + _HEAD_WORDS) // FRAME_WORDS)
    frames = torch.zeros(count * FRAME_WORDS, dtype=torch.int64)
    frames[: len(words) + _HEAD_WORDS] = torch.tensor([number, len(words), *words])
    return frames.view(count, FRAME_WORDS)


def num_more(first: Tensor, number: int) -> int:
    """Frames that come behind the `first` of plan `number`."""
    found, length = map(int, first[:_HEAD_WORDS])
    assert found == number, f"plan {found} came where plan {number} was expected"
    return -(-(length + _HEAD_WORDS) // FRAME_WORDS) - 1


def unframed(frames: Tensor) -> list[int]:
    """The words of a plan in its frames."""
    words: list[int] = frames.flatten().tolist()
    return words[_HEAD_WORDS : _HEAD_WORDS + words[1]]
