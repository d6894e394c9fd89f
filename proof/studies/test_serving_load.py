"""The arithmetic of the studies of the server; the server itself runs in `proof`."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from foretoken.errors import InputError
from studies.serving_load.__main__ import failures, parser
from studies.serving_load.client import StreamAnswer, _events
from studies.serving_load.rivals import _drafter_of, command_of, compared
from studies.serving_load.server import LoadedServer, _held_by, kept
from studies.serving_load.soak import _lag_share
from studies.serving_load.statistics import quantile_of, theil_sen
from studies.side_channel import Observed, recognised


def test_a_slope_does_not_follow_outliers() -> None:
    line = [(float(x), 3.0 * x + 1) for x in range(20)]
    assert theil_sen(line) == pytest.approx(3.0)
    assert theil_sen([*line[:5], (5.5, 1e9), *line[5:]]) == pytest.approx(3.0, abs=0.2)
    assert theil_sen([(0.0, 5.0)]) == 0.0


def test_quantiles() -> None:
    assert quantile_of(list(range(1, 101)), 0.99) == 99
    assert math.isnan(quantile_of([], 0.5))


def stream(*lines: bytes, leave_after: int | None = None) -> tuple[str, StreamAnswer]:
    async def read() -> tuple[str, StreamAnswer]:
        reader, answer = asyncio.StreamReader(), StreamAnswer(0.0)
        reader.feed_data(b"".join(line + b"\r\n" for line in lines))
        reader.feed_eof()
        return await _events(reader, answer, leave_after, 0.0), answer

    return asyncio.run(read())


def test_the_client_reads_events() -> None:
    last = b'data: {"choices": [], "usage": {"completion_tokens": 7}}'
    error, answer = stream(b"header: x", b"", b"3f", b'data: {"choices": []}', b": ping", last, b"data: [DONE]")
    assert (error, len(answer.times_s), answer.num_tokens) == ("", 2, 7)
    assert stream(b'data: {"choices": []}')[0] == "cut"
    assert stream(b'data: {"error": {}}')[0] == "stream"
    assert stream(last, last, leave_after=1)[0] == "left"


def test_a_process_that_has_ended_holds_nothing() -> None:
    """Grammars are tried in processes of their own: one that ends while it is looked at must not end the watch."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    assert _held_by(ended.pid, ended.pid) is None
    assert LoadedServer(0, ended.pid, "").held().resident_bytes == 0
    own = LoadedServer(0, os.getpid(), "").held()
    assert own.num_threads >= 1
    assert 0 < own.front_bytes <= own.resident_bytes


def test_what_is_kept_is_found() -> None:
    pool = {"free": 90, "used": 10, "total": 100}
    empty = {"free": 100, "used": 0, "total": 100}
    found = kept({"num_open": 1, "workers": [{"number": 0, "num_calls": 2, "pools": {"target": pool, "draft": empty}}]})
    assert [line.split(":")[0] for line in found] == ["worker 0", "worker 0", "front"]
    assert kept({"num_open": 0, "workers": [{"number": 0, "num_calls": 0, "pools": {"target": empty}}]}) == []


def test_the_verdict() -> None:
    good: dict[str, Any] = {
        "errors": {},
        "kept": [],
        "files_before": 10,
        "files_after": 11,
        "resident_mb_per_hour": 50.0,
    }
    short, long = (parser().parse_args(["--minutes", minutes]) for minutes in ("1", "10"))
    assert failures({"soak": good}, short) == []
    assert failures({"cost": {}}, long) == []
    assert failures({"soak": good}, long) == ["memory: 50.00 MB an hour"]
    bad = good | {"errors": {"cut": 2}, "kept": ["front: 1 calls"], "files_after": 40}
    assert len(failures({"soak": bad}, short)) == 3


def test_the_share_of_late_timers() -> None:
    name = "foretoken_event_loop_lag_seconds"
    before = {f"{name}_count": 100.0, f'{name}_bucket{{le="0.05"}}': 100.0}
    after = {f"{name}_count": 300.0, f'{name}_bucket{{le="0.05"}}': 298.0}
    assert _lag_share(before, after, "0.05") == pytest.approx(0.01)


def test_prompts_are_recognised_by_what_differs() -> None:
    streams = [Observed(prompt, (10 * prompt, 20), (0.0, 1.0)) for prompt in range(4) for _ in range(3)]
    assert recognised(streams, "sizes") == 1.0
    assert recognised(streams, "times") < 0.5


def row(rate: str, speed: float, p95_s: float, failed: int = 0) -> dict[str, Any]:
    return {
        "setting": rate,
        "num_requests": 10,
        "num_ok": 10 - failed,
        "tokens_per_s": {"value": speed},
        "e2e_s": {"p95": {"value": p95_s}},
    }


def test_servers_are_compared_within_the_percentile_of_plain() -> None:
    found = {
        "foretoken": [row("0.1/s", 5.0, 2.0), row("0.2/s", 8.0, 9.0)],
        "foretoken-auto": [row("0.1/s", 5.0, 1.0), row("0.2/s", 10.0, 1.9), row("0.4/s", 12.0, 8.0)],
        "llama.cpp": [row("0.1/s", 5.0, 2.5), row("0.2/s", 9.0, 3.0, failed=1)],
    }
    slow, fast = compared(found)
    assert slow["ratio"] == {"foretoken": 1.0, "foretoken-auto": 2.0, "llama.cpp": None}
    assert fast["ratio"] == {"foretoken": 1.0, "foretoken-auto": 1.5, "llama.cpp": 5.0 / 8.0}


def test_names_of_servers_say_engine_drafter_and_number() -> None:
    assert _drafter_of("") == ("", None)
    assert _drafter_of("ngram-mod-8") == ("ngram-mod", 8)
    assert _drafter_of("draft-simple") == ("draft-simple", None)
    given = {"target": "reference:target", "draft": None, "port": 1, "slots": 4, "context": 64, "threads": 1}
    options = argparse.Namespace(**given)
    assert command_of("foretoken", options)[-2:] == ["--drafter", "none"]
    assert command_of("foretoken-ngram-5", options)[-4:] == ["--drafter", "ngram", "--num-draft", "5"]
    with pytest.raises(InputError, match="servers='vllm'"):
        command_of("vllm", options)
