"""OpenTelemetry metrics: those of `/metrics`, under the same names, for OTLP.

Counters and gauges are read when the SDK asks for them; times go into its histograms as they are measured. Where
metrics go, and how often, is set by the usual OTEL_* variables (`OTEL_METRIC_EXPORT_INTERVAL`, in milliseconds).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from prometheus_client.samples import Sample

from foretoken.server.observe.metric_table import METRICS, PREFIX
from foretoken.server.observe.metrics import ServerMetrics
from foretoken.server.observe.tracing import PROVIDER, missing_extra

_PATIENCE_S = 5.0  # for the loop that serves; the SDK gives an export 30


class OpenTelemetryMetrics:
    """The metrics of one server for `reader`, or without one for OTLP, from a thread of the SDK.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """

    def __init__(self, metrics: ServerMetrics, reader: object | None = None) -> None:
        try:
            from opentelemetry.sdk.metrics import MeterProvider  # type: ignore[import-not-found, unused-ignore]
            from opentelemetry.sdk.resources import Resource  # type: ignore[import-not-found, unused-ignore]

            readers: list[Any] = [_sender() if reader is None else reader]
        except ImportError as error:
            raise missing_extra(error) from None
        self._metrics = metrics
        self._unread: dict[str, list[Sample]] = {}  # of the collection that goes on, by metric
        self._is_closing = False
        self._provider: Any = MeterProvider(readers, Resource.create({"service.name": PROVIDER}))
        meter = self._provider.get_meter(PROVIDER)
        for metric in METRICS:
            name = PREFIX + metric.name
            if metric.kind == "histogram":
                measured = meter.create_histogram(
                    name, "s", metric.help, explicit_bucket_boundaries_advisory=metric.bounds_s
                )
                metrics.watch_times(metric.name, measured.record)
            elif metric.kind == "counter":
                meter.create_observable_counter(name, [partial(self._observe, name)], description=metric.help)
            else:
                meter.create_observable_gauge(name, [partial(self._observe, name)], description=metric.help)

    def close(self) -> None:
        """Send what is left. The loop that serves may be waiting for this, so the engine is not asked any more."""
        self._is_closing = True
        self._provider.shutdown()

    def _observe(self, name: str, _options: object) -> Iterable[Any]:
        """The values of one metric. Each is asked for once in a collection: the second time begins the next one."""
        from opentelemetry.metrics import Observation

        if name not in self._unread:
            patience_s = 0.0 if self._is_closing else _PATIENCE_S
            families = self._metrics.families_for_thread(patience_s)
            self._unread = {family.name: family.samples for family in families}
        samples = self._unread.pop(name, [])
        return [Observation(one.value, one.labels) for one in samples if not one.name.endswith("_created")]


def is_wanted() -> bool:
    """Whether metrics are sent beside spans: OTEL_METRICS_EXPORTER=none says no."""
    return os.environ.get("OTEL_METRICS_EXPORTER", "otlp") != "none"


def _sender() -> object:
    """What asks for the metrics now and then and sends them over OTLP."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # type: ignore[import-not-found, unused-ignore]
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # type: ignore[import-not-found, unused-ignore]

    return PeriodicExportingMetricReader(OTLPMetricExporter())
