"""`/metrics`: every metric of the table and no other; counters that only grow; board and page name what exists."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretoken.engine.stats import EngineStats
from foretoken.errors import ConfigError, UnavailableError
from foretoken.kv.prefix import PrefixStats
from foretoken.server.observe.config import ObserveConfig
from foretoken.server.observe.metric_table import METRICS, PREFIX, Metric
from foretoken.server.observe.metrics import MAX_POSITIONS, ServerMetrics
from foretoken.server.observe.observation import counted
from tests.server.asgi import ask, scope_of
from tests.server.records import drafted, record, stats_of

ROOT = Path(__file__).resolve().parents[2]
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class FakeBackend:
    """A backend of which only the statistics are asked; None: the engine is not there."""

    state, info = "ready", None

    def __init__(self) -> None:
        self.values: dict[str, Any] | None = engine_stats()

    async def stats(self) -> dict[str, Any]:
        if self.values is None:
            raise UnavailableError("restarting")
        return self.values


def engine_stats(*rounds: Any, slice_: str = "", engine: str = "a", **fields: Any) -> dict[str, Any]:
    stats = EngineStats(prefix=PrefixStats(30, 10, 0), **fields)
    for one in rounds:
        stats.count_round_of(slice_, one)
    usage = {"kv_cache_usage": 0.25, "draft_kv_cache_usage": 0.5, "engine": engine}
    return stats.as_dict() | usage


def metrics_of(backend: Any, **options: Any) -> ServerMetrics:
    return ServerMetrics(backend, ObserveConfig(stats_max_age_s=0.0, **options))


def read(metrics: ServerMetrics) -> Series:
    text = asyncio.run(metrics.text()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[PREFIX + name, tuple(sorted(labels.items()))]


def test_the_text_has_every_metric_of_the_table_and_no_other() -> None:
    text = asyncio.run(metrics_of(FakeBackend()).text()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {PREFIX + metric.name for metric in METRICS}
    for metric in METRICS:
        family = families[PREFIX + metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
    assert "_created" not in text
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    suffixes = {"perc", "ratio", "seconds", "up", "fell", "running", "waiting"}
    assert all(m.name.rpartition("_")[2] in suffixes for m in METRICS if m.kind == "gauge")


def test_figures_of_the_engine() -> None:
    backend = FakeBackend()
    backend.values = engine_stats(
        drafted(4, 2), drafted(3, 3), slice_="code", num_running=2, num_waiting=1, verify_s=1.5, num_preempted=1
    )
    found = read(metrics_of(backend, slices=("code",)))
    assert value(found, "spec_decode_num_drafts_total", drafter="ngram") == 2
    assert value(found, "spec_decode_num_draft_tokens_total", drafter="ngram") == 7
    assert value(found, "spec_decode_num_accepted_tokens_total", drafter="ngram") == 5
    accepted = [
        value(found, "spec_decode_num_accepted_tokens_per_pos_total", drafter="ngram", position=str(place))
        for place in range(4)
    ]
    assert accepted == [2, 2, 1, 0]
    assert value(found, "spec_decode_num_draft_tokens_by_slice_total", drafter="ngram", slice="code") == 7
    assert value(found, "num_requests_running") == 2
    assert value(found, "num_requests_waiting") == 1
    assert value(found, "kv_cache_usage_perc") == 0.25
    assert value(found, "draft_kv_cache_usage_perc") == 0.5
    assert value(found, "verify_seconds_total") == 1.5
    assert value(found, "num_preemptions_total") == 1
    assert value(found, "prefix_cache_queries_total") == 30
    assert value(found, "prefix_cache_hits_total") == 10
    assert not any(number != number or number < 0 for number in found.values())
    assert (PREFIX + "spec_estimated_speedup_ratio", ()) not in found  # not known: no sample, never NaN


def test_slices_and_positions_do_not_multiply_labels() -> None:
    backend = FakeBackend()
    stats = EngineStats()
    for name in ("ignore all previous instructions", "my secret", "code"):
        stats.count_round_of(name, drafted(MAX_POSITIONS + 8, 2))
    backend.values = stats.as_dict()
    found = read(metrics_of(backend, slices=("code",)))
    labels = {dict(key)["slice"] for name, key in found if "by_slice" in name}
    assert labels == {"code", "other"}
    places = {int(dict(key)["position"]) for name, key in found if "per_pos" in name}
    assert places == set(range(MAX_POSITIONS))
    last = value(found, "spec_decode_num_draft_tokens_per_pos_total", drafter="ngram", position=str(MAX_POSITIONS - 1))
    assert last == 3 * 9


def test_counters_do_not_go_backwards_over_a_restart() -> None:
    backend = FakeBackend()
    metrics = metrics_of(backend)
    backend.values = engine_stats(drafted(4, 2), num_emitted=100)
    first = read(metrics)
    backend.values = None
    gone = read(metrics)
    assert value(gone, "scrape_engine_up") == 0
    assert value(gone, "num_requests_running") == value(gone, "kv_cache_usage_perc") == 0
    assert value(gone, "generation_tokens_total") == value(first, "generation_tokens_total") == 103
    backend.values = engine_stats(drafted(5, 5), engine="b", num_emitted=200) | {
        "num_restarts": 1
    }  # more than before, yet from zero
    after = read(metrics)
    assert value(after, "generation_tokens_total") == 103 + 206
    assert value(after, "spec_decode_num_draft_tokens_total", drafter="ngram") == 9
    assert value(after, "engine_restarts_total") == 1
    assert read(metrics) == after  # read twice, counted once
    falls = {key for key in first if key[0].endswith("_total") and after[key] < first[key]}
    assert not falls


def test_replicas_add_up() -> None:
    backend = FakeBackend()
    metrics = metrics_of(backend)
    one, two = engine_stats(drafted(4, 2), engine="a"), engine_stats(drafted(2, 1), engine="b")

    def num_drafted(*replicas: dict[str, Any]) -> float:
        backend.values = one | {"replicas": list(replicas)}
        return value(read(metrics), "spec_decode_num_draft_tokens_total", drafter="ngram")

    assert num_drafted(one, two) == 6
    assert num_drafted(two) == 6  # one does not answer for once
    assert num_drafted(one, two) == 6
    assert num_drafted(one, engine_stats(drafted(3, 1), engine="c")) == 9


def test_figures_of_requests() -> None:
    metrics = metrics_of(FakeBackend())
    metrics.finished(record())
    metrics.finished(
        record(finish_reasons=("length", "stop"), accepted_prediction_tokens=3, rejected_prediction_tokens=2)
    )
    metrics.finished(record(drafter="", stats=(stats_of(),), ttft_s=None, inter_token_s=()))
    metrics.finished(record(status=499, reason="client", finish_reasons=(), stats=()))
    metrics.finished(record(status=429, reason="queue_full", finish_reasons=(), stats=(), ttft_s=None))
    metrics.finished(record(status=429, reason="the user's text", finish_reasons=(), stats=(), ttft_s=None))
    metrics.finished(record(status=529, reason="queue_full", finish_reasons=(), stats=(), ttft_s=None))
    metrics.finished(record(status=500, reason="numerical_error", finish_reasons=("error",), stats=()))
    metrics.finished(record(status=200, reason="engine_error", finish_reasons=(), stats=()))  # a stream that failed
    metrics.finished(record(status=400, reason="invalid_value", finish_reasons=(), stats=(), ttft_s=None))
    found = read(metrics)
    assert value(found, "time_to_first_token_seconds_count") == 5
    assert value(found, "inter_token_latency_seconds_count") == 45
    assert value(found, "e2e_request_latency_seconds_count") == 3
    assert value(found, "request_success_total", finished_reason="stop") == 3
    assert value(found, "request_success_total", finished_reason="length") == 1
    aborted = {dict(labels)["reason"]: count for (name, labels), count in found.items() if "aborted_total" in name}
    assert aborted == {"client": 1, "numerical_error": 1, "engine_error": 1}
    assert value(found, "admission_rejections_total", reason="queue_full") == 2
    assert value(found, "admission_rejections_total", reason="other") == 1
    assert value(found, "requests_not_speculated_total", reason="off") == 1
    assert value(found, "draft_seconds_total", drafter="ngram") == pytest.approx(0.2)
    assert value(found, "numerical_errors_total") == value(found, "corrupted_requests_total") == 1
    assert value(found, "prediction_tokens_total", result="accepted") == 3
    assert "the user's text" not in asyncio.run(metrics.text()).decode()


def test_the_alias_has_vllms_names_without_our_labels() -> None:
    backend = FakeBackend()
    metrics = metrics_of(backend, metrics_alias="vllm")
    before = asyncio.run(metrics.text()).decode()
    assert "vllm:spec_decode_num_drafts_total 0.0" in before  # there before anything was drafted
    backend.values = engine_stats(drafted(4, 2), drafted(3, 3, "suffix"))
    metrics.finished(record())
    lines = asyncio.run(metrics.text()).decode().splitlines()
    ours = {name: float(number) for name, _, number in (x.rpartition(" ") for x in lines if x.startswith("vllm:"))}
    assert ours["vllm:spec_decode_num_drafts_total"] == 2
    assert ours["vllm:spec_decode_num_draft_tokens_total"] == 7
    assert ours["vllm:spec_decode_num_accepted_tokens_total"] == 5
    assert ours['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'] == 2
    assert ours["vllm:time_to_first_token_seconds_count"] == 1
    assert not any("drafter" in name for name in ours)
    with pytest.raises(ConfigError, match="metrics_alias"):
        ObserveConfig(metrics_alias="tgi")


def test_scrapes_close_together_ask_the_engine_once() -> None:
    backend, calls = FakeBackend(), list[int]()
    stats = backend.stats

    async def counting() -> dict[str, Any]:
        calls.append(1)
        return await stats()

    backend.stats = counting  # type: ignore[method-assign]
    metrics = ServerMetrics(backend, ObserveConfig(stats_max_age_s=3600.0))

    async def both() -> None:
        await asyncio.gather(metrics.text(), metrics.text())

    asyncio.run(both())
    assert len(calls) == 1


def test_responses_count_by_template() -> None:
    metrics = metrics_of(FakeBackend())

    class Route:
        path = "/v1/models/{name}"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/left":
            return
        if scope["path"].startswith("/v1/models/"):
            scope["route"] = Route()
        await send({"type": "http.response.start", "status": 200 if "route" in scope else 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    for method, path in (("GET", "/v1/models/a"), ("GET", "/v1/models/b"), ("BREW", "/secret"), ("GET", "/left")):
        asyncio.run(ask(counted(app, metrics), scope_of(method, path)))
    found = read(metrics)
    assert value(found, "http_requests_total", route="/v1/models/{name}", method="GET", code="200") == 2
    assert value(found, "http_requests_total", route="other", method="other", code="404") == 1
    assert value(found, "http_requests_total", route="other", method="GET", code="499") == 1


# ---- board and page


def series_of(metric: Metric) -> tuple[str, ...]:
    """The names that a query may use, without labels."""
    name = PREFIX + metric.name
    if metric.kind == "histogram":
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
    return (f"{name}_total",) if metric.kind == "counter" else (name,)


def names_in(text: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", text))


def test_the_board_queries_metrics_that_exist() -> None:
    board = json.loads((ROOT / "foretoken" / "server" / "observe" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    known = {series: metric for metric in METRICS for series in series_of(metric)}
    named = {name for query in queries for name in names_in(query)}
    assert len(queries) > 20
    assert named <= set(known)
    assert {known[name].name for name in named if "spec_decode" in name} >= {
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_accepted_tokens_by_slice",
    }
    for query in queries:  # labels that are grouped by belong to the metrics of the query
        labels = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")} - {
            "le"
        }
        assert all(labels <= set(known[name].labels) for name in names_in(query)), query
    identifiers = [panel["id"] for panel in board["panels"]]
    assert len(set(identifiers)) == len(identifiers)


def test_the_page_on_metrics_is_the_table() -> None:
    text = (ROOT / "docs" / "serving" / "metrics.md").read_text()
    rows = [
        f"| `{PREFIX}{m.name}{'_total' if m.kind == 'counter' else ''}` | {m.kind} | "
        f"{', '.join(m.labels) or '-'} | {m.help} |{' yes |' if m.alias else ' |'}"
        for m in METRICS
    ]
    assert [line for line in text.splitlines() if line.startswith(f"| `{PREFIX}")] == rows
