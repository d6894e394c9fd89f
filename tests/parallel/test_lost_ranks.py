"""A rank that dies or hangs ends the group with a typed error within its patience, and no process is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from foretoken import LLM, AsyncEngine, EngineConfig, RankError, SamplingParams, SpecConfig
from foretoken.engine.request import GenerateOutput
from foretoken.model.row_kernels import row_kernels
from foretoken.parallel import group
from foretoken.parallel.exchange import LostRankError, RankExchange
from foretoken.parallel.open import LeadModel
from tests.helpers import faulty_rank
from tests.helpers.checkpoints import token_ids, variant
from tests.helpers.deadline import within
from tests.helpers.faulty_rank import Fault

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
DEADLINE_S = 90.0  # of a test that would hang: a group's patience, and a loaded machine


def ranks_of(llm: LLM) -> list[int]:
    assert isinstance(llm.target, LeadModel)
    return llm.target.group.processes


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def opened(pair: SimpleNamespace, **options: object) -> LLM:
    return LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512, tensor_parallel=2, **options)  # type: ignore[arg-type]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(group, "RANK_COMMAND", faulty_rank.COMMAND)
    yield
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(1, "kill", 17), "rank 1 .* was ended by SIGKILL"),
        (Fault(1, "stop", 23), "rank 1 did not answer within 4 s"),
    ],
    ids=["kill", "stop"],
)
def test_a_rank_that_is_lost_in_a_step_ends_all(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faulty: None, fault: Fault, told: str
) -> None:
    """The callers of that step and all later ones get the same error; the failed ranks are gone."""
    monkeypatch.setenv(faulty_rank.VARIABLE, str(tmp_path / "fault"))
    fault.tell(tmp_path / "fault")
    llm = opened(pair)
    pids = ranks_of(llm)
    with within(DEADLINE_S), pytest.raises(RankError, match=told):
        llm.generate([token_ids(9), token_ids(5)], PARAMS)
    assert llm.has_failed
    assert all(map(is_gone, pids))
    with pytest.raises(RankError, match=told):
        llm.generate([token_ids(9)], PARAMS)
    llm.close()


def test_the_death_of_a_rank_may_be_seen_after_its_connection_has_closed(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faulty: None
) -> None:
    watch = group._watch

    def late(one: group._Process, deaths: list[str]) -> None:
        one.running.wait()
        time.sleep(1.0)  # of a loaded machine
        watch(one, deaths)

    monkeypatch.setattr(group, "_watch", late)
    monkeypatch.setenv(faulty_rank.VARIABLE, str(tmp_path / "fault"))
    Fault(1, "kill", 17).tell(tmp_path / "fault")
    with opened(pair) as llm, within(DEADLINE_S), pytest.raises(RankError, match=r"rank 1 .* was ended by SIGKILL"):
        llm.generate([token_ids(9)], PARAMS)


def test_rank_0_without_memory_for_experts_ends_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it exchanges anything. The requests of the step fail at once: without the other ranks none runs again,
    neither alone nor in smaller steps.
    """
    kernels = row_kernels()
    assert kernels is not None
    with opened(SimpleNamespace(target=variant(tmp_path, "qwen3-moe")), weights="int8") as llm:
        llm.generate([token_ids(9)] * 2, PARAMS)
        monkeypatch.setattr(kernels.library, "foretoken_expert_channels", lambda *_: False)
        with (
            within(DEADLINE_S),
            warnings.catch_warnings(action="error"),
            pytest.raises(RankError, match=r"rank 0 left a step .*MemoryError: no memory for the experts of 18 rows"),
        ):
            llm.generate([token_ids(9)] * 2, PARAMS)
        assert llm.has_failed
        assert llm.stats.num_faults == 0


def test_a_lost_group_leaves_no_folder_while_its_processes_end(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which takes a while on a loaded machine; a server's worker ends in that time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    llm = opened(pair)
    assert isinstance(llm.target, LeadModel)
    (one,) = llm.target.group._processes
    waited, kept = one.running.wait, list[Path]()

    def wait(timeout: float | None = None) -> int:
        kept.extend(tmp_path.glob("foretoken-ranks-*"))
        return waited(timeout)

    assert list(tmp_path.glob("foretoken-ranks-*"))
    monkeypatch.setattr(one.running, "wait", wait)
    llm.close()
    assert not kept


def test_a_rank_that_dies_between_steps_is_noticed_without_one(pair: SimpleNamespace) -> None:
    with opened(pair) as llm:
        llm.generate([token_ids(9)], PARAMS)
        assert not llm.has_failed
        os.kill(ranks_of(llm)[0], signal.SIGKILL)
        ends = time.monotonic() + DEADLINE_S
        while not llm.has_failed and time.monotonic() < ends:
            time.sleep(0.01)
        with pytest.raises(RankError, match="SIGKILL"):
            llm.generate([token_ids(9)], PARAMS)


def test_an_engine_for_many_callers_ends_with_its_ranks(pair: SimpleNamespace) -> None:
    """A server's worker looks at `is_running` and ends, so that its supervisor starts another."""

    async def fails(answer: Awaitable[GenerateOutput]) -> None:
        """As the answer's error where it took part in the step, otherwise at once."""
        with pytest.raises(RankError):
            raise (await answer).error or AssertionError("answered")

    async def serve(engine: AsyncEngine) -> None:
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        tickets = [await engine.submit_async(token_ids(9), long) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(ranks_of(engine.llm)[0], signal.SIGKILL)
        for ticket in tickets:
            await fails(ticket.wait())
        with pytest.raises(RankError):  # at once, or, while the engine's thread still ends, as the answer's error
            raise (await (await engine.submit_async(token_ids(9), long)).wait()).error or AssertionError("answered")

    config = EngineConfig(pair.target, SpecConfig(), dtype="float32", cache_tokens=1024, tensor_parallel=2)
    with AsyncEngine(config) as engine:
        asyncio.run(asyncio.wait_for(serve(engine), DEADLINE_S))
        assert not engine.is_running


def test_a_rank_that_cannot_load_its_part_is_told(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "RANK_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with within(DEADLINE_S), pytest.raises(RankError, match="ended with exit code 3"):
        opened(pair)
    monkeypatch.setattr(group, "RANK_COMMAND", (sys.executable, "-c", "print('CheckpointError: gone')"))
    await_loaded = group._await_loaded
    monkeypatch.setattr(group, "_await_loaded", lambda ranks: (ranks[0].running.wait(), await_loaded(ranks)))
    with within(DEADLINE_S), pytest.raises(RankError, match="rank 1 could not load its part: CheckpointError: gone"):
        opened(pair)
    assert torch.get_num_threads() == 1


def test_a_rank_that_reads_another_version_of_the_model_is_refused(
    pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to the model may be moved to its next version before the last rank reads it: parts of two models were
    computed with as one.
    """
    second, started = shutil.copytree(pair.target, tmp_path / "second"), group._started
    monkeypatch.setattr(group, "_started", lambda setup: started(replace(setup, model=str(second))))
    told = "rank 1 could not load its part: CheckpointError: .*second was replaced or written to while"
    with within(DEADLINE_S), pytest.raises(RankError, match=told):
        opened(pair)
    assert torch.get_num_threads() == 1


_USER = """
import json, sys, time
from foretoken import LLM, SamplingParams, SpecConfig
llm = LLM(sys.argv[1], SpecConfig(), dtype="float32", cache_tokens=512, tensor_parallel=2)
print(json.dumps(llm.target.group.processes), flush=True)
llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=240, ignore_eos=True))
"""


def test_no_rank_outlives_rank_0(pair: SimpleNamespace, tmp_path: Path) -> None:
    """Killed in the middle of its steps; the other says so in a line, or ends before it notices. Nor do files."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command, pipe = [sys.executable, "-c", _USER, str(pair.target)], subprocess.PIPE
    with (
        within(DEADLINE_S),
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        pids = json.loads(process.stdout.readline())
        assert list(tmp_path.glob("foretoken-ranks-*"))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        while not all(map(is_gone, pids)):
            time.sleep(0.01)
        assert process.stderr.read() in ("", "rank 1 ends: rank 0 is gone\n")
        assert not list(tmp_path.glob("foretoken-ranks-*"))


@pytest.mark.parametrize("fails", ["send", "recv"])
def test_a_connection_that_is_known_to_be_closed_is_a_lost_rank(fails: str) -> None:
    """Gloo then raises where an operation begins, not where its end is waited for."""

    def raises(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    exchange, done = RankExchange(1, 2, torch.device("cpu")), SimpleNamespace(wait=lambda: None)
    exchange._host = SimpleNamespace(**{"send": lambda *_: done, "recv": lambda *_: done, fails: raises})
    with pytest.raises(LostRankError, match="rank 0 is gone"):
        exchange.all_gather(torch.ones(1, 2))


@pytest.mark.repeated
def test_a_learner_keeps_its_number_of_threads(pair: SimpleNamespace) -> None:
    """It asks for embeddings and logits from a thread with one; passes are computed with the group's number."""
    found, asked = list[int](), torch.tensor([1, 2])
    torch.set_num_threads(4)
    with opened(pair) as llm:
        target = llm.target
        assert isinstance(target, LeadModel)
        assert target.group.num_threads == 2

        def learn() -> None:
            torch.set_num_threads(1)
            target.output_logits(target.embed(asked))
            found.append(torch.get_num_threads())

        thread = threading.Thread(target=learn)
        thread.start()
        thread.join()
        assert found == [1]
        torch.set_num_threads(3)
        llm.generate([token_ids(9)], PARAMS)
        assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


class Ended(KeyboardInterrupt):
    """What the command line raises for SIGTERM and SIGHUP."""


def end(number: int, _frame: object) -> None:
    raise Ended(number)


@pytest.fixture
def ending() -> Iterator[None]:
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        assert signal.signal(number, handler) is end


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([signal.SIGINT], KeyboardInterrupt),
        ([signal.SIGTERM], Ended),
        ([signal.SIGHUP], Ended),
        ([signal.SIGINT, signal.SIGTERM], Ended),
    ],
    ids=["interrupt", "terminate", "hang-up", "both"],
)
def test_an_interrupt_waits_for_the_end_of_a_pass(
    pair: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    ending: None,
    numbers: list[signal.Signals],
    told: type[BaseException],
) -> None:
    """A signal ends the call, not the group: the next one is answered. Torch's threads are divided, and given back."""
    torch.set_num_threads(3)
    with opened(pair) as llm:
        assert torch.get_num_threads() == 1
        expected = llm.generate([token_ids(9)], PARAMS)[0].token_ids
        exchange, seen = llm.target.group.exchange, [0]  # type: ignore[attr-defined]
        parts = exchange._parts

        def interrupted(x: torch.Tensor) -> list[torch.Tensor]:
            seen[0] += 1
            if seen[0] == 20:
                for number in numbers:
                    signal.raise_signal(number)
            return parts(x)  # type: ignore[no-any-return]

        monkeypatch.setattr(exchange, "_parts", interrupted)
        with pytest.raises(told) as raised:
            llm.generate([token_ids(9)], PARAMS)
        assert type(raised.value) is told
        assert llm.generate([token_ids(9)], PARAMS)[0].token_ids == expected
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)


def test_a_rank_waits_for_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a thread that never named one, whose current device is the first."""
    done = mock.Mock()
    done.query.side_effect = [False, True]
    monkeypatch.setattr(torch.cuda, "Event", lambda: done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    exchange = RankExchange(0, 2, torch.device("cuda:1"))
    exchange._fast, exchange._patience_s = mock.Mock(), DEADLINE_S
    exchange.settle()
    done.record.assert_called_once_with(torch.device("cuda:1"))
