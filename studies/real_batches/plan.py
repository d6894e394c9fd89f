"""The turns of a run: which setting answers which prompts, in an order that a machine which drifts does not bias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

MIXED = "mixed"  # prompts of all kinds, one of each in turn
_MIN_TURN = 6  # prompts of a turn: shorter turns are lost in the noise of the clock
_TURN_PER_REQUEST = 4  # prompts of a turn by requests at once: more, so that the tail with fewer requests is short


@dataclass(frozen=True)
class Cell:
    """What a ratio is about: a kind of prompt, requests at once, temperature, and whether a process loops beside it."""

    kind: str
    num_requests: int
    temperature: float
    neighbour: bool


@dataclass(frozen=True)
class Turn:
    """One setting answers the prompts at `places` of a cell's kind."""

    setting: str
    cell: Cell
    part: int
    places: tuple[int, ...]
    repeat: int

    @property
    def key(self) -> tuple[str, str, int, float, bool, int, int]:
        """What tells it from all other turns of a run."""
        cell = self.cell
        return (
            *(self.setting, cell.kind, cell.num_requests, cell.temperature, cell.neighbour),
            *(self.part, self.repeat),
        )


def turns(
    settings: Sequence[str],
    counts: Mapping[str, int],
    requests: Sequence[int],
    temperatures: Sequence[float],
    neighbours: Sequence[bool],
    repeats: int,
) -> Iterator[Turn]:
    """Every turn of a run; `counts` are the prompts of each kind.

    All cells advance together, so that a run which is stopped has measured each of them about equally. The settings of
    a part follow one another, in reversed order at every second part: what drifts evenly cancels in the ratios.
    """
    number = 0
    max_parts = max(len(parts(count, n)) for count, n in product(counts.values(), requests))
    for repeat, part in product(range(repeats), range(max_parts)):
        for n, temperature, neighbour, (kind, count) in product(requests, temperatures, neighbours, counts.items()):
            own = parts(count, n)
            if part >= len(own):
                continue
            order = settings if number % 2 == 0 else tuple(reversed(settings))
            number += 1
            for setting in order:
                yield Turn(setting, Cell(kind, n, temperature, neighbour), part, own[part], repeat)


def parts(count: int, num_requests: int) -> list[tuple[int, ...]]:
    """Places of `count` prompts, divided into turns of about equal size."""
    size = max(_MIN_TURN, _TURN_PER_REQUEST * num_requests)
    num_parts = max(1, round(count / size))
    return [tuple(range(part, count, num_parts)) for part in range(num_parts)]
