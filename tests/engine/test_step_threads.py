"""The number of threads of steps: given back after each, as the user set it, and without a say in answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, AsyncEngine, SamplingParams, SpecConfig
from foretoken.control.cost import CostTable
from foretoken.control.threads import Threading
from foretoken.engine import step_threads
from foretoken.engine.step_threads import StepThreads
from foretoken.machine import threads as waiting
from tests.helpers.checkpoints import token_ids


class Flapping:
    """A neighbour that comes and goes with every step."""

    def __init__(self) -> None:
        self.asked = self.rested = 0

    def is_contended(self, num_threads: int, step_began_s: float) -> bool | None:
        self.asked += 1
        assert step_began_s <= time.perf_counter()
        return (None, True, False)[self.asked % 3]

    def rest(self) -> None:
        self.rested += 1


@pytest.fixture(autouse=True)
def _own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    yield
    waiting.set_waiting("spin")
    torch.set_num_threads(before)


def teams() -> int:
    return sum(thread.name == "foretoken-waiting" for thread in threading.enumerate())


def test_waiting_threads_are_told_to_sleep_and_to_spin_again() -> None:
    torch.set_num_threads(2)
    for _ in range(2):
        waiting.set_waiting("sleep")
        assert waiting.current_waiting() == ("sleep" if waiting.may_change() else "spin")
        assert teams() == int(waiting.may_change())
        assert torch.get_num_threads() == 2
    waiting.set_waiting("spin")
    assert (waiting.current_waiting(), teams(), torch.get_num_threads()) == ("spin", 0, 2)


def test_an_engine_s_thread_begins_with_its_caller_s_number(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with the one that another thread has set last, as a step that runs on fewer threads does."""
    torch.set_num_threads(2)
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
    numbers, forward = set[int](), llm.engine.runner.forward

    def noted(*arguments: Any) -> Any:
        numbers.add(llm.engine.threads._max_threads)
        return forward(*arguments)

    monkeypatch.setattr(llm.engine.runner, "forward", noted)
    with AsyncEngine(llm) as engine:
        engine.submit(token_ids(5), SamplingParams(max_tokens=2)).result()
        assert engine._loading.submit(torch.get_num_threads).result() == 2
    assert numbers == {2}


def test_a_way_of_waiting_that_is_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    waiting.set_waiting("sleep")
    assert (waiting.current_waiting(), teams()) == ("spin", 0)


def test_torchs_number_is_the_most_and_is_given_back() -> None:
    watch = Flapping()
    threads = StepThreads(True, watch)
    torch.set_num_threads(2)
    seen = set()
    for _ in range(40):
        threads.begin(True, time.perf_counter())
        seen.add(torch.get_num_threads())
        threads.observe(1, 0.01 * torch.get_num_threads(), CostTable())
        threads.end()
        assert torch.get_num_threads() == 2
    assert seen <= {1, 2}
    torch.set_num_threads(1)
    threads.begin(True, time.perf_counter())
    threads.end()
    assert threads.current.num_threads == torch.get_num_threads() == 1
    assert watch.rested == watch.asked == 40


def test_a_number_that_is_set_by_a_variable_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"OMP_NUM_THREADS": "2"})
    torch.set_num_threads(2)
    threads = StepThreads(True, Flapping())
    for _ in range(60):
        threads.begin(True, time.perf_counter())
        assert torch.get_num_threads() == 2
        threads.observe(1, 0.02, CostTable())
        threads.end()


def test_a_model_that_needs_equal_threads_keeps_them() -> None:
    torch.set_num_threads(2)
    watch = Flapping()
    threads = StepThreads(False, watch)
    threads.begin(True, time.perf_counter())
    assert (torch.get_num_threads(), watch.asked) == (2, 0)
    assert threads.current == Threading(2, waiting.current_waiting())


def test_answers_do_not_depend_on_the_threads_of_their_steps(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [token_ids(9, seed=seed) for seed in range(3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(pair.target, dtype="float32", profile="off") as llm:
        alone = [out.token_ids for out in llm.generate(prompts, params, SpecConfig(None))]
        torch.set_num_threads(2)
        monkeypatch.setattr(llm.engine, "threads", StepThreads(True, Flapping()))
        used: list[int] = []
        run_ = llm.engine.runner.forward

        def forward(*given: object) -> object:
            used.append(torch.get_num_threads())
            return run_(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(llm.engine.runner, "forward", forward)
        found = llm.generate(prompts, params, SpecConfig("auto"))
        assert [out.token_ids for out in found] == alone
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(step_threads, "ways", lambda *given: (Threading(1, "sleep"), Threading(2, "sleep")))
        monkeypatch.setattr(llm.engine, "threads", StepThreads(True, Flapping()))
        found = llm.generate([token_ids(5, seed=9)], params, SpecConfig(None))
        assert set(used) == {1, 2}
        assert found[0].error is None


@pytest.mark.parametrize(("numerics", "adapts"), [("default", True), ("strict", False)])
def test_strict_numerics_that_were_proved_for_a_number_of_threads_keep_it(
    pair: SimpleNamespace, numerics: str, adapts: bool
) -> None:
    with LLM(pair.target, dtype="float32", numerics=numerics, profile="off") as llm:
        assert llm.engine.threads._adapts is adapts
