"""`ServerMetrics`: what `/metrics` shows, from the engine's statistics, finished requests and responses.

The series that vLLM has too are also shown under vLLM's names, if that is asked for: tools that read those read ours.
Labels that vLLM does not have are summed out.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from foretoken.backend.call import Backend
from foretoken.errors import ForetokenError
from foretoken.server.api.envelopes import OVERLOADED
from foretoken.server.api.errors import CLIENT_GONE, CODES
from foretoken.server.observe.config import ObserveConfig
from foretoken.server.observe.figures import FiguresWriter, why_plain
from foretoken.server.observe.history import History
from foretoken.server.observe.metric_table import (
    ACCEPTANCE_FELL,
    ENGINE_UP,
    HISTORY_DROPPED,
    LOG_DROPPED,
    METRICS,
    OF_ENGINE,
    OF_REQUESTS,
    OF_RESPONSES,
    PREFIX,
    Metric,
)
from foretoken.server.record import RequestRecord

# ---- the engine's statistics as counters that never go backwards
#
# An engine that is started again begins at zero, and so does a slice that was dropped for others. So differences
# between two readings are added up, each against the last reading of the same counter of the same engine.

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


_ALIASES = {PREFIX + metric.name: metric.alias for metric in METRICS if metric.alias}
_OURS_ALONE = frozenset({"drafter"})
# Readers take the difference of two readings: these are there, at 0, before anything was drafted.
_FROM_THE_START = frozenset(PREFIX + metric.name for metric in METRICS if metric.labels == ("drafter",))
EVERY_S = 0.05  # 20 timers a second cost nothing, and a block of 50 ms is never missed
# Labels are from closed sets: what a set does not have counts as "other".
FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "abort", "error"})
REASONS = frozenset({*CODES, "client"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REJECTED = frozenset({429, 503, OVERLOADED})

_GAUGES = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_usage_perc": "kv_cache_usage",
    "draft_kv_cache_usage_perc": "draft_kv_cache_usage",
    "spec_estimated_speedup_ratio": "estimated_speedup",
}


class ServerMetrics(Collector):
    """Metrics of one server in a registry of its own, its history and request log included: a `RequestObserver`."""

    def __init__(
        self, backend: Backend, config: ObserveConfig, history: History | None = None, log: FiguresWriter | None = None
    ) -> None:
        self._backend, self._config, self._history, self._log = backend, config, history, log
        self._registry = CollectorRegistry()
        self._counters = EngineCounters(config.slices)
        self._stats: Mapping[str, Any] = {}
        self._is_up = False
        self._read_s = float("-inf")
        self._reading: asyncio.Lock | None = None
        counted = (*OF_REQUESTS, *OF_RESPONSES)
        self._counted = {
            m.name: Counter(PREFIX + m.name, m.help, m.labels, registry=self._registry)
            for m in counted
            if m.kind == "counter"
        }
        self._measured = {
            m.name: Histogram(PREFIX + m.name, m.help, m.labels, buckets=m.bounds_s, registry=self._registry)
            for m in counted
            if m.kind == "histogram"
        }
        self._told: dict[str, Callable[[float], object]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._registry.register(self)

    def finished(self, record: RequestRecord) -> None:
        """See `RequestObserver.finished`."""
        if record.ttft_s is not None:
            self._measure("time_to_first_token_seconds", record.ttft_s)
        for gap_s in record.inter_token_s:
            self._measure("inter_token_latency_seconds", gap_s)
        if record.status < 400 and not record.reason:  # a stream that failed has code 200
            self._measure("e2e_request_latency_seconds", record.duration_s)
        for reason in record.finish_reasons:
            self._counted["request_success"].labels(_within(reason, FINISH_REASONS)).inc()
        if record.status in _REJECTED:
            self._counted["admission_rejections"].labels(_within(record.reason, REASONS)).inc()
        elif record.reason and not 400 <= record.status < CLIENT_GONE:
            self._counted["requests_aborted"].labels(_within(record.reason, REASONS)).inc()
        self._count_answers(record)

    def count_response(self, route: str, method: str, code: int) -> None:
        """A response was begun; `route` is a template of the application, or "other"."""
        self._counted["http_requests"].labels(route, _within(method, METHODS), str(code)).inc()

    def watch_loop(self) -> None:
        """Measure the lag of the running event loop from now on: how late a timer is, as long as the loop runs."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(EVERY_S, self._tick, loop, loop.time() + EVERY_S)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._measure("event_loop_lag_seconds", max(0.0, now_s - due_s))
        loop.call_later(EVERY_S, self._tick, loop, now_s + EVERY_S)

    def watch_times(self, name: str, note: Callable[[float], object]) -> None:
        """Also tell `note` every time, in seconds, that is measured for the metric `name`."""
        self._told[name] = note

    async def text(self) -> bytes:
        """The metrics in Prometheus' text format, with the engine's figures of this moment if it answers."""
        families = await self._families()
        if self._config.metrics_alias is not None:
            families += alias_families(families)
        return generate_latest(_Collected(_without_created(families)))

    def families_for_thread(self, patience_s: float) -> list[Family]:
        """The metrics of this moment, for a thread that is not the loop's. Where no loop serves or it does not answer
        within `patience_s`, the engine's figures are those of the last reading.
        """
        if self._loop is None or not self._loop.is_running() or not patience_s:
            return list(self._registry.collect())
        reading = asyncio.run_coroutine_threadsafe(self._families(), self._loop)
        try:
            return reading.result(patience_s)
        except TimeoutError:
            reading.cancel()
            return list(self._registry.collect())

    def collect(self) -> Iterator[Family]:
        """See `Collector`: what is not counted here."""
        for metric in OF_ENGINE:
            if metric.kind == "gauge":
                yield self._gauge(metric)
            else:
                yield _family(metric, self._counters.totals.get(metric.name, {} if metric.labels else {(): 0.0}))
        for metric, writer in ((HISTORY_DROPPED, self._history), (LOG_DROPPED, self._log)):
            yield _family(metric, {(): 0.0 if writer is None else float(writer.num_dropped)})
        yield self._fallen()
        yield GaugeMetricFamily(PREFIX + ENGINE_UP.name, ENGINE_UP.help, value=float(self._is_up))

    def _fallen(self) -> Family:
        """Whether acceptance has fallen, by drafter and by the slices that are labels."""
        fallen: dict[Labels, bool] = {}
        for one in () if self._history is None else self._history.series:
            shown = one.name.slice if not one.name.slice or one.name.slice in self._config.slices else "other"
            labels: Labels = (one.name.drafter, shown)
            fallen[labels] = fallen.get(labels, False) or one.has_fallen
        metric = ACCEPTANCE_FELL
        family = GaugeMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
        for key, has_fallen in sorted(fallen.items()):
            family.add_metric(key, float(has_fallen))
        return family

    # ---- the engine

    async def _families(self) -> list[Family]:
        await self._read()
        return list(self._registry.collect())

    async def _read(self) -> None:
        """Ask the engine, unless that was just done. Without an answer counters stay, and there are no requests."""
        if self._reading is None:
            self._reading = asyncio.Lock()  # belongs to the loop that serves
        async with self._reading:
            if time.monotonic() - self._read_s < self._config.stats_max_age_s:
                return
            try:
                stats = await self._backend.stats()
            except ForetokenError:
                self._stats, self._is_up = {}, False
            else:
                for one in stats.get("replicas") or [stats]:
                    self._counters.add(one, str(one.get("engine", "")))
                restarts = self._counters.totals.setdefault("engine_restarts", {(): 0.0})
                restarts[()] = max(restarts[()], float(stats.get("num_restarts", 0)))
                self._stats, self._is_up = stats, True
            self._read_s = time.monotonic()

    def _gauge(self, metric: Metric) -> Family:
        """A gauge of the engine's; without an answer 0, but a speedup that is not known has no value."""
        family = GaugeMetricFamily(PREFIX + metric.name, metric.help)
        value = self._stats.get(_GAUGES[metric.name], None if metric.name.endswith("_ratio") else 0.0)
        if value is not None:
            family.add_metric((), max(0.0, float(value)))
        return family

    # ---- requests

    def _measure(self, name: str, seconds: float) -> None:
        self._measured[name].observe(seconds)
        if name in self._told:
            self._told[name](seconds)

    def _count_answers(self, record: RequestRecord) -> None:
        for stats in record.stats:
            self._measure("request_queue_time_seconds", stats["queued_s"])
            for drafter, seconds in _drafting_s(stats, record.drafter):
                self._counted["draft_seconds"].labels(drafter).inc(seconds)
            for drafter in stats["disabled_drafters"]:
                self._counted["drafter_disabled"].labels(drafter).inc()
        if why := why_plain(record):
            self._counted["requests_not_speculated"].labels(why).inc()
        if record.reason == "numerical_error":
            self._counted["corrupted_requests"].inc()
            self._counted["numerical_errors"].inc()
        for result, count in (
            ("accepted", record.accepted_prediction_tokens),
            ("rejected", record.rejected_prediction_tokens),
        ):
            if count:
                self._counted["prediction_tokens"].labels(result).inc(count)


class _Collected:
    """Families in place of a registry."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _drafting_s(stats: Mapping[str, Any], drafter: str) -> Iterator[tuple[str, float]]:
    """Drafting time of an answer by drafter: in proportion to the drafted tokens, all its own drafter's without any."""
    total = sum(stats["drafted_by"].values())
    if total:
        for name, count in stats["drafted_by"].items():
            yield name, stats["draft_s"] * count / total
    elif drafter and stats["draft_s"] > 0:
        yield drafter, stats["draft_s"]


def _family(metric: Metric, series: Mapping[tuple[str, ...], float]) -> Family:
    family = CounterMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
    for labels, value in sorted(series.items()):
        family.add_metric(labels, value)
    return family


def _without_created(families: Iterable[Family]) -> Iterator[Family]:
    """Without the times at which counters were made, which readers by prefix take for counts."""
    for family in families:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield family


def _within(value: str, known: Iterable[str]) -> str:
    return value if value in known else "other"


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
