"""Metrics over OTLP: those of `/metrics`, under the same names and with the same values."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from foretoken.errors import ConfigError, UnavailableError
from foretoken.server.observe import otel
from foretoken.server.observe.metric_table import METRICS, PREFIX
from foretoken.server.observe.metrics import ServerMetrics
from foretoken.server.observe.otel import OpenTelemetryMetrics, is_wanted
from tests.server.records import drafted, record, stats_of
from tests.server.test_metrics import FakeBackend, engine_stats, metrics_of, read, value

Point = dict[tuple[tuple[str, str], ...], Any]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def metrics(backend: FakeBackend) -> ServerMetrics:
    return metrics_of(backend)


@pytest.fixture
def reader(metrics: ServerMetrics) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    sent = OpenTelemetryMetrics(metrics, reader)
    yield reader
    sent.close()


def points(reader: InMemoryMetricReader) -> dict[str, Point]:
    """Points of each metric by labels."""
    data = reader.get_metrics_data()
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    assert resource.resource.attributes["service.name"] == scope.scope.name == "foretoken"
    return {
        metric.name: {tuple(sorted(point.attributes.items())): point for point in metric.data.data_points}
        for metric in scope.metrics
    }


def while_serving(metrics: ServerMetrics, reader: InMemoryMetricReader) -> dict[str, Point]:
    """What a reader in its own thread gets while a loop serves."""

    async def serve() -> dict[str, Point]:
        metrics.watch_loop()
        return await asyncio.to_thread(points, reader)

    return asyncio.run(serve())


def test_every_metric_has_the_name_labels_and_value_that_prometheus_gets(
    backend: FakeBackend, metrics: ServerMetrics, reader: InMemoryMetricReader
) -> None:
    backend.values = engine_stats(drafted(4, 3), num_steps=7)
    metrics.finished(record(stats=(stats_of(),), ttft_s=0.3, inter_token_s=(0.01, 0.02)))
    metrics.count_response("/v1/completions", "POST", 200)
    found, series = while_serving(metrics, reader), read(metrics)
    checked = 0
    for metric in METRICS:
        name = PREFIX + metric.name
        for labels, point in found.get(name, {}).items():
            if metric.name == "event_loop_lag_seconds":  # goes on
                continue
            if metric.kind == "histogram":
                assert (point.count, point.sum) == (series[f"{name}_count", labels], series[f"{name}_sum", labels])
                assert tuple(point.explicit_bounds) == metric.bounds_s
            else:
                shown = f"{name}_total" if metric.kind == "counter" else name
                assert point.value == series[shown, labels], name
            checked += 1
    plain = {PREFIX + metric.name for metric in METRICS if not metric.labels and metric.kind != "histogram"}
    assert plain - set(found) <= {PREFIX + "spec_estimated_speedup_ratio"}  # unknown yet
    assert found[PREFIX + "engine_steps"][()].value == 7
    assert found[PREFIX + "time_to_first_token_seconds"][()].count == 1
    assert found[PREFIX + "inter_token_latency_seconds"][()].count == 2
    assert checked > 30


def test_each_collection_reads_the_engine_anew(
    backend: FakeBackend, metrics: ServerMetrics, reader: InMemoryMetricReader
) -> None:
    name = PREFIX + "engine_steps"
    for steps in (3, 8):
        backend.values = engine_stats(num_steps=steps)
        assert while_serving(metrics, reader)[name][()].value == steps
    backend.values = None
    found = while_serving(metrics, reader)
    assert (found[name][()].value, found[PREFIX + "scrape_engine_up"][()].value) == (8, 0)


def test_without_a_loop_or_an_answer_the_last_reading_is_sent(
    backend: FakeBackend, metrics: ServerMetrics, reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is blocked, as it is where the server ends, delays nothing."""
    backend.values = engine_stats(num_steps=3)
    assert points(reader)[PREFIX + "engine_steps"][()].value == 0
    assert while_serving(metrics, reader)[PREFIX + "engine_steps"][()].value == 3
    monkeypatch.setattr(otel, "_PATIENCE_S", 0.01)

    async def silent() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise UnavailableError("too late")

    backend.stats = silent  # type: ignore[method-assign]
    assert while_serving(metrics, reader)[PREFIX + "engine_steps"][()].value == 3


def test_metrics_can_be_left_out_and_need_the_extra(metrics: ServerMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_wanted()
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert not is_wanted()
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(ConfigError, match="foretoken\\[otel\\]"):
        OpenTelemetryMetrics(metrics)
    assert value(read(metrics), "engine_steps_total") == 0
