"""A hundred thousand tickets in races of submit, read, cancel and close, over a hundred engines and more: every one
ends, and none is kept. What one ticket in 20,000 would bring is seen with probability 0.98, before a release one in
200,000.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import LLM, AsyncEngine, EngineError, InputError, OverloadedError, SamplingParams, SpecConfig, Ticket
from foretoken.core import Request, StepOutput
from foretoken.engine.admission import UNQUEUED
from foretoken.engine.request import PreparedRequest, RequestState, TextAssembler

# Share of submissions that raise, and tickets: too few of these would meet no fault while they are refused.
RACES = [
    pytest.param(0.0, 80_000, id="sound"),
    pytest.param(0.001, 50_000, id="with faults"),
    pytest.param(0.0, 800_000, id="sound, long", marks=pytest.mark.release),
    pytest.param(0.001, 200_000, id="with faults, long", marks=pytest.mark.release),
]
NUM_OF_A_REAL_ENGINE = [2_000, pytest.param(10_000, marks=pytest.mark.release)]
NUM_THREADS = 4
LIFETIME = 1_000  # tickets of one engine, about
MAX_WAITING = 64
GREEDY = SamplingParams(max_tokens=4)


class StubLLM(LLM):
    """An `LLM` without a model: what `AsyncEngine` uses of one, at a few microseconds a call. Some calls raise."""

    def __init__(self, fault_rate: float = 0.0) -> None:
        self.spec, self.owner, self.fault_rate = SpecConfig(), None, fault_rate
        self.states: dict[int, RequestState] = {}
        self.num_left: dict[int, int] = {}  # tokens that a request still says
        self.numbers = itertools.count()
        self.random = random.Random(7)
        self.stub_engine = StubEngine(self)

    @property
    def engine(self) -> Any:
        return self.stub_engine

    def prepare(self, spec: SpecConfig) -> None:
        """Nothing to load."""

    def claim(self, owner: Any) -> Any:
        assert self.owner is None, "two owners at once"
        self.owner = owner
        return StubDriver(self)

    def prepare_request(self, prompt: Any, params: SamplingParams, spec: SpecConfig) -> Any:
        return PreparedRequest(
            Request(UNQUEUED, tuple(prompt), params, spec, 0), TextAssembler(None, ()), frozenset(), 10
        )

    def abort(self, number: int) -> None:
        state = self.states.pop(number, None)
        if state is not None:
            state.finish_reason = "abort"

    def perhaps_raise(self, times: int = 1) -> None:
        """Raise with `times` the fault rate."""
        if self.fault_rate and self.random.random() < times * self.fault_rate:
            raise RuntimeError("a fault")


class StubEngine:
    """What `AsyncEngine` asks of the engine itself."""

    def __init__(self, llm: StubLLM) -> None:
        self.states, self.scheduler = llm.states, SimpleNamespace(waiting=())

    @property
    def has_work(self) -> bool:
        return bool(self.states)


class StubDriver:
    """Runs the steps of a `StubLLM`."""

    def __init__(self, llm: StubLLM) -> None:
        self.llm, self.engine, self.receivers = llm, llm.engine, dict[int, Any]()

    def disclaim(self) -> None:
        assert not self.llm.states, "requests outlive their engine"
        self.llm.owner = None

    def enqueue(self, prepared: Any, receive: Any, owner: Any) -> Any:
        assert owner is self.llm.owner
        self.llm.perhaps_raise()
        state = prepared.state(next(self.llm.numbers))
        self.llm.states[state.request_id], self.llm.num_left[state.request_id] = state, self.llm.random.randrange(1, 5)
        self.receivers[state.request_id] = receive
        return state

    def step(self, owner: Any) -> None:
        assert owner is self.llm.owner
        self.llm.perhaps_raise(times=10)  # there are as few as one for ten submissions
        for state in list(self.llm.states.values()):
            self.llm.num_left[state.request_id] -= 1
            state.tokens.append(7)
            state.finish_reason = None if self.llm.num_left[state.request_id] else "length"
            receive = self.receivers[state.request_id]
            if state.finish_reason is not None:
                del self.llm.states[state.request_id], self.receivers[state.request_id]
            receive(StepOutput(state.request_id, (7,), "", (), state.finish_reason))

    def leave(self, states: Any) -> None:
        for state in states:
            self.receivers.pop(state.request_id, None)
            self.llm.abort(state.request_id)


class Pausing:
    """A lock that now and then lets other threads run before it is taken and after it was given back: the points where
    races happen.
    """

    def __init__(self, inner: Any, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng

    def _pause(self) -> None:
        if self._rng.random() < 0.004:
            time.sleep(self._rng.choice((0, 0, 1e-5, 2e-4)))

    def __enter__(self) -> object:
        self._pause()
        return self._inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)
        self._pause()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


class Race:
    """Several threads submit to one engine after the other; somebody closes each of them in the middle of it."""

    def __init__(self, llm: LLM, num_tickets: int, seed: int) -> None:
        self.llm, self.num_tickets, self.seed = llm, num_tickets, seed
        self.ends: Counter[str] = Counter()
        self.num_issued = self.num_engines = 0
        self.failures: list[BaseException] = []
        self.counting = threading.Lock()

    def run(self) -> None:
        while self.num_issued < self.num_tickets:
            rng = random.Random(self.seed + self.num_engines)
            self.num_engines += 1
            engine = AsyncEngine(self.llm, max_waiting=MAX_WAITING)
            engine._wake = Pausing(engine._wake, rng)  # type: ignore[assignment]
            close_after = rng.randrange(LIFETIME // 4, LIFETIME // 2)
            workers = [
                threading.Thread(target=self.work, args=(engine, rng.randrange(2**32), close_after), daemon=True)
                for _ in range(NUM_THREADS)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(120)
                assert not worker.is_alive(), "somebody waits for ever"
            engine.close()
            assert not engine._requests
            assert not engine._thread.is_alive()
            assert not self.failures, self.failures[0]

    def work(self, engine: AsyncEngine, seed: int, close_after: int) -> None:
        """Submit until the engine is closed, which one of the threads does; every ticket must end, with what it is
        allowed to end with.
        """
        rng, held, counts = random.Random(seed), list[Ticket](), Counter[str]()
        try:
            for number in itertools.count():
                if number == close_after:
                    engine.close()
                try:
                    ticket = engine.submit([1], GREEDY)
                except OverloadedError:
                    counts["overloaded"] += 1
                    self.settle(rng, held, counts)
                    continue
                except (InputError, EngineError):
                    break
                ticket._changed = Pausing(ticket._changed, rng) if rng.random() < 0.01 else ticket._changed  # type: ignore[assignment]
                if rng.random() < 0.3:
                    ticket.cancel()
                held.append(ticket)
                if len(held) > 20:
                    self.settle(rng, held, counts)
            self.settle(rng, held, counts)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.failures.append(error)
            engine.close()
        self.count(counts)

    def settle(self, rng: random.Random, held: list[Ticket], counts: Counter[str]) -> None:
        """Wait for the end of tickets, in any of the ways that there are, and often in several."""
        if rng.random() < 0.02:
            asyncio.run(settle_in_coroutines(held))
        for ticket in held:
            counts[end_of(rng, ticket)] += 1
        held.clear()

    def count(self, counts: Counter[str]) -> None:
        with self.counting:
            self.ends.update(counts)
            self.num_issued += sum(number for name, number in counts.items() if name != "overloaded")


async def settle_in_coroutines(held: list[Ticket]) -> None:
    """Two tasks wait for every ticket, and some of them lose patience."""
    tasks = [asyncio.ensure_future(ticket.wait()) for ticket in held for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks[::5]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def end_of(rng: random.Random, ticket: Ticket) -> str:
    """How a ticket ended; asking again, or in another way, says the same."""
    how = rng.random()
    num_pieces = None
    if how < 0.3:
        try:
            num_pieces = 0
            for _ in ticket:
                num_pieces += 1
                if how < 0.05:
                    num_pieces = None
                    break
        except (EngineError, RuntimeError):
            num_pieces = None
    try:
        answer = ticket.result()
    except (EngineError, RuntimeError):
        return "refused"
    if how > 0.9:
        assert ticket.result() is answer
    assert num_pieces is None or num_pieces == len(answer.token_ids)
    assert (answer.error is None) == (answer.finish_reason != "error")
    return answer.finish_reason


@pytest.mark.parametrize(("fault_rate", "num_tickets"), RACES)
def test_all_tickets_end(fault_rate: float, num_tickets: int) -> None:
    llm = StubLLM(fault_rate)
    race = Race(llm, num_tickets, seed=3)
    race.run()
    assert race.num_issued >= num_tickets
    assert race.ends["length"] > race.num_issued / 4
    assert race.ends["abort"] > race.num_issued / 20
    assert (race.ends["error"] > 0) == (race.ends["refused"] > 0) == (fault_rate > 0)
    assert race.num_engines > num_tickets / LIFETIME / 4
    assert llm.owner is None
    assert not llm.states
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Ticket], "tickets are kept by somebody"
    print(f"{race.num_issued} tickets, {race.num_engines} engines: {dict(race.ends)}")


@pytest.mark.parametrize("num_tickets", NUM_OF_A_REAL_ENGINE)
def test_tickets_of_a_real_engine_end(tmp_path: Path, num_tickets: int) -> None:
    """The same races over a model, a tenth of a per cent as many: what runs is aborted in the middle, and its cache
    comes back.
    """
    from tests.helpers.audit import check_idle
    from tests.helpers.checkpoints import tiny_checkpoint

    tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1, hidden_size=16)
    with LLM(tmp_path, SpecConfig(), dtype="float32", cache_tokens=2048, profile="off") as llm:  # a token a piece
        race = Race(llm, num_tickets, seed=5)
        race.run()
        assert race.ends["length"] > 0 < race.ends["abort"]
        check_idle(llm)
