"""The series that vLLM has too, under vLLM's names: tools that read those read ours.

Labels that vLLM does not have are summed out.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from foretoken.server.observe.metric_table import METRICS, PREFIX

_ALIASES = {PREFIX + metric.name: metric.alias for metric in METRICS if metric.alias}
_OURS_ALONE = frozenset({"drafter"})
# Readers take the difference of two readings: these are there, at 0, before anything was drafted.
_FROM_THE_START = frozenset(PREFIX + metric.name for metric in METRICS if metric.labels == ("drafter",))


def alias_families(families: Iterable[Family]) -> list[Family]:
    """The families of `families` that have an alias, under it."""
    return [_alias(family) for family in families if family.name in _ALIASES]


def _alias(family: Family) -> Family:
    name = _ALIASES[family.name]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        labels = tuple((key, value) for key, value in sample.labels.items() if key not in _OURS_ALONE)
        series = (name + sample.name.removeprefix(family.name), labels)
        values[series] = values.get(series, 0.0) + sample.value
    if not values and family.name in _FROM_THE_START:
        values[(f"{name}_total", ())] = 0.0
    found = Family(name, family.documentation, family.type)
    found.samples = [Sample(series, dict(labels), value) for (series, labels), value in values.items()]
    return found
