"""A call that raises inside the engine: every other request gets the answer it would have had, and no block is lost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import LLM, AsyncEngine, EngineError, GenerateOutput, SamplingParams, SpecConfig
from foretoken.core import StepOutput
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.faults import Broken, Fault, Injected, Interrupt, expect
from tests.helpers.usual import some_of

pytestmark = pytest.mark.filterwarnings("ignore:.*injected:UserWarning")

# Greedy and seeded, with and without drafting, short prompts and one of several chunks, with processors and prompt
# log-probabilities.
PROMPTS = [token_ids(3 + i, seed=i) for i in range(5)] + [token_ids(70, seed=9), token_ids(70, seed=9)[:40]]
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=5)
PARAMS = [
    GREEDY,
    SEEDED,
    SEEDED,
    SamplingParams(max_tokens=9, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
    SEEDED,
    SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=1),
    GREEDY,
]


@pytest.fixture(scope="module")
def specs(pair: SimpleNamespace) -> list[SpecConfig]:
    draft = SpecConfig("draft_model", str(pair.draft), num_draft=3)
    block = SpecConfig("draft_model", str(pair.draft), num_draft=3, rule="block")
    return [SpecConfig(), SpecConfig("ngram"), block, SpecConfig("ngram", num_draft=2), SpecConfig(), draft, draft]


@pytest.fixture(scope="module")
def llm(pair: SimpleNamespace, specs: list[SpecConfig]) -> Iterator[LLM]:
    with LLM(
        pair.target,
        SpecConfig(),
        dtype="float32",
        cache_tokens=2048,
        max_batch_size=5,
        max_prompt_tokens=32,
        profile="off",
    ) as llm:
        for spec in specs:
            llm.prepare(spec)
        yield llm


@pytest.fixture(scope="module")
def undisturbed(llm: LLM, specs: list[SpecConfig]) -> list[tuple[int, ...]]:
    answers = [out.token_ids for out in llm.generate(PROMPTS, PARAMS, specs)]
    assert answers == [llm.generate([p], one, s)[0].token_ids for p, one, s in zip(PROMPTS, PARAMS, specs, strict=True)]
    return answers


def inject(monkeypatch: pytest.MonkeyPatch, llm: LLM, path: str, **options: Any) -> Fault:
    """A fault in the method that `path` names from the engine on."""
    owner_path, _, name = path.rpartition(".")
    owner = attrgetter(owner_path)(llm.engine) if owner_path else llm.engine
    fault = Fault(getattr(owner, name), **options)
    monkeypatch.setattr(owner, name, fault)
    return fault


def run(llm: LLM, specs: list[SpecConfig], way: str) -> list[GenerateOutput]:
    """All requests together, by `generate` or through tickets; what came in pieces is the answer."""
    if way == "generate":
        pieces: dict[int, list[int]] = {}

        def note(outputs: list[StepOutput]) -> None:
            for output in outputs:
                pieces.setdefault(output.request_id, []).extend(output.token_ids)

        outputs = llm.generate(PROMPTS, PARAMS, specs, on_step=note)
        assert [tuple(pieces[number]) for number in sorted(pieces)] == [out.token_ids for out in outputs]
        return outputs
    with AsyncEngine(llm) as engine:
        tickets = [engine.submit(p, one, s) for p, one, s in zip(PROMPTS, PARAMS, specs, strict=True)]
        outputs = [ticket.result() for ticket in tickets]
        assert all(
            out.error is not None or tuple(t for piece in ticket for t in piece.token_ids) == out.token_ids
            for ticket, out in zip(tickets, outputs, strict=True)
        )
        return outputs


STEP = ("_admit", "_preview", "_schedule", "_propose", "_forward", "_verify", "_commit", "_observe", "_emit")
INSIDE = (
    *(
        "scheduler.schedule",
        "scheduler.rows",
        "chooser.plan",
        "chooser.observe",
        "chooser.observe_host",
        "drafters.propose",
        "drafters.commit",
        "drafters.taps",
    ),
    *("target.open", "target.adopt", "target.forward", "target.commit", "target.publish", "runner.forward"),
)


@pytest.mark.parametrize(
    ("nth", "after"), some_of([(2, False), (2, True), (5, False), (5, True)], {(2, False), (5, True)})
)
@pytest.mark.parametrize("path", [*STEP, *INSIDE])
def test_one_fault_changes_no_answer(
    llm: LLM,
    specs: list[SpecConfig],
    undisturbed: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    nth: int,
    after: bool,
) -> None:
    before = llm.stats.num_faults
    fault = inject(monkeypatch, llm, path, nth=nth, after=after)
    outputs = run(llm, specs, "generate" if nth % 2 else "tickets")
    assert fault.num_raised == 1
    assert [out.token_ids for out in outputs] == undisturbed
    assert {out.finish_reason for out in outputs} == {"length"}
    assert llm.stats.num_faults > before
    assert [len(out.logprobs or ()) for out in outputs] == [0, 0, 0, 9, 0, 0, 0]
    assert len(outputs[5].prompt_logprobs or ()) == len(PROMPTS[5])
    check_idle(llm)


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("ngram", "look_up"),
        ("ngram", "propose"),
        ("ngram", "follow"),
        ("draft_model", "propose"),
        ("draft_model", "commit"),
    ],
)
def test_one_fault_of_a_drafter_changes_no_greedy_or_coupled_answer(
    llm: LLM,
    specs: list[SpecConfig],
    undisturbed: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    when: str,
) -> None:
    """Under another rule a seed draws something else, of the same distribution, where draft tokens are lost."""
    (drafter,) = (one for one in llm.engine.drafters.drafters.values() if one.name == name)
    fault = Fault(getattr(drafter, when), nth=2)
    monkeypatch.setattr(drafter, when, fault)
    outputs = run(llm, specs, "generate")
    alike = [
        (out.token_ids, known)
        for out, known, spec in zip(outputs, undisturbed, specs, strict=True)
        if spec.rule == "auto"
    ]
    assert len(alike) == 6
    assert all(answer == known for answer, known in alike)
    assert {out.finish_reason for out in outputs} == {"length"}
    assert fault.num_raised == 1
    check_idle(llm)


@pytest.mark.parametrize("path", ["_forward", "_commit", "_verify", "_propose"])
@pytest.mark.parametrize("way", ["generate", "tickets"])
def test_who_breaks_every_step_fails_alone(
    llm: LLM,
    specs: list[SpecConfig],
    undisturbed: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    way: str,
) -> None:
    """One request is poison: each step that it takes part in raises."""
    call = getattr(llm.engine, path)

    def poisoned(batch: Any, *others: Any) -> Any:
        if any(
            entry.request.prompt_ids == tuple(PROMPTS[2]) and len(entry.request.prompt_ids) < entry.round_start
            for entry in batch.entries
        ):
            expect("poison")
            raise Injected("injected poison")
        return call(batch, *others)

    monkeypatch.setattr(llm.engine, path, poisoned)
    outputs = run(llm, specs, way)
    failed = outputs[2]
    assert (failed.finish_reason, type(failed.error)) == ("error", EngineError)
    assert isinstance(failed.error.__cause__, Injected)
    assert "injected poison" in str(failed.error)
    assert failed.token_ids == undisturbed[2][: len(failed.token_ids)] != ()
    assert [out.token_ids for out in outputs if out is not failed] == undisturbed[:2] + undisturbed[3:]
    assert [out.finish_reason for out in outputs if out is not failed] == ["length"] * 6
    check_idle(llm)


def test_a_target_that_is_broken_for_good_fails_everybody_and_nothing_stays(
    llm: LLM, specs: list[SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("target.forward", "target.open"):
        with monkeypatch.context() as patch:
            inject(patch, llm, path, once=False)
            outputs = run(llm, specs, "generate")
            assert {out.finish_reason for out in outputs} == {"error"}
        check_idle(llm)


@pytest.mark.parametrize("what", ["text", "processors", "noise", "structure"])
def test_a_fault_of_one_request_is_its_own(
    llm: LLM, specs: list[SpecConfig], undisturbed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its detokeniser, its processors, its noise: it alone fails, at once, and no step runs again."""
    prepare, culprit = llm.engine.admission.prepare, {"text": 0, "processors": 3, "noise": 1, "structure": 3}[what]

    def prepared(prompt: Any, *arguments: Any) -> Any:
        state = prepare(prompt, *arguments)
        if tuple(prompt) == tuple(PROMPTS[culprit]):
            owner, name = {
                "text": (state.text, "push"),
                "processors": (state.processors, "adjust"),
                "noise": (state.noise, "rows"),
                "structure": (state.processors, "commit"),
            }[what]
            monkeypatch.setattr(owner, name, Fault(getattr(owner, name), nth=3, once=False))
        return state

    monkeypatch.setattr(llm.engine.admission, "prepare", prepared)
    preempted = llm.stats.num_preempted
    outputs = run(llm, specs, "generate")
    assert [out.finish_reason for out in outputs] == [
        "error" if i == culprit else "length" for i in range(len(PROMPTS))
    ]
    failed = outputs[culprit]
    assert isinstance(failed.error, EngineError)
    assert isinstance(failed.error.__cause__, Injected)
    assert len(failed.token_ids) == len(failed.provenance) == failed.stats.num_emitted > 0
    assert failed.logprobs is None or len(failed.logprobs) == len(failed.token_ids)
    assert [out.token_ids for i, out in enumerate(outputs) if i != culprit] == [
        ids for i, ids in enumerate(undisturbed) if i != culprit
    ]
    assert llm.stats.num_preempted == preempted
    check_idle(llm)


@pytest.mark.parametrize("path", ["scheduler.remove", "target.close", "chooser.finish", "scheduler.publish"])
def test_what_raises_when_a_request_ends_keeps_nothing_else(
    llm: LLM, specs: list[SpecConfig], undisturbed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    inject(monkeypatch, llm, path, after=True)
    assert [out.token_ids for out in run(llm, specs, "generate")] == undisturbed
    check_idle(llm)


def test_h3_a_drafter_whose_finish_raises_costs_no_answer(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512, profile="off") as llm,
        AsyncEngine(llm) as engine,
    ):
        llm.prepare(SpecConfig("ngram"))
        (drafter,) = llm.engine.drafters.drafters.values()
        monkeypatch.setattr(drafter, "finish", Fault(drafter.finish, after=True, once=False))
        tickets = [engine.submit(PROMPTS[i], GREEDY, SpecConfig("ngram")) for i in range(3)]
        assert {len(ticket.result().token_ids) for ticket in tickets} == {9}


def test_l1_a_request_that_cannot_be_started_leaves_nothing(
    llm: LLM, specs: list[SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two: then neither runs."""
    for path, kind in (
        ("drafters.start", Injected),
        ("scheduler.add", Injected),
        ("drafters.start", Interrupt),
        ("scheduler.add", Interrupt),
    ):
        for after in (False, True):
            with monkeypatch.context() as patch:
                inject(patch, llm, path, nth=2, after=after, kind=kind)
                with pytest.raises(EngineError if kind is Injected else Interrupt, match="injected"):
                    llm.generate(PROMPTS[:2], GREEDY)
            check_idle(llm)


@pytest.mark.parametrize("path", [*INSIDE, "_emit", "scheduler.add", "drafters.start", "release", "take_outputs"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_goes_through_and_leaves_nothing(
    llm: LLM,
    specs: list[SpecConfig],
    undisturbed: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    after: bool,
) -> None:
    with monkeypatch.context() as patch:
        inject(patch, llm, path, nth=3, after=after, kind=Interrupt)
        with pytest.raises(Interrupt):
            llm.generate(PROMPTS, PARAMS, specs)
    check_idle(llm)
    assert llm.generate(PROMPTS[:1], PARAMS[:1], specs[:1])[0].token_ids == undisturbed[0]


@pytest.mark.parametrize("path", [*STEP, *INSIDE])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_of_one_costs_nobody_else(
    llm: LLM,
    specs: list[SpecConfig],
    undisturbed: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    after: bool,
) -> None:
    """Requests of another caller share the step that is interrupted; they are run on by whoever steps next, and their
    pieces are whole.
    """
    stream = llm.stream(PROMPTS[2], PARAMS[2], specs[2])
    pieces = [next(stream)]
    with monkeypatch.context() as patch:
        inject(patch, llm, path, nth=2, after=after, kind=Interrupt)
        with pytest.raises(Interrupt):
            llm.generate(PROMPTS[:2], PARAMS[:2], specs[:2])
    pieces += stream
    assert tuple(token for piece in pieces for token in piece.token_ids) == undisturbed[2]
    assert pieces[-1].finish_reason == "length"
    check_idle(llm)


# ---- who looks on


@pytest.mark.parametrize("named", ["begin", "round", "end", "between_steps"])
@pytest.mark.parametrize("way", ["generate", "tickets"])
def test_l1_a_watcher_that_raises_is_taken_off(
    llm: LLM, specs: list[SpecConfig], undisturbed: list[tuple[int, ...]], named: str, way: str
) -> None:
    broken, sound = Broken(named), Broken()
    llm.engine.watchers += [broken, sound]
    try:
        with pytest.warns(
            UserWarning,
            match=f"the observer Broken raised Injected: injected into {named}; it is removed, and generation",
        ):
            outputs = run(llm, specs, way)
        assert [watcher for watcher in llm.engine.watchers if isinstance(watcher, Broken)] == [sound]
        assert (broken.is_closed, sound.is_closed) == (True, False)
    finally:
        llm.engine.watchers.clear()
    assert [out.token_ids for out in outputs] == undisturbed
    check_idle(llm)


def test_a_watcher_that_cannot_even_be_closed(pair: SimpleNamespace) -> None:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512, profile="off") as llm:
        llm.engine.watchers += [Broken("round", "close"), Broken("close")]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 9
            llm.close()
    assert ["observer Broken" in str(one.message) for one in told] == [True, True, True]


def test_a_watcher_may_leave_requests_but_not_run_steps(llm: LLM, undisturbed: list[tuple[int, ...]]) -> None:
    class Leaving(Broken):
        def round(self, view: Any) -> None:
            if view.entry.request.prompt_ids == tuple(PROMPTS[1]):
                llm.engine.abort(view.output.request_id)

    class Stepping(Broken):
        def round(self, view: Any) -> None:
            llm.step()

    llm.engine.watchers += [Leaving(), Stepping()]
    expect("a step in a step")
    try:
        with pytest.warns(
            UserWarning, match="observer Stepping raised EngineError: a step was asked for while one runs"
        ):
            first, second = llm.generate(PROMPTS[:2], [GREEDY, SEEDED])
        assert sum(isinstance(watcher, Broken) for watcher in llm.engine.watchers) == 1
    finally:
        llm.engine.watchers.clear()
    assert first.token_ids == undisturbed[0]
    assert (second.finish_reason, second.token_ids) == ("abort", undisturbed[1][:1])
    check_idle(llm)
