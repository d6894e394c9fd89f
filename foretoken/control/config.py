"""Every dial of the control, in one frozen value: `PolicyConfig`. Each field has its unit and its reason.

docs/controller.md lists them (`python -m studies.dials --table`), studies/dials tells what each is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

_Value = TypeVar("_Value")


def _dial(value: _Value, unit: str, reason: str) -> _Value:
    return field(default=value, metadata={"unit": unit, "reason": reason})


@dataclass(frozen=True)
class AcceptanceConfig:
    """How fast estimates of acceptance move, and where they begin (`acceptance`)."""

    memory: float = _dial(0.98, "weight per round", "of a place's past: about the last fifty rounds count")
    chance_memory: float = _dial(0.995, "weight per draft token", "of a class's past: lookups show many at once")
    request_memory: float = _dial(0.9, "weight per round", "of one request's past: its text may change")
    prior_rounds: float = _dial(3.0, "rounds", "that the wider estimate of a place counts as in the narrower one")
    prior_count: float = _dial(6.0, "draft tokens", "that the wider estimate of a class counts as in the narrower one")
    first_chance: float = _dial(0.6, "chance", "of any draft token before anything is known: high enough to be tried")
    max_places: int = _dial(128, "places", "of a draft that are distinguished: bounds the memory")
    max_slices: int = _dial(256, "slices", "that are kept: callers name them freely")
    class_edges: tuple[float, ...] = _dial(
        (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.96),
        "chances",
        "between classes of the chance that a lookup names: finer where most draft tokens are",
    )

    @cached_property
    def class_middles(self) -> tuple[float, ...]:
        """The middle of each class."""
        bounds = zip((0.0, *self.class_edges), (*self.class_edges, 1.0), strict=True)
        return tuple((low + high) / 2 for low, high in bounds)


@dataclass(frozen=True)
class CostConfig:
    """How fast estimates of seconds move (`cost`). Variances are relative, squared."""

    speed_variance: float = _dial(
        1.0, "variance", "of the speed factor before anything ran: a profile may be of other days"
    )
    speed_drift: float = _dial(7e-5, "variance per step", "that each step adds to the speed factor's: machines heat up")
    shape_variance: float = _dial(
        0.15**2, "variance", "of a count's place on a measured curve: profiles are good to 15 %"
    )
    min_shape_variance: float = _dial(2e-4, "variance", "that stays: a count's place moves as texts grow")
    first_variance: float = _dial(1.0, "variance", "of a count's place where the curve is one observation")
    step_variance: float = _dial(0.1**2, "variance", "of one step: steps scatter by 10 %")
    outlier_deviations: float = _dial(3.0, "deviations", "that a step counts as at most: machines pause")
    min_outlier: float = _dial(0.5, "share of a step", "that may always count: a bound must not stop learning")
    min_change: float = _dial(0.1, "share of an estimate", "that one observation leaves at least")
    pace_ratio: float = _dial(
        2.0, "factor", "off which is another pace: noise stays below, a looping neighbour makes it three"
    )
    pace_steps: int = _dial(3, "steps in a row", "that make another pace: pauses come singly")
    rows_per_step: int = _dial(
        48, "rows", "of a step never run that cost as much as the step: cheap, so they are tried"
    )
    exact_counts: int = _dial(
        32, "counts", "that are distinguished, as many rows as two tiles have; larger ones share buckets"
    )


@dataclass(frozen=True)
class BudgetConfig:
    """What draft tokens are weighed with (`budget`, `chooser`)."""

    cheap_share: float = _dial(0.01, "share of a step", "below which a drafter need not be weighed as a whole")
    min_emitted: float = _dial(0.02, "chance", "below which a draft token pays on no machine and is not weighed")
    first_preview: int = _dial(8, "draft tokens", "that a lookup shows where few were made: showing takes time")
    priority_factor: float = _dial(1.2, "factor", "of a token's worth per level of priority")
    max_priority: int = _dial(8, "levels", "of priority that count, up and down")
    lateness_factor: float = _dial(2.0, "factor", "of a token's worth where the deadline needs speculation")


@dataclass(frozen=True)
class ThreadConfig:
    """How ways to run a step are tried (`threads`)."""

    trial_steps: int = _dial(4, "steps", "on which another way is tried: their median counts")
    abort_ratio: float = _dial(1.25, "of the slowest base step", "beyond which a single step ends a trial")
    base_steps: int = _dial(16, "steps", "of the present way that a trial is compared with")
    min_base_steps: int = _dial(4, "steps", "of the present way before anything is tried")
    min_gain: float = _dial(0.05, "share", "by which another way must be faster to be taken")
    trial_share: float = _dial(0.005, "share of the time", "that trying ways again may cost")
    min_trial_loss: float = _dial(0.15, "share of a step", "that a trial is taken to lose: equal ways are seldom tried")
    new_pace_ratio: float = _dial(1.5, "factor", "off which all ways are tried anew")
    new_pace_steps: int = _dial(3, "steps in a row", "that must be off: pauses come singly")
    min_pace_s: float = _dial(5.0, "seconds", "between two changes of pace: neighbours flicker")


@dataclass(frozen=True)
class PolicyConfig:
    """Every dial: of the account, of trials and of deciding here, the others in groups."""

    max_num_draft: int = _dial(24, "draft tokens", "per request and round where the caller leaves the number open")
    slack_share: float = _dial(0.015, "share of the time", "by which decoding may fall behind plain decoding")
    first_slack_steps: float = _dial(0.25, "plain steps", "by which a new request may fall behind, to be learnt about")
    max_slack_steps: float = _dial(8.0, "plain steps", "of gains kept for later losses")
    min_slack_steps: float = _dial(-0.5, "plain steps", "of losses kept for later gains")
    decision_share: float = _dial(
        0.025, "share of the time", "that deciding may take: budgets are repeated until it is kept"
    )
    max_repeats: int = _dial(16, "rounds", "for which budgets are repeated at most")
    repeat_share: float = _dial(0.75, "share of requests", "that must have a budget to repeat; else it is decided anew")
    trial_share: float = _dial(0.005, "share of the time", "for trying again what did not pay: not run, not learnt")
    decisions_per_trial: int = _dial(
        4, "decisions", "against any draft token before rows are taken to cost half, once; doubled each time"
    )
    first_draft_tokens: int = _dial(2, "draft tokens", "of a drafter of unknown cost, by one request")
    first_plain: int = _dial(4, "steps", "with draft tokens before the first without one, which tells what that costs")
    plain_every: int = _dial(128, "steps", "with draft tokens between later ones without")
    rate_memory: float = _dial(0.96, "weight per request and step", "of the past in the long-run token rate")
    first_rows: int = _dial(8, "rows", "beside the requests' own before anything is known; later twice the largest")
    acceptance: AcceptanceConfig = AcceptanceConfig()
    cost: CostConfig = CostConfig()
    budget: BudgetConfig = BudgetConfig()
    threads: ThreadConfig = ThreadConfig()


DEFAULT = PolicyConfig()
