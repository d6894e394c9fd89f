"""What steps take at the user's load: measured for each number of requests at once, by draft tokens and by drafter.

Real engine steps are timed (`engine.startup.profiling`) behind texts as long as the user's: scheduling, verification
and bookkeeping are in them. Drafters that run a model are timed in whole steps with their own drafts; for lookups,
whose drafts vary in length, the step is timed by draft tokens and the lookup beside it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from foretoken.config import SpecConfig
from foretoken.draft.base import Drafter
from foretoken.engine.startup.profiling import StepBench, Tell, Work
from foretoken.errors import InputError
from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.measure.advise.options import AdviseOptions
from foretoken.model.interface import LanguageModel
from foretoken.plan.profile import Curve

_MAX_TURNS = 3
_MAX_POINTS = 5  # numbers of draft tokens that are timed at each load; those between are interpolated

Made = tuple[AdviseCandidate, SpecConfig, Drafter]


@dataclass(frozen=True)
class DrafterCosts:
    """A drafter by requests at once: `steps` by draft tokens of a request, of whole steps where `is_whole`, else of the
    drafting alone. `prompt_s`: reading a prompt of the usual length before it drafts for the first time.
    """

    is_whole: bool
    steps: Mapping[int, Curve]
    prompt_s: float = 0.0


@dataclass(frozen=True)
class LoadCosts:
    """Seconds of steps by requests at once: `target` by draft tokens of a request, that cost nothing to draft.

    `prefill_s` is what the target takes for one prompt of `prompt_tokens`; steps have `context_tokens` of past.
    """

    prompt_tokens: int
    context_tokens: int
    prefill_s: float
    target: Mapping[int, Curve]
    drafters: Mapping[str, DrafterCosts] = field(default_factory=dict)
    num_turns: int = 1
    left_out: tuple[str, ...] = ()

    def plain_s(self, concurrency: float) -> float:
        """A step of plain decoding."""
        return _between(self.target, concurrency, lambda curve: curve.seconds(0))

    def round_s(self, drafter: str, concurrency: float, num_draft: int, own: int, mean: float) -> float:
        """A step in which one request has `own` draft tokens, the others `mean` on average, of `num_draft` at most."""
        costs = self.drafters[drafter]
        each = (own + (concurrency - 1) * mean) / concurrency if concurrency >= 1 else own
        if costs.is_whole:
            return _between(costs.steps, concurrency, lambda curve: curve.seconds(each))
        drafting_s = _between(costs.steps, concurrency, lambda curve: curve.seconds(num_draft))
        return drafting_s + _between(self.target, concurrency, lambda curve: curve.seconds(each))


def _between(curves: Mapping[int, Curve], count: float, seconds: Callable[[Curve], float]) -> float:
    """Seconds at `count` requests, interpolated between the measured numbers, constant beyond them."""
    known = sorted(curves)
    place = bisect_left(known, count)
    if place == len(known) or known[place] == count or place == 0:
        return seconds(curves[known[min(place, len(known) - 1)]])
    low, high = known[place - 1 : place + 1]
    share = (count - low) / (high - low)
    return (1 - share) * seconds(curves[low]) + share * seconds(curves[high])


@dataclass(frozen=True)
class _Point:
    """Steps to time: of the target alone (`drafter` "") or with a drafter."""

    drafter: str
    load: int
    count: int


def measure_costs(
    target: LanguageModel, made: Mapping[str, Made], options: AdviseOptions, prompt_tokens: int, tell: Tell
) -> LoadCosts:
    """The costs of an open target and of drafters by their candidates' names, within about `options.budget_s`.

    All points are timed in turns, up to three times, and the fastest turn counts: other processes only add to it.
    """
    began = time.perf_counter()
    bench = StepBench(target, options.seed, began + options.budget_s, options.budget_s, tell)
    context_tokens = max(1, min(prompt_tokens + options.max_tokens // 2, target.max_context_tokens // 2))
    prompt_tokens = max(1, min(prompt_tokens, target.max_context_tokens // 2))
    if not bench.fits(Work(1, context_tokens, options.lengths[0])):
        context = target.max_context_tokens
        remedy = f"do not fit behind {context_tokens} tokens into a context of {context}; give smaller ones"
        raise InputError("num_drafts", options.num_drafts, remedy)
    bench.step_times("warm-up", Work(1, context_tokens, min(options.lengths)))
    counts = spread(options.lengths)
    points = [_Point("", load, count) for load in options.loads for count in (0, *counts)]
    for name, (candidate, _, _) in made.items():
        own = counts if candidate.runs_model else (counts[0], counts[-1])
        points += [_Point(name, load, count) for load in options.loads for count in own]
    points = [one for one in points if bench.fits(Work(one.load, context_tokens, one.count))]
    found: dict[_Point, list[float]] = {one: [] for one in points}
    prefill_s: list[float] = []
    prompt_s: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(_MAX_TURNS):
        turn_began = time.perf_counter()
        prefill_s.append(sum(bench.step_times("prompt", Work(1, prompt_tokens, 0)).prompt_s))
        for one in points:
            found[one].append(_step_s(bench, one, context_tokens, made.get(one.drafter)))
        for name, (candidate, spec, drafter) in made.items():
            if candidate.runs_model:
                times = bench.step_times(f"{name} prompt", Work(1, prompt_tokens, counts[0]), (spec, drafter))
                prompt_s[name].append(max(0.0, times.draft_s[0] - median(times.draft_s[1:])))
        now = time.perf_counter()
        if now + (now - turn_began) > began + options.budget_s:
            break
    seconds = {one: min(values) for one, values in found.items()}
    drafters = {}
    for name, (candidate, _, _) in made.items():
        curves = _drafter_curves(seconds, name, candidate.runs_model)
        drafters[name] = DrafterCosts(candidate.runs_model, curves, min(prompt_s[name], default=0.0))
    num_turns, left_out = len(prefill_s), tuple(bench.left_out())
    target_curves = _curves(seconds, "")
    return LoadCosts(prompt_tokens, context_tokens, min(prefill_s), target_curves, drafters, num_turns, left_out)


def _step_s(bench: StepBench, one: _Point, context_tokens: int, made: Made | None) -> float:
    """A step at this point: of the target alone, whole with a drafter that runs a model, else of the lookup alone."""
    work, words = Work(one.load, context_tokens, one.count), f"{one.drafter or 'target'}, {one.load} at once"
    if made is None:
        return median(bench.step_times(words, work).step_s)
    candidate, spec, drafter = made
    times = bench.step_times(words, work, (spec, drafter))
    if not candidate.runs_model:
        return median(times.draft_s)
    return median(map(sum, zip(times.step_s, times.draft_s, strict=True)))


def _drafter_curves(seconds: Mapping[_Point, float], drafter: str, is_whole: bool) -> dict[int, Curve]:
    """`_curves` of a drafter; a whole step in which it drafts nothing is a plain one."""
    plain = {_Point(drafter, one.load, 0): value for one, value in seconds.items() if not one.drafter and not one.count}
    own = {one: value for one, value in seconds.items() if one.drafter == drafter}
    return _curves({**plain, **own} if is_whole else own, drafter)


def _curves(seconds: Mapping[_Point, float], drafter: str) -> dict[int, Curve]:
    """By requests at once; where many do not fit into the cache there is none. More draft tokens never take less."""
    found: dict[int, list[tuple[int, float]]] = {}
    for one, value in seconds.items():
        if one.drafter == drafter:
            own = found.setdefault(one.load, [])
            own.append((one.count, max(value, own[-1][1] if own else 0.0)))
    return {load: Curve(tuple(points)) for load, points in found.items()}


def spread(lengths: Sequence[int]) -> tuple[int, ...]:
    """At most a few of ascending numbers, the first and the last among them."""
    if len(lengths) <= _MAX_POINTS:
        return tuple(lengths)
    last = len(lengths) - 1
    return tuple(dict.fromkeys(lengths[round(last * place / (_MAX_POINTS - 1))] for place in range(_MAX_POINTS)))
