"""Metrics, history and log over the real engine: they count what the responses say."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from foretoken.backend.local import LocalBackend
from foretoken.config import SpecConfig
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.guard.app import Guard
from foretoken.server.guard.config import GuardConfig
from foretoken.server.observe.config import ObserveConfig
from foretoken.server.observe.observation import Observation
from tests.helpers.http import client_of, events_of
from tests.server.asgi import ask, scope_of

KEY = "a-key-of-a-user"
SECRET = "the users own words"
DRAFTERS = (None, "ngram", "suffix", "draft_model")


def test_metrics_and_history_count_what_responses_say(backend: LocalBackend, tmp_path: Path) -> None:
    path = str(tmp_path / "history.db")
    observation = Observation(backend, ObserveConfig(history=path, request_log="none", stats_max_age_s=0.0))
    api = ApiConfig(specs=(SpecConfig("draft_model", "reference:draft", num_draft=3),))
    app = create_app(backend, api, observation.observers, observation.routers)
    whole = observation.around(Guard(app, GuardConfig(api_key=KEY, allowed_hosts=("test",))))

    async def play() -> tuple[list[dict[str, Any]], Any, Any]:
        reports = []
        async with client_of(whole) as client:
            client.headers["authorization"] = f"Bearer {KEY}"
            before = samples((await client.get("/metrics")).text)
            for drafter in DRAFTERS:
                for stream in (False, True):
                    body = {"prompt": f"{SECRET}(", "max_tokens": 24, "n": 2, "temperature": 0.7, "seed": 5}
                    body |= {"ignore_eos": True, "spec": {"drafter": drafter}, "stream": stream}
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    reports.append(events_of(answer.text)[-1] if stream else answer.json())
            assert (await client.post("/v1/completions", json={"prompt": 3})).status_code == 400
            text = (await client.get("/metrics")).text
            assert (await client.head("/metrics")).status_code == 200
        assert SECRET not in text
        return reports, before, samples(text)

    reports, before, after = asyncio.run(play())
    observation.close()

    def grown(name: str, **labels: str) -> float:
        keys = [key for key in after if key[0] == f"foretoken_{name}" and set(labels.items()) <= set(key[1])]
        return sum(after[key] - before.get(key, 0.0) for key in keys)

    specs = [report["foretoken"]["spec"] for report in reports]
    with closing(sqlite3.connect(path)) as connection:
        kept_drafters = {name for (name,) in connection.execute("SELECT drafter FROM requests")}
        kept = {
            name: connection.execute(f"SELECT sum({name}) FROM requests WHERE finish_reason = 'length'").fetchone()[0]
            for name in ("num_drafted", "num_accepted", "num_drafts", "num_completion_tokens")
        }
    for name, series in (
        ("num_drafted", "spec_decode_num_draft_tokens_total"),
        ("num_accepted", "spec_decode_num_accepted_tokens_total"),
        ("num_drafts", "spec_decode_num_drafts_total"),
    ):
        total = sum(spec[name] for spec in specs)
        assert total == grown(series) == kept[name] > 0, name
    for drafter in ("ngram", "draft_model"):
        said = [spec["by_drafter"].get(drafter, {"num_drafted": 0})["num_drafted"] for spec in specs]
        assert sum(said) == grown("spec_decode_num_draft_tokens_total", drafter=drafter)
    accepted = grown("spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted == grown("spec_decode_num_accepted_tokens_total")
    assert sum(spec["num_rejected"] for spec in specs) == grown("spec_decode_num_rejected_tokens_total")
    num_tokens = len(DRAFTERS) * 2 * 2 * 24
    assert grown("generation_tokens_total") == num_tokens == kept["num_completion_tokens"]
    assert grown("request_success_total", finished_reason="length") == len(DRAFTERS) * 2 * 2
    assert grown("e2e_request_latency_seconds_count") == grown("time_to_first_token_seconds_count") == len(DRAFTERS) * 2
    assert grown("requests_not_speculated_total", reason="off") == 2
    assert grown("http_requests_total", route="/v1/completions", code="200") == len(DRAFTERS) * 2
    assert grown("http_requests_total", route="/v1/completions", code="400") == 1
    gauges = {name: value for (name, _), value in after.items() if name.endswith(("_running", "_waiting", "_perc"))}
    assert set(gauges.values()) == {0.0}
    assert len(gauges) == 4
    assert kept_drafters == {"", "ngram", "suffix", "draft_model"}
    assert SECRET not in (tmp_path / "history.db").read_bytes().decode("latin-1")


def test_a_client_that_leaves_counts_once(backend: LocalBackend) -> None:
    observation = Observation(backend, ObserveConfig(request_log="none"))
    app = observation.around(Guard(create_app(backend, observers=observation.observers), GuardConfig()))
    body = json.dumps({"prompt": "def f(x):", "max_tokens": 500, "ignore_eos": True}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    asyncio.run(ask(app, scope_of("POST", "/v1/completions", headers), body))  # disconnects behind its body
    after = samples(asyncio.run(observation.metrics.text()).decode())
    assert after["foretoken_requests_aborted_total", (("reason", "client"),)] == 1
    assert not any(
        name == "foretoken_e2e_request_latency_seconds_count" and count for (name, _), count in after.items()
    )
    assert after["foretoken_num_requests_running", ()] == 0


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
