"""OpenTelemetry: spans of finished requests, after the conventions for generative models (status: Development), and the
metrics of `/metrics` under the same names.

A span is made when its request has ended, with the times of the request, so nothing runs while tokens are emitted.
Counters and gauges are read when the SDK asks for them; times go into its histograms as they are measured. The extra
`otel` brings the SDK and the OTLP exporter; where they send, and how often (`OTEL_METRIC_EXPORT_INTERVAL`, in
milliseconds), is set by the usual OTEL_* variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from prometheus_client.samples import Sample

from foretoken.errors import ConfigError, install
from foretoken.server.observe.figures import RequestFigures, figures_of
from foretoken.server.observe.metric_table import METRICS, PREFIX
from foretoken.server.observe.metrics import ServerMetrics
from foretoken.server.record import RequestRecord

PROVIDER = "foretoken"
_NS = 1_000_000_000
_ALLOWED = "gen_ai.request."  # of a record's attributes; none of them holds a message

# The W3C trace context of the request that this task, or the one that started it, answers.
TRACE_HEADERS: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)

AttributeValue = str | bool | int | float | Sequence[str]
_PATIENCE_S = 5.0  # for the loop that serves; the SDK gives an export 30


class Tracing:
    """A span of kind SERVER for every finished request (see `record.RequestObserver`), for `processor`, or without one
    for OTLP, in batches from a thread of the SDK.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """

    def __init__(self, processor: object | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource  # type: ignore[import-not-found, unused-ignore]
            from opentelemetry.sdk.trace import TracerProvider  # type: ignore[import-not-found, unused-ignore]

            used: Any = _span_sender() if processor is None else processor
        except ImportError as error:
            raise missing_extra(error) from None
        self._provider: Any = TracerProvider(resource=Resource.create({"service.name": PROVIDER}))
        self._provider.add_span_processor(used)
        self._tracer = self._provider.get_tracer(PROVIDER)

    def finished(self, record: RequestRecord) -> None:
        """See `RequestObserver.finished`."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = span_attributes(record, figures_of(record))
        sent = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {record.model}",
            context=TraceContextTextMapPropagator().extract(TRACE_HEADERS.get() or {}),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=int(record.began_unix_s * _NS),
        )
        if "error.type" in attributes:
            sent.set_status(trace.Status(trace.StatusCode.ERROR, str(attributes["error.type"])))
        sent.end(end_time=int((record.began_unix_s + record.duration_s) * _NS))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def span_attributes(record: RequestRecord, figures: RequestFigures) -> dict[str, AttributeValue]:
    """The attributes of a request's span; those that are not known are left out."""
    given: dict[str, Any] = {key: value for key, value in record.attributes.items() if key.startswith(_ALLOWED)}
    found = given | {
        "gen_ai.operation.name": record.attributes.get("gen_ai.operation.name", "chat"),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.response.id": figures.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": list(record.finish_reasons) or None,
        "gen_ai.response.time_to_first_chunk": record.ttft_s,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "http.response.status_code": record.status,
        "http.route": record.route,
        "error.type": (record.reason or str(record.status)) if record.status >= 400 or record.reason else None,
        "foretoken.spec.drafter": record.drafter or None,
        "foretoken.spec.num_drafted": figures.num_drafted,
        "foretoken.spec.num_accepted": figures.num_accepted,
        "foretoken.spec.num_steps": figures.num_steps,
        "foretoken.spec.mean_acceptance_length": 1 + figures.num_accepted / figures.num_drafts
        if figures.num_drafts
        else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def missing_extra(error: ImportError) -> ConfigError:
    """What is said where OpenTelemetry's packages cannot be imported."""
    return ConfigError("tracing", True, f"needs the extra otel: {install('otel')} ({error})")


class OpenTelemetryMetrics:
    """The metrics of one server for `reader`, or without one for OTLP, from a thread of the SDK.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """

    def __init__(self, metrics: ServerMetrics, reader: object | None = None) -> None:
        try:
            from opentelemetry.sdk.metrics import MeterProvider  # type: ignore[import-not-found, unused-ignore]
            from opentelemetry.sdk.resources import Resource  # type: ignore[import-not-found, unused-ignore]

            readers: list[Any] = [_metric_sender() if reader is None else reader]
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


def _span_sender() -> object:
    """What sends spans over OTLP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # type: ignore[import-not-found, unused-ignore]
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # type: ignore[import-not-found, unused-ignore]

    return BatchSpanProcessor(OTLPSpanExporter())


def _metric_sender() -> object:
    """What asks for the metrics now and then and sends them over OTLP."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # type: ignore[import-not-found, unused-ignore]
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # type: ignore[import-not-found, unused-ignore]

    return PeriodicExportingMetricReader(OTLPMetricExporter())
