"""One `LLM`, several threads; and what a closed one says."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import LLM, AsyncEngine, InputError, SamplingParams, SpecConfig, StorageError
from foretoken.core import Batch, StepOutput, TapRequest
from foretoken.engine.request import RequestState
from foretoken.engine.watch import Watcher
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.faults import Fault, Injected, Interrupt, expect

PROMPTS = [token_ids(3 + i, seed=i) for i in range(8)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=240, ignore_eos=True)
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def llm(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(pair.target, dtype="float32", max_batch_size=6, cache_tokens=4096, profile="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[int, ...]]:
    return [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]


def start(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that runs `call`, and a list that will hold what it returns or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def results(calls: list[Callable[[], Any]]) -> list[Any]:
    started = [start(call) for call in calls]
    for thread, _ in started:
        thread.join(120)
        assert not thread.is_alive()
    return [found[0] for _, found in started]


# ---- L2


@pytest.mark.parametrize("way", ["generate", "on_step", "stream", "submit"])
def test_l2_four_threads_get_their_own_answers(
    llm: LLM, pair: SimpleNamespace, alone: list[tuple[int, ...]], way: str
) -> None:
    specs = [
        SpecConfig(),
        SpecConfig("ngram"),
        SpecConfig("draft_model", str(pair.draft)),
        SpecConfig("suffix", num_draft=3),
    ]

    def answer(i: int, spec: SpecConfig) -> tuple[int, ...]:
        if way == "stream":
            return tuple(token for piece in llm.stream(PROMPTS[i], GREEDY, spec) for token in piece.token_ids)
        if way == "submit":
            state = llm.submit(PROMPTS[i], GREEDY, spec)
            while state.finish_reason is None:
                llm.step()
            return tuple(state.output_ids)
        pieces: list[StepOutput] = []
        (out,) = llm.generate([PROMPTS[i]], GREEDY, spec, on_step=pieces.extend if way == "on_step" else None)
        if way == "on_step":
            assert tuple(token for piece in pieces for token in piece.token_ids) == out.token_ids
            assert pieces[-1].finish_reason == "length"
        return out.token_ids

    def work(worker: int) -> list[tuple[int, tuple[int, ...]]]:
        order = random.Random(worker).sample(range(8), 8)
        return [(i, answer(i, specs[(i + worker) % 4])) for i in order]

    for found in results([lambda worker=worker: work(worker) for worker in range(4)]):
        assert found == [(i, alone[i]) for i, _ in found]
    check_idle(llm)


def test_l2_requests_of_several_threads_run_together(llm: LLM) -> None:
    """A long answer in one thread does not keep another thread's request waiting for its end."""
    first_piece, most = threading.Event(), list[int]()

    class Entries(Watcher):
        """On a busy machine one thread may run all steps of the short one, so that the other sees none of them."""

        def begin(self, state: RequestState) -> None:
            most.append(len(llm.engine.states))

    watcher = Entries()
    llm.engine.watchers.append(watcher)
    try:
        thread, found = start(lambda: llm.generate([PROMPTS[0]], LONG, on_step=lambda _: first_piece.set()))
        assert first_piece.wait(60)
        (short,) = llm.generate([PROMPTS[1]], GREEDY)
        assert len(short.token_ids) == 12
        thread.join(60)
    finally:
        llm.engine.watchers.remove(watcher)
    assert len(found[0][0].token_ids) == 240
    assert max(most) == 2, "the short one had to wait for the end of the long one"


def test_l2_an_error_in_one_thread_is_not_anothers(llm: LLM, alone: list[tuple[int, ...]]) -> None:
    def broken(outputs: list[StepOutput]) -> None:
        raise Injected("in a callback")

    calls: list[Callable[[], Any]] = [lambda i=i: llm.generate([PROMPTS[i]], GREEDY) for i in range(3)]
    *good, bad, refused = results(
        [*calls, lambda: llm.generate([PROMPTS[3]], GREEDY, on_step=broken), lambda: llm.generate([[10**6]], GREEDY)]
    )
    assert [outs[0].token_ids for outs in good] == alone[:3]
    assert isinstance(bad, Injected)
    assert isinstance(refused, InputError)
    check_idle(llm)


def test_closing_while_others_answer(pair: SimpleNamespace) -> None:
    """They end as aborted, or hear that it was closed; nobody waits for ever, and nothing else is raised."""
    for with_callback in (False, True):
        llm = LLM(pair.target, dtype="float32", cache_tokens=2048, profile="off")
        begun = threading.Barrier(4)

        def ask(i: int, llm: LLM = llm, begun: threading.Barrier = begun, stream: bool = with_callback) -> object:
            begun.wait(60)
            return list(llm.stream(PROMPTS[i], LONG)) if stream else llm.generate([PROMPTS[i]], LONG)[0].finish_reason

        started = [start(lambda i=i, ask=ask: ask(i)) for i in range(3)]
        begun.wait(60)
        while not llm.engine.has_work:
            threading.Event().wait(0.001)
        llm.close()
        for thread, found in started:
            thread.join(60)
            assert not thread.is_alive()
            assert found[0] == "abort" or "was closed; open it again" in str(found[0])


def test_loading_a_drafter_in_one_thread_disturbs_no_step_in_another(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go through all drafters: none may appear meanwhile."""
    llm._drafters.drafters.clear()
    taps, prepared = llm.engine.drafters.taps, threading.Event()

    def slow_taps(batch: Batch) -> TapRequest:
        for _ in llm.engine.drafters.drafters.values():
            prepared.wait(0.05)  # another thread would add one here
        return taps(batch)

    monkeypatch.setattr(llm.engine.drafters, "taps", slow_taps)
    calls = [
        lambda: llm.generate(PROMPTS[:2], GREEDY, SpecConfig("ngram")),
        lambda: [
            llm.prepare(spec)
            for spec in (SpecConfig("suffix"), SpecConfig("recycling"), SpecConfig("draft_model", str(pair.draft)))
        ],
    ]
    assert not [found for found in results(calls) if isinstance(found, Exception)]
    assert len(llm._drafters.drafters) == 4


# ---- L1: nothing stays of a call that failed


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_l1_a_trace_on_a_full_disk_costs_no_answer(pair: SimpleNamespace, alone: list[tuple[int, ...]]) -> None:
    with LLM(pair.target, dtype="float32", cache_tokens=1024, profile="off", trace=FULL) as llm:
        expect("the disk is full")
        with pytest.warns(
            UserWarning, match="the observer Trace raised StorageError: cannot write the trace /dev/full"
        ):
            outputs = llm.generate(PROMPTS, GREEDY)
        assert [out.token_ids for out in outputs] == alone
        assert isinstance(llm.trace_error, StorageError)
        check_idle(llm)


def test_a_trace_that_cannot_be_opened_is_refused_before_the_model_is_loaded(
    pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.engine.llm.open_target", Fault(lambda *_: None))
    for path in (tmp_path / "no" / "t.jsonl", tmp_path, "a\0b"):
        with pytest.raises(StorageError, match="cannot write the trace"):
            LLM(pair.target, trace=path)


def test_l1_a_callback_that_raises_leaves_nothing(llm: LLM) -> None:
    for nth in (1, 4):
        with pytest.raises(Injected):
            llm.generate(PROMPTS, [GREEDY] * 8, on_step=Fault(lambda outputs: None, nth=nth))
        check_idle(llm)


@pytest.mark.parametrize("how", ["generate", "claim"])
def test_a_caller_who_is_interrupted_twice_leaves_nothing(
    llm: LLM, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The second interrupt comes while the caller waits for the lock to free its requests: the next user frees them."""

    class Impatient:
        """A lock that is held by the step of another thread, for which nobody waits."""

        def __enter__(self) -> None:
            raise Interrupt("second")

        def __exit__(self, *about: object) -> None: ...

    def interrupt(_: list[StepOutput]) -> None:
        monkeypatch.setattr(llm._turns, "_lock", Impatient())
        raise Interrupt("first")

    with pytest.raises(Interrupt, match="second"):
        llm.generate(PROMPTS[:3], LONG, on_step=interrupt)
    monkeypatch.undo()
    if how == "claim":
        with AsyncEngine(llm) as engine:
            assert engine.submit(PROMPTS[0], GREEDY).result().token_ids == alone[0]
    else:
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == alone[0]
    assert not llm.engine.has_work
    check_idle(llm)


def test_a_call_that_an_async_engine_overtakes_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine opens while the call prepares its request, before anything is queued."""
    prepare, opened = llm.prepare, list[AsyncEngine]()

    def overtaken(spec: SpecConfig) -> None:
        prepare(spec)
        if not opened:
            opened.append(AsyncEngine(llm))

    calls: list[Callable[[], object]] = [
        lambda: llm.generate([PROMPTS[0]], GREEDY),
        lambda: list(llm.stream(PROMPTS[0], GREEDY)),
    ]
    for call in calls:
        with monkeypatch.context() as patched:
            patched.setattr(llm, "prepare", overtaken)
            with pytest.raises(InputError, match="is served by an AsyncEngine"):
                call()
        check_idle(llm)
        assert opened[0].submit(PROMPTS[0], GREEDY).result().finish_reason == "length"
        opened.pop().close()
    assert llm.generate([PROMPTS[0]], GREEDY)[0].finish_reason == "length"


# ---- C6


def test_c6_every_use_of_a_closed_llm_says_so(pair: SimpleNamespace) -> None:
    llm = LLM(pair.target, dtype="float32", cache_tokens=512, profile="off")
    half = llm.stream(PROMPTS[0], GREEDY)
    next(half)
    llm.close()
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: llm.stats,
        lambda: llm.engine,
        lambda: llm.target,
        lambda: llm.generate([PROMPTS[0]]),
        lambda: llm.stream(PROMPTS[0]),
        lambda: list(half),
        llm.step,
        lambda: llm.submit(PROMPTS[0], GREEDY, SpecConfig()),
        lambda: llm.prepare(SpecConfig("ngram")),
        lambda: llm.encode("a"),
        llm.drain_shadow,
        lambda: AsyncEngine(llm),
    ]
    for use in uses:
        with pytest.raises(InputError, match=r"llm=.*: was closed; open it again"):
            use()
    with llm:
        pass
    assert llm.costs.profile is None
    assert llm.trace_error is None


def test_a_finished_stream_of_a_closed_llm_is_over(pair: SimpleNamespace) -> None:
    """Its last piece had come: nothing is missing."""
    llm = LLM(pair.target, dtype="float32", cache_tokens=512, profile="off")
    stream = llm.stream(PROMPTS[0], GREEDY)
    pieces = [next(stream) for _ in range(12)]
    llm.close()
    assert pieces[-1].finish_reason == "length"
    assert list(stream) == []
