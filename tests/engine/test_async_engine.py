"""Many submitters, one engine thread: the same answers as alone, nothing held after leaving, no failure that
spreads.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from foretoken import LLM, AsyncEngine, InputError, OverloadedError, SamplingParams, SpecConfig
from foretoken.engine.prompts import as_prompts
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.faults import Fault

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
    assert not engine._requests
    check_idle(engine.llm.engine)


class Paced:
    """While it is entered the engine's thread stands before every forward until the test lets it go on: nothing hangs
    on who is faster.
    """

    def __init__(self, llm: LLM) -> None:
        self.target, self.forward, self.is_over = llm.target, llm.target.forward, False
        self.standing, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def __enter__(self) -> Paced:
        self.target.forward = self.wait_and_run
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over, self.target.forward = True, self.forward
        self.allowed.release()

    def wait_and_run(self, *arguments: object) -> object:
        self.standing.release()
        if not self.is_over:
            self.allowed.acquire()
        return self.forward(*arguments)

    def go(self, num_forwards: int) -> None:
        """Let so many forwards begin; all steps but the last are over then."""
        for _ in range(num_forwards):
            self.standing.acquire()
            self.allowed.release()


def test_threads_get_the_answers_they_would_get_alone(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    answers: dict[int, tuple[int, ...]] = {}

    def ask(worker: int) -> None:
        order = list(range(len(PROMPTS)))
        random.Random(worker).shuffle(order)
        for i in order:
            answers[worker * 100 + i] = (
                engine.submit(PROMPTS[i], GREEDY, SPECS[(i + worker) % len(SPECS)]).result().token_ids
            )

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
        with Paced(engine.llm) as paced:
            task = asyncio.create_task(engine.generate(PROMPTS[1], LONG))
            await asyncio.sleep(0)  # it has asked
            pieces = engine.stream(PROMPTS[2], LONG)
            first = asyncio.create_task(anext(pieces))
            await asyncio.sleep(0)
            await asyncio.to_thread(paced.go, 4)
            await first
            await pieces.aclose()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    wait_until_idle(engine)
    with Paced(engine.llm) as paced:
        tickets = [engine.submit(PROMPTS[i], LONG) for i in range(8)]
        paced.go(3)
        assert (engine.llm.stats.num_running, engine.llm.stats.num_waiting) == (4, 4)
        for ticket in tickets:
            ticket.cancel()
    assert [ticket.result().finish_reason for ticket in tickets] == ["abort"] * 8
    wait_until_idle(engine)


def test_a_loop_that_ends_without_leaving_frees_its_request(engine: AsyncEngine) -> None:
    with Paced(engine.llm) as paced:
        loop = asyncio.new_event_loop()
        ticket = engine.submit(PROMPTS[0], LONG)
        pieces = ticket.__aiter__()
        paced.go(2)
        loop.run_until_complete(anext(pieces))
        loop.close()
    wait_until_idle(engine)
    assert ticket.result().finish_reason == "abort"


def test_overload_is_told_and_passes(pair: SimpleNamespace) -> None:
    with (
        LLM(pair.target, dtype="float32", max_batch_size=1, cache_tokens=2048) as llm,
        AsyncEngine(llm, max_waiting=2) as engine,
    ):
        with Paced(llm) as paced:
            first = iter(engine.submit(PROMPTS[0], LONG))
            paced.go(2)
            next(first)  # runs
            waiting = [engine.submit(PROMPTS[i], GREEDY) for i in (1, 2)]
            with pytest.raises(OverloadedError, match="2 requests wait"):
                engine.submit(PROMPTS[3], GREEDY)
            with pytest.raises(InputError, match="n=3: prompts times n must be at most 2"):
                asyncio.run(engine.generate(PROMPTS[3], replace(GREEDY, n=3)))
        first.close()
        assert [len(ticket.result().token_ids) for ticket in waiting] == [20, 20]
        assert len(engine.submit(PROMPTS[3], GREEDY).result().token_ids) == 20


def test_bad_input_reaches_who_asked_and_nobody_else(engine: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    good = engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(InputError, match="n=2"):
        engine.submit(PROMPTS[0], SamplingParams(n=2))
    with pytest.raises(InputError, match="prompt"):
        engine.submit([10**6], GREEDY)
    with pytest.raises(InputError, match="prompt"):
        asyncio.run(engine.generate([], GREEDY))
    assert good.result().token_ids == alone[0]


def test_prompts_of_submit_all_are_those_of_generate(text_pair: SimpleNamespace) -> None:
    """A text is one prompt, not one for each of its characters; what cannot be prompts is refused."""

    async def ask(engine: AsyncEngine, prompts: Any) -> list[tuple[int, ...]]:
        return [(await ticket.wait()).prompt_ids for ticket in await engine.submit_all(prompts, GREEDY)]

    with (
        LLM(text_pair.target, SpecConfig(), dtype="float32", cache_tokens=512, profile="off") as llm,
        AsyncEngine(llm) as engine,
    ):
        for prompts in ("abc", [5, 6, 7], ["abc", [5, 6]], ((5, 6), (7,)), []):
            expected = [len(llm.encode(one)) if isinstance(one, str) else len(one) for one in as_prompts(prompts)]
            assert [len(ids) for ids in asyncio.run(ask(engine, prompts))] == expected
        for wrong in (None, 3, {"a": 1}, [None]):
            with pytest.raises(InputError, match="prompt"):
                asyncio.run(ask(engine, wrong))


def test_a_step_that_breaks_down_once_costs_nobody_his_answer(
    engine: AsyncEngine, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.llm.target, "forward", Fault(engine.llm.target.forward, nth=5))
    tickets = [engine.submit(PROMPTS[i], GREEDY) for i in range(8)]  # four run, four wait
    with pytest.warns(
        UserWarning, match="a step of the engine raised Injected: injected; its requests run again, one by one"
    ):
        outputs = [ticket.result() for ticket in tickets]
    assert [out.token_ids for out in outputs] == alone[:8]
    assert engine.submit(PROMPTS[0], GREEDY).result().token_ids == alone[0]
    wait_until_idle(engine)


def test_closing_ends_what_runs(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="float32", max_batch_size=2) as llm:
        engine = AsyncEngine(llm)
        with Paced(llm) as paced:
            tickets = [engine.submit(PROMPTS[i], LONG) for i in range(4)]
            paced.go(3)
            next(iter(tickets[0]))
            closing = threading.Thread(target=engine.close)
            closing.start()
            while not engine._is_closing:
                closing.join(0.01)
        closing.join()
        engine.close()
        assert all(ticket.result().finish_reason == "abort" for ticket in tickets[1:])
        with pytest.raises(InputError, match="closed"):
            engine.submit(PROMPTS[0])
        assert len(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == 20  # the models live on
