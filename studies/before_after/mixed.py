"""A load that changes in size and kind (the trace `mixed` of the bench): plain, auto, and every fixed setting.

All fixed settings run once; the best of them by that run then take turns with plain and auto for the repeats that
count, so that the winner is not chosen by the turns it is judged by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from studies.before_after.grid import Ratio, Tell
from studies.before_after.pair import AFTER, Pair
from studies.changing_load.options import MIXED

_LENGTHS = (0.5, 1.0, 1.5)  # of answers, in turn, so that requests do not end together
_MAX_REQUESTS = 2000
SCREENING = -1  # the repeat of the first run of a fixed setting

Turn = tuple[str, str]  # checkout, setting


@dataclass(frozen=True)
class TraceSample:
    """One way through the trace; seconds and tokens by phase."""

    side: str
    setting: str
    repeat: int
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    phases: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Of the whole trace."""
        return sum(self.tokens) / sum(self.seconds)


@dataclass(frozen=True)
class MixedPlan:
    """What is measured: `phase_s` is how long plain decoding takes for each phase."""

    fixed: tuple[str, ...]
    finalists: int
    repeats: int
    max_tokens: int
    phase_s: float


def measure(pair: Pair, plan: MixedPlan, samples: list[TraceSample], tell: Tell) -> None:
    """Add the samples of all ways through the trace; what there is stays in `samples` after an interruption."""
    phases = _sized(pair, plan, tell)
    tell(f"trace: {len(plan.fixed) + (4 + plan.finalists) * plan.repeats} ways of about {5 * plan.phase_s:.0f} s each")
    for setting in plan.fixed:
        tell(f"trace, screening: {setting}")
        samples.append(_run(pair, (AFTER, setting), SCREENING, phases))
    best = sorted((one for one in samples if one.repeat == SCREENING), key=lambda one: -one.tokens_per_s)
    turns: list[Turn] = [(side, setting) for setting in ("plain", "auto") for side in pair.checkouts]
    turns += [(AFTER, one.setting) for one in best[: plan.finalists]]
    small = [{**phase, "jobs": phase["jobs"][: phase["batch"]]} for phase in phases]
    for turn in turns[:4]:
        tell(f"trace, warm-up: {turn[1]} {turn[0]}")
        _run(pair, turn, SCREENING, small)
    for repeat in range(plan.repeats):
        first = repeat % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            tell(f"trace, repeat {repeat + 1}: {turn[1]} {turn[0]}")
            samples.append(_run(pair, turn, repeat, phases))


def _sized(pair: Pair, plan: MixedPlan, tell: Tell) -> list[dict[str, Any]]:
    """The phases with as many requests each as plain decoding answers in `phase_s`."""
    one = [_phase(phase.batch, phase.slice, phase.batch, plan.max_tokens) for phase in MIXED]
    tell("trace: how long plain decoding takes")
    _run(pair, (AFTER, "plain"), SCREENING, one)
    first = _run(pair, (AFTER, "plain"), SCREENING, one)
    sized = []
    for phase, seconds, tokens in zip(MIXED, first.seconds, first.tokens, strict=True):
        wanted = math.ceil(plan.phase_s * tokens / max(seconds, 1e-9) / plan.max_tokens)
        sized.append(_phase(phase.batch, phase.slice, min(max(wanted, phase.batch), _MAX_REQUESTS), plan.max_tokens))
    return sized


def _phase(batch: int, name: str, count: int, max_tokens: int) -> dict[str, Any]:
    jobs = [(place, max(2, round(max_tokens * _LENGTHS[place % len(_LENGTHS)]))) for place in range(count)]
    return {"batch": batch, "slice": name, "jobs": jobs}


def _run(pair: Pair, turn: Turn, repeat: int, phases: list[dict[str, Any]]) -> TraceSample:
    side, setting = turn
    reply = pair.turn(side, {"do": "trace", "setting": setting, "phases": phases})
    return TraceSample(side, setting, repeat, tuple(reply["seconds"]), tuple(reply["tokens"]), reply["phases"])


class Traces:
    """The samples of the trace by checkout and setting."""

    def __init__(self, samples: list[TraceSample]) -> None:
        self._by: dict[Turn, dict[int, TraceSample]] = {}
        self._screened: dict[str, TraceSample] = {}
        for one in samples:
            if one.repeat == SCREENING:
                self._screened[one.setting] = one
            else:
                self._by.setdefault((one.side, one.setting), {})[one.repeat] = one
        self.turns = list(self._by)

    @property
    def screened(self) -> list[TraceSample]:
        """The first run of every fixed setting, fastest first."""
        return sorted(self._screened.values(), key=lambda one: -one.tokens_per_s)

    @property
    def best_fixed(self) -> str | None:
        """The fastest setting of `after` that never changes, by the repeats that count; plain is one."""
        fixed = [turn for turn in self.turns if turn[0] == AFTER and turn[1] != "auto"]
        return max(fixed, key=self.speed)[1] if fixed else None

    def speed(self, turn: Turn) -> float:
        """The median over repeats."""
        return median(one.tokens_per_s for one in self._by[turn].values())

    def phase_speeds(self, turn: Turn) -> list[float]:
        """Tokens per second of each phase, medians over repeats."""
        own = list(self._by[turn].values())
        return [
            median(one.tokens[place] / one.seconds[place] for one in own if one.seconds[place] > 0)
            for place in range(len(own[0].seconds))
        ]

    def ratio(self, over: Turn, under: Turn) -> Ratio | None:
        """Median, smallest and largest ratio over repeats; None where no repeat has both."""
        above, below = self._by.get(over, {}), self._by.get(under, {})
        found = [above[n].tokens_per_s / below[n].tokens_per_s for n in above if n in below]
        return Ratio(median(found), min(found), max(found)) if found else None


PHASE_NAMES = tuple(f"{phase.batch} {phase.slice}" for phase in MIXED)
