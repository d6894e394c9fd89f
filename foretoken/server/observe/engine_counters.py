"""The engine's statistics as counters that never go backwards, whatever becomes of the engine.

An engine that is started again begins at zero, and so does a slice that was dropped for others. So differences between
two readings are added up, each against the last reading of the same counter of the same engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Labels = tuple[str, ...]

MAX_POSITIONS = 32  # a label per position: longer drafts count at the last one
_MAX_ENGINES = 256  # with those that have ended
PHASES = ("schedule", "draft", "target", "rule", "commit", "observe", "emit")

_SIMPLE = {
    "spec_decode_num_rejected_tokens": "num_rejected",
    "spec_decode_num_cut_tokens": "num_cut",
    "num_preemptions": "num_preempted",
    "prompt_tokens": "num_prompt_tokens",
    "generation_tokens": "num_emitted",
    "verify_seconds": "verify_s",
    "prompt_seconds": "prompt_s",
    "wasted_seconds": "wasted_s",
    "engine_steps": "num_steps",
    "engine_faults": "num_faults",
}
_BY_DRAFTER = {
    "spec_decode_num_drafts": "drafts_by",
    "spec_decode_num_draft_tokens": "drafted_by",
    "spec_decode_num_accepted_tokens": "accepted_by",
    "drafter_failures": "draft_failures",
}

# A counter's metric and labels, and what it is called in the statistics.
_Reading = tuple[str, Labels, tuple[str, ...], float]


class EngineCounters:
    """Totals by metric and labels over all engines that were read; `slices` are those that become labels."""

    def __init__(self, slices: Collection[str] = ()) -> None:
        self._slices = frozenset(slices)
        # By engine, then by counter; the engine read last at the end. One that did not answer for once goes on later.
        self._last: OrderedDict[str, dict[tuple[str, ...], float]] = OrderedDict()
        self.totals: dict[str, dict[Labels, float]] = {}

    def add(self, stats: Mapping[str, Any], engine: str = "") -> None:
        """Read the statistics of one engine; another name is another engine, which began at zero."""
        before, now = self._last.get(engine, {}), dict[tuple[str, ...], float]()
        for metric, labels, counter, value in self._readings(stats):
            value = max(0.0, value)
            added = value - before.get(counter, 0.0)
            series = self.totals.setdefault(metric, {})
            series[labels] = series.get(labels, 0.0) + (added if added >= 0 else value)
            now[counter] = value
        self._last[engine] = now
        self._last.move_to_end(engine)
        if len(self._last) > _MAX_ENGINES:
            self._last.popitem(last=False)

    def _readings(self, stats: Mapping[str, Any]) -> Iterator[_Reading]:
        for metric, name in _SIMPLE.items():
            yield metric, (), (metric,), stats[name]
        for metric, name in _BY_DRAFTER.items():
            for drafter, count in stats[name].items():
                yield metric, (drafter,), (metric, drafter), count
        for phase in PHASES:
            yield "engine_phase_seconds", (phase,), ("phase", phase), stats[f"{phase}_s"]
        prefix = stats["prefix"] or {"num_looked_up_tokens": 0, "num_found_tokens": 0}
        yield "prefix_cache_queries", (), ("queries",), prefix["num_looked_up_tokens"]
        yield "prefix_cache_hits", (), ("hits",), prefix["num_found_tokens"]
        shadow = stats["shadow"] or {"num_requests": 0, "alarm": False}
        alarms = int(shadow["alarm"])
        yield "self_audit_checks", ("alarm",), ("audit", "alarm"), alarms
        yield "self_audit_checks", ("pass",), ("audit", "pass"), shadow["num_requests"] - alarms
        yield from self._acceptance(stats["acceptance_by_slice"])

    def _acceptance(self, slices: Mapping[str, Mapping[str, Any]]) -> Iterator[_Reading]:
        for name, drafters in slices.items():
            shown = name if not name or name in self._slices else "other"
            for drafter, positions in drafters.items():
                for place, (drafted, accepted) in enumerate(positions):
                    where, counter = str(min(place, MAX_POSITIONS - 1)), (name, drafter, str(place))
                    for metric, count in (("draft", drafted), ("accepted", accepted)):
                        head = f"spec_decode_num_{metric}_tokens"
                        yield f"{head}_per_pos", (drafter, where), (head, "pos", *counter), count
                        yield f"{head}_by_slice", (drafter, shown), (head, "slice", *counter), count
