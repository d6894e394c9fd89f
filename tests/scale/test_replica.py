"""What a replica answers, in this process: messages of a call, its canary, the tokens that it reports. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from foretoken import SamplingParams, SpecConfig
from foretoken.backend.call import AnswerEnded, Begun, Call, ModelInfo, Piece, TextToEncode
from foretoken.engine_config import EngineConfig
from foretoken.errors import EngineError
from foretoken.scale.replica import Address, EngineReplica, batches, queued_tokens
from foretoken.server.config import ServerConfig
from foretoken.server.life.wire import (
    AskStats,
    Cancel,
    Channel,
    Command,
    Message,
    Open,
    Over,
    Refused,
    Returned,
    Tokenize,
    packed,
)

READ = msgspec.msgpack.Decoder(tuple[str, Message])
KEY = "a key"


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineReplica]:
    config = ServerConfig(EngineConfig("reference:target", dtype="float32", profile="off"))
    made = EngineReplica(config, "one")
    yield made
    made.__del__()


def opened(number: int, max_tokens: int, prompt: str = "def f(x):\n") -> bytes:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return packed(Open(number, Call(params, [prompt], spec=SpecConfig())))


@asynccontextmanager
async def front(replica: EngineReplica) -> AsyncIterator[tuple[Address, asyncio.Queue[Any]]]:
    """Where a front listens, and what came: first the line with which the replica introduces itself."""
    came: asyncio.Queue[Any] = asyncio.Queue()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.put_nowait(await reader.readline())
        channel = Channel(reader, writer, Message)
        while (message := await channel.receive()) is not None:
            came.put_nowait(message)
        writer.close()

    replica._channels.clear()  # those of another event loop
    replica._connecting = asyncio.Lock()
    server = await asyncio.start_server(read, "127.0.0.1", 0)
    yield Address("127.0.0.1", server.sockets[0].getsockname()[1], KEY), came
    server.close()
    for channel in replica._channels.values():
        channel.close()
    await asyncio.sleep(0.05)


async def answered(replica: EngineReplica, data: bytes, address: Address, came: asyncio.Queue[Any]) -> list[Any]:
    """The messages of a call, whose last one has come when the call returns."""
    await replica.generate(data, "front", b"prefix", tuple(address))
    found = [await came.get()]
    while not isinstance(found[-1], Over | Refused):
        found.append(await came.get())
    return found


async def asked(replica: EngineReplica, command: Command, wanted: str = "") -> Message | None:
    data = await replica.answer(packed(command), "front", wanted)
    return None if data is None else READ.decode(data)[1]


def test_the_messages_of_a_call(replica: EngineReplica) -> None:
    async def run() -> None:
        assert msgspec.msgpack.decode(await replica.info(), type=ModelInfo).max_model_len > 0
        async with front(replica) as (address, came):
            found = await answered(replica, opened(7, 12), address, came)
            assert found.pop(0) == b"a key one\n"
            assert found[-1] == Over(7)
            events = [message.event for message in found[:-1]]
            assert isinstance(events[0], Begun)
            assert isinstance(events[-1], AnswerEnded)
            assert "".join(event.text for event in events if isinstance(event, Piece)) == events[-1].text
            (refused,) = await answered(replica, opened(8, 10**6, "x" * 10**5), address, came)  # on the same connection
            assert isinstance(refused, Refused)
            assert refused.error.name == "ContextLengthError"
        with pytest.raises(OSError):  # which Ray tells the front, if there is one
            await replica.generate(opened(9, 4), "another front", b"", tuple(address))

    asyncio.run(run())


def test_commands_reach_the_replica_that_they_name(replica: EngineReplica) -> None:
    async def run() -> None:
        answer = await asked(replica, Tokenize(1, TextToEncode("def", add_special_tokens=False)))
        assert isinstance(answer, Returned)
        assert answer.value
        assert isinstance(await asked(replica, AskStats(2), "one"), Returned)
        assert await asked(replica, AskStats(2), "another") is None
        assert isinstance(await asked(replica, Tokenize(3, TextToEncode(messages=[{"role": "x"}]))), Refused)

    asyncio.run(run())


def test_queued_tokens_and_a_call_that_is_cancelled(replica: EngineReplica) -> None:
    async def run() -> None:
        assert replica.record_autoscaling_stats() == {"queued_tokens": 0.0, "batches": 0.0}
        async with front(replica) as (address, came):
            call = asyncio.create_task(answered(replica, opened(9, 400), address, came))
            while not queued_tokens(replica.engine.llm):
                await asyncio.sleep(0.01)
            assert 300 < queued_tokens(replica.engine.llm) <= 500
            assert batches(replica.engine.llm) == 1 / 16
            assert await asked(replica, Cancel(9), "another") is None
            assert queued_tokens(replica.engine.llm) > 0
            await asked(replica, Cancel(9), "one")
            *_, ended, over = await call
            assert over == Over(9)
            assert isinstance(ended.event, AnswerEnded)
            assert ended.event.finish_reason == "abort"
            call = asyncio.create_task(answered(replica, opened(10, 400), address, came))
            while not replica._running:
                await asyncio.sleep(0.01)
            call.cancel()  # as Ray does
            while replica.engine.llm.engine.scheduler.running:
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("emitted", "num_waiting", "expected"),
    [
        ([True] * 3, 0, 3 / 16),
        ([True] * 3, 6, 3.0),  # the cache holds three
        ([True, True, False], 6, 9 / 16),  # they may wait for the prompt that is read, which begins like theirs
        ([True] * 16, 8, 1.5),
        ([], 2, 2 / 16),
    ],
)
def test_how_full_a_replica_is(emitted: list[bool], num_waiting: int, expected: float) -> None:
    running = {number: SimpleNamespace(has_emitted=one) for number, one in enumerate(emitted)}
    config = SimpleNamespace(max_batch_size=16)
    scheduler = SimpleNamespace(running=running, waiting=[object()] * num_waiting, config=config)
    assert batches(SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler))) == expected  # type: ignore[arg-type]


def test_health_follows_the_canary(replica: EngineReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        await replica.check_health()
        golden = replica._golden
        assert golden is not None
        replica._asked_s = -1e9
        await replica.check_health()
        replica._golden, replica._asked_s = msgspec.structs.replace(golden, text="other"), -1e9
        with pytest.raises(EngineError, match="other text"):
            await replica.check_health()
        replica._golden = golden
        monkeypatch.setattr(replica.engine, "turn_began_s", -1e9)
        with pytest.raises(EngineError, match="a step has lasted"):
            await replica.check_health()

    asyncio.run(run())
