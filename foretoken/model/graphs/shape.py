"""What a captured step is made for, and where its numbers lie in the input block.

Sizes are rounded up to buckets, so that few graphs serve all steps. What stands behind a step's own numbers is padding:
a row that is written to a spare slot and read by nobody, a tile of a segment without columns, a row without parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from foretoken.kernels.paged_work import ALIGNED, MERGE_FIELDS, SEGMENT_FIELDS, TILE_FIELDS, PagedWork
from foretoken.model.attention.fused import WorkNumbers, max_part_rows
from foretoken.model.paged_cache import ForwardInputs

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
