"""Processes other than the one that opened a model: forks are refused by name, copies too."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, AsyncEngine, ContextLengthError, EngineConfig, InputError, SamplingParams, SpecConfig
from foretoken.machine import process
from tests.helpers.checkpoints import token_ids

PROMPT = token_ids(5)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(pair.target, dtype="float32", cache_tokens=4096, profile="off") as llm:
        yield llm


def in_fork(calls: Sequence[Callable[[], object]]) -> list[str]:
    """What each of `calls` raises in a forked process, "none" where nothing; the process is killed if it hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if not child:
        said = []
        for call in calls:
            try:
                call()
                said.append("none")
            except BaseException as error:  # noqa: BLE001 - the parent looks at it
                said.append(f"{type(error).__name__} {error}")
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read().split("\n")
    os.waitpid(child, 0)
    return found


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """A lock that another thread holds."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join(60)


def test_h1_a_forked_process_cannot_use_an_llm(llm: LLM) -> None:
    """Also with a lock that another thread held when the process was forked, and a stream that was begun before."""
    begun = llm.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(begun)
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate([PROMPT], GREEDY),
        "stream": lambda: list(llm.stream(PROMPT, GREEDY)),
        "a stream that was begun": lambda: next(begun),
        "step": llm.step,
        "submit": lambda: llm.submit(PROMPT, GREEDY, SpecConfig()),
        "prepare": lambda: llm.prepare(SpecConfig("ngram")),
        "encode": lambda: llm.encode("a"),
        "stats": lambda: llm.stats,
        "drain_shadow": llm.drain_shadow,
        "AsyncEngine": lambda: AsyncEngine(llm),
    }
    with held_elsewhere(llm._turns.lock):
        found = in_fork([*calls.values(), begun.close, llm.close])
    for name, said in zip(calls, found, strict=False):
        assert said.startswith(f"InputError llm='opened in process {os.getpid()}': a forked process"), (name, said)
    assert found[-2:] == ["none", "none"], "closing waits for nothing and drops nothing"
    begun.close()
    assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 6


def test_h1_an_async_engine_names_the_fork(llm: LLM) -> None:
    with AsyncEngine(llm) as engine:
        said = in_fork([lambda: engine.submit(PROMPT, GREEDY), lambda: llm.generate([PROMPT]), engine.close])
    assert [text.split("=")[0] for text in said] == ["InputError engine", "InputError llm", "none"]
    assert all("a forked process" in text for text in said[:2])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_h1_another_model_in_a_forked_process(llm: LLM, pair: SimpleNamespace, num_threads: int) -> None:
    """OpenMP's threads are the parent's: with several a new model would wait for them, with one it answers."""
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids

    def again() -> None:
        torch.set_num_threads(num_threads)
        with LLM(pair.target, dtype="float32", cache_tokens=4096, profile="off") as other:
            assert other.generate([PROMPT], GREEDY)[0].token_ids == expected

    (said,) = in_fork([again])
    if num_threads == 1:
        assert said == "none"
    else:
        assert said.startswith("InputError model='a model was opened in process")
        assert "torch.set_num_threads(1)" in said


def test_h1_a_fork_before_the_first_model_may_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_computing", [])
    process.note_computing(8)
    process.note_computing(8)
    monkeypatch.setattr(process, "_computing", [])
    assert in_fork([lambda: process.note_computing(8)]) == ["none"]


COPIES: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "old pickle": lambda thing: pickle.dumps(thing, protocol=0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "inside": lambda thing: pickle.dumps({"a": [thing]}),
}


@pytest.mark.parametrize("way", COPIES)
def test_c4_what_runs_is_not_copied(llm: LLM, way: str) -> None:
    with pytest.raises(InputError, match=r"LLM=.*EngineConfig"):
        COPIES[way](llm)
    with AsyncEngine(llm) as engine:
        with pytest.raises(InputError, match=r"AsyncEngine=.*EngineConfig"):
            COPIES[way](engine)
        ticket = engine.submit(PROMPT, GREEDY)
        with pytest.raises(InputError, match=r"Ticket=.*answer"):
            COPIES[way](ticket)
        answer = ticket.result()
    assert pickle.loads(pickle.dumps(answer)) == answer


def test_c4_the_configuration_is_what_another_process_gets(llm: LLM) -> None:
    assert pickle.loads(pickle.dumps(llm.config)) == llm.config
    assert isinstance(llm.config, EngineConfig)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_c4_a_refusal_reaches_another_process(llm: LLM, protocol: int) -> None:
    """A pool of processes hands on what a call raised, and breaks down where that cannot be read again."""
    with pytest.raises(ContextLengthError) as refused:
        llm.generate([[1] * 1000])
    for again in (pickle.loads(pickle.dumps(refused.value, protocol)), copy.deepcopy(refused.value)):
        assert (type(again), str(again)) == (ContextLengthError, str(refused.value))
        assert (again.field, again.value, again.remedy) == ("prompt", "1000 tokens", refused.value.remedy)
    (answer,) = llm.generate([PROMPT], SamplingParams(bad_words=[[token] for token in range(97)]))
    assert str(pickle.loads(pickle.dumps(answer, protocol)).error) == str(answer.error)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_c4_a_copied_refusal_keeps_its_notes_and_shows_a_value_that_cannot_be_copied(protocol: int) -> None:
    """Of `[lock]` no process can have a copy: what reached the caller was an error about the lock."""
    error = InputError("prompts", [threading.Lock()], "give texts")
    error.add_note("in line 7 of prompts.jsonl")
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again), again.args) == (InputError, str(error), error.args)
        assert again.__notes__ == ["in line 7 of prompts.jsonl"]
        assert again.field == "prompts"
