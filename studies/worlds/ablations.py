"""Mechanisms of the policy, each switched off by other values of its constants."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

_NEVER = 1 << 40


@dataclass(frozen=True)
class Ablation:
    """`changes` maps MODULE.CONSTANT, under foretoken.control, to the value that switches the mechanism off."""

    name: str
    about: str
    changes: Mapping[str, object] = field(default_factory=dict)


FULL = Ablation("full", "the policy as it is")
ABLATIONS: tuple[Ablation, ...] = (
    Ablation("no_trials", "drafters that were given up are not tried again", {"policy._PROBE_SHARE": 0.0}),
    Ablation("no_rest_rounds", "no round that supposes cheap rows after long rest", {"policy._REST_ROUNDS": _NEVER}),
    Ablation("no_held_prices", "budgets are weighed anew in every round", {"policy._MOST_HELD_STEPS": 0}),
    Ablation(
        "no_plain_steps",
        "no step without guesses is run to learn its cost",
        {"policy._FIRST_PLAIN": -_NEVER, "policy._PLAIN_EVERY": _NEVER},
    ),
    Ablation("short_rate_memory", "the token rate is that of the last step", {"policy._RATE_MEMORY": 0.0}),
    Ablation("no_first_guesses", "a drafter of unknown cost may guess as much as any", {"policy._FIRST_GUESSES": 24}),
    Ablation("free_rows", "rows that measured as free are free", {"policy._FREE_ROWS": _NEVER}),
    Ablation("no_stickiness", "another option is chosen if it is better at all", {"budget._STAY": 1.0}),
    Ablation("no_cost_memory", "of a count of rows the last step alone counts", {"cost._MEMORY_STEPS": 1}),
    Ablation("no_outlier_bound", "a slow step counts in full", {"cost._OUTLIER": float(_NEVER)}),
    Ablation("one_speed", "the acceptance shift follows at one speed", {"acceptance_shift._DRIFTS": (0.0005, 0.0005)}),
    Ablation(
        "no_acceptance_shift",
        "requests are taken to be like all others",
        {"acceptance_shift._DOUBT": 1e-9, "acceptance_shift._DRIFTS": (1e-12, 1e-12)},
    ),
    Ablation("no_preview_classes", "a lookup's own chances are believed", {"previews._TRUST": float(_NEVER)}),
    Ablation(
        "no_preview_requests", "previews are not corrected by request", {"previews._PRIOR_GUESSES": float(_NEVER)}
    ),
    Ablation("no_preview_throttle", "previews are made in every round", {"previews._WORTH_LOOKING": float(_NEVER)}),
)


@contextmanager
def applied(ablation: Ablation) -> Iterator[None]:
    """Change the constants while the context lasts.

    Raises:
        AttributeError: a constant that the policy does not have.
    """
    before: list[tuple[ModuleType, str, object]] = []
    try:
        for name, value in ablation.changes.items():
            module_name, _, constant = name.rpartition(".")
            module = importlib.import_module(f"foretoken.control.{module_name}")
            before.append((module, constant, getattr(module, constant)))
            setattr(module, constant, value)
        yield
    finally:
        for module, constant, value in before:
            setattr(module, constant, value)
