"""Every dial of the control, in one frozen value: `PolicyConfig`. Each field has its unit and its reason.

docs/controller.md lists them (`python -m studies.dials --table`), studies/dials tells what each is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


def _why(unit: str, reason: str) -> Mapping[str, str]:
    """The metadata of a dial."""
    return {"unit": unit, "reason": reason}


@dataclass(frozen=True)
class AcceptanceConfig:
    """How fast estimates of acceptance move, and where they begin (`acceptance`)."""

    memory: float = field(
        default=0.98, metadata=_why("weight per round", "of a place's past: about the last fifty rounds count")
    )
    chance_memory: float = field(
        default=0.995, metadata=_why("weight per draft token", "of a class's past: lookups show many at once")
    )
    request_memory: float = field(
        default=0.9, metadata=_why("weight per round", "of one request's past: its text may change")
    )
    prior_rounds: float = field(
        default=3.0, metadata=_why("rounds", "that the wider estimate of a place counts as in the narrower one")
    )
    prior_count: float = field(
        default=6.0, metadata=_why("draft tokens", "that the wider estimate of a class counts as in the narrower one")
    )
    first_chance: float = field(
        default=0.6, metadata=_why("chance", "of any draft token before anything is known: high enough to be tried")
    )
    max_places: int = field(
        default=128, metadata=_why("places", "of a draft that are distinguished: bounds the memory")
    )
    max_slices: int = field(default=256, metadata=_why("slices", "that are kept: callers name them freely"))
    class_edges: tuple[float, ...] = field(
        default=(0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.96),
        metadata=_why(
            "chances", "between classes of the chance that a lookup names: finer where most draft tokens are"
        ),
    )

    @cached_property
    def class_middles(self) -> tuple[float, ...]:
        """The middle of each class."""
        bounds = zip((0.0, *self.class_edges), (*self.class_edges, 1.0), strict=True)
        return tuple((low + high) / 2 for low, high in bounds)


@dataclass(frozen=True)
class CostConfig:
    """How fast estimates of seconds move (`cost`). Variances are relative, squared."""

    speed_variance: float = field(
        default=1.0,
        metadata=_why("variance", "of the speed factor before anything ran: a profile may be of other days"),
    )
    speed_drift: float = field(
        default=7e-5, metadata=_why("variance per step", "that each step adds to the speed factor's: machines heat up")
    )
    shape_variance: float = field(
        default=0.15**2, metadata=_why("variance", "of a count's place on a measured curve: profiles are good to 15 %")
    )
    min_shape_variance: float = field(
        default=2e-4, metadata=_why("variance", "that stays: a count's place moves as texts grow")
    )
    first_variance: float = field(
        default=1.0, metadata=_why("variance", "of a count's place where the curve is one observation")
    )
    step_variance: float = field(default=0.1**2, metadata=_why("variance", "of one step: steps scatter by 10 %"))
    outlier_deviations: float = field(
        default=3.0, metadata=_why("deviations", "that a step counts as at most: machines pause")
    )
    min_outlier: float = field(
        default=0.5, metadata=_why("share of a step", "that may always count: a bound must not stop learning")
    )
    min_change: float = field(
        default=0.1, metadata=_why("share of an estimate", "that one observation leaves at least")
    )
    pace_ratio: float = field(
        default=2.0,
        metadata=_why("factor", "off which is another pace: noise stays below, a looping neighbour makes it three"),
    )
    pace_steps: int = field(default=3, metadata=_why("steps in a row", "that make another pace: pauses come singly"))
    rows_per_step: int = field(
        default=48, metadata=_why("rows", "of a step never run that cost as much as the step: cheap, so they are tried")
    )
    exact_counts: int = field(
        default=32,
        metadata=_why("counts", "that are distinguished, as many rows as two tiles have; larger ones share buckets"),
    )


@dataclass(frozen=True)
class BudgetConfig:
    """What draft tokens are weighed with (`budget`, `chooser`)."""

    cheap_share: float = field(
        default=0.01, metadata=_why("share of a step", "below which a drafter need not be weighed as a whole")
    )
    min_emitted: float = field(
        default=0.02, metadata=_why("chance", "below which a draft token pays on no machine and is not weighed")
    )
    first_preview: int = field(
        default=8, metadata=_why("draft tokens", "that a lookup shows where few were made: showing takes time")
    )
    priority_factor: float = field(default=1.2, metadata=_why("factor", "of a token's worth per level of priority"))
    max_priority: int = field(default=8, metadata=_why("levels", "of priority that count, up and down"))
    lateness_factor: float = field(
        default=2.0, metadata=_why("factor", "of a token's worth where the deadline needs speculation")
    )


@dataclass(frozen=True)
class ThreadConfig:
    """How ways to run a step are tried (`threads`)."""

    trial_steps: int = field(default=4, metadata=_why("steps", "on which another way is tried: their median counts"))
    abort_ratio: float = field(
        default=1.25, metadata=_why("of the slowest base step", "beyond which a single step ends a trial")
    )
    base_steps: int = field(default=16, metadata=_why("steps", "of the present way that a trial is compared with"))
    min_base_steps: int = field(default=4, metadata=_why("steps", "of the present way before anything is tried"))
    min_gain: float = field(default=0.05, metadata=_why("share", "by which another way must be faster to be taken"))
    trial_share: float = field(default=0.005, metadata=_why("share of the time", "that trying ways again may cost"))
    min_trial_loss: float = field(
        default=0.15, metadata=_why("share of a step", "that a trial is taken to lose: equal ways are seldom tried")
    )
    new_pace_ratio: float = field(default=1.5, metadata=_why("factor", "off which all ways are tried anew"))
    new_pace_steps: int = field(default=3, metadata=_why("steps in a row", "that must be off: pauses come singly"))
    min_pace_s: float = field(default=5.0, metadata=_why("seconds", "between two changes of pace: neighbours flicker"))


@dataclass(frozen=True)
class PolicyConfig:
    """Every dial: of the account, of trials and of deciding here, the others in groups."""

    max_num_draft: int = field(
        default=24, metadata=_why("draft tokens", "per request and round where the caller leaves the number open")
    )
    slack_share: float = field(
        default=0.015, metadata=_why("share of the time", "by which decoding may fall behind plain decoding")
    )
    first_slack_steps: float = field(
        default=0.25, metadata=_why("plain steps", "by which a new request may fall behind, to be learnt about")
    )
    max_slack_steps: float = field(default=8.0, metadata=_why("plain steps", "of gains kept for later losses"))
    min_slack_steps: float = field(default=-0.5, metadata=_why("plain steps", "of losses kept for later gains"))
    decision_share: float = field(
        default=0.025,
        metadata=_why("share of the time", "that deciding may take: budgets are repeated until it is kept"),
    )
    max_repeats: int = field(default=16, metadata=_why("rounds", "for which budgets are repeated at most"))
    repeat_share: float = field(
        default=0.75, metadata=_why("share of requests", "that must have a budget to repeat; else it is decided anew")
    )
    trial_share: float = field(
        default=0.005, metadata=_why("share of the time", "for trying again what did not pay: not run, not learnt")
    )
    decisions_per_trial: int = field(
        default=4,
        metadata=_why(
            "decisions", "against any draft token before rows are taken to cost half, once; doubled each time"
        ),
    )
    first_draft_tokens: int = field(
        default=2, metadata=_why("draft tokens", "of a drafter of unknown cost, by one request")
    )
    first_plain: int = field(
        default=4, metadata=_why("steps", "with draft tokens before the first without one, which tells what that costs")
    )
    plain_every: int = field(default=128, metadata=_why("steps", "with draft tokens between later ones without"))
    rate_memory: float = field(
        default=0.96, metadata=_why("weight per request and step", "of the past in the long-run token rate")
    )
    first_rows: int = field(
        default=8, metadata=_why("rows", "beside the requests' own before anything is known; later twice the largest")
    )
    acceptance: AcceptanceConfig = AcceptanceConfig()
    cost: CostConfig = CostConfig()
    budget: BudgetConfig = BudgetConfig()
    threads: ThreadConfig = ThreadConfig()


DEFAULT = PolicyConfig()
