"""Every cell (batch size and slice): each setting of each checkout in turn, in an order that rotates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from foretoken.measure.stats import expanded_interval, geometric_mean
from studies.before_after.pair import AFTER, BEFORE, Pair, rotated

_RESAMPLES = 2000
_POLICY_PHASES = ("schedule_s", "preview_s", "observe_s")  # those that a checkout has

Cell = tuple[int, str]  # batch size, slice
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One turn: what the child replied, without the answers' tokens."""

    side: str
    setting: str
    batch: int
    slice: str
    repeat: int
    seconds: float
    num_tokens: int
    request_tokens_per_s: float  # the mean over requests
    num_drafted: int
    num_accepted: int
    num_rounds: int
    phases: Mapping[str, float]
    answers: tuple[tuple[int, ...], ...]
    near_ties: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch, prompts included."""
        return self.num_tokens / self.seconds

    @property
    def cell(self) -> Cell:
        """Where it belongs."""
        return self.batch, self.slice

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the record; answers are left out."""
        return {name: value for name, value in vars(self).items() if name not in ("answers", "near_ties")} | {
            "tokens_per_s": self.tokens_per_s
        }


@dataclass(frozen=True)
class Ratio:
    """The median of ratios of neighbouring turns, with their smallest and largest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class GridPlan:
    """What a grid measures; a cell answers a whole batch, at least `min_requests`."""

    batches: tuple[int, ...]
    slices: tuple[str, ...]
    settings: tuple[str, ...]
    repeats: int
    max_tokens: int
    min_requests: int

    def count(self, batch: int) -> int:
        """Requests of a cell."""
        return max(batch, self.min_requests)


def measure(pair: Pair, plan: GridPlan, samples: list[Sample], tell: Tell) -> None:
    """Add the samples of all cells; what was measured before an interruption stays in `samples`."""
    sides = list(pair.checkouts)
    turn = 0
    for batch in sorted(set(plan.batches)):
        for name in plan.slices:
            for repeat in range(plan.repeats):
                for side, setting in rotated(sides, plan.settings, turn):
                    tell(f"{batch} {name}, repeat {repeat + 1}: {setting} {side}")
                    samples.append(_sample(pair, plan, side, setting, (batch, name), repeat))
                turn += 1


def warm_up(pair: Pair, plan: GridPlan) -> dict[int, float]:
    """One turn of every setting of both checkouts; returns seconds of plain at the smallest and largest batch."""
    batches = sorted(set(plan.batches))
    for side in pair.checkouts:
        for setting in plan.settings:
            _sample(pair, plan, side, setting, (batches[0], plan.slices[0]), 0)
    last = list(pair.checkouts)[-1]
    return {
        batch: _sample(pair, plan, last, "plain", (batch, plan.slices[0]), 0).seconds
        for batch in dict.fromkeys((batches[0], batches[-1]))
    }


def estimate_s(plan: GridPlan, plain_s: Mapping[int, float], num_sides: int) -> float:
    """Seconds of the whole grid if every setting takes as long as plain, by a line through the measured turns."""
    low, high = min(plain_s), max(plain_s)
    slope = (plain_s[high] - plain_s[low]) / (high - low) if high > low else 0.0
    each = sum(plain_s[low] + slope * (batch - low) for batch in set(plan.batches))
    return each * len(plan.slices) * plan.repeats * len(plan.settings) * num_sides


def _sample(pair: Pair, plan: GridPlan, side: str, setting: str, cell: Cell, repeat: int) -> Sample:
    batch, name = cell
    reply = pair.turn(
        side,
        {
            "do": "cell",
            "setting": setting,
            "slice": name,
            "batch": batch,
            "count": plan.count(batch),
            "max_tokens": plan.max_tokens,
        },
    )
    return Sample(
        side=side,
        setting=setting,
        batch=batch,
        slice=name,
        repeat=repeat,
        seconds=reply["seconds"],
        num_tokens=sum(map(len, reply["answers"])),
        request_tokens_per_s=fmean(reply["request_tokens_per_s"]),
        num_drafted=reply["num_drafted"],
        num_accepted=reply["num_accepted"],
        num_rounds=reply["num_rounds"],
        phases=reply["phases"],
        answers=tuple(map(tuple, reply["answers"])),
        near_ties=tuple(reply["near_ties"]),
    )


class Grid:
    """The samples of a grid by cell, checkout and setting."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.samples = list(samples)
        self._by: dict[tuple[Cell, str, str], dict[int, Sample]] = {}
        for one in self.samples:
            self._by.setdefault((one.cell, one.side, one.setting), {})[one.repeat] = one
        self.cells = list(dict.fromkeys(one.cell for one in self.samples))
        self.settings = list(dict.fromkeys(one.setting for one in self.samples))

    def of(self, cell: Cell, side: str, setting: str) -> list[Sample]:
        """The samples of one setting of one checkout in a cell, by repeat."""
        return list(self._by.get((cell, side, setting), {}).values())

    def speed(self, cell: Cell, side: str, setting: str, field: str = "tokens_per_s") -> float:
        """The median over repeats; NaN where nothing was measured."""
        own = [getattr(one, field) for one in self.of(cell, side, setting)]
        return median(own) if own else math.nan

    def pairs(self, cell: Cell, over: tuple[str, str], under: tuple[str, str], field: str) -> list[float]:
        """Ratios of (side, setting) `over` to `under`, one for each repeat that has both."""
        above = self._by.get((cell, *over), {})
        below = self._by.get((cell, *under), {})
        return [getattr(above[n], field) / getattr(below[n], field) for n in above if n in below]

    def ratio(
        self, cell: Cell, over: tuple[str, str], under: tuple[str, str], field: str = "tokens_per_s"
    ) -> Ratio | None:
        """See `Ratio`; None where no repeat has both."""
        found = self.pairs(cell, over, under, field)
        return Ratio(median(found), min(found), max(found)) if found else None

    def mean_ratio(self, over: tuple[str, str], under: tuple[str, str], field: str = "tokens_per_s") -> Ratio | None:
        """The geometric mean over cells of their median ratios, with a 95 % interval: repeats drawn anew per
        cell; without width for a single repeat."""
        by_cell = [found for cell in self.cells if (found := self.pairs(cell, over, under, field))]
        if not by_cell:
            return None
        rng = np.random.default_rng(0)
        logs = [
            np.log(np.median(rng.choice(found, size=(_RESAMPLES, len(found))), axis=1)) for found in by_cell
        ]  # [draws] of each cell
        middle = geometric_mean([median(found) for found in by_cell])
        num_repeats = min(map(len, by_cell))
        freedom = sum(len(found) - 1 for found in by_cell)
        ends = expanded_interval(np.exp(np.mean(logs, axis=0)), num_repeats, freedom=freedom)
        return Ratio(middle, middle, middle) if ends is None else Ratio(middle, ends.low, ends.high)

    def noise(self, cell: Cell) -> Ratio | None:
        """The ratio of plain decoding after to plain decoding before: what differs there is noise or the engine."""
        return self.ratio(cell, (AFTER, "plain"), (BEFORE, "plain"))

    def answers(self, cell: Cell, setting: str) -> tuple[int, int, int]:
        """(answers compared, equal in both checkouts, different although no choice of either was a near tie)."""
        total = same = unexplained = 0
        before, after = (self._by.get((cell, side, setting), {}) for side in (BEFORE, AFTER))
        for repeat in after:
            if repeat not in before:
                continue
            one, other = before[repeat], after[repeat]
            for b, (old, new) in enumerate(zip(one.answers, other.answers, strict=True)):
                total, same = total + 1, same + (old == new)
                unexplained += old != new and not one.near_ties[b] + other.near_ties[b]
        return total, same, unexplained

    def policy(self, side: str, setting: str, batch: int) -> tuple[float, float, float] | None:
        """(policy milliseconds per step, beyond plain's, their share of a step) at a batch size."""
        own = [one.phases for one in self.samples if (one.side, one.setting, one.batch) == (side, setting, batch)]
        plain = [one.phases for one in self.samples if (one.side, one.setting, one.batch) == (side, "plain", batch)]
        if not own or not plain:
            return None
        spent_s, plain_spent_s = _per_step(own, _POLICY_PHASES), _per_step(plain, _POLICY_PHASES)
        return 1e3 * spent_s, 1e3 * (spent_s - plain_spent_s), spent_s / _per_step(own, ("step_s",))


def _per_step(phases: Sequence[Mapping[str, float]], names: Sequence[str]) -> float:
    steps = sum(one["num_steps"] for one in phases)
    return sum(one.get(name, 0.0) for one in phases for name in names) / max(1.0, steps)
