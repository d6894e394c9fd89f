"""What crosses between front and worker: configurations, errors, messages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import msgspec.structs
import pytest

from foretoken import errors
from foretoken.backend.call import Call
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.adaptation import AdaptConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, ContextLengthError, EngineError, ForetokenError, InputError, RankError
from foretoken.server.life import wire
from foretoken.server.life.wire import engine_config_of, from_wire, plain, to_wire, to_wire_of_loading
from tests.helpers.workers import channels, crossed

SPECS = (
    SpecConfig(),
    SpecConfig("draft_model", "reference:draft", num_draft=5, rule="block", tree="chain", min_confidence=0.25),
    SpecConfig("auto", parts=("ngram", SpecConfig("draft_model", "reference:draft", tree="static", branching=(4, 2)))),
    SpecConfig("early_exit", skip_layers=(2, 3)),
    SpecConfig("auto", draft="reference:draft"),
)
PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    seed=2**64 - 1,
    stop=("\n", "é"),
    logit_bias={3: -1.5, 7: 2.0},
    bad_words=("x", (1, 2)),
    stop_token_ids=(9,),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    allowed_token_ids=(4, 9),
    json_schema={"type": "object", "properties": {"a": {"enum": [1, None, "ü"]}}},
    prediction=(4, 5),
    deadline_s=2.5,
    tenant="a",
)


def test_configurations_cross_unchanged() -> None:
    whole = SamplingParams(temperature=1, top_p=1, presence_penalty=1, deadline_s=3, json_schema="{}")
    for params in (PARAMS, SamplingParams(), whole):
        assert crossed(params, SamplingParams) == params
    assert plain(SpecConfig()) == {}
    for spec in SPECS:
        assert crossed(spec, SpecConfig) == spec
    config = EngineConfig(
        Path("folder"),
        SPECS[2],
        dtype="float32",
        cache_tokens=512,
        routing=RoutingRules(min_tokens_to_speculate=4),
        profile=Path("costs.json"),
        trace="trace.jsonl",
        adapt=AdaptConfig(share=0.1),
    )
    arrived = engine_config_of(crossed(plain(config)))
    assert plain(arrived) == plain(config)
    assert (arrived.spec, arrived.routing, arrived.adapt) == (config.spec, config.routing, config.adapt)
    assert engine_config_of(crossed(plain(EngineConfig("m", adapt=True)))).adapt is True


def test_what_arrives_is_checked_again() -> None:
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        crossed({"temperature": -1.0}, SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="did you mean"):
        crossed({"drafter": "ngran"}, SpecConfig)
    with pytest.raises(ConfigError, match="max_batch_size"):
        engine_config_of({"model": "m", "max_batch_sizes": 1})
    with pytest.raises(InputError):
        engine_config_of({"model": "m", "device": "tpu"})


def subclasses(kind: type[ForetokenError]) -> list[type[ForetokenError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in subclasses(child))]


@pytest.mark.parametrize("kind", [kind for kind in subclasses(ForetokenError) if kind.__module__ == errors.__name__])
def test_errors_arrive_as_the_same_class(kind: type[ForetokenError]) -> None:
    error = kind("n", 3, "must be smaller") if issubclass(kind, InputError) else kind("what happened")
    arrived = from_wire(to_wire(error))
    assert type(arrived) is kind
    if isinstance(arrived, InputError):
        assert (arrived.field, arrived.value, arrived.remedy) == ("n", 3, "must be smaller")


def test_no_text_of_a_user_crosses_in_an_error() -> None:
    cause = RuntimeError("SECRET")
    broken = EngineError("a step failed: RuntimeError: SECRET")
    broken.__cause__ = cause
    found = [InputError("prompt", "SECRET", "cannot be honoured"), broken, cause, KeyError("SECRET")]
    found.append(RankError("rank 0 left a step (RuntimeError: SECRET)"))
    for error in found:
        assert b"SECRET" not in msgspec.msgpack.encode(to_wire(error)), error
        assert "SECRET" not in str(from_wire(to_wire(error)))
    assert "RuntimeError" in str(from_wire(to_wire(broken)))
    assert "SECRET" in str(from_wire(to_wire_of_loading(InputError("device", "SECRET", "no such"))))  # the operator's


def test_numbers_of_errors_cross() -> None:
    error = ContextLengthError("prompt", "4097 tokens", "shorten it")
    error.n_ctx = 4096  # type: ignore[attr-defined]
    arrived = from_wire(to_wire(error))
    assert isinstance(arrived, ContextLengthError)
    assert (arrived.value, arrived.n_ctx) == ("4097 tokens", 4096)  # type: ignore[attr-defined]


def test_every_field_of_a_call_crosses() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "ü"}]}
    call = Call(PARAMS, ["é", [1, 2]], [message], [{"type": "function"}], {"a": 1}, SPECS[2], "text", True)
    assert all(getattr(call, field.name) != field.default for field in msgspec.structs.fields(Call))
    assert crossed(call, Call) == call


def test_messages_are_read_as_they_were_sent_and_nothing_else() -> None:
    async def run() -> None:
        front, worker = await channels()
        sent = [wire.AskStats(1), wire.Open(2, Call(PARAMS, ["é" * 70_000, [1, 2]])), wire.Cancel(2)]
        for one in sent:
            front.send(one)
        assert [await worker.receive() for _ in sent] == sent
        worker._writer.write((5).to_bytes(4, "big") + b"hello")
        with pytest.raises(EngineError, match="no message"):
            await front.receive()
        worker._writer.write(b"\xff" * 4)
        with pytest.raises(EngineError, match="4294967295 bytes"):
            await front.receive()
        front.close()
        assert await worker.receive() is None
        worker.close()

    asyncio.run(run())
