"""Many submitters, one engine thread: the same answers as alone, nothing held after leaving, no failure that spreads."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from foretoken import LLM, AsyncEngine, EngineError, InputError, OverloadedError, SamplingParams, SpecConfig
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids

PROMPTS = [token_ids(3 + i, seed=i) * (1 + i % 3) for i in range(12)]
SPECS = [SpecConfig(), SpecConfig("ngram"), SpecConfig("suffix", num_draft=5), SpecConfig("recycling", num_draft=4)]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine(pair: SimpleNamespace) -> Iterator[AsyncEngine]:
    with LLM(pair.target, dtype="float32", max_batch_size=4, cache_tokens=2048) as llm, AsyncEngine(llm) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(pair: SimpleNamespace) -> list[tuple[int, ...]]:
    with LLM(pair.target, dtype="float32") as llm:
        return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def wait_until_idle(engine: AsyncEngine) -> None:
    """What was left is freed between two steps; a new answer is only given after that."""
    engine.submit([1], SamplingParams(max_tokens=1)).result()
    assert not engine._tickets
    check_idle(engine.llm.engine)


def test_threads_get_the_answers_they_would_get_alone(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    answers: dict[int, tuple[int, ...]] = {}

    def ask(worker: int) -> None:
        order = list(range(len(PROMPTS)))
        random.Random(worker).shuffle(order)
        for i in order:
            answers[worker * 100 + i] = engine.submit(PROMPTS[i], GREEDY, SPECS[(i + worker) % len(SPECS)]).result().token_ids

    threads = [threading.Thread(target=ask, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {worker * 100 + i: alone[i] for worker in range(4) for i in range(len(PROMPTS))}
    wait_until_idle(engine)


def test_coroutines_stream_and_generate(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    async def stream(i: int) -> tuple[int, ...]:
        pieces = [piece async for piece in engine.stream(PROMPTS[i], GREEDY, SPECS[i % len(SPECS)])]
        assert pieces[-1].finish_reason == "length"
        return tuple(token for piece in pieces for token in piece.token_ids)

    async def everything() -> None:
        assert await asyncio.gather(*(stream(i) for i in range(len(PROMPTS)))) == alone
        three = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=3))
        assert len(three.choices) == 3
        assert three.choices[0].token_ids != three.choices[1].token_ids

    asyncio.run(everything())
    wait_until_idle(engine)


def test_leaving_frees_everything_at_once(engine: AsyncEngine) -> None:
    """A stream that is closed, a task that is cancelled, a ticket that is cancelled, and one that had not begun."""
    for _piece in engine.submit(PROMPTS[0], LONG):
        break
    wait_until_idle(engine)

    async def cancelled() -> None:
        task = asyncio.create_task(engine.generate(PROMPTS[1], LONG))
        async for _piece in engine.stream(PROMPTS[2], LONG):
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_until_idle(engine)
    tickets = [engine.submit(PROMPTS[i], LONG) for i in range(8)]  # four run, four wait
    for ticket in tickets:
        ticket.cancel()
    assert all(ticket.result().finish_reason == "abort" for ticket in tickets if ticket.state is not None)
    wait_until_idle(engine)


def test_a_loop_that_ends_without_leaving_frees_its_request(engine: AsyncEngine) -> None:
    loop = asyncio.new_event_loop()
    pieces = engine.submit(PROMPTS[0], LONG).__aiter__()
    loop.run_until_complete(anext(pieces))
    loop.close()
    wait_until_idle(engine)


def test_overload_is_told_and_passes(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="float32", max_batch_size=1, cache_tokens=2048) as llm, AsyncEngine(llm, max_waiting=2) as engine:
        first = iter(engine.submit(PROMPTS[0], LONG))
        next(first)  # runs
        waiting = [engine.submit(PROMPTS[i], GREEDY) for i in (1, 2)]
        with pytest.raises(OverloadedError, match="2 requests wait"):
            engine.submit(PROMPTS[3], GREEDY)
        first.close()
        assert [len(ticket.result().token_ids) for ticket in waiting] == [20, 20]
        assert len(engine.submit(PROMPTS[3], GREEDY).result().token_ids) == 20


def test_bad_input_reaches_who_asked_and_nobody_else(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    good = engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(InputError, match="n=2"):
        engine.submit(PROMPTS[0], SamplingParams(n=2))
    bad = engine.submit([10**6], GREEDY)
    with pytest.raises(InputError, match="prompt"):
        bad.result()
    with pytest.raises(InputError, match="prompt"):
        asyncio.run(engine.generate([], GREEDY))
    assert good.result().token_ids == alone[0]


def test_a_step_that_breaks_down_fails_who_ran_in_it(engine: AsyncEngine, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = engine.llm.target.forward, []

    def broken(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("none left")
        return forward(*arguments)

    monkeypatch.setattr(engine.llm.target, "forward", broken)
    tickets = [engine.submit(PROMPTS[i], GREEDY) for i in range(8)]  # four run, four wait
    outputs = [ticket.result() for ticket in tickets]
    failed = [out for out in outputs if out.finish_reason == "error"]
    assert 1 <= len(failed) <= 4
    assert all(isinstance(out.error, EngineError) and "none left" in str(out.error) for out in failed)
    assert all(out.token_ids == alone[i] for i, out in enumerate(outputs) if out.finish_reason != "error")
    assert engine.submit(PROMPTS[0], GREEDY).result().token_ids == alone[0]
    wait_until_idle(engine)


def test_closing_ends_what_runs(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="float32", max_batch_size=2) as llm:
        engine = AsyncEngine(llm)
        tickets = [engine.submit(PROMPTS[i], LONG) for i in range(4)]
        next(iter(tickets[0]))
        engine.close()
        engine.close()
        assert all(ticket.result().finish_reason == "abort" for ticket in tickets[1:])
        with pytest.raises(InputError, match="closed"):
            engine.submit(PROMPTS[0])
        assert len(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == 20  # the models live on
