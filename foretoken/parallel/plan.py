"""What rank 0 tells the other ranks before all of them compute: one plan, with every decision in it.

A plan travels in frames of one fixed size, so that no rank ever waits for a message of another size than was sent. The
first frame begins with the number of the plan and its length; a rank that gets another number than the one it expects
has lost step, and ends.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from foretoken.model.attention.paged import KeySlots, Reader
from foretoken.model.interface import Segment
from foretoken.model.paged import Join, Pass
from foretoken.model.paged_cache import ForwardInputs

FRAME_BYTES = 16_384
_HEAD = struct.Struct("<QQ")

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

    # ---- as bytes

    def encoded(self) -> bytes:
        """The plan as JSON, see `decoded`."""
        readers = [(one.past, one.slots.num_tokens, one.slots.blocks, *_shape(one.segment)) for one in self.segments]
        parts = (
            *(self.kind, self.moves, self.numbers, self.tokens, self.positions, self.slots, self.wanted),
            *(tuple(self.layers), self.joins, self.is_alone, readers),
        )
        return json.dumps(parts, separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Plan:
        """The plan that `encoded` gave; its readers know blocks and lengths, rows and devices are the rank's own."""
        parts: list[Any] = json.loads(data)
        parts[0], parts[-1] = PlanKind(parts[0]), [_reader(*one) for one in parts[-1]]
        return cls(*parts)


def _shape(segment: Segment) -> tuple[int, tuple[int, ...], int, int]:
    return segment.num_pending, segment.parents, segment.num_logits, segment.num_held


def _reader(past: int, num_tokens: int, blocks: list[int], pending: int, parents: list[int], *counts: int) -> Reader:
    slots = KeySlots(tuple(blocks), 1, num_tokens, torch.device("cpu"))
    return Reader(slice(0), slots, past, Segment(0, pending, tuple(parents), *counts))


def framed(data: bytes, number: int) -> Tensor:
    """Plan `number` as frames [F, FRAME_BYTES] uint8."""
    whole = _HEAD.pack(number, len(data)) + data
    count = -(-len(whole) // FRAME_BYTES)
    padded = bytearray(whole.ljust(count * FRAME_BYTES, b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8).view(count, FRAME_BYTES)


def num_more(first: Tensor, number: int) -> int:
    """Frames that come behind the `first` of plan `number`."""
    found, length = _HEAD.unpack_from(first.numpy().tobytes())
    assert found == number, f"plan {found} came where plan {number} was expected"
    return int(-(-(length + _HEAD.size) // FRAME_BYTES)) - 1


def unframed(frames: Tensor) -> bytes:
    """The plan in its frames."""
    whole = frames.numpy().tobytes()
    return whole[_HEAD.size : _HEAD.size + _HEAD.unpack_from(whole)[1]]
