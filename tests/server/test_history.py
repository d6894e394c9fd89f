"""History, request log and traces: what is kept of requests, and that a full disk or a locked file stops nothing."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from foretoken.errors import ConfigError, StorageError
from foretoken.server.observe.figures import FiguresWriter, RequestFigures, figures_of, quantile
from foretoken.server.observe.history import COLUMNS, History, acceptance_series
from foretoken.server.observe.observation import RequestLog
from foretoken.server.observe.otel import TRACE_HEADERS, Tracing
from tests.server.records import drafted, record, stats_of

MIB = 1 << 20
DAY_S = 86_400.0


def history(path: Path, days: float = 90.0, max_bytes: int = 64 * MIB) -> History:
    return History(path, days, max_bytes)


def selected(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def values(path: Path, column: str) -> list[Any]:
    """One column, the oldest request first."""
    return [row[0] for row in selected(path, f"SELECT {column} FROM requests ORDER BY began_unix_s, id")]


def documented_statement() -> str:
    text = (Path(__file__).resolve().parents[2] / "docs" / "serving" / "metrics.md").read_text()
    return text.partition("```sql\n")[2].partition("```")[0]


def test_figures_survive_a_restart_and_hold_no_text(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    for number in range(2):
        kept = history(path)
        kept.finished(record(request_id=f"req-{number}"))
        kept.finished(record(request_id="tell me a secret", slice="a text of the user"))
        kept.close()
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT * FROM requests").fetchall()
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert len(rows) == 4
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(rows)
    assert "text of the user" not in repr(rows)
    assert "req-1" in repr(rows)
    assert "tell me" not in path.read_bytes().decode("latin-1")


def test_a_statement_of_sqlite_groups_requests(tmp_path: Path) -> None:
    """The statement of docs/serving/metrics.md."""
    path = tmp_path / "history.db"
    kept, now = history(path), time.time()
    for _ in range(10):
        kept.finished(record(began_unix_s=now))
    kept.finished(
        record(began_unix_s=now - DAY_S, drafter="suffix", key="bob", stats=(stats_of(drafted(2, 2, "suffix")),))
    )
    kept.finished(record(began_unix_s=now, status=500, reason="error", stats=()))
    kept.close()
    found = documented_statement()
    assert [row[1:] for row in selected(path, found)] == [("suffix", 1, 1.0), ("ngram", 11, 0.5)]


def test_old_requests_are_deleted_by_age_and_size(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    kept = history(path, days=1.0)
    for _ in range(5):
        kept.finished(record(began_unix_s=time.time() - 2 * DAY_S))
    kept.finished(record())
    kept.drain()
    kept.close()
    history(path, days=1.0).close()
    assert len(values(path, "id")) == 1
    path = tmp_path / "large.db"
    kept = history(path)
    for number in range(4000):  # in batches that the queue takes
        kept.finished(record(request_id=f"{number:064}", key="k" * 64, began_unix_s=1e9 + number))
    kept.drain()
    kept.close()
    before = path.stat().st_size
    small = history(path, days=36_500.0, max_bytes=MIB)
    small.finished(record())
    small.drain()
    small.close()
    assert path.stat().st_size <= MIB < before
    left = values(path, "began_unix_s")
    assert 0 < len(left) < 4000
    assert left[-2] == 1e9 + 3999  # the oldest went


def test_a_locked_file_costs_rows_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 70, the history."""
    monkeypatch.setattr("foretoken.server.observe.history._BUSY_S", 0.01)
    path = tmp_path / "history.db"
    kept = history(path)
    kept.finished(record(request_id="before"))
    kept.drain()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(3):
            kept.finished(record(request_id="lost"))
        kept.drain()
        assert kept.num_dropped == 3
        other.execute("ROLLBACK")
    kept.finished(record(request_id="after"))
    kept.drain()
    assert values(path, "request_id") == ["before", "after"]
    kept.close()
    assert kept.num_dropped == 3


def test_a_full_disk_costs_rows_and_nothing_else(tmp_path: Path) -> None:
    """Case 70, the disk: SQLite reports a file that may not grow like a disk that is full."""
    path = tmp_path / "history.db"
    kept = history(path)
    kept.finished(record(request_id="before"))
    kept.drain()
    assert kept._connection is not None
    pages = kept._connection.execute("PRAGMA page_count").fetchone()[0]
    kept._connection.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(200):
        kept.finished(record(request_id="x" * 60))
    kept.drain()
    assert kept.num_dropped > 0
    kept.finished(record(request_id="after"))  # a new connection has no such limit: there is room again
    kept.drain()
    kept.close()
    assert values(path, "request_id")[-1] == "after"
    full = RequestLog("text", open("/dev/full", "w"))  # noqa: SIM115 - closed below
    full.finished(record())
    full.drain()
    assert full.num_dropped == 1
    full.close()
    with pytest.raises(OSError, match="No space"):
        full._stream.close()


@pytest.mark.parametrize("content", [b"no database at all, but text" * 100, None])
def test_another_programs_file_is_refused_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "other.db"
    if content is None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE photos (id INTEGER)")
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StorageError, match="history"):
        history(path)
    assert path.read_bytes() == before
    with pytest.raises(StorageError, match="history"):
        history(tmp_path / "no" / "folder.db")


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    history(path).close()
    with closing(sqlite3.connect(path)) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(requests)")]
        connection.execute("PRAGMA user_version = 99")
    assert columns == ["id", *COLUMNS]
    for use in (history, acceptance_series):
        with pytest.raises(StorageError, match="99"):
            use(path)


def test_what_does_not_fit_into_the_queue_is_dropped() -> None:
    import threading

    entered, go_on, seen = threading.Event(), threading.Event(), list[str]()

    class Slow(FiguresWriter):
        def _write(self, batch: Sequence[RequestFigures]) -> int:
            entered.set()
            go_on.wait()
            seen.extend(one.request_id for one in batch)
            return 0

    writer = Slow("test", max_queued=2)
    writer.finished(record(request_id="0"))
    entered.wait()
    for number in range(1, 6):
        writer.finished(record(request_id=str(number)))
    assert writer.num_dropped == 3
    go_on.set()
    writer.close()
    assert seen == ["0", "1", "2"]
    writer.finished(record(request_id="7"))
    assert writer.num_dropped == 4


def test_a_writer_that_raises_goes_on() -> None:
    seen: list[str] = []

    class Broken(FiguresWriter):
        def _write(self, batch: Sequence[RequestFigures]) -> int:
            if any(one.request_id == "1" for one in batch):
                raise ZeroDivisionError
            seen.extend(one.request_id for one in batch)
            return 0

    writer = Broken("test")
    for name in ("1", "2"):
        writer.finished(record(request_id=name))
        writer.drain()
    writer.close()
    assert (seen, writer.num_dropped) == (["2"], 1)


# ---- log


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_one_line_for_each_request(log_format: Any) -> None:
    stream = io.StringIO()
    log = RequestLog(log_format, stream)
    log.finished(record())
    log.finished(record(request_id="a\nforged=line", status=499, reason="client", stats=(), ttft_s=None))
    log.close()
    first, second = stream.getvalue().splitlines()
    if log_format == "json":
        values = json.loads(first)
        assert (values["id"], values["tokens"], values["acceptance"], values["ttft_s"]) == ("req-1", 6, 0.5, 0.1)
        assert json.loads(second)["id"].startswith("sha256:")
    else:
        assert "id=req-1 " in first
        assert " tokens=6 " in first
        assert " acceptance=0.5" in first
        assert "reason=client" in second
        assert "forged" not in second


def test_reasons_for_not_speculating() -> None:
    def why(**changes: Any) -> str:
        return figures_of(record(**changes)).why_plain

    assert why() == ""
    assert why(stats=(stats_of(),), drafter="") == "off"
    assert why(stats=(stats_of(),)) == "nothing_proposed"
    assert why(stats=(stats_of(),), num_completion_tokens=1) == "too_short"
    assert why(stats=(stats_of(draft_failures={"ngram": 1}),)) == "drafter_failed"
    assert why(stats=(stats_of(disabled_drafters={"ngram": "x"}),)) == "drafter_disabled"
    assert why(stats=()) == ""


def test_quantiles_are_nearest_ranks() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert quantile([], 0.5) is None


# ---- traces


def test_spans_follow_the_conventions_and_the_trace_of_the_client() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    parent = {"traceparent": f"00-{trace_id}-{span_id}-01"}

    async def answer() -> None:
        TRACE_HEADERS.set(parent)
        settings = {"gen_ai.request.temperature": 0.5, "gen_ai.input.messages": "a text"}
        tracing.finished(record(began_unix_s=100.0, attributes=settings))
        TRACE_HEADERS.set(None)
        tracing.finished(
            record(status=500, reason="error", stats=(), attributes={"gen_ai.operation.name": "text_completion"})
        )

    asyncio.run(answer())
    tracing.close()
    span, failed = exporter.get_finished_spans()
    assert (span.name, span.start_time, span.end_time) == ("chat reference", 100 * 10**9, 100.5 * 10**9)
    assert (span.kind, span.resource.attributes["service.name"]) == (SpanKind.SERVER, "foretoken")
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace_id, span_id)
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["gen_ai.request.temperature"] == 0.5
    assert span.attributes["gen_ai.usage.input_tokens"] == 10
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["foretoken.spec.mean_acceptance_length"] == 1 + 3 / 2
    assert "a text" not in repr(dict(span.attributes))
    assert failed.name == "text_completion reference"
    assert (failed.parent, failed.status.status_code, failed.status.description) == (None, StatusCode.ERROR, "error")
    assert failed.attributes["error.type"] == "error"


def test_without_the_extra_tracing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="foretoken\\[otel\\]"):
        Tracing()
