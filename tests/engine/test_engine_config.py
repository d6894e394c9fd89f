"""`EngineConfig`: the one description of an engine, checked when it is made and sent to other processes."""

from __future__ import annotations

import multiprocessing
import pickle
import typing
from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, AsyncEngine, ConfigError, EngineConfig, InputError, RoutingRules, SamplingParams, SpecConfig
from foretoken.config import DTYPES
from foretoken.engine_config import EngineOptions
from foretoken.model.loader import _FLOATS
from tests.helpers.audit import check_idle

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def config_of(pair: SimpleNamespace) -> EngineConfig:
    return EngineConfig(
        pair.target,
        SpecConfig("draft_model", str(pair.draft)),
        dtype="float32",
        cache_tokens=512,
        max_batch_size=3,
        routing=RoutingRules(min_tokens_to_speculate=4),
        profile="off",
    )


def answer(blob: bytes) -> tuple[int, ...]:
    """In another process: the answer of an engine built from a pickled configuration."""
    with LLM(pickle.loads(blob)) as llm:
        return llm.generate([[5, 6, 7]], GREEDY)[0].token_ids


def test_another_process_builds_the_same_engine(pair: SimpleNamespace) -> None:
    config = config_of(pair)
    assert pickle.loads(pickle.dumps(config)) == config
    with LLM(config) as llm:
        assert llm.config is config
        expected = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(answer, (pickle.dumps(config),)) == expected


def test_arguments_are_fields(pair: SimpleNamespace) -> None:
    given = config_of(pair)
    options = {field.name: getattr(given, field.name) for field in fields(given) if field.name not in ("model", "spec")}
    with LLM(given.model, given.spec, **options) as llm:
        assert llm.config == given
        assert llm.engine.scheduler.config == given.scheduler
        assert llm.engine.scheduler.config.max_batch_size == 3
    hints = typing.get_type_hints(EngineConfig)
    assert typing.get_type_hints(EngineOptions) == {
        name: hint for name, hint in hints.items() if name not in ("model", "spec")
    }


def test_it_is_frozen_and_refuses_by_name(pair: SimpleNamespace) -> None:
    config = config_of(pair)
    with pytest.raises(FrozenInstanceError):
        config.dtype = "bfloat16"  # type: ignore[misc]
    with pytest.raises(ConfigError, match="max_batch=3: unknown option of EngineConfig; did you mean 'max_batch_size'"):
        LLM(pair.target, max_batch=3)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="dtype='float32': is a field of the EngineConfig: set it there"):
        LLM(config, dtype="float32")
    with pytest.raises(InputError, match="spec=.*is a field of the EngineConfig"):  # noqa: RUF043
        LLM(config, SpecConfig())
    with pytest.raises(ConfigError, match="max_step_tokens=16: must be more than max_batch_size, 16"):
        EngineConfig("m", max_step_tokens=16)
    with pytest.raises(ConfigError, match="rules hold where the number of draft tokens is open"):
        EngineConfig("m", SpecConfig("ngram", num_draft=3), routing=RoutingRules(min_tokens_to_speculate=2))


def test_what_depends_on_the_machine_is_checked_where_the_engine_is_built() -> None:
    """So that a configuration may be made where neither the model nor the device is."""
    config = EngineConfig("/nowhere/at/all", device="cuda:7", profile="/nowhere/profile.json")
    assert EngineConfig("m", dtype=torch.bfloat16, device=torch.device("cpu")) == EngineConfig(  # type: ignore[arg-type]
        "m", dtype="bfloat16", device="cpu"
    )
    with pytest.raises(InputError):
        LLM(config)


def test_the_dtypes_are_those_of_the_loader() -> None:
    assert set(DTYPES) == {"auto", *_FLOATS}


def test_an_async_engine_of_its_own(pair: SimpleNamespace) -> None:
    """Built from a configuration, the `LLM` is closed with it."""
    with AsyncEngine(config_of(pair)) as engine:
        assert len(engine.submit([5, 6, 7], GREEDY).result().token_ids) == 12
        check_idle(engine.llm.engine)
    with pytest.raises(InputError, match="was closed"):
        engine.llm.generate([[1]])
