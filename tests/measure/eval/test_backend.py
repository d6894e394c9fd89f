"""Evaluation of another engine: what it reports is counted, what it does not report stays unknown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, InputError, SpecConfig
from foretoken.backend.answering import SERVED, Answer, Capabilities, Drafting, Question
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.measure.asked import BackendSource
from foretoken.measure.eval.compare import check_comparable, compare
from foretoken.measure.eval.counts import AnswerCounts, reported_counts
from foretoken.measure.eval.options import BackendEvalOptions
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.measure.eval.report import eval_report
from foretoken.measure.eval.result import BACKEND_SCHEMA, EvalResult, read_result, rows_of, write_result
from foretoken.measure.eval.run import BackendEvalRun
from foretoken.measure.report import markdown
from foretoken.server.api.app import create_app
from tests.measure.endpoint import Fake, serving, tokens
from tests.server.serving import served

ANSWER = Answer((), "text", num_emitted=12, decode_tokens=11, decode_s=1.0)
PROMPTS = [EvalPrompt(f"p{i}", "ab"[i % 2], f"text {i}") for i in range(12)]
CAN = Capabilities(False, False, True, False, "total", conversations=False)


@dataclass
class Scripted:
    """An engine without a model: each answer drafts 8 tokens, of which `num_accepted` are accepted."""

    capabilities: Capabilities = CAN
    num_accepted: int = 4
    reports: bool = True
    counts: bool = False
    report: Mapping[str, Any] = field(default_factory=dict)
    name: str = "scripted"
    asked: list[tuple[Question, Drafting]] = field(default_factory=list)
    num_resets: int = 0

    def version(self) -> str:
        return "1"

    def draftings(
        self, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int] | None = None
    ) -> Sequence[Drafting]:
        return [Drafting("lookup", number) for number in (None, *num_drafts)] + [Drafting("tree")]

    def notes(self) -> Sequence[str]:
        return ("a note of the engine",)

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        self.asked.append((question, drafting))
        counts = {"num_drafted": 8, "num_accepted": self.num_accepted} if self.reports else {}
        return replace(ANSWER, **counts, **self.report)  # type: ignore[arg-type]

    def counters(self) -> Mapping[str, float] | None:
        if not self.counts:
            return None
        return {"drafted": 8.0 * len(self.asked), "accepted": float(self.num_accepted * len(self.asked))}

    def reset(self) -> None:
        self.num_resets += 1

    def close(self) -> None:
        """Nothing to free."""


def options(**changes: Any) -> BackendEvalOptions:
    return BackendEvalOptions(BackendSource("http://test", served_model="m"), **changes)


def run_of(backend: Scripted, prompts: Sequence[EvalPrompt] = PROMPTS, **changes: Any) -> BackendEvalRun:
    return BackendEvalRun(options(**changes), prompts, "foretoken eval", backend)


def result_of(backend: Scripted, **changes: Any) -> EvalResult:
    run = run_of(backend, **changes)
    run.run()
    return run.result()


def stored(result: EvalResult, path: Path) -> EvalResult:
    write_result(result.as_dict(rows_of(result)), path)
    return read_result(path)


# ---- what is counted of an answer


def test_positions_that_are_reported_are_counted() -> None:
    answer = replace(ANSWER, num_steps=6, positions=((5, 4), (5, 3), (4, 1)))
    assert reported_counts(answer, 14, 8) == AnswerCounts(6, None, 14, 8, 12, reached=[5, 4, 3], passed=[4, 3, 1])
    shorter = replace(answer, positions=((5, 4), (2, 2)))
    assert reported_counts(shorter, 7, 6).reached == [5, 2]  # at most as often as something was drafted there
    tree = replace(answer, positions=((12, 4), (12, 3)))
    assert reported_counts(tree, 24, 7).reached == [6, 4]  # several tokens of a step stand at one place


def test_totals_leave_the_rest_unknown() -> None:
    counts = reported_counts(ANSWER, 8, 4)
    assert counts == AnswerCounts(None, None, 8, 4, 12)
    assert not counts.has_positions
    decoding = reported_counts(replace(ANSWER, decode_steps=5), 8, 4)
    assert (decoding.num_rounds, decoding.num_emitted) == (5, 11)  # without the prompt's own pass
    nothing = reported_counts(ANSWER, 0, 0)
    assert (nothing.num_drafts, nothing.has_positions) == (0, True)


# ---- runs


def test_totals_are_measured_and_positions_are_said_to_be_unknown(tmp_path: Path) -> None:
    backend = Scripted()
    result = result_of(backend)
    assert [(cell.drafter, cell.slice, cell.temperature) for cell in result.cells][:3] == [
        ("lookup-5", "a", 0.0),
        ("lookup-5", "b", 0.0),
        ("lookup-5", "a", 0.8),
    ]
    assert {cell.drafter for cell in result.cells} == {"lookup-5", "tree"}
    assert (backend.num_resets, len(backend.asked)) == (48, 48)
    seeds = {question.seed for question, _ in backend.asked if question.temperature}
    assert (len(seeds), None in seeds) == (12, False)
    row = rows_of(result)[0]
    assert (row["num_drafted"], row["num_accepted"], row["acceptance_rate"]) == (48, 24, 0.5)
    unknown = ("num_rounds", "num_drafts", "accepted_per_draft", "emitted_per_step", "positions", "accepted_at_length")
    assert [row[name] for name in unknown] == [None] * 6
    page = markdown(eval_report(result, rows_of(result), None))
    assert "| lookup-5 | a | 0 | not reported | - | - |" in page
    assert "a note of the engine" in page
    written = stored(result, tmp_path / "a.json")
    assert written == replace(result, samples=written.samples, options=written.options, notes=written.notes)
    assert list(written.samples) == list(result.samples)
    assert result.as_dict([])["schema"] == BACKEND_SCHEMA
    assert result.identity == {"backend": {"name": "scripted", "version": "1", "model": ""}}


def test_counters_are_read_around_each_answer_slice_by_slice() -> None:
    backend = Scripted(replace(CAN, draft_counts="none"), reports=False, counts=True)
    result = result_of(backend, drafters=("tree",), temperatures=(0.0,))
    assert [sample.counts.num_drafted for sample in result.samples] == [8] * 12
    assert [sample.slice for sample in result.samples] == ["a"] * 6 + ["b"] * 6
    assert "differences of the engine's counters" in " ".join(result.notes)


@pytest.mark.parametrize(("promised", "num_asked"), [("total", 12), ("none", 1)])
def test_an_engine_that_reports_nothing_cannot_be_evaluated(promised: Any, num_asked: int) -> None:
    backend = Scripted(replace(CAN, draft_counts=promised), reports=False)
    run = run_of(backend, drafters=("tree",), temperatures=(0.0,))
    with pytest.raises(InputError, match="backend='scripted': reports no drafted and accepted tokens"):
        run.run()
    assert (run.samples, len(backend.asked)) == ([], num_asked)


def test_an_interrupted_evaluation_goes_on(tmp_path: Path) -> None:
    @dataclass
    class Ends(Scripted):
        most: int = 7

        def answer(self, question: Question, drafting: Drafting) -> Answer:
            if len(self.asked) == self.most:
                raise KeyboardInterrupt
            self.reports = question.text != "text 0"
            return super().answer(question, drafting)

    asked = {"drafters": ("tree",), "temperatures": (0.0, 0.5), "resume": tmp_path / "kept.jsonl"}
    with pytest.raises(KeyboardInterrupt):
        result_of(Ends(), **asked)
    last = Ends(most=99)
    resumed = result_of(last, **asked)
    assert len(last.asked) == 24 - 7
    whole = result_of(Ends(most=99), **asked | {"resume": None})
    assert (resumed.samples, resumed.notes, resumed.complete) == (whole.samples, whole.notes, True)
    assert "2 answers came without counts" in resumed.notes[-1]
    with pytest.raises(InputError, match="was measured with max_tokens=64"):
        result_of(Ends(), **asked | {"max_tokens": 9})


def test_an_answer_without_a_word_on_drafts_drafted_nothing() -> None:
    class Sometimes(Scripted):
        def answer(self, question: Question, drafting: Drafting) -> Answer:
            self.reports = question.text != "text 0"
            return super().answer(question, drafting)

    result = result_of(Sometimes(), drafters=("tree",), temperatures=(0.0,))
    assert [sample.counts.num_drafted for sample in result.samples] == [0, *[8] * 11]
    assert "1 answers came without counts of drafts" in result.notes[-1]


@pytest.mark.parametrize("counts", [True, False])
def test_a_llama_cpp_server_that_never_drafted_counts_nothing(counts: bool) -> None:
    """It leaves `draft_n` out of an answer for which nothing was drafted."""
    series = "".join(f"llamacpp:spec_decode_num_{name}_tokens_total 0\n" for name in ("draft", "accepted"))
    fake = Fake(owner="llamacpp", metrics=lambda: series if counts else "llamacpp:requests_processing 0\n")
    fake.answer = lambda _number, _body: tokens("a", "b", timings={"predicted_n": 4})
    with serving(fake):
        asked = BackendEvalOptions(BackendSource(fake.url), temperatures=(0.0,))
        with asked.source.open() as backend:
            run = BackendEvalRun(asked, PROMPTS, "foretoken eval", backend)
            if not counts:
                with pytest.raises(InputError, match="reports no drafted and accepted tokens; acceptance cannot"):
                    run.run()
                return
            run.run()
    assert [(one.counts.num_drafted, one.counts.num_emitted) for one in run.samples] == [(0, 4)] * len(PROMPTS)
    rows = rows_of(run.result())
    assert (rows[0]["acceptance_rate"], run.num_silent) == (None, 0)
    assert "served" in markdown(eval_report(run.result(), rows, None))


def test_a_price_times_answers_and_asks_plainly_too() -> None:
    """A plain answer of 12 tokens takes 4 s, one with drafts 2 s; an engine that always drafts has no price before."""

    class Timed(Scripted):
        def answer(self, question: Question, drafting: Drafting) -> Answer:
            return replace(super().answer(question, drafting), e2e_s=4.0 if drafting.kind is None else 2.0)

    backend = Timed(replace(CAN, plain=True))
    run = run_of(backend, drafters=("tree",), temperatures=(0.0,), price_per_hour=36.0)
    told: list[str] = []
    run.run(told.append)
    assert set(told) == {"plain", "tree"}
    found = {
        (row.place, row.setting): (row.tokens_per_s, row.price_per_million_tokens, row.change) for row in run.prices()
    }
    before, after = (3.0, pytest.approx(0.01 / 3.0 * 1e6), None), (6.0, pytest.approx(0.01 / 6.0 * 1e6), -0.5)
    assert found == {(f"{s}, 0", name): cell for s in "ab" for name, cell in (("plain", before), ("tree", after))}
    first = [drafting.kind for _, drafting in backend.asked[::2]]
    assert first == ["tree", None] * 6
    result = run.result()
    assert (result.complete, {one.drafter for one in result.samples}) == (True, {"tree"})
    page = markdown(eval_report(result, rows_of(result), None, run.prices()))
    assert "| a, 0 | tree | 6 | 1.67e+03 | -50% |" in page
    always = run_of(Timed(), drafters=("tree",), temperatures=(0.0,), price_per_hour=36.0)
    always.run()
    assert {(row.setting, row.change) for row in always.prices()} == {("tree", None)}
    assert run_of(Timed(replace(CAN, plain=True)), drafters=("tree",)).prices() == ()


def test_a_price_at_a_deadline_counts_the_tokens_of_answers_in_time() -> None:
    """A plain answer takes 0.3 s a token behind its first, one with drafts 0.1 s."""

    class Timed(Scripted):
        def answer(self, question: Question, drafting: Drafting) -> Answer:
            gap_s = 0.3 if drafting.kind is None else 0.1
            return replace(super().answer(question, drafting), e2e_s=2.0, decode_s=11 * gap_s, decode_tokens=11)

    run = run_of(
        Timed(replace(CAN, plain=True)), drafters=("tree",), temperatures=(0.0,), price_per_hour=36.0, slo_ms=200.0
    )
    run.run()
    found = {(row.setting, row.price_per_million_tokens is None, row.change) for row in run.prices()}
    assert found == {("plain", True, None), ("tree", False, None)}
    result = run.result()
    page = markdown(eval_report(result, rows_of(result), None, run.prices()))
    assert "| a, 0 | plain | 0 | never in time |" in page
    assert "Answers with more than 200 ms between two tokens are paid for" in page
    with pytest.raises(InputError, match="give price_per_hour too"):
        run_of(Timed(CAN), drafters=("tree",), slo_ms=200.0)


def test_what_the_engine_cannot_be_asked_is_refused_by_name() -> None:
    silent = replace(CAN, sampling=False)
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    cases: list[tuple[Scripted, dict[str, Any], str]] = [
        (
            Scripted(),
            {"drafters": ("eagle",)},
            r"drafters='eagle': scripted drafts otherwise; choose from lookup, tree",
        ),
        (Scripted(), {"temperatures": ()}, r"temperatures=.*: give at least one; 0 is greedy"),
        (Scripted(silent), {"temperatures": (0.0, 0.5)}, "temperatures=0.5: scripted does not sample by a seed"),
        (Scripted(), {"chat": True}, "chat='p0': scripted renders no conversations"),
        (Scripted(), {"prompts": [EvalPrompt("i", "s", (1, 2))]}, "it takes no token ids"),
        (Scripted(), {"prompts": [EvalPrompt("i", "s", (called,))]}, "tools and tool calls are not replayed"),
        (Scripted(), {"prompts": [EvalPrompt("m", "s", ({"role": "user", "content": "a"},))]}, "renders no"),
        (Scripted(), {"prompts": [EvalPrompt("m", "s", ({"role": "user", "content": [1]},))]}, "content is a text"),
    ]
    for backend, changes, message in cases:
        with pytest.raises(InputError, match=message):
            run_of(backend, **changes)
    assert {cell.temperature for cell in result_of(Scripted(silent)).cells} == {0.0}


def test_conversations_and_predictions_are_passed_on() -> None:
    backend = Scripted(replace(CAN, conversations=True))
    prompts = [
        EvalPrompt("m", "s", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})),
        EvalPrompt("t", "s", "text", prediction="expected"),
    ]
    run = run_of(backend, prompts, drafters=("tree",), temperatures=(0.0,), chat=True)
    run.run()
    found = [(question.messages, question.text, question.prediction) for question, _ in backend.asked]
    assert found == [((("user", "a"), ("assistant", "b")), "", None), ((("user", "text"),), "", "expected")]


def test_results_of_two_engines_are_compared(tmp_path: Path) -> None:
    before = stored(result_of(Scripted(num_accepted=6)), tmp_path / "a.json")
    other = Scripted(num_accepted=3, name="other")
    after = result_of(other)
    check_comparable(before, after.settings, ["tree"], ["a"])
    found = compare(before, after, 0.05)
    assert {one.outcome for one in found.lost} == {"lost"}
    assert len(found.lost) == 8
    assert found.changed == ["backend: name (scripted -> other)"]
    with pytest.raises(InputError, match="acceptance depends on rule"):
        check_comparable(before, {"rule": "auto"}, ["tree"], ["a"])


# ---- our server


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    spec = SpecConfig("ngram", num_draft=4)
    with LLM("reference:target", spec, dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        yield engine


def test_a_server_reports_what_the_engine_counted(engine: AsyncEngine) -> None:
    prompts = [EvalPrompt("p", "code", "def a():\n    return 1\n\n\ndef b():\n    return 1\n\n\ndef c():\n")]
    with served(create_app(LocalBackend(engine, "reference"))) as url:
        asked = BackendEvalOptions(BackendSource(url), max_tokens=24)
        with asked.source.open() as backend:
            run = BackendEvalRun(asked, prompts, "foretoken eval", backend)
            run.run()
            result = run.result()
    stats = engine.llm.stats
    assert [cell.drafter for cell in result.cells] == [SERVED, SERVED]
    assert sum(sample.counts.num_drafted for sample in result.samples) == stats.num_drafted > 0
    assert sum(sample.counts.num_accepted for sample in result.samples) == stats.num_accepted > 0
    assert result.identity["backend"]["model"] == "reference"
    assert result.identity["backend"]["version"].startswith("foretoken ")
    assert rows_of(result)[0]["emitted_per_step"] > 1
