"""A step of the engine that raises, seen by HTTP clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx2
import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from tests.helpers.faults import expect
from tests.helpers.faulty_worker import FaultHook

PROMPTS = ("def f(x):\n", "class Reader", "import os\n")


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with (
        LLM("reference:target", SpecConfig("ngram"), dtype="float32", profile="off") as llm,
        AsyncEngine(llm) as engine,
    ):
        yield engine


async def answers(engine: AsyncEngine, *prompts: str) -> list[httpx2.Response]:
    """One request for each prompt, all at once."""
    transport = httpx2.ASGITransport(create_app(LocalBackend(engine, "m")))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        bodies = [
            {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            for prompt in prompts
        ]
        return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)))


@pytest.mark.parametrize("nth", [1, 5])
def test_engine_step_raises(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, nth: int, unheard: list[str]) -> None:
    """Case 62: on pass k only the culprit fails, and clients do not repeat it; the others get their own answers."""
    alone = [asyncio.run(answers(engine, prompt))[0].json()["choices"][0]["text"] for prompt in PROMPTS]
    expect("a step that raises")
    runner = engine.llm.engine.runner
    monkeypatch.setattr(runner, "forward", runner.forward)
    hook = FaultHook("step", nth, "poison", is_armed=True)
    hook.watch_steps(engine.llm.engine)
    found = asyncio.run(answers(engine, *PROMPTS))
    assert len(hook.poisoned) == 1
    failed = [response for response in found if response.status_code != 200]
    assert [(one.status_code, one.headers["x-should-retry"]) for one in failed] == [(500, "false")]
    assert failed[0].json()["error"]["code"] == "engine_error"
    for text, response in zip(alone, found, strict=True):
        assert response.status_code == 500 or response.json()["choices"][0]["text"] == text
    assert "the request that ran alone in it fails" in unheard.pop()
    unheard.clear()


def test_engine_step_raises_once(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, unheard: list[str]) -> None:
    """Case 62: a fault that does not come again costs nobody an answer."""
    alone = [asyncio.run(answers(engine, prompt))[0].json()["choices"][0]["text"] for prompt in PROMPTS]
    expect("a step that raises")
    runner = engine.llm.engine.runner
    monkeypatch.setattr(runner, "forward", runner.forward)
    hook = FaultHook("step", 4, "raise", is_armed=True)
    hook.watch_steps(engine.llm.engine)
    found = asyncio.run(answers(engine, *PROMPTS))
    assert hook.num_passed > 4
    assert [response.json()["choices"][0]["text"] for response in found] == alone
    assert "its requests run again, one by one" in unheard.pop()
