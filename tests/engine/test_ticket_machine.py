"""Any sequence of submitting, reading, leaving and closing, with faults in any call of the engine: tickets end, answers
are right, blocks stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule, run_state_machine_as_test

from foretoken import LLM, AsyncEngine, EngineError, GenerateOutput, InputError, SamplingParams, SpecConfig, Ticket
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.faults import Broken, Fault, Injected

PROMPTS = [token_ids(3, seed=1), token_ids(40, seed=2), token_ids(40, seed=2)[:33]]
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=5),
    SamplingParams(max_tokens=80, ignore_eos=True, repetition_penalty=1.3),
]
SPECS = [SpecConfig(), SpecConfig("ngram"), SpecConfig("ngram", num_draft=2)]
# Every call of the engine in turn. A `finish` that does nothing and raises would keep what it holds: it raises when it
# is done.
CALLS = [
    *(
        "_schedule",
        "_propose",
        "_forward",
        "_verify",
        "_commit",
        "_observe",
        "_emit",
        "chooser.plan",
        "chooser.observe",
        "chooser.observe_host",
        "admission.prepare",
    ),
    *(
        "scheduler.schedule",
        "target.open",
        "target.adopt",
        "target.forward",
        "target.commit",
        "drafters.start",
        "drafters.propose",
        "drafters.commit",
    ),
    *("drafter.start", "drafter.look_up", "drafter.propose", "drafter.commit"),
]
ENDINGS = ["drafter.finish", "chooser.finish", "target.close", "release"]
WATCHED = ["begin", "round", "end", "between_steps"]


@dataclass(frozen=True)
class Asked:
    """A ticket, and which answer it is to."""

    ticket: Ticket
    wanted: tuple[int, ...]


class TicketMachine(RuleBasedStateMachine):
    """One `LLM` for all runs; an engine for each, or several one after the other."""

    llm: ClassVar[LLM]
    alone: ClassVar[dict[tuple[int, int], tuple[int, ...]]]
    asked = Bundle("asked")

    @initialize()
    def open(self) -> None:
        self.engine = AsyncEngine(self.llm)
        self.everybody: list[Asked] = []
        self.left: set[Ticket] = set()
        self.patched: list[tuple[object, str]] = []

    @rule(target=asked, prompt=st.sampled_from(range(3)), params=st.sampled_from(range(3)), spec=st.sampled_from(SPECS))
    def submit(self, prompt: int, params: int, spec: SpecConfig) -> Asked:
        try:
            ticket = self.engine.submit(PROMPTS[prompt], PARAMS[params], spec)
        except Injected:  # while it was prepared
            assert self.has_faults
            return multiple()
        self.everybody.append(Asked(ticket, self.alone[prompt, params]))
        return self.everybody[-1]

    @rule(one=asked, num_pieces=st.integers(1, 4))
    def iterate(self, one: Asked, num_pieces: int) -> None:
        """From the first piece on; leaving it leaves the request if nobody else reads it."""
        pieces, tokens = iter(one.ticket), []
        try:
            for _ in range(num_pieces):
                tokens += next(pieces).token_ids
        except StopIteration:
            pass
        except (EngineError, InputError, Injected):
            assert self.has_faults
        pieces.close()  # type: ignore[attr-defined]
        self.left.add(one.ticket)
        assert tuple(tokens) == one.wanted[: len(tokens)]

    @rule(one=asked)
    def result(self, one: Asked) -> None:
        self.check(one)
        self.check(one)

    @rule(one=asked)
    def cancel(self, one: Asked) -> None:
        one.ticket.cancel()
        self.left.add(one.ticket)

    @rule(path=st.sampled_from(CALLS), nth=st.integers(1, 6), after=st.booleans())
    def break_a_call(self, path: str, nth: int, after: bool) -> None:
        self.patch(path, nth, after)

    @rule(path=st.sampled_from(ENDINGS), nth=st.integers(1, 3))
    def break_an_ending(self, path: str, nth: int) -> None:
        self.patch(path, nth, after=True)

    @rule(named=st.sampled_from(WATCHED))
    def break_a_watcher(self, named: str) -> None:
        self.llm.engine.watchers.append(Broken(named))

    @rule()
    def close_and_open(self) -> None:
        self.close()
        self.engine = AsyncEngine(self.llm)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.close()
            for owner, name in self.patched:
                vars(owner).pop(name, None)
            self.llm.engine.watchers.clear()

    def close(self) -> None:
        """Then everybody hears an end, and nothing is held."""
        self.engine.close()
        with pytest.raises(InputError, match="was closed"):
            self.engine.submit(PROMPTS[0])
        self.left |= {one.ticket for one in self.everybody}
        for one in self.everybody:
            assert one.ticket._has_ended
            self.check(one)
        assert not self.engine._requests
        check_idle(self.llm)
        self.llm.target.check()  # type: ignore[attr-defined]

    def patch(self, path: str, nth: int, after: bool) -> None:
        """A fault at the nth call from now on."""
        owner_path, _, name = path.rpartition(".")
        (drafter,) = self.llm.engine.drafters.drafters.values()
        owner: Any = (
            drafter
            if owner_path == "drafter"
            else attrgetter(owner_path)(self.llm.engine)
            if owner_path
            else self.llm.engine
        )
        setattr(owner, name, Fault(getattr(owner, name), nth, after))
        self.patched.append((owner, name))

    @property
    def has_faults(self) -> bool:
        return bool(self.patched)

    def check(self, one: Asked) -> None:
        """Wait for the end: the whole answer, or the beginning of it for a reason."""
        try:
            answer: GenerateOutput = one.ticket.result()
        except (EngineError, Injected):
            assert self.has_faults
            return
        if answer.finish_reason == "length":
            assert answer.token_ids == one.wanted
            return
        assert answer.token_ids == one.wanted[: len(answer.token_ids)]
        assert (answer.finish_reason == "abort" and one.ticket in self.left) or (
            answer.finish_reason == "error" and self.has_faults
        )


@pytest.fixture(scope="module")
def llm(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(
        pair.target, spec=SpecConfig("ngram"), dtype="float32", cache_tokens=1024, max_batch_size=3, profile="off"
    ) as llm:
        yield llm


def test_any_use_with_any_fault(llm: LLM) -> None:
    TicketMachine.llm = llm
    TicketMachine.alone = {
        (p, k): llm.generate([prompt], params)[0].token_ids
        for p, prompt in enumerate(PROMPTS)
        for k, params in enumerate(PARAMS)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(injected|may be lost)", UserWarning)
        run_state_machine_as_test(
            TicketMachine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
        )
