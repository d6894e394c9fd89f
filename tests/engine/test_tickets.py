"""Every ticket ends, whatever raises and whoever closes; what came is there for everybody who asks, as often as he
asks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import (
    LLM,
    AsyncEngine,
    EngineError,
    GenerateOutput,
    InputError,
    SamplingParams,
    SpecConfig,
    StorageError,
    Ticket,
)
from foretoken.core import StepOutput
from foretoken.machine.process import REMEDY
from tests.engine.test_async_engine import Paced, wait_until_idle
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.faults import Broken, Fault, Injected, Interrupt, expect

PROMPTS = [token_ids(3 + i, seed=i) for i in range(6)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def llm(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(pair.target, SpecConfig(), dtype="float32", max_batch_size=4, cache_tokens=2048, profile="off") as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncEngine]:
    with AsyncEngine(llm) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[int, ...]]:
    return [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]


def ids_of(pieces: list[StepOutput]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.token_ids)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, each in a thread of its own."""
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        found[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    return found


# ---- H1: results stay


def test_h1_what_came_is_there_for_everybody_as_often_as_he_asks(
    engine: AsyncEngine, alone: list[tuple[int, ...]]
) -> None:
    ticket = engine.submit(PROMPTS[0], GREEDY)
    assert ids_of(list(ticket)) == alone[0]
    first, second = ticket.result(), ticket.result()
    assert first is second
    assert first.token_ids == alone[0]
    assert ids_of(list(ticket)) == alone[0], "a second iteration sees every piece from the first one on"
    assert asyncio.run(ticket.wait()) is first


def test_h1_several_waiters_in_threads(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    ticket = engine.submit(PROMPTS[1], GREEDY)
    found = in_threads(
        ticket.result, lambda: list(ticket), ticket.result, lambda: asyncio.run(ticket.wait()), lambda: list(ticket)
    )
    assert {answer.token_ids for answer in found if isinstance(answer, GenerateOutput)} == {alone[1]}
    assert {ids_of(pieces) for pieces in found if isinstance(pieces, list)} == {alone[1]}


def test_h1_iterating_then_waiting_in_coroutines(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    async def everything() -> None:
        ticket = engine.submit(PROMPTS[2], GREEDY)
        assert ids_of([piece async for piece in ticket]) == alone[2]
        assert (await ticket.wait()).token_ids == alone[2]
        other = engine.submit(PROMPTS[3], GREEDY)
        one, two, pieces = await asyncio.gather(other.wait(), other.wait(), collected(other))
        assert one is two
        assert one.token_ids == ids_of(pieces) == alone[3]
        assert other.result() is one, "it has ended, so nothing blocks the loop"

    async def collected(pieces: AsyncIterator[StepOutput]) -> list[StepOutput]:
        return [piece async for piece in pieces]

    asyncio.run(everything())


def test_h1_leaving_one_of_two_readers_leaves_nothing(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    """The request goes on for who still reads; when the last one leaves, it is dropped."""
    with Paced(engine.llm) as paced:
        ticket = engine.submit(PROMPTS[0], GREEDY)
        one, two = iter(ticket), iter(ticket)
        paced.go(2)
        assert next(one).token_ids == next(two).token_ids == alone[0][:1]
        one.close()
    assert ids_of(list(two)) == alone[0][1:]
    assert ticket.result().finish_reason == "length"

    async def two_tasks() -> None:
        shared = engine.submit(PROMPTS[1], GREEDY)
        with Paced(engine.llm) as paced:
            tasks = [asyncio.create_task(shared.wait()) for _ in range(2)]
            await asyncio.sleep(0)
            paced.go(2)
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
        assert (await tasks[1]).token_ids == alone[1]

    asyncio.run(two_tasks())
    left = engine.submit(PROMPTS[1], LONG)
    readers = [iter(left), iter(left)]
    for reader in readers:
        next(reader)
    for reader in readers:
        reader.close()
    assert left.result().finish_reason == "abort"


def test_h1_a_cancelled_ticket_has_an_answer(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    """Also one that was cancelled before the engine had seen it."""
    with Paced(engine.llm) as paced:
        running = engine.submit(PROMPTS[0], GREEDY)
        paced.go(3)
        unseen = engine.submit(PROMPTS[1], SamplingParams(max_tokens=3, logprobs=1))
        for ticket in (running, unseen):
            ticket.cancel()
            ticket.cancel()
    answer = running.result()
    assert (answer.finish_reason, answer.error) == ("abort", None)
    assert answer.token_ids == alone[0][: len(answer.token_ids)] == ids_of(list(running))
    never = unseen.result()
    assert (never.finish_reason, never.token_ids, never.logprobs, never.prompt_ids) == (
        "abort",
        (),
        (),
        tuple(PROMPTS[1]),
    )
    assert list(unseen) == []
    wait_until_idle(engine)


def test_a_request_that_cannot_be_queued_raises_for_everybody(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.llm.engine.scheduler, "add", Fault(engine.llm.engine.scheduler.add))
    bad = engine.submit(PROMPTS[0], GREEDY)
    for ask in (bad.result, bad.result, lambda: list(bad), lambda: asyncio.run(bad.wait())):
        with pytest.raises(EngineError, match="injected"):
            ask()


def test_a_failed_request_has_an_answer_and_its_pieces_end_with_the_error(
    engine: AsyncEngine, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.llm.target, "forward", Fault(engine.llm.target.forward, nth=4, once=False))
    with pytest.warns(UserWarning, match="injected"):
        answer = (ticket := engine.submit(PROMPTS[0], GREEDY)).result()
    assert (answer.finish_reason, answer.token_ids) == ("error", alone[0][:3])
    assert isinstance(answer.error, EngineError)
    for _ in range(2):
        pieces: list[StepOutput] = []
        with pytest.raises(EngineError, match="injected"):
            pieces.extend(ticket)
        assert ids_of(pieces) == alone[0][:3]
    assert asyncio.run(ticket.wait()) is answer
    wait_until_idle_again(engine, monkeypatch)


def wait_until_idle_again(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    wait_until_idle(engine)


# ---- H2: the thread does not die in silence


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_h2_a_trace_on_a_full_disk_ends_and_answers_go_on(pair: SimpleNamespace, alone: list[tuple[int, ...]]) -> None:
    with (
        LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=1024, profile="off", trace=FULL) as llm,
        AsyncEngine(llm) as engine,
    ):
        assert llm.trace_error is None
        expect("the disk is full")
        with pytest.warns(
            UserWarning,
            match="the observer Trace raised StorageError: cannot write the trace /dev/full: .*it is removed",
        ) as told:
            answers = [ticket.result().token_ids for ticket in [engine.submit(PROMPTS[i], GREEDY) for i in range(3)]]
        assert answers == alone[:3]
        assert len(told) == 1
        assert isinstance(llm.trace_error, StorageError)
        assert llm.stats.num_faults == 1
    assert "/dev/full" in str(llm.trace_error)


@pytest.mark.filterwarnings("ignore:.*injected:UserWarning")
@pytest.mark.parametrize("kind", [Injected, Interrupt])
@pytest.mark.parametrize("place", ["enqueue", "step", "watcher"])
def test_h2_whatever_raises_in_the_thread_every_ticket_ends(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, kind: type[BaseException]
) -> None:
    """What is no `Exception` ends the thread: then it says why, to those who wait and to those who come."""
    engine = AsyncEngine(llm)
    if place == "watcher":
        llm.engine.watchers.append(Broken("round", kind=kind))
    else:
        monkeypatch.setattr(llm._driver, place, Fault(getattr(llm._driver, place), nth=3, kind=kind))
    with Paced(llm) as paced:
        tickets = [submitted(engine, PROMPTS[i]) for i in range(2)]
        paced.go(1)
        tickets += [submitted(engine, PROMPTS[i]) for i in range(2, 4)]
    outcomes = in_threads(*(lambda ticket=ticket: outcome(ticket) for ticket in tickets))
    broken = [one for one in outcomes if isinstance(one, EngineError | Injected)]
    if kind is Interrupt:
        assert len(broken) == 4
        engine._thread.join(60)
        assert not engine._thread.is_alive()
        with pytest.raises(EngineError, match=r"the engine's thread has broken down, .*: Interrupt") as caught:
            engine.submit(PROMPTS[0], GREEDY)
        assert isinstance(caught.value.__cause__, Interrupt)
    else:
        assert len(broken) == {"enqueue": 1, "step": 4, "watcher": 0}[place]
        monkeypatch.undo()
        assert engine.submit(PROMPTS[0], GREEDY).result().finish_reason == "length"
    engine.close()
    llm.engine.watchers.clear()
    check_idle(llm)
    assert len(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == 12  # the models live on


def submitted(engine: AsyncEngine, prompt: list[int]) -> Ticket | EngineError:
    """The ticket, or the refusal of an engine whose thread has broken down by now."""
    try:
        return engine.submit(prompt, GREEDY)
    except EngineError as error:
        return error


def outcome(ticket: Ticket | EngineError) -> object:
    """The answer, or what is raised in its place."""
    if isinstance(ticket, EngineError):
        return ticket
    try:
        answer = ticket.result()
    except (EngineError, Injected) as error:
        return error
    return answer.error or answer


# ---- H4 and closing


@pytest.mark.parametrize("point", ["before", "after"])
def test_h4_submit_that_races_close_is_refused_or_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """The submitter stands still before or after it queues, until the engine is closed."""
    engine, standing, go_on = AsyncEngine(llm), threading.Event(), threading.Event()
    prepare, notify = llm.prepare, engine._wake.notify

    def pause() -> None:
        if threading.current_thread().name == "submitter":
            standing.set()
            assert go_on.wait(60)

    if point == "before":
        monkeypatch.setattr(llm, "prepare", lambda spec: (prepare(spec), pause()))
    else:
        monkeypatch.setattr(
            engine._wake,
            "notify",
            lambda: (notify(), threading.current_thread().name == "submitter" and standing.set()),
        )
    found: list[object] = []

    def submit() -> None:
        try:
            found.append(engine.submit(PROMPTS[0], LONG).result())
        except InputError as error:
            found.append(error)

    submitter = threading.Thread(target=submit, name="submitter", daemon=True)
    submitter.start()
    assert standing.wait(60)
    in_threads(engine.close, engine.close)
    go_on.set()
    submitter.join(60)
    assert not submitter.is_alive()
    (end,) = found
    if point == "before":
        assert isinstance(end, InputError)
        assert "engine='closed': was closed; open it again" in str(end)
    else:
        assert isinstance(end, GenerateOutput)
        assert end.finish_reason == "abort"
    check_idle(llm)


def test_closing_from_a_callback_of_the_engines_own_thread(llm: LLM) -> None:
    class Closing(Broken):
        def round(self, view: Any) -> None:
            engine.close()
            engine.close()

    engine = AsyncEngine(llm)
    llm.engine.watchers.append(Closing())
    ticket = engine.submit(PROMPTS[0], LONG)
    assert ticket.result().finish_reason == "abort"
    engine.close()
    llm.engine.watchers.clear()
    assert llm.generate([PROMPTS[0]], GREEDY)[0].finish_reason == "length"
    check_idle(llm)


def test_closing_the_llm_closes_the_engine_first(pair: SimpleNamespace) -> None:
    llm = LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=1024, profile="off")
    engine = AsyncEngine(llm)
    ticket = engine.submit(PROMPTS[0], LONG)
    llm.close()
    assert ticket.result().finish_reason == "abort"
    with pytest.raises(InputError, match="engine='closed': was closed"):
        engine.submit(PROMPTS[0])
    engine.close()


def test_who_waits_in_a_coroutine_hears_of_the_close(llm: LLM) -> None:
    async def waiting() -> None:
        engine = AsyncEngine(llm)
        tickets = [engine.submit(prompt, LONG) for prompt in PROMPTS]
        tasks = [asyncio.create_task(ticket.wait()) for ticket in tickets]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        assert {answer.finish_reason for answer in await asyncio.gather(*tasks)} == {"abort"}

    asyncio.run(waiting())


def test_a_stream_that_the_close_cuts_short_says_so(llm: LLM) -> None:
    """It ended like a whole answer; a stream of `LLM` raises, too."""

    async def reading() -> None:
        engine = AsyncEngine(llm)
        pieces = engine.stream(PROMPTS[0], LONG)
        await anext(pieces)
        await asyncio.to_thread(engine.close)
        with pytest.raises(InputError, match="engine='closed': was closed"):
            async for _ in pieces:
                pass

    asyncio.run(reading())
    check_idle(llm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_refused(engine: AsyncEngine) -> None:
    """It has no engine thread, and would wait for ever."""
    ticket = engine.submit(PROMPTS[0], LONG)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for ask in (lambda: engine.submit(PROMPTS[0], GREEDY), ticket.result, lambda: list(ticket)):
            try:
                ask()
            except InputError as error:
                said.append(error.remedy)
        os.write(writing, "|".join(said).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "|".join([REMEDY] * 3)
    ticket.cancel()


# ---- who owns the model


def test_only_the_engine_runs_requests_while_it_is_open(llm: LLM, engine: AsyncEngine) -> None:
    for use in (
        lambda: llm.generate([PROMPTS[0]]),
        lambda: llm.stream(PROMPTS[0]),
        lambda: llm.submit(PROMPTS[0], GREEDY, SpecConfig()),
        llm.step,
        llm.drain_shadow,
    ):
        with pytest.raises(InputError, match=r"llm=.* is served by an AsyncEngine: submit to that, or close it first"):
            use()
    with pytest.raises(InputError, match="is served by another AsyncEngine"):
        AsyncEngine(llm)
    assert llm.stats.num_running == 0
    llm.prepare(SpecConfig("ngram"))
    engine.close()
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    with pytest.raises(InputError, match="still answers requests: let them end, or close their streams"):
        AsyncEngine(llm)
    stream.close()
    AsyncEngine(llm).close()


def test_things_of_the_wrong_kind(llm: LLM, engine: AsyncEngine) -> None:
    for submit, message in (
        (lambda: engine.submit(PROMPTS[0], 0), "params=0: give SamplingParams"),  # type: ignore[arg-type]
        (lambda: engine.submit(PROMPTS[0], spec=""), "spec='': give SpecConfig"),  # type: ignore[arg-type]
        (lambda: engine.submit(5), "prompt=5: give a text"),  # type: ignore[arg-type]
        (lambda: asyncio.run(engine.generate(PROMPTS[0], 5)), "params=5: give SamplingParams"),  # type: ignore[arg-type]
        (lambda: AsyncEngine("model"), "llm='model': give an LLM"),  # type: ignore[arg-type]
        (lambda: AsyncEngine(llm, max_waiting=0), "max_waiting=0: must be"),
    ):
        with pytest.raises(InputError, match=message):
            submit()
