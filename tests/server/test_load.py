"""More requests than fit: queue, budgets, deadlines, and answers that do not depend on company."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.call import Begun
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from tests.helpers.fake_backend import FakeBackend, ended, piece
from tests.helpers.http import Records, client_of, events_of, run, text_of
from tests.helpers.usual import some_of
from tests.server.drafters import DRAFTERS, FEW, config_for

TEXT = "/v1/completions"
PROMPT = "def read(self, path):\n"


async def post_all(app: Any, bodies: Sequence[dict[str, Any]]) -> list[httpx2.Response]:
    """All bodies at once."""
    async with client_of(app) as client:
        return await asyncio.gather(*(client.post(TEXT, json=body) for body in bodies))


def texts_of(responses: Sequence[httpx2.Response]) -> list[list[str]]:
    assert {response.status_code for response in responses} == {200}, [one.text[:300] for one in responses]
    return [[choice["text"] for choice in response.json()["choices"]] for response in responses]


def test_overload_queue_full(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 29."""
    monkeypatch.setattr(backend.engine, "max_waiting", 3)
    records = Records()
    app = create_app(backend, observers=[records])
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    responses = run(post_all(app, [body] * 40))
    accepted = [one for one in responses if one.status_code == 200]
    refused = [one for one in responses if one.status_code == 429]
    assert len(accepted) + len(refused) == 40
    assert accepted
    assert refused
    for one in refused:
        assert (one.json()["error"]["code"], one.json()["error"]["type"]) == ("queue_full", "overloaded")
        assert int(one.headers["retry-after"]) >= 1
    assert len({text for (text,) in texts_of(accepted)}) == 1
    assert sum(record.reason == "queue_full" for record in records.all) == len(refused)
    assert sum(record.status == 200 for record in records.all) == len(accepted)


def test_overload_token_budget(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 30."""
    app = create_app(backend, ApiConfig(max_pending_tokens=100))
    body = {"prompt": PROMPT, "max_tokens": 20, "n": 4, "ignore_eos": True}
    responses = run(post_all(app, [body, body]))
    assert sorted(one.status_code for one in responses) == [200, 429]
    refused = next(one for one in responses if one.status_code == 429)
    assert refused.json()["error"]["code"] == "token_budget_full"
    assert refused.headers["retry-after"]
    assert app.state.api.budget.num_taken == 0
    assert run(post_all(app, [{**body, "n": 6}]))[0].status_code == 400  # never
    num_before = backend.engine.llm.stats.num_submitted
    monkeypatch.setattr(backend.engine, "_num_coming", backend.engine.max_waiting - 3)
    (all_or_none,) = run(post_all(app, [body]))
    assert all_or_none.status_code == 429
    assert backend.engine.llm.stats.num_submitted == num_before


def test_queue_deadline(backend: LocalBackend) -> None:
    """Case 31."""
    records = Records()
    fake = FakeBackend((Begun(((1,),)), asyncio.Event(), piece(0, "a"), ended(0, "a")))
    app = create_app(fake, ApiConfig(first_token_timeout_s=0.02), [records])
    for response in run(post_all(app, [{"prompt": "a"}, {"prompt": "a", "stream": True}])):
        assert (response.status_code, response.json()["error"]["code"]) == (504, "queue_deadline")
        assert response.headers["x-should-retry"] == "false"
    assert [generation.num_cancelled > 0 for generation in fake.generations] == [True, True]
    assert [(record.status, record.reason) for record in records.all] == [(504, "queue_deadline")] * 2

    async def behind_others() -> httpx2.Response:
        async with client_of(create_app(backend)) as other, client_of(create_app(backend, short)) as late:
            long = asyncio.create_task(other.post(TEXT, json={"prompt": PROMPT, "n": 8, "max_tokens": 1900}))
            while len(backend.engine.llm.engine.scheduler.running) < 8:
                await asyncio.sleep(0.001)
            response = await late.post(TEXT, json={"prompt": PROMPT, "max_tokens": 2})
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            return response

    short = ApiConfig(first_token_timeout_s=0.02)
    assert run(behind_others()).json()["error"]["code"] == "queue_deadline"


def test_generation_deadline_is_an_event_after_the_first_byte() -> None:
    fake = FakeBackend((Begun(((1,),)), piece(0, "a"), asyncio.Event(), ended(0, "a")))
    app = create_app(fake, ApiConfig(request_timeout_s=0.5))
    streamed, whole = run(post_all(app, [{"prompt": "a", "stream": True}, {"prompt": "a"}]))
    events = events_of(streamed.text)
    assert text_of(events[:-1]) == "a"
    assert events[-1]["error"]["code"] == "generation_deadline"
    assert whole.status_code == 504


def mixed_bodies(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """32 requests of different parameters."""
    prompts = (PROMPT, "class Reader:\n", "import os\n\n", "for i in range(3):\n    print(i)\n")
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 0.9, "min_p": 0.05},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0, "logit_bias": {"100": -50, "200": 3}},
        {"temperature": 1, "stop": ["self", "\n\n"]},
    ]
    return [
        {"prompt": prompt, "seed": 7 * number, "max_tokens": 6, "spec": {**spec, **coupled(spec)}, **option}
        for number, (prompt, option) in enumerate((prompt, option) for prompt in prompts for option in options)
    ]


def coupled(spec: dict[str, Any]) -> dict[str, Any]:
    """Under the coupled rule a seeded answer does not depend on what was drafted, nor on how much."""
    return {} if spec["drafter"] is None else {"rule": "coupled"}


@pytest.mark.parametrize("drafter", some_of(FEW, {"off", "tree", "synthetic_0.0"}))
def test_mixed_sampling_batch(backend: LocalBackend, drafter: str) -> None:
    """Case 32, and 33: alone or in company, drafted or not, cached or not."""
    app = create_app(backend, config_for(drafter))
    bodies = mixed_bodies(DRAFTERS[drafter])
    together = texts_of(run(post_all(app, bodies)))
    for number in range(0, 32, 11):
        assert texts_of(run(post_all(app, [bodies[number]]))) == [together[number]]
    if drafter != "off":
        plain = [{**body, "spec": {"drafter": None}} for body in bodies[1::12]]
        expected = [{**body, "spec": {"drafter": "ngram", "num_draft": 0}} for body in bodies[1::12]]
        assert texts_of(run(post_all(app, plain))) == texts_of(run(post_all(app, expected)))


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, {"off", "tree", "synthetic_0.5"}))
def test_seed_determinism(backend: LocalBackend, drafter: str) -> None:
    """Case 33: the same seed twice; the second time the prompt is cached."""
    app = create_app(backend, config_for(drafter))
    body = {"prompt": PROMPT * 16, "seed": 11, "temperature": 1, "max_tokens": 10, "n": 2, "cache_salt": drafter}
    body["spec"] = {**DRAFTERS[drafter], **coupled(DRAFTERS[drafter])}
    (first,) = run(post_all(app, [body]))
    (second,) = run(post_all(app, [body]))
    assert texts_of([first]) == texts_of([second])
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first.json()["choices"][0]["text"] != first.json()["choices"][1]["text"]


def test_different_seed_differs(backend: LocalBackend) -> None:
    """Case 34."""
    app = create_app(backend)
    bodies = [{"prompt": PROMPT, "temperature": 1.2, "max_tokens": 12, "seed": seed} for seed in range(4)]
    assert len({text for (text,) in texts_of(run(post_all(app, bodies)))}) == 4
    unseeded = [{"prompt": PROMPT, "temperature": 1.2, "max_tokens": 12}] * 2
    first, second = texts_of(run(post_all(app, unseeded)))
    assert first != second


@pytest.fixture(scope="module")
def small_engine(chat_folder: Path) -> Iterator[AsyncEngine]:
    """A cache for three requests of the next test."""
    llm = LLM(str(chat_folder), SpecConfig(), dtype="float32", profile="off", cache_tokens=128, max_batch_size=12)
    with llm, AsyncEngine(llm, max_waiting=64) as engine:
        yield engine


@pytest.mark.parametrize("drafter", some_of(FEW, {"off", "synthetic_1.0"}))
def test_kv_exhaustion_preempt(backend: LocalBackend, small_engine: AsyncEngine, drafter: str) -> None:
    """Case 35: the answers are those of a cache that is large enough."""
    config = config_for(drafter)
    bodies = [
        {"prompt": f"def read_{number}(self):\n", "temperature": 0, "max_tokens": 32, "ignore_eos": True}
        for number in range(7)
    ]
    for body in bodies:
        body["spec"] = DRAFTERS[drafter]
    expected = texts_of(run(post_all(create_app(backend, config), bodies)))
    num_before = small_engine.llm.stats.num_preempted
    found = texts_of(run(post_all(create_app(LocalBackend(small_engine, "small"), config), bodies)))
    assert found == expected
    assert small_engine.llm.stats.num_preempted > num_before
    assert not small_engine.llm.engine.has_work


def test_kv_too_small_for_one(small_engine: AsyncEngine) -> None:
    """Case 36."""
    app = create_app(LocalBackend(small_engine, "small"))
    (refused,) = run(post_all(app, [{"prompt": PROMPT, "max_tokens": 500}]))
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "capacity_exceeded"
    (served,) = run(post_all(app, [{"prompt": PROMPT, "max_tokens": 5}]))
    assert served.status_code == 200
