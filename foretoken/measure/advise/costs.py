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

from foretoken.config import SpecConfig
from foretoken.draft.base import Drafter
from foretoken.engine.startup.profiling import StepBench, Tell, Work
from foretoken.measure.advise.candidates import Candidate
from foretoken.measure.advise.options import AdviseOptions
from foretoken.model.interface import LanguageModel
from foretoken.plan.profile import Curve

_MAX_POINTS = 5  # numbers of draft tokens that are timed at each load; those between are interpolated


@dataclass(frozen=True)
class DrafterCosts:
    """A drafter by requests at once: `steps` by draft tokens of a request, of whole steps where `is_whole`, else of the
    drafting alone. `prompt_s`: reading a prompt of the usual length before it drafts for the first time.
    """

    is_whole: bool
    steps: Mapping[int, Curve]
    prompt_s: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps by requests at once: `target` by draft tokens of a request, that cost nothing to draft.

    `prefill_s` is what the target takes for one prompt of `prompt_tokens`; steps have `context_tokens` of past.
    """

    prompt_tokens: int
    context_tokens: int
    prefill_s: float
    target: Mapping[int, Curve]
    drafters: Mapping[str, DrafterCosts] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def plain_s(self, concurrency: float) -> float:
        """A step of plain decoding."""
        return _between(self.target, concurrency, lambda curve: curve.seconds(0))

    def round_s(self, drafter: str, concurrency: float, num_draft: int, own: int, mean: float) -> float:
        """A step in which one request has `own` draft tokens and the others `mean` on average; drafts may have
        `num_draft`.
        """
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


def measure_costs(
    target: LanguageModel,
    made: Mapping[str, tuple[Candidate, SpecConfig, Drafter]],
    options: AdviseOptions,
    prompt_tokens: int,
    tell: Tell,
) -> StepCosts:
    """The costs of an open target and of drafters by their candidates' names, within about `options.budget_s`."""
    bench = StepBench(target, options.seed, time.perf_counter() + options.budget_s, options.budget_s, tell)
    context_tokens = max(1, min(prompt_tokens + options.max_tokens // 2, target.max_context_tokens // 2))
    prompt_tokens = max(1, min(prompt_tokens, target.max_context_tokens // 2))
    bench.step_times("warm-up", Work(1, context_tokens, min(options.lengths)))
    prefill_s = sum(bench.step_times("prompt", Work(1, prompt_tokens, 0)).prompt_s)
    counts = spread(options.lengths)
    curves = {
        load: bench.curve(f"{load} requests, draft tokens", (0, *counts), _work(load, context_tokens))
        for load in options.loads
    }
    drafters = {}
    for name, (candidate, spec, drafter) in made.items():
        timed = bench.drafting_curve if candidate.runs_model else bench.drafter_curve
        steps = {
            load: timed(f"{name}, {load} requests", (spec, drafter), counts, _work(load, context_tokens))
            for load in options.loads
        }
        prompt = bench.prompt_curve(name, (spec, drafter), (prompt_tokens,)) if candidate.runs_model else Curve()
        drafters[name] = DrafterCosts(candidate.runs_model, _measured(steps), prompt.seconds(prompt_tokens))
    return StepCosts(prompt_tokens, context_tokens, prefill_s, _measured(curves), drafters, tuple(bench.left_out()))


def spread(lengths: Sequence[int]) -> tuple[int, ...]:
    """At most a few of ascending numbers, the first and the last among them."""
    if len(lengths) <= _MAX_POINTS:
        return tuple(lengths)
    last = len(lengths) - 1
    return tuple(dict.fromkeys(lengths[round(last * place / (_MAX_POINTS - 1))] for place in range(_MAX_POINTS)))


def _work(load: int, context_tokens: int) -> Callable[[int], Work]:
    return lambda count: Work(load, context_tokens, count)


def _measured(curves: Mapping[int, Curve]) -> dict[int, Curve]:
    """Curves with a point: where many requests do not fit into the cache there is none."""
    return {load: curve for load, curve in curves.items() if curve.points}
