"""What an observer of encrypted packets learns of accepted tokens: sizes and times of a stream's events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from foretoken.backend.call import AnswerEnded, Begun, Event, Piece, TokenEvent
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.guard.app import Guard
from foretoken.server.guard.config import GuardConfig
from tests.helpers.fake_backend import STATS, FakeBackend
from tests.helpers.http import client_of, run
from tests.helpers.virtual_loop import run_virtually
from tests.server.asgi import HOST, scope_of

NUM_TOKENS = 480
STEP_S = 0.02
# Tokens of each step: the same answer, differently accepted.
PATTERNS = {
    "nothing accepted": [1] * NUM_TOKENS,
    "everything accepted": [8] * (NUM_TOKENS // 8),
    "in turn": [1, 1, 1, 5] * (NUM_TOKENS // 8),
    "late": [1] * (NUM_TOKENS // 2) + [6] * (NUM_TOKENS // 12),
}


class TimedGeneration:
    """A step every `STEP_S`, with as many tokens as the pattern has."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self.pattern = pattern

    async def __aiter__(self) -> AsyncIterator[Event]:
        yield Begun(((1, 2, 3),))
        for step, count in enumerate(self.pattern):
            await asyncio.sleep(STEP_S)
            token = TokenEvent(7, "word ", b"word ", "accepted" if count > 1 else "plain", "ngram", step, 0.5)
            yield Piece(0, "word " * count, (token,) * count)
        yield AnswerEnded(0, "length", "word " * NUM_TOKENS, NUM_TOKENS, STATS)

    async def cancel(self) -> None:
        return


class PatternBackend(FakeBackend):
    def __init__(self, pattern: Sequence[int]) -> None:
        super().__init__()
        self._pattern = pattern

    async def open(self, call: Any) -> Any:
        return TimedGeneration(self._pattern)


@dataclass(frozen=True)
class Packet:
    """One write of the server."""

    at_s: float
    data: bytes


def packets(pattern: Sequence[int], config: ApiConfig, **body: Any) -> list[Packet]:
    """What is sent for a streamed request."""
    request = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": NUM_TOKENS} | body
    app, found = Guard(create_app(PatternBackend(pattern), config), GuardConfig()), list[Packet]()

    async def play() -> None:
        loop = asyncio.get_running_loop()
        waiting = [json.dumps(request).encode()]

        async def receive() -> dict[str, Any]:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            return await loop.create_future()

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                found.append(Packet(loop.time(), message["body"]))

        headers = [HOST, (b"content-type", b"application/json")]
        await app(scope_of("POST", "/v1/completions", headers), receive, send)

    run_virtually(play())
    return found


def events_of(found: Sequence[Packet]) -> list[bytes]:
    """The events of a stream without the last, which is [DONE]."""
    events = b"".join(packet.data for packet in found).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [event + b"\n\n" for event in events[:-2]]


def text_of(found: Sequence[Packet]) -> str:
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events_of(found)]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True}])
def test_side_channel_padding(more: dict[str, Any]) -> None:
    """Case 59: with obfuscation all chunks are of one size, whatever was accepted."""
    config = ApiConfig(force_obfuscation=True)
    for pattern in PATTERNS.values():
        found = packets(pattern, config, **more)
        assert {len(event) for event in events_of(found)} == {config.obfuscation_bucket_bytes}
        assert text_of(found) == "word " * NUM_TOKENS
    bare = packets(PATTERNS["in turn"], ApiConfig())  # without it the sizes tell the pattern
    sizes = [len(event) for event in events_of(bare)]
    assert len(set(sizes[:-1])) > 1


def test_side_channel_padding_is_the_requests_choice_unless_forced() -> None:
    """Case 59: who decides."""

    def is_padded(config: ApiConfig, asked: bool | None) -> bool:
        options = {} if asked is None else {"stream_options": {"include_obfuscation": asked}}
        events = events_of(packets(PATTERNS["in turn"], config, **options))
        return len({len(event) for event in events}) == 1

    assert [is_padded(ApiConfig(), asked) for asked in (None, True, False)] == [False, True, False]
    assert [is_padded(ApiConfig(obfuscation=True), asked) for asked in (None, True, False)] == [True, True, False]
    assert is_padded(ApiConfig(force_obfuscation=True), False)


MESSAGES = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/completion", {"prompt": "a"}, "\n\n"),
        ("/api/generate", {"prompt": "a"}, "\n"),
        ("/api/chat", MESSAGES, "\n"),
        ("/v1/messages", MESSAGES, "\n\n"),
        ("/v1/responses", {"input": "a"}, "\n\n"),
    ],
)
def test_every_interface_pads_its_events(path: str, body: dict[str, Any], end: str) -> None:
    config = ApiConfig(force_obfuscation=True, llama_cpp=True, ollama=True)

    async def read() -> str:
        async with client_of(create_app(FakeBackend(), config)) as client:
            response = await client.post(path, json=body | {"stream": True})
            assert response.status_code == 200, response.text
            return response.text

    events = [event + end for event in run(read()).split(end)[:-1] if "ping" not in event]
    sizes = [len(re.sub(r"^event: .*\n", "", event)) for event in events]
    assert len(events) >= 2
    assert {size % config.obfuscation_bucket_bytes for size in sizes} == {0}


def test_side_channel_padding_of_times() -> None:
    """Case 59: with an interval longer than a step, what is sent when does not depend on what was accepted, but for the
    end of the answer.
    """
    config = ApiConfig(granularity="interval:100", force_obfuscation=True)
    seen = {name: packets(pattern, config) for name, pattern in PATTERNS.items()}
    for name, found in seen.items():
        times = [packet.at_s for packet in found]
        gaps = [round(later - earlier, 6) for earlier, later in pairwise(times)]
        assert set(gaps[:-1]) <= {0.1}, name  # the rhythm of the clock, not of the steps
        assert text_of(found) == "word " * NUM_TOKENS
    shortest = min(len(found) for found in seen.values()) - 2  # the last two are the end of an answer
    assert shortest > 5
    heads = {tuple((round(p.at_s, 6), len(p.data)) for p in found[:shortest]) for found in seen.values()}
    assert len(heads) == 1  # all patterns look alike while they all run
    by_step = {tuple(len(p.data) for p in packets(pattern, ApiConfig())) for pattern in PATTERNS.values()}
    assert len(by_step) == len(PATTERNS)
