"""Workers across restarts: canary, watchdog, quarantine, replicas, drain. No process is started here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from foretoken import SamplingParams
from foretoken.backend.call import AnswerEnded, Call, Event, Generation, Piece, TextToEncode
from foretoken.engine_config import EngineConfig
from foretoken.errors import CheckpointError, EngineError, InputError, UnavailableError, WorkerDiedError
from foretoken.machine.threads import sleeping
from foretoken.server.life import supervisor
from foretoken.server.life.config import LifeConfig
from foretoken.server.life.replicas import PrefixRouting, Quarantine, Replicas, merged, prefix_of
from foretoken.server.life.supervisor import CanaryAnswer, Watchdog, difference, worker_environment
from tests.helpers.workers import ProcessHere, ScriptedBackend

QUICK: dict[str, Any] = {"first_restart_s": 0.001, "longest_restart_s": 0.01, "beat_s": 0.01}
CALL = Call(SamplingParams(), [[1]])
HELD = Call(SamplingParams(tenant="hold"), [[1]])


def broken() -> ScriptedBackend:
    raise CheckpointError("no such folder")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[ProcessHere]:
    """Workers run in the event loop of the test."""

    class Processes(ProcessHere):
        started: list[ProcessHere] = []  # noqa: RUF012 - of this test

    monkeypatch.setattr(supervisor, "WorkerProcess", Processes)
    return Processes


@asynccontextmanager
async def replicas(processes: type[ProcessHere], *makers: Callable[[], Any], **options: Any) -> AsyncIterator[Replicas]:
    """Started; each start of a worker takes the next maker."""
    processes.makers = makers
    backend = Replicas(EngineConfig("m"), "m", LifeConfig(**QUICK | options))
    backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def left(generation: Generation) -> list[Event]:
    """Every event up to the end."""
    return [event async for event in generation]


async def until(backend: Replicas, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        await backend.changes.wait_for(condition)


async def ready(backend: Replicas) -> None:
    await until(backend, lambda: backend.state == "ready")


async def tokens_of(backend: Replicas, call: Call) -> list[int]:
    pieces = [event async for event in await backend.open(call) if isinstance(event, Piece)]
    return [token.token_id for piece in pieces for token in piece.tokens]


def test_a_worker_that_died_is_restarted_and_its_calls_end(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend, quarantine_s=0.0) as backend:
            assert backend.state == "loading"
            assert backend.info is None
            with pytest.raises(UnavailableError, match="being loaded"):
                await backend.open(CALL)
            await ready(backend)
            assert await tokens_of(backend, CALL) == [3, 4]
            for number in range(3):
                held = await backend.open(HELD)
                processes.started[number].kill_now()
                with pytest.raises(WorkerDiedError):
                    await left(held)
                await until(backend, lambda: backend.state != "ready")
                with pytest.raises(UnavailableError, match="restarted"):
                    await backend.tokenize(TextToEncode("x"))
                await ready(backend)
            assert await backend.tokenize(TextToEncode("x")) == [1]
            held_now = await backend.invariants()
            assert (held_now["num_open"], held_now["workers"][0]["num_starts"]) == (0, 4)
            assert (await backend.stats())["num_restarts"] == 3

    asyncio.run(run())


def test_a_worker_that_sends_nonsense_is_replaced(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend) as backend:
            for number, nonsense in enumerate((b"\xff\xff\xff\xff", b"\x00\x00\x00\x01x", bytes((0, 0, 0, 1, 0xC0)))):
                await ready(backend)
                held = await backend.open(Call(SamplingParams(tenant="hold"), [[number]]))
                processes.started[number]._theirs._writer.write(nonsense)
                with pytest.raises(WorkerDiedError):
                    await left(held)
                await until(backend, lambda: backend.state != "ready")
            await ready(backend)

    asyncio.run(run())


def test_no_room_for_a_process_is_a_failed_start(processes: type[ProcessHere], monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_room() -> ProcessHere:
        raise OSError(12, "Cannot allocate memory")

    async def run() -> None:
        async with replicas(processes, ScriptedBackend, failed_starts=3) as backend:
            await ready(backend)
            monkeypatch.setattr(processes, "start", no_room)
            processes.started[0].kill_now()
            await until(backend, lambda: backend.failure is not None)
            assert "could not be started 3 times in a row" in str(backend.failure)

    asyncio.run(run())


def test_a_start_that_cannot_succeed_is_not_repeated(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, broken) as backend:
            await until(backend, lambda: backend.failure is not None)
            assert isinstance(backend.failure, CheckpointError)
            assert (backend.state, len(processes.started)) == ("failed", 1)

    asyncio.run(run())


def test_starts_that_fail_later_are_repeated_a_few_times(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend, broken, failed_starts=3) as backend:
            await ready(backend)
            processes.started[0].kill_now()
            await until(backend, lambda: backend.failure is not None)
            assert isinstance(backend.failure, EngineError)
            assert "3 times in a row" in str(backend.failure)
            assert len(processes.started) == 4

    asyncio.run(run())


def test_another_answer_to_the_canary_keeps_the_worker_out(
    processes: type[ProcessHere], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        makers = (ScriptedBackend, lambda: ScriptedBackend((3, 5)), ScriptedBackend)
        async with replicas(processes, *makers) as backend:
            await ready(backend)
            processes.started[0].kill_now()
            await until(backend, lambda: backend.state == "restarting")
            await ready(backend)
            assert len(processes.started) == 3

    with caplog.at_level(logging.CRITICAL, "foretoken.server"):
        asyncio.run(run())
    assert any("not that of the first start (other tokens, from 1 on)" in line for line in caplog.messages)


def test_differences_of_canary_answers() -> None:
    golden = CanaryAnswer("ab", (1, 2), ("-0x1.8p+0", "-0x1.0p-1"))
    assert difference(golden, CanaryAnswer("ab", (1, 2), ("-0x1.8p+0", "-0x1.0p-1"))) == ""
    assert "log-probabilities" in difference(golden, CanaryAnswer("ab", (1, 2), ("-0x1.8p+0", "-0x1.1p-1")))
    assert "from the end on" in difference(golden, CanaryAnswer("a", (1,), ("-0x1.8p+0",)))
    assert "other text" in difference(golden, CanaryAnswer("ac", (1, 2), golden.logprobs))


def test_the_watchdog_sees_long_steps_and_silence() -> None:
    watchdog = Watchdog(10.0)
    watchdog.beat(None, 100.0)
    assert watchdog.reason(109.0) == ""
    assert "no sign of life" in watchdog.reason(111.0)
    watchdog.beat(4.0, 112.0)
    assert watchdog.reason(117.0) == ""
    assert "a step has lasted 11.0 s" in watchdog.reason(119.0)
    watchdog.beat(0.1, 119.0)
    assert watchdog.reason(119.0) == ""


def test_a_stuck_worker_is_killed_and_its_calls_end(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend) as backend:
            await ready(backend)
            first = processes.started[0]
            held = await backend.open(HELD)
            stuck = backend.workers[0]._stuck
            stuck.beat = lambda _step_s, _now_s: None  # type: ignore[method-assign]  # the worker says nothing more,
            stuck._beaten_s = -math.inf  # and has not for longer than any limit
            with pytest.raises(WorkerDiedError):
                await left(held)
            assert first.num_dumps == 1
            assert first.task.done()
            del stuck.beat
            await ready(backend)

    asyncio.run(run())


def test_a_request_in_flight_at_two_deaths_is_refused(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend) as backend:
            for number in range(2):
                await ready(backend)
                held = await backend.open(HELD)
                processes.started[number].kill_now()
                with pytest.raises(WorkerDiedError):
                    await left(held)
                await until(backend, lambda: backend.state != "ready")
            await ready(backend)
            with pytest.raises(InputError, match="died 2 times"):
                await backend.open(HELD)
            assert await tokens_of(backend, Call(SamplingParams(), [[2]])) == [3, 4]

    asyncio.run(run())


def test_quarantine_ends() -> None:
    now = [0.0]
    quarantine = Quarantine(60.0, lambda: now[0])
    quarantine.died([b"a", b"b"])
    quarantine.check(b"a")
    quarantine.died([b"a"])
    quarantine.check(b"b")
    with pytest.raises(InputError):
        quarantine.check(b"a")
    assert len(quarantine) == 1
    now[0] = 61.0
    quarantine.check(b"a")
    off = Quarantine(0.0)
    off.died([b"a"])
    off.check(b"a")
    off.died([b"a"])
    off.check(b"a")


def test_workers_that_are_killed_together_count_once() -> None:
    """Two copies of a request were in flight on them; neither was sent after the first death."""
    quarantine = Quarantine(60.0, lambda: 0.0)
    for copies in ([b"a", b"a"], [b"a"], [b"a"]):
        quarantine.died(copies)
    quarantine.check(b"a")
    assert len(quarantine) == 0
    quarantine.died([b"a"])
    with pytest.raises(InputError, match="died 2 times"):
        quarantine.check(b"a")


def test_no_call_goes_to_a_worker_that_is_gone_and_not_yet_noticed(processes: type[ProcessHere]) -> None:
    """The connection ends before the supervisor changes the worker's state."""

    async def run() -> None:
        async with replicas(processes, ScriptedBackend, workers=2) as backend:
            await until(backend, lambda: all(worker.state == "ready" for worker in backend.workers))
            gone = backend.workers[0].backend
            assert gone is not None
            gone.fail(WorkerDiedError("gone"))
            assert backend.workers[0].state == "ready"
            for _ in range(3):
                assert await tokens_of(backend, CALL) == [3, 4]

    asyncio.run(run())


def test_calls_are_spread_and_follow_their_prefix(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend, workers=2) as backend:
            await until(backend, lambda: all(worker.state == "ready" for worker in backend.workers))
            held = [await backend.open(Call(SamplingParams(tenant="hold"), [[number]])) for number in range(6)]
            assert [worker.backend.num_open for worker in backend.workers if worker.backend] == [3, 3]
            again = await backend.open(Call(SamplingParams(tenant="hold"), [[1]]))  # known to the second worker
            assert [worker.backend.num_open for worker in backend.workers if worker.backend] == [3, 4]
            processes.started[0].kill_now()
            await until(backend, lambda: backend.workers[0].state != "ready")
            assert backend.state == "ready"  # the other one goes on
            for one in (*held[1::2], again):
                await one.cancel()
                assert [event async for event in one][-1] == AnswerEnded(0, "abort", "", 2, {})
            stats = await backend.stats()
            assert stats["acceptance_rate"] == 0.5

    asyncio.run(run())


def test_routing_prefers_the_least_loaded_where_the_prefix_is_too_busy() -> None:
    routing = PrefixRouting[int]()
    call = prefix_of(Call(SamplingParams(), ["a" * 1000 + "b"]))
    same = prefix_of(Call(SamplingParams(), ["a" * 1000 + "c"]))
    other_tenant = prefix_of(Call(SamplingParams(tenant="t"), ["a" * 1000 + "b"]))
    assert routing.choose(call, {0: 3, 1: 2}) == 1
    assert routing.choose(same, {0: 0, 1: 4}) == 1
    assert routing.choose(other_tenant, {0: 0, 1: 4}) == 0
    assert routing.choose(same, {0: 0, 1: 5}) == 0
    assert routing.choose(same, {0: 4, 1: 0}) == 0
    assert routing.choose(same, {1: 9}) == 1


def test_statistics_of_workers_add_up() -> None:
    one = {"num_drafted": 4, "num_accepted": 1, "acceptance_rate": 0.25, "num_emitted": 10, "inter_token_s": 1.0}
    other = {"num_drafted": 4, "num_accepted": 3, "acceptance_rate": 0.75, "num_emitted": 30, "inter_token_s": 2.0}
    rest: dict[str, Any] = {"drafted_by": {"ngram": 2}, "accepted_per_position": [[3, 1], [1, 0]], "prefix": None}
    more: dict[str, Any] = {
        "drafted_by": {"ngram": 1, "suffix": 5},
        "accepted_per_position": [[1, 1]],
        "prefix": {"num_found_tokens": 2},
        "kv_cache_usage": 0.5,
    }
    found = merged([one | rest | {"kv_cache_usage": 0.25}, other | more])
    assert (found["num_drafted"], found["acceptance_rate"], found["inter_token_s"]) == (8, 0.5, 1.75)
    assert found["drafted_by"] == {"ngram": 3, "suffix": 5}
    assert found["accepted_per_position"] == [[4, 2], [1, 0]]
    assert (found["prefix"], found["kv_cache_usage"]) == ({"num_found_tokens": 2}, 0.5)
    assert merged([one]) == one


@pytest.mark.parametrize("drain_s", [0.0, 0.05])
def test_a_drain_refuses_new_calls_and_ends_the_others(processes: type[ProcessHere], drain_s: float) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend) as backend:
            await ready(backend)
            held = await backend.open(HELD)
            draining = asyncio.create_task(backend.drain(drain_s))
            await asyncio.sleep(0)
            assert backend.state == "draining"
            with pytest.raises(UnavailableError, match="shutting down"):
                await backend.open(CALL)
            assert not await draining
            with pytest.raises(UnavailableError, match="shutting down"):
                await left(held)

    asyncio.run(run())


def test_a_drain_waits_for_what_is_in_flight(processes: type[ProcessHere]) -> None:
    async def run() -> None:
        async with replicas(processes, ScriptedBackend) as backend:
            await ready(backend)
            held = await backend.open(HELD)
            draining = asyncio.create_task(backend.drain(60.0))
            await held.cancel()
            assert isinstance([event async for event in held][-1], AnswerEnded)
            assert await draining

    asyncio.run(run())


def test_threads_of_a_worker_sleep_while_they_wait_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in sleeping():
        monkeypatch.delenv(name, raising=False)
    assert worker_environment()["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert worker_environment()["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(
    "values",
    [{"workers": 0}, {"watchdog_s": 0.0}, {"beat_s": 100.0}, {"drain_s": -1.0}, {"longest_restart_s": 0.1}],
)
def test_life_settings_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values)).replace("beat_s", "watchdog_s")):
        LifeConfig(**values)


def test_devices_go_round_the_workers() -> None:
    config = LifeConfig(workers=3, devices=("cuda:0", "cuda:1"))
    assert [config.device_of(number) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert LifeConfig().device_of(0) is None
