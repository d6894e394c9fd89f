"""Mechanisms of the policy, each switched off by other values of its dials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.control.config import PolicyConfig
from studies.dials.dials import with_dials

_NEVER = 1 << 40
_ENDLESS = 1e9


@dataclass(frozen=True)
class Ablation:
    """`dials` maps fields of `PolicyConfig`, with their group (`cost.pace_ratio`), to values."""

    name: str
    about: str
    dials: Mapping[str, Any] = field(default_factory=dict)

    def policy_config(self) -> PolicyConfig:
        """The policy's dials under this ablation."""
        return with_dials(self.dials)


FULL = Ablation("full", "the policy as it is")
ABLATIONS: tuple[Ablation, ...] = (
    Ablation(
        "no_slack",
        "no bound on how far a request falls behind plain decoding",
        {"slack_share": _ENDLESS, "min_slack_steps": -_ENDLESS, "max_slack_steps": _ENDLESS},
    ),
    Ablation("no_kept_gains", "gains are not kept for later losses", {"max_slack_steps": 0.25}),
    Ablation("no_repeats", "budgets are decided anew in every round", {"max_repeats": 0}),
    Ablation("no_trials", "drafters that were passed over are not tried again", {"trial_share": 0.0}),
    Ablation("more_trials", "twice the time for trials", {"trial_share": 0.01}),
    Ablation("no_first_guesses", "a drafter of unknown cost may draft as much as any", {"first_draft_tokens": 24}),
    Ablation(
        "no_plain_steps",
        "no step without drafting is run to learn its cost",
        {"first_plain": _NEVER, "plain_every": _NEVER},
    ),
    Ablation("no_rate_memory", "the token rate is that of the last step", {"rate_memory": 0.0}),
    Ablation("no_first_rows", "any number of rows may be run at once", {"first_rows": 1 << 20}),
    Ablation("slow_request_rates", "a request's counts have a long memory", {"acceptance.request_memory": 0.98}),
    Ablation(
        "no_chance_rates",
        "the chances that lookups name are not corrected by class",
        {"acceptance.prior_count": float(_NEVER)},
    ),
    Ablation(
        "no_place_rates",
        "places of a draft are not told apart by what was seen there",
        {"acceptance.prior_rounds": float(_NEVER)},
    ),
    Ablation("no_cheap_share", "every drafter is weighed as a whole", {"budget.cheap_share": 0.0}),
    Ablation(
        "no_speed_factor",
        "the machine is taken to be as fast as at first",
        {"cost.speed_variance": 1e-9, "cost.speed_drift": 0.0},
    ),
    Ablation(
        "no_outlier_bound",
        "slow steps count in full",
        {"cost.outlier_deviations": _ENDLESS, "cost.min_outlier": _ENDLESS},
    ),
    Ablation("long_previews", "lookups show all they can at once", {"budget.first_preview": 24}),
)
