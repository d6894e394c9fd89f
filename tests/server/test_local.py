"""The backend in one process: events of a call are the answers of `LLM.generate`, and cross a process boundary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.backend.call import AnswerEnded, Begun, Call, Event, Piece, TextToEncode
from foretoken.backend.local import LocalBackend, build_engine
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine_config import EngineConfig
from foretoken.errors import InputError, OverloadedError
from foretoken.server.life.replicas import merged
from foretoken.server.life.wire import engine_config_of, plain
from tests.helpers.tiny_heads import tiny_head

PROMPTS = ("def f(x):\n", "class Reader")


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with LLM("reference:target", dtype="float32", profile="off") as llm, AsyncEngine(llm, max_waiting=4) as engine:
        yield engine


async def events_of(backend: LocalBackend, call: Call) -> list[Event]:
    return [event async for event in await backend.open(call)]


def test_a_traced_call_keeps_its_rounds_where_another_ends_while_it_is_queued(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, submit = LocalBackend(engine, "reference"), engine.submit_all
    call = Call(SamplingParams(max_tokens=3), PROMPTS[:1], spec=SpecConfig(), trace=True)

    async def both() -> list[Event]:
        first = await backend.open(call)

        async def submit_until_the_first_ends(*asked: Any) -> Any:
            tickets = await submit(*asked)
            assert [event async for event in first]
            return tickets

        monkeypatch.setattr(engine, "submit_all", submit_until_the_first_ends)
        return await events_of(backend, call)

    pieces = [event for event in asyncio.run(both()) if isinstance(event, Piece)]
    assert pieces
    assert all(piece.round is not None for piece in pieces)


def test_a_request_arrives_before_its_prompt_is_tokenised(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, encode, prepare = engine.llm, engine.llm.encode_prompt, engine.llm.engine.admission.prepare
    encoded_s, arrived_s = list[float](), list[float]()

    def timed(text: str) -> list[int]:
        encoded_s.append(time.perf_counter())
        return encode(text)

    def noted(*asked: Any) -> Any:
        prepared = prepare(*asked)
        arrived_s.append(prepared.arrived_s)
        return prepared

    monkeypatch.setattr(llm, "encode_prompt", timed)
    monkeypatch.setattr(llm.engine.admission, "prepare", noted)
    params = SamplingParams(max_tokens=1)
    asyncio.run(events_of(LocalBackend(engine, "reference"), Call(params, PROMPTS[:1], spec=SpecConfig())))
    asyncio.run(engine.generate(PROMPTS[0], params, SpecConfig()))
    llm.prepare_request(PROMPTS[0], params, SpecConfig())
    assert len(encoded_s) == len(arrived_s) == 3
    assert all(came < read for came, read in zip(arrived_s, encoded_s, strict=True))


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_events_add_up_to_the_answers_of_generate(engine: AsyncEngine, drafter: str | None) -> None:
    params = SamplingParams(max_tokens=12, n=2, logprobs=1, temperature=0.8, seed=3, prompt_logprobs=0)
    spec = SpecConfig(drafter, rule="coupled") if drafter else SpecConfig()
    backend = LocalBackend(engine, "reference")
    found = asyncio.run(events_of(backend, Call(params, PROMPTS, spec=spec)))
    assert [msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event) for event in found] == found

    async def generate() -> list[str]:
        outputs = [await engine.generate(prompt, params, spec) for prompt in PROMPTS]
        return [choice.text for output in outputs for choice in output.choices]

    texts = asyncio.run(generate())
    begun, ends = found[0], {event.index: event for event in found if isinstance(event, AnswerEnded)}
    assert isinstance(begun, Begun)
    assert len(begun.prompt_ids) == 2
    assert [ends[index].text for index in range(4)] == texts
    for index, text in enumerate(texts):
        pieces = [event for event in found if isinstance(event, Piece) and event.index == index]
        tokens = [token for piece in pieces for token in piece.tokens]
        assert "".join(piece.text for piece in pieces) == text
        assert len(tokens) == ends[index].num_tokens == ends[index].stats["num_emitted"]
        assert b"".join(token.data or b"" for token in tokens).decode("utf-8", "replace").startswith(text[:4])
        assert all(token.logprob is not None and token.top for token in tokens)
    assert [len(ends[index].prompt) > 0 for index in range(4)] == [True, False, True, False]


def test_a_call_is_queued_whole_or_not_at_all(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(engine, "reference")
    with pytest.raises(InputError, match="n=6: prompts times n must be at most 4"):
        asyncio.run(backend.open(Call(SamplingParams(max_tokens=4, n=3), PROMPTS)))
    monkeypatch.setattr(engine, "_num_coming", 1)
    with pytest.raises(OverloadedError):
        asyncio.run(backend.open(Call(SamplingParams(max_tokens=4, n=2), PROMPTS)))
    assert not engine.llm.engine.has_work


def test_cancel_frees_every_answer(engine: AsyncEngine) -> None:
    async def run() -> list[Event]:
        generation = await LocalBackend(engine, "reference").open(
            Call(SamplingParams(max_tokens=2000, n=2, ignore_eos=True, temperature=1.0), PROMPTS[:1])
        )
        found: list[Event] = []
        async for event in generation:
            found.append(event)
            if len(found) == 3:
                await generation.cancel()
                await generation.cancel()
        return found

    ends = [event for event in asyncio.run(run()) if isinstance(event, AnswerEnded)]
    assert [end.finish_reason for end in ends] == ["abort", "abort"]
    assert not engine.llm.engine.has_work


def test_text_and_tokens_both_ways(engine: AsyncEngine) -> None:
    backend = LocalBackend(engine, "reference")
    ids = asyncio.run(backend.tokenize(TextToEncode("def f(x):")))
    assert asyncio.run(backend.detokenize(ids)) == "def f(x):"
    with pytest.raises(InputError, match="tokens=4096"):
        asyncio.run(backend.detokenize([4096]))


def test_what_learning_did_is_in_the_statistics(
    engine: AsyncEngine, text_pair: SimpleNamespace, tmp_path: Path
) -> None:
    assert "adaptation" not in asyncio.run(LocalBackend(engine, "reference").stats())
    head = tiny_head(tmp_path / "head", text_pair.target, "medusa")
    spec = SpecConfig("medusa", head=str(head), num_draft=2)
    config = engine_config_of(plain(EngineConfig(str(text_pair.target), spec, profile="off", adapt=True)))
    learning, _ = build_engine(config, max_waiting=4, draft_required=False)
    with learning.llm, learning:
        backend = LocalBackend(learning, "reference")
        asyncio.run(events_of(backend, Call(SamplingParams(max_tokens=8), PROMPTS[:1])))
        found = asyncio.run(backend.stats())["adaptation"]
    assert (found["num_drafters"], found["num_swaps"]) == (1, 0)
    two = merged([{"adaptation": found}, {"adaptation": found | {"num_swaps": 2}}])
    assert two["adaptation"]["num_swaps"] == 2
