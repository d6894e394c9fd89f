"""A backend over the socket is the backend behind it: same events, same errors, same release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.backend.call import AnswerEnded, Backend, Begun, Call, Event, Generation, TextToEncode
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.errors import InputError, OverloadedError, UnavailableError, WorkerDiedError
from foretoken.server.life import worker
from foretoken.server.life.remote import RemoteBackend
from foretoken.server.life.wire import Beat, Loaded, LoadEngine
from tests.helpers.workers import ScriptedBackend, WorkerHere, channels

_PATIENCE_S = 60.0  # until a test gives up; nothing depends on it


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with LLM("reference:target", dtype="float32", profile="off") as llm, AsyncEngine(llm, max_waiting=4) as engine:
        yield engine


class Kept:
    """A backend whose engine is not closed with its worker."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.engine = _KeptEngine(backend.engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


class _KeptEngine:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None: ...

    @property
    def llm(self) -> Any:
        return _KeptEngine(self._engine.llm)


@asynccontextmanager
async def remote(backend: Any, max_unread: int = 1000) -> AsyncIterator[RemoteBackend]:
    """`backend` seen through a socket."""
    front, theirs = await channels()
    worker = asyncio.create_task(WorkerHere(theirs, LoadEngine({}, "m", 4, 0.05), lambda: Kept(backend)).run())
    loaded = await front.receive()
    assert isinstance(loaded, Loaded)
    found = RemoteBackend(front, loaded.info, max_unread)

    async def read() -> None:
        while (message := await front.receive()) is not None:
            if not isinstance(message, Beat):
                found.take(message)
        found.fail(WorkerDiedError("died"))

    reading = asyncio.create_task(read())
    try:
        yield found
    finally:
        front.close()
        await worker
        await reading
        theirs.close()


async def read_into(found: list[Event], generation: Generation) -> None:
    async for event in generation:
        found.append(event)


async def events_of(backend: Backend, call: Call) -> list[Event]:
    return [event async for event in await backend.open(call)]


def without_times(events: list[Event]) -> list[Event]:
    """In order of the answers, without what no two runs have alike."""
    plain = [
        AnswerEnded(one.index, one.finish_reason, one.text, one.num_tokens, {}, one.prompt)
        if isinstance(one, AnswerEnded)
        else one
        for one in events
    ]
    return sorted(plain, key=lambda one: -1 if isinstance(one, Begun) else one.index)


def test_the_events_are_those_of_the_backend_behind_it(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=6, n=2, logprobs=1, temperature=0.8, seed=3, prompt_logprobs=0)
    call = Call(params, ("def f(x):\n", [5, 6, 7]), spec=SpecConfig())
    local = LocalBackend(engine, "reference")

    async def run() -> tuple[list[Event], list[Event]]:
        async with remote(local) as backend:
            assert backend.info == local.info
            return await events_of(local, call), await events_of(backend, call)

    here, there = asyncio.run(run())
    assert without_times(there) == without_times(here)


def test_texts_figures_and_refusals(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with remote(LocalBackend(engine, "reference")) as backend:
            ids = await backend.tokenize(TextToEncode("def f(x):"))
            assert await backend.detokenize(ids) == "def f(x):"
            assert await backend.spell([*ids, 10**6]) == [*map(engine.llm.tokenizer.token, ids), None]
            held = await backend.invariants()
            assert held["num_calls"] == held["num_running"] == held["pools"]["target"]["used"] == 0
            assert held["pools"]["target"]["total"] > 0
            with pytest.raises(InputError, match=r"tokens=4096: must lie in \[0, 4096\)"):
                await backend.detokenize([4096])
            with monkeypatch.context() as patch:
                patch.setattr(engine, "_num_coming", 1)
                with pytest.raises(OverloadedError):
                    await backend.open(Call(SamplingParams(max_tokens=4, n=4), ["x"]))
            for prompt, field in (("\ud800", "prompts.1"), ([5, 2**64], "prompts.1.1")):
                with pytest.raises(InputError, match="64 bits") as refused:
                    await backend.open(Call(SamplingParams(max_tokens=4), ["a", prompt]))
                assert refused.value.field == field
            said = [{"role": "user", "content": "a", "name": -(2**63) - 1}]
            with pytest.raises(InputError, match=r"^messages\.0\.name=-9223372036854775809: "):
                await backend.tokenize(TextToEncode(messages=said))
            deep: Any = 2**64
            for _ in range(900):
                deep = [deep]
            with pytest.raises(InputError, match=r"^messages\.0\.content(\.0){13}="):
                await backend.tokenize(TextToEncode(messages=[{"role": "user", "content": deep}]))
            assert backend.num_open == 0

    asyncio.run(run())


def test_every_way_of_leaving_frees_the_call(engine: AsyncEngine) -> None:
    call = Call(SamplingParams(max_tokens=2000, n=2, ignore_eos=True, temperature=1.0), ["def f(x):"])

    async def run() -> None:
        async with remote(LocalBackend(engine, "reference")) as backend:
            generation = await backend.open(call)  # cancelled: its ends still come
            found: list[Event] = []
            async for event in generation:
                found.append(event)
                if len(found) == 3:
                    await generation.cancel()
                    await generation.cancel()
            assert [event.finish_reason for event in found if isinstance(event, AnswerEnded)] == ["abort", "abort"]
            events = aiter(await backend.open(call))  # left half-way
            await anext(events)
            await events.aclose()  # type: ignore[attr-defined]
            opening = asyncio.create_task(backend.open(call))  # left before it was opened
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            held = await backend.invariants()
            while held["num_calls"]:
                held = await backend.invariants()
            assert held["num_running"] == held["num_waiting"] == backend.num_open == 0

    asyncio.run(run())


def test_a_reader_that_does_not_read_loses_the_call() -> None:
    async def run() -> None:
        async with remote(ScriptedBackend(token_ids=range(50)), max_unread=10) as backend:
            generation = await backend.open(Call(SamplingParams(), [[1]]))
            while backend.num_open:
                await backend.stats()
            found: list[Event] = []
            with pytest.raises(OverloadedError, match="10 events"):
                await read_into(found, generation)
            assert len(found) == 10

    asyncio.run(run())


def test_what_is_in_flight_fails_with_the_worker() -> None:
    async def run() -> None:
        async with remote(ScriptedBackend()) as backend:
            generation = await backend.open(Call(SamplingParams(tenant="hold"), [[1]]))
            found: list[Event] = []
            reading = asyncio.create_task(read_into(found, generation))
            while len(found) < 2:
                await backend.stats()
            backend.fail(WorkerDiedError("died"))
            with pytest.raises(WorkerDiedError):
                await reading
            assert len(found) == 2
            with pytest.raises(UnavailableError):
                await backend.tokenize(TextToEncode("x"))

    asyncio.run(run())


def test_a_call_of_wrong_types_is_refused_alone() -> None:
    async def run() -> None:
        async with remote(ScriptedBackend()) as backend:
            with pytest.raises(InputError, match="request"):
                await backend.open(Call(SamplingParams(), prompts=[(1.5,)]))  # type: ignore[list-item]
            events: list[Event] = []
            await read_into(events, await backend.open(Call(SamplingParams(), prompts=[(1, 2)])))
            assert isinstance(events[-1], AnswerEnded)

    asyncio.run(run())


def test_a_worker_gives_freed_memory_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(worker, "_TRIM_S", 0.0)
    monkeypatch.setattr(worker, "give_back_freed_memory", lambda: given.append(True))

    async def run() -> None:
        async with remote(ScriptedBackend()), asyncio.timeout(_PATIENCE_S):
            while len(given) < 2:
                await asyncio.sleep(0.001)

    asyncio.run(run())
