"""The fields of `PolicyConfig` by name, other values for them, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import Any

from foretoken.control.config import DEFAULT, PolicyConfig
from foretoken.printing import console as markdown

_NEVER, _ENDLESS = 1 << 40, 1e9

# The value at which a dial does nothing, of those that a simulated world can tell. Not among them: what deciding takes
# (a simulation's takes nothing), priorities and deadlines (its requests have none), threads (it has none:
# tests/control/test_threads.py), and bounds on memory.
NEUTRAL: Mapping[str, Any] = {
    "max_num_draft": 128,
    "slack_share": 0.0,
    "first_slack_steps": 0.0,
    "max_slack_steps": _ENDLESS,
    "min_slack_steps": -_ENDLESS,
    "trial_share": 0.0,
    "decisions_per_trial": _NEVER,
    "first_draft_tokens": 24,
    "first_plain": _NEVER,
    "plain_every": _NEVER,
    "rate_memory": 0.0,
    "first_rows": 1 << 20,
    "acceptance.memory": 1.0,
    "acceptance.chance_memory": 1.0,
    "acceptance.request_memory": 0.98,
    "acceptance.prior_rounds": float(_NEVER),
    "acceptance.prior_count": float(_NEVER),
    "acceptance.first_chance": 0.999,
    "acceptance.class_edges": (),
    "cost.speed_variance": 1e-9,
    "cost.speed_drift": 0.0,
    "cost.shape_variance": 1e-9,
    "cost.min_shape_variance": 0.0,
    "cost.first_variance": 0.15**2,
    "cost.step_variance": 1e-9,
    "cost.outlier_deviations": _ENDLESS,
    "cost.min_outlier": 0.0,
    "cost.min_change": 1e-9,
    "cost.pace_ratio": _ENDLESS,
    "cost.pace_steps": 1,
    "cost.rows_per_step": _NEVER,
    "cost.exact_counts": _NEVER,
    "budget.cheap_share": 0.0,
    "budget.min_emitted": 0.0,
    "budget.first_preview": 24,
}


@dataclass(frozen=True)
class Variant:
    """The policy with one dial at another value."""

    dial: str
    form: str  # neutral, halved or doubled
    value: Any

    @property
    def config(self) -> PolicyConfig:
        """All dials."""
        return with_dials({self.dial: self.value})


def named_dials(config: PolicyConfig = DEFAULT) -> list[tuple[str, Any]]:
    """Every dial's name, with its group, and its value."""
    return [(name, value) for name, value, _ in _walk(config)]


def with_dials(values: Mapping[str, Any], config: PolicyConfig = DEFAULT) -> PolicyConfig:
    """`config` with other values.

    Raises:
        AttributeError, TypeError: a dial that there is not.
    """
    for name, value in values.items():
        group, _, own = name.rpartition(".")
        changed = {group: replace(getattr(config, group), **{own: value})} if group else {own: value}
        config = replace(config, **changed)
    return config


def variants(forms: tuple[str, ...] = ("neutral", "halved", "doubled")) -> list[Variant]:
    """Every form of every dial that a world can tell, form by form."""
    values = dict(named_dials())
    found = []
    for form in forms:
        for dial, neutral in NEUTRAL.items():
            value = neutral if form == "neutral" else _scaled(dial, values[dial], 0.5 if form == "halved" else 2.0)
            if value != values[dial]:
                found.append(Variant(dial, form, value))
    return found


def table() -> list[str]:
    """All dials, for docs/controller.md."""
    rows = [
        [f"`{name}`", _spelled(value), *(about.metadata[key] for key in ("unit", "reason"))]
        for name, value, about in _walk(DEFAULT)
    ]
    return markdown.table(["dial", "value", "unit", "why"], rows, "lrll")


def _walk(config: Any, group: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:  # noqa: ANN401 - a config or a group
    for own in fields(config):
        value = getattr(config, own.name)
        if is_dataclass(value):
            yield from _walk(value, f"{group}{own.name}.")
        else:
            yield f"{group}{own.name}", value, own


def _scaled(dial: str, value: Any, factor: float) -> Any:  # noqa: ANN401 - of any dial
    if dial in ("rate_memory", *(f"acceptance.{name}" for name in ("memory", "chance_memory", "request_memory"))):
        return 1 - (1 - value) / factor  # the number of observations that count is scaled
    if isinstance(value, tuple):  # classes half or twice as wide
        between = [(low + high) / 2 for low, high in zip(value, (*value[1:], 1.0), strict=True)]
        return value[1::2] if factor < 1 else tuple(sorted((*value, *between)))
    if dial.endswith("_chance"):
        return min(0.99, value * factor)
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


def _spelled(value: Any) -> str:  # noqa: ANN401 - of any dial
    return ", ".join(map(_spelled, value)) if isinstance(value, tuple) else f"{value:g}"
