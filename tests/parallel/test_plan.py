"""Plans in frames of one size."""

from __future__ import annotations

import pytest
import torch

from foretoken.model.attention.paged import KeySlots, Reader
from foretoken.model.interface import Segment
from foretoken.model.paged import Join, Pass
from foretoken.model.paged_cache import ForwardInputs
from foretoken.parallel.plan import FRAME_BYTES, Plan, PlanKind, framed, num_more, unframed

CPU = torch.device("cpu")


def plan(num_blocks: int) -> tuple[Plan, Pass]:
    """A chunk of a prompt, a tree, and a chain of which two rows ran early."""
    blocks = tuple(range(7, 7 + num_blocks))
    segments = [Segment(5, 4, (), 0), Segment(9, 1, (-1, 0, 0), 4), Segment(2, 1, (-1, 0), 3, num_taps=2)]
    first, readers = 0, list[Reader]()
    for segment in segments:
        rows = slice(first, first + segment.num_rows)
        slots = KeySlots(blocks, 4, 30 + segment.num_rows, CPU)
        readers.append(Reader(rows, slots, 30, segment))
        first = rows.stop
    inputs = ForwardInputs(list(range(first)), list(range(50, 50 + first)), [4, 5, 9], [9, 10], readers)
    joins = [Join(2, 2, slice(8, 10), 3, torch.ones(2, 6))]
    one = Pass(torch.arange(first), inputs, joins, taps=(1,), layers=(0, 2), alone=True)
    moves = [((1, 2), (3, 4)), ((3,), (9,))]
    return Plan.of_pass(PlanKind.PASS, one, list(range(first)), moves), one


@pytest.mark.parametrize("num_blocks", [2, 3000])
def test_a_plan_is_read_as_it_was_sent(num_blocks: int) -> None:
    """Short in one frame, long in several; a rank makes the same pass of it, without taps, which rank 0 keeps."""
    sent, one = plan(num_blocks)
    frames = framed(sent.encoded(), 41)
    assert frames.shape[1] == FRAME_BYTES
    assert num_more(frames[0], 41) == len(frames) - 1 == (0 if num_blocks == 2 else 2)
    got = Plan.decoded(unframed(frames))
    assert (got.kind, list(got.moves), got.num_rows) == (PlanKind.PASS, [[[1, 2], [3, 4]], [[3], [9]]], 2)
    streams = torch.randn(2, 6)
    found = got.pass_of(4, CPU, streams)
    assert torch.equal(found.tokens, one.tokens)
    assert (found.alone, tuple(found.layers), found.taps) == (True, (0, 2), ())
    for name in ("positions", "slots", "wanted"):
        assert getattr(found.inputs, name) == getattr(one.inputs, name)
    for own, other in zip(found.inputs.readers, one.inputs.readers, strict=True):
        assert (own.rows, own.past, len(own.slots)) == (other.rows, other.past, len(other.slots))
        assert own.slots.index == other.slots.index
        assert own.segment.parents == other.segment.parents
        assert own.segment.num_rows == other.segment.num_rows
    (join,) = found.joins
    assert (join.index, join.count, join.rows, join.depth) == (2, 2, slice(8, 10), 3)
    assert torch.equal(join.hidden, streams)


def test_a_rank_that_has_lost_step_notices() -> None:
    frames = framed(plan(2)[0].encoded(), 41)
    with pytest.raises(AssertionError, match="plan 41 came where plan 42 was expected"):
        num_more(frames[0], 42)
