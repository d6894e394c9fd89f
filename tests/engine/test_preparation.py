"""Requests are prepared where they are asked for: neither the steps of other requests nor an event loop wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import LLM, AsyncEngine, InputError, OverloadedError, SamplingParams, SpecConfig
from tests.engine.test_async_engine import wait_until_idle
from tests.helpers.checkpoints import token_ids

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SLOW = ["tokenising", "checking", "loading a drafter"]


class Held:
    """A call that waits for the test in the middle, and says in which thread it ran."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.begun, self.may_end, self.threads = call, threading.Event(), threading.Event(), list[str]()

    def __call__(self, *arguments: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.may_end.wait(60)
        return self.call(*arguments)


@pytest.fixture
def engine(text_pair: SimpleNamespace) -> Iterator[AsyncEngine]:
    with (
        LLM(text_pair.target, SpecConfig(), dtype="float32", cache_tokens=2048, profile="off") as llm,
        AsyncEngine(llm) as engine,
    ):
        yield engine


def hold(what: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Let one part of preparing a request wait; only requests for the text "slow" with drafter `ngram` meet it."""
    loader = llm._loader
    assert loader is not None
    owner, name = {
        "tokenising": (llm._encoder, "encode"),
        "checking": (llm.engine.admission._structures, "compile"),
        "loading a drafter": (loader.factory, "make"),
    }[what]
    held = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, held)
    return held


@pytest.mark.parametrize("what", SLOW)
def test_neither_the_loop_nor_running_requests_wait(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A request that runs ends, and the loop does other things, while a slow one is prepared; that runs afterwards."""
    expected = engine.submit("slow", GREEDY).result().token_ids

    async def everything() -> None:
        running = await engine.submit_async(token_ids(4), SamplingParams(max_tokens=100, ignore_eos=True))
        held = hold(what, engine.llm, monkeypatch)
        slow = asyncio.create_task(engine.generate("slow", GREEDY, SpecConfig("ngram")))
        assert await asyncio.to_thread(held.begun.wait, 60)
        assert (await running.wait()).finish_reason == "length"  # every step of it ran, and this loop heard of them
        assert not slow.done()
        assert engine.llm.engine.stats.num_submitted == 2
        held.may_end.set()
        assert (await slow).token_ids == expected
        prefix = "foretoken-load" if what == "loading a drafter" else "foretoken-prepare"
        assert all(name.startswith(prefix) for name in held.threads)

    asyncio.run(everything())
    wait_until_idle(engine)


@pytest.mark.parametrize("what", SLOW)
def test_steps_go_on_while_a_thread_prepares(
    text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """`LLM.generate` in two threads: the slow one holds no lock of the engine and takes no turn."""
    with LLM(text_pair.target, SpecConfig(), dtype="float32", cache_tokens=2048, profile="off") as llm:
        expected = llm.generate(["slow"], GREEDY)[0].token_ids
        running = llm.submit(token_ids(4), GREEDY, SpecConfig())
        held = hold(what, llm, monkeypatch)
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(llm.generate(["slow"], GREEDY, SpecConfig("ngram"))[0]), name="slow"
        )
        thread.start()
        assert held.begun.wait(60)
        while running.finish_reason is None:
            llm.step()
        assert not answers
        held.may_end.set()
        thread.join(60)
        assert answers[0].token_ids == expected
        assert set(held.threads) == {"slow"}


def test_the_engines_thread_prepares_nothing(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`submit` prepares in its caller's thread, coroutines in worker threads."""
    names: list[str] = []
    prepare = engine.llm.engine.admission.prepare

    def recorded(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return prepare(*arguments)

    monkeypatch.setattr(engine.llm.engine.admission, "prepare", recorded)
    engine.submit("a", GREEDY).result()
    asyncio.run(engine.generate("a", SamplingParams(max_tokens=2, n=3, seed=1, temperature=1.0)))
    assert names[0] == threading.current_thread().name
    assert len(names) == 4
    assert all(name.startswith("foretoken-prepare") for name in names[1:])


def test_what_is_being_prepared_has_a_place_in_the_queue(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a crowd is refused before its prompts are read; a request that is refused or left gives its place
    back.
    """
    engine.max_waiting = 2

    async def crowd() -> None:
        held = hold("tokenising", engine.llm, monkeypatch)
        slow = [asyncio.create_task(engine.generate("slow", GREEDY)) for _ in range(2)]
        assert await asyncio.to_thread(held.begun.wait, 60)
        with pytest.raises(OverloadedError, match="2 requests wait already"):
            await engine.generate([5], GREEDY)
        slow[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow[0]
        assert len((await engine.generate([5], GREEDY)).token_ids) == 12
        held.may_end.set()
        assert len((await slow[1]).token_ids) == 12
        with pytest.raises(InputError, match="prompt"):
            await engine.generate([10**6], GREEDY)

    asyncio.run(crowd())
    assert engine._num_coming == 0
    wait_until_idle(engine)


def test_closing_while_a_request_is_prepared(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def closing() -> None:
        held = hold("tokenising", engine.llm, monkeypatch)
        slow = asyncio.create_task(engine.generate("slow", GREEDY))
        assert await asyncio.to_thread(held.begun.wait, 60)
        await asyncio.to_thread(engine.close)
        held.may_end.set()
        with pytest.raises(InputError, match="was closed"):
            await slow

    asyncio.run(closing())
    assert not engine.llm.engine.has_work
