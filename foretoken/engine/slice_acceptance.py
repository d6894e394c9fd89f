"""Acceptance since the engine started, by slice, drafter and position in the draft."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_SLICES = 64  # slices are named by callers: without a limit their names would fill the memory of a server

PositionCounts = list[tuple[int, int]]


@dataclass
class SliceAcceptance:
    """Drafted and accepted tokens of at most `MAX_SLICES` slices; the one unused longest is dropped for a new one.

    `num_dropped` counts the dropped slices. A dropped slice that comes again begins at zero. Requests without a slice
    count under "".
    """

    num_dropped: int = 0
    _counts: OrderedDict[str, dict[str, PositionCounts]] = field(default_factory=OrderedDict)  # used last at the end

    def count(
        self, slice_: str, depths: Sequence[int], provenance: Sequence[str | None], emitted: Sequence[int]
    ) -> None:
        """Add one round: `depths` [n] and `provenance` [n] of its drafted tokens, and indices of the emitted ones."""
        drafters = self._drafters(slice_)
        accepted = set(emitted)
        for node, (depth, drafter) in enumerate(zip(depths, provenance, strict=True)):
            if drafter is None:
                continue
            positions = drafters.setdefault(drafter, [])
            positions += [(0, 0)] * (depth - len(positions))
            num_drafted, num_accepted = positions[depth - 1]
            positions[depth - 1] = (num_drafted + 1, num_accepted + (node in accepted))

    def of(self, slice_: str, drafter: str) -> tuple[tuple[int, int], ...]:
        """(drafted, accepted) counts at each position of the draft, the first one first; empty without drafts."""
        return tuple(self._counts.get(slice_, {}).get(drafter, ()))

    @property
    def slices(self) -> tuple[str, ...]:
        """The slices that are counted, the one used last at the end."""
        return tuple(self._counts)

    def copy(self) -> SliceAcceptance:
        """A copy that later rounds do not change; any thread may ask for one while another one counts."""
        # A list of items is made in one piece: a loop over them could meet a round half-way.
        counts = OrderedDict(
            (name, {drafter: list(positions) for drafter, positions in list(drafters.items())})
            for name, drafters in list(self._counts.items())
        )
        return SliceAcceptance(self.num_dropped, counts)

    def as_dict(self) -> dict[str, Any]:
        """[drafted, accepted] per position by slice and drafter, for JSON."""
        return {
            name: {drafter: [list(pair) for pair in positions] for drafter, positions in drafters.items()}
            for name, drafters in self._counts.items()
        }

    def _drafters(self, slice_: str) -> dict[str, PositionCounts]:
        if slice_ not in self._counts:
            self._counts[slice_] = {}
            if len(self._counts) > MAX_SLICES:
                self._counts.popitem(last=False)
                self.num_dropped += 1
        self._counts.move_to_end(slice_)
        return self._counts[slice_]
