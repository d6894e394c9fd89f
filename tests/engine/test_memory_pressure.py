"""Out of memory on a device: smaller steps, the same answers, and no request lost that fits alone."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, CapacityError, SamplingParams, SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.engine.engine import Engine
from foretoken.engine.recovery import PATIENCE_STEPS, MemoryPressure, is_out_of_memory
from tests.helpers import faults
from tests.helpers.checkpoints import token_ids

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [token_ids(10 + 12 * i, seed=i) for i in range(6)]


class Small:
    """The target's forward on a device whose memory ends at `max_requests` or `max_rows` of a step."""

    def __init__(self, engine: Engine, max_requests: int = 99, max_rows: int = 999, never: int = -1) -> None:
        self._forward, self._engine, self._never = engine.target.forward, engine, never
        self.max_requests, self.max_rows = max_requests, max_rows
        self.num_errors, self.sizes = 0, list[int]()

    def __call__(self, tokens: torch.Tensor, segments: Any, *more: Any) -> Any:
        refused = any(segment.sequence == self._never for segment in segments)
        if refused or len(segments) > self.max_requests or tokens.numel() > self.max_rows:
            self.num_errors += 1
            faults.expect("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.sizes.append(len(segments))
        return self._forward(tokens, segments, *more)


@pytest.fixture
def own(pair: SimpleNamespace) -> Any:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048, max_batch_size=6, profile="off") as llm:
        yield llm


@pytest.mark.parametrize("drafter", [None, "recycling", "draft_model"])
@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_rows": 20}, {"max_requests": 1, "max_rows": 17}])
def test_smaller_steps_give_the_same_answers(
    own: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, drafter: str | None, limits: dict[str, int]
) -> None:
    spec = SpecConfig(drafter, str(pair.draft) if drafter == "draft_model" else None)
    expected = [out.token_ids for out in own.generate(PROMPTS, PARAMS, SpecConfig())]
    small = Small(own.engine, **limits)
    monkeypatch.setattr(own.target, "forward", small)
    with pytest.warns(
        UserWarning, match="OutOfMemoryError: CUDA out of memory.*; its requests run again, at most . at"
    ):
        outputs = own.generate(PROMPTS, PARAMS, spec)
    assert [out.token_ids for out in outputs] == expected
    assert {out.finish_reason for out in outputs} == {"length"}
    assert small.num_errors > 0
    assert max(small.sizes) <= small.max_requests
    assert sum(out.stats.num_preempted for out in outputs) > 0


def test_draft_tokens_go_before_a_request_does(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows have room: a short prompt, or one token and one draft token."""
    params, prompts = SamplingParams(max_tokens=9, ignore_eos=True), [[5, 6], [7, 8], [5, 9]]
    expected = [out.token_ids for out in own.generate(prompts, params)]
    monkeypatch.setattr(own.target, "forward", Small(own.engine, max_rows=2))
    with pytest.warns(UserWarning, match="out of memory"):
        outputs = own.generate(prompts, params, SpecConfig("recycling", num_draft=4))
    assert [out.token_ids for out in outputs] == expected


def test_a_request_that_does_not_fit_alone_fails_and_the_others_do_not(
    own: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [out.token_ids for out in own.generate(PROMPTS[:4], PARAMS)]
    number = own.submit([1], PARAMS, SpecConfig()).request_id
    own.engine.abort(number)
    monkeypatch.setattr(own.target, "forward", Small(own.engine, never=number + 2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outputs = own.generate(PROMPTS[:4], PARAMS)
    assert [out.token_ids for i, out in enumerate(outputs) if i != 1] == [*expected[:1], *expected[2:]]
    said = [str(one.message) for one in told]
    assert [text.endswith("; the request fails") for text in said] == [False] * (len(said) - 1) + [True]
    error = outputs[1].error
    assert isinstance(error, CapacityError)
    assert "out of device memory: 22 tokens do not fit beside weights and cache, with no other request" in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)


def test_what_counts_as_out_of_memory() -> None:
    caused = RuntimeError("a step failed")
    caused.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    on_cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
    assert all(is_out_of_memory(error) for error in (caused, on_cpu, MemoryError(), caused.__cause__))
    assert not any(is_out_of_memory(error) for error in (None, RuntimeError("shapes"), KeyboardInterrupt()))


def test_limits_shrink_and_grow_back() -> None:
    config, pressure = SchedulerConfig(max_batch_size=8, max_prompt_tokens=64), MemoryPressure()
    assert pressure.narrowed(config) is config
    found = []
    for num_requests in (5, 2, 1, 1):
        found.append((pressure.shrink(num_requests, config), pressure.max_requests, pressure.max_prompt_tokens))
    assert found == [(True, 2, 32), (True, 1, 16), (False, 1, 16), (False, 1, 16)]
    assert pressure.is_tight
    assert pressure.narrowed(config).max_prompt_tokens == 16

    def limits_after(num_steps: int) -> tuple[int | None, int | None]:
        for _ in range(num_steps):
            pressure.begin_step(config)
        return pressure.max_requests, pressure.max_prompt_tokens

    assert limits_after(PATIENCE_STEPS) == (1, 16)
    assert limits_after(1) == (2, 32)
    assert limits_after(PATIENCE_STEPS + 1) == (4, 64)
    assert limits_after(PATIENCE_STEPS + 1) == (None, None)
    assert pressure.narrowed(config) is config


@pytest.mark.parametrize("seed", [1, 2])
def test_what_a_seed_draws_stays(own: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A draft length that the caller set stands, also while one request runs at a time: the draws depend on it."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=3, rule="rejection")
    expected = [out.token_ids for out in own.generate(PROMPTS, params, spec)]
    monkeypatch.setattr(own.target, "forward", Small(own.engine, max_requests=1))
    with pytest.warns(UserWarning, match="out of memory"):
        assert [out.token_ids for out in own.generate(PROMPTS, params, spec)] == expected
