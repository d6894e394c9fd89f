"""Load on a server in processes of its own: nothing is lost or stays behind. Long runs: `studies.serving_load`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from studies.serving_load.server import loaded_server
from studies.serving_load.soak import soak
from tests.helpers import faulty_worker

ROOT = Path(__file__).resolve().parents[1]
PAIR = ("--target", "reference:target", "--draft", "reference:draft")
# Pools of the front and the worker start a thread when a call finds the others busy, so the number of threads grows for
# a while and then stays: prompts (4), the loop's own pool (cores + 4). A thread kept by each request would make 50.
NUM_POOL_THREADS = 16


@pytest.mark.parametrize("minutes", [pytest.param(minutes, marks=pytest.mark.release) for minutes in (0.5, 1.75)])
def test_soak(monkeypatch: pytest.MonkeyPatch, minutes: float) -> None:
    """Case 72, for minutes. The slope of the memory needs hours: the study measures it, no test judges it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = (*PAIR, "--dtype", "float32", "--cost-profile", "off", "--cache-tokens", "8192", "--drafter", "auto")
    with loaded_server(options) as server:
        first = asyncio.run(soak(server, minutes=0.25, rate=3.0, seed=1))  # what is filled once is filled
        found = asyncio.run(soak(server, minutes=minutes, rate=3.0, seed=2))
        metrics = asyncio.run(server.metrics())
    assert found["num_requests"] > 110 * minutes
    assert found["num_left"] > 0
    assert found["errors"] == {}
    assert found["kept"] == []
    assert found["files_after"] <= found["files_before"] + 1
    assert found["threads_after"] <= found["threads_before"] + NUM_POOL_THREADS
    aborted = metrics['foretoken_requests_aborted_total{reason="client"}']
    ended = sum(value for name, value in metrics.items() if name.startswith("foretoken_request_success_total{"))
    assert ended + aborted == first["num_requests"] + found["num_requests"]
    assert 0 < aborted <= first["num_left"] + found["num_left"]  # a short answer may have ended before its client left
    assert metrics["foretoken_num_requests_running"] == metrics["foretoken_num_requests_waiting"] == 0
    assert metrics["foretoken_kv_cache_usage_perc"] == metrics["foretoken_draft_kv_cache_usage_perc"] == 0
    assert metrics["foretoken_engine_restarts_total"] == 0


def test_soak_with_faults_and_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 72: one step in fifty raises, and the cache has room for two of the larger requests, so that others are
    preempted. A fault costs at most the request that ran alone in its step, which is told so; nothing stays behind.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(faulty_worker.VARIABLE, "step:every-50:raise")
    options = (*PAIR, "--dtype", "float32", "--cost-profile", "off", "--cache-tokens", "768", "--drafter", "auto")
    with loaded_server(options, faulty_worker.MODULE) as server:
        found = asyncio.run(soak(server, minutes=0.5, rate=6.0, seed=3))
        metrics = asyncio.run(server.metrics())
    assert found["num_requests"] > 100
    assert set(found["errors"]) <= {"stream", "500"}
    assert (
        sum(found["errors"].values())
        <= metrics["foretoken_engine_faults_total"]
        < 0.04 * metrics["foretoken_engine_steps_total"]
    )
    assert found["kept"] == []
    assert metrics["foretoken_engine_faults_total"] > 10
    assert metrics["foretoken_num_preemptions_total"] > 5
    assert metrics["foretoken_num_requests_running"] == metrics["foretoken_num_requests_waiting"] == 0
    assert metrics["foretoken_kv_cache_usage_perc"] == metrics["foretoken_draft_kv_cache_usage_perc"] == 0
    assert metrics["foretoken_engine_restarts_total"] == 0
