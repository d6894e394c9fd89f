"""Mechanisms of the policy, each switched off by other values of its constants."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from foretoken.control.acceptance import _KEEP_REQUEST, ChanceRates, PlaceRates
from foretoken.control.policy import PolicyConfig

_NEVER = 1 << 40
_ENDLESS = 1e9


@dataclass(frozen=True)
class Ablation:
    """`config` are fields of `PolicyConfig`; `constants` maps MODULE.CONSTANT, under foretoken.control, to a value."""

    name: str
    about: str
    config: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)

    def policy_config(self) -> PolicyConfig:
        """The policy's constants under this ablation."""
        return replace(PolicyConfig(), **self.config)


Rates = TypeVar("Rates", PlaceRates, ChanceRates)


def _without_requests(kind: Callable[..., Rates], prior: Rates | None = None, keep: float = 0.0) -> Rates:
    """Rates of `kind`, but for a request those of its slice."""
    return prior if keep == _KEEP_REQUEST and prior is not None else kind(prior, keep)


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
    Ablation(
        "no_request_rates",
        "requests are taken to be like all others of their slice",
        constants={
            "acceptance.PlaceRates": partial(_without_requests, PlaceRates),
            "acceptance.ChanceRates": partial(_without_requests, ChanceRates),
        },
    ),
    Ablation(
        "slow_request_rates", "a request's counts have a long memory", constants={"acceptance._KEEP_REQUEST": 0.98}
    ),
    Ablation(
        "no_chance_rates",
        "the chances that lookups name are not corrected by class",
        constants={"acceptance._PRIOR_COUNT": float(_NEVER)},
    ),
    Ablation(
        "no_place_rates",
        "places of a draft are not told apart by what was seen there",
        constants={"acceptance._PRIOR_ROUNDS": float(_NEVER)},
    ),
    Ablation("no_cheap_share", "every drafter is weighed as a whole", constants={"budget._CHEAP_SHARE": 0.0}),
    Ablation(
        "no_speed_factor",
        "the machine is taken to be as fast as at first",
        constants={"cost._SPEED_VARIANCE": 1e-9, "cost._SPEED_DRIFT": 0.0},
    ),
    Ablation(
        "no_outlier_bound",
        "slow steps count in full",
        constants={"cost._BOUND": _ENDLESS, "cost._MIN_BOUND": _ENDLESS},
    ),
    Ablation("long_previews", "lookups show all they can at once", constants={"chooser._FIRST_PREVIEW": 24}),
)


@contextmanager
def applied(ablation: Ablation) -> Iterator[None]:
    """Change the constants while the context lasts.

    Raises:
        AttributeError: a constant that the policy does not have.
    """
    before: list[tuple[ModuleType, str, object]] = []
    try:
        for name, value in ablation.constants.items():
            module_name, _, constant = name.rpartition(".")
            module = importlib.import_module(f"foretoken.control.{module_name}")
            before.append((module, constant, getattr(module, constant)))
            setattr(module, constant, value)
        yield
    finally:
        for module, constant, value in before:
            setattr(module, constant, value)
