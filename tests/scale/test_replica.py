"""What a replica answers, in this process: messages of a call, its canary, the tokens that it reports. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from foretoken import SamplingParams, SpecConfig
from foretoken.backend.call import AnswerEnded, Begun, Call, ModelInfo, Piece
from foretoken.engine_config import EngineConfig
from foretoken.errors import EngineError
from foretoken.scale.replica import EngineReplica, queued_tokens
from foretoken.server.config import ServerConfig
from foretoken.server.life.wire import (
    AskStats,
    Cancel,
    Command,
    Happened,
    Message,
    Open,
    Over,
    Refused,
    Returned,
    Tokenize,
    packed,
)

READ = msgspec.msgpack.Decoder(tuple[str, Message])


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineReplica]:
    config = ServerConfig(EngineConfig("reference:target", dtype="float32", profile="off"))
    made = EngineReplica(config, "one")
    yield made
    made.__del__()


def opened(number: int, max_tokens: int, prompt: str = "def f(x):\n") -> bytes:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return packed(Open(number, Call(params, [prompt], spec=SpecConfig())))


async def messages(replica: EngineReplica, data: bytes) -> AsyncIterator[Message]:
    async for chunk in replica.generate(data, "front", b"prefix"):
        name, message = READ.decode(chunk)
        assert name == "one"
        yield message


async def asked(replica: EngineReplica, command: Command, wanted: str = "") -> Message | None:
    data = await replica.answer(packed(command), "front", wanted)
    return None if data is None else READ.decode(data)[1]


def test_the_messages_of_a_call(replica: EngineReplica) -> None:
    async def run() -> None:
        assert msgspec.msgpack.decode(await replica.info(), type=ModelInfo).max_model_len > 0
        found = [message async for message in messages(replica, opened(7, 12))]
        assert found[-1] == Over(7)
        events = [message.event for message in found[:-1] if isinstance(message, Happened)]
        assert len(events) == len(found) - 1
        assert isinstance(events[0], Begun)
        assert isinstance(events[-1], AnswerEnded)
        assert "".join(event.text for event in events if isinstance(event, Piece)) == events[-1].text
        (refused,) = [message async for message in messages(replica, opened(8, 10**6, "x" * 10**5))]
        assert isinstance(refused, Refused)
        assert refused.error.name == "ContextLengthError"

    asyncio.run(run())


def test_commands_reach_the_replica_that_they_name(replica: EngineReplica) -> None:
    async def run() -> None:
        answer = await asked(replica, Tokenize(1, "def", None, False))
        assert isinstance(answer, Returned)
        assert answer.value
        assert isinstance(await asked(replica, AskStats(2), "one"), Returned)
        assert await asked(replica, AskStats(2), "another") is None
        assert isinstance(await asked(replica, Tokenize(3, None, [{"role": "x"}], False)), Refused)

    asyncio.run(run())


def test_queued_tokens_and_a_call_that_is_cancelled(replica: EngineReplica) -> None:
    async def run() -> None:
        assert replica.record_autoscaling_stats() == {"queued_tokens": 0.0}
        stream = messages(replica, opened(9, 400))
        await anext(stream)
        assert 300 < queued_tokens(replica.engine.llm) <= 500
        assert await asked(replica, Cancel(9), "another") is None
        assert queued_tokens(replica.engine.llm) > 0
        await asked(replica, Cancel(9), "one")
        rest = [message async for message in stream]
        assert rest[-1] == Over(9)
        assert isinstance(rest[-2], Happened)
        assert isinstance(rest[-2].event, AnswerEnded)
        assert rest[-2].event.finish_reason == "abort"
        left = messages(replica, opened(10, 400))
        await anext(left)
        await left.aclose()  # type: ignore[attr-defined]
        while replica.engine.llm.engine.scheduler.running:
            await asyncio.sleep(0.01)

    asyncio.run(run())


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
