"""Audits of other engines: a sound one passes, planted errors are found, what cannot be asked is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken import LLM, ForetokenError, InputError, SpecConfig
from foretoken.backend.answering import Answer, Drafting, Question
from foretoken.backend.http import HttpBackend
from foretoken.backend.local import LocalBackend
from foretoken.backend.local_answers import LocalAnswers
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.shadow.sequential_test import Evidence
from foretoken.measure.asked import BackendSource
from foretoken.measure.audit.backend import _NO_IDS, not_asked
from foretoken.measure.audit.checks import AS_PLAIN
from foretoken.measure.audit.distribution import judged
from foretoken.measure.audit.judge import Judge
from foretoken.measure.audit.options import BackendAuditOptions, ChatPrompt, Prompt
from foretoken.measure.audit.run import audit_report, run_backend_audit
from foretoken.measure.checks import Check, failed
from foretoken.measure.report import Report
from foretoken.server.api.app import create_app
from tests.helpers.outside import NAME, Answering, Outside, register
from tests.server.serving import served

TARGET = "reference:target"
PROMPTS: list[Prompt] = [
    "def a():\n    return 1\n\n\ndef b():\n    return 1\n\n\ndef c():\n",
    "import os\nimport sys\nimport os\nimport",
    "class A:\n    def read(self):\n        return self.read()\n\n    def write(self",
    '{"name": "one", "value": 1, "name": "two", "value":',
]
PLAIN, CHOICE = "the same answers as plain decoding", "every token is the target's choice"
AGAIN, SEEDS = "the same answer again", "equal seeds, equal answers"
WHOLE, FIRST = "distribution", "distribution of first tokens"
LAW = {"only possible tokens", "sharpness", "ranks"}
INSIDE = {"distribution: no bias by the draft", "logits do not depend on the batch", "all cache is released"}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalAnswers]:
    with LLM(TARGET, SpecConfig(), dtype="float32", profile="off", cache_tokens=4096) as llm:
        yield LocalAnswers(llm)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Our server, which drafts by `ngram` unless a request says otherwise."""
    spec = SpecConfig("ngram", num_draft=4)
    with (
        LLM(TARGET, spec, dtype="float32", profile="off", cache_tokens=8192) as llm,
        AsyncEngine(llm) as engine,
        served(create_app(LocalBackend(engine, "reference"))) as url,
    ):
        yield url


def audit(backend: str = NAME, **changes: Any) -> Report:
    settings: dict[str, Any] = {"num_prompts": 4, "max_tokens": 24, "num_seeds": 64, "temperatures": (0.0, 0.8)}
    settings |= {"target": TARGET, "dtype": "float32", "cache_tokens": 4096} | changes
    source = BackendSource(backend, None if backend.startswith("http") else TARGET)
    return run_backend_audit(BackendAuditOptions(source, **settings), PROMPTS, "foretoken audit")


def checks_of(report: Report) -> tuple[Check, ...]:
    found: tuple[Check, ...] = report.results["checks"]
    return found


def results(report: Report) -> dict[str, set[str]]:
    """The results of each check by its name."""
    found: dict[str, set[str]] = {}
    for check in checks_of(report):
        found.setdefault(check.name, set()).add(check.result)
    return found


def failures(report: Report) -> set[str]:
    return {check.name for check in failed(checks_of(report))}


def check_of(report: Report, name: str, result: str = "not asked") -> Check:
    return next(check for check in checks_of(report) if (check.name, check.result) == (name, result))


# ---- sound engines


def test_our_server_passes_all_that_it_can_be_asked(address: str) -> None:
    report = audit(address, num_prompts=8, max_tokens=40, num_seeds=160)  # fewer leave a law undecided
    assert failed(checks_of(report)) == (), [str(check) for check in failed(checks_of(report))]
    assert results(report) == {
        **{name: {"pass"} for name in (PLAIN, CHOICE, AGAIN, SEEDS)},
        **{f"{name}: {law}": {"pass"} for name in (WHOLE, FIRST) for law in LAW},
        **{name: {"not asked"} for name in INSIDE},
    }
    assert [check.where for check in checks_of(report) if check.name == AGAIN] == [
        "temperature 0, served, alone",
        "temperature 0, served, among others",
    ]
    assert check_of(report, f"{WHOLE}: only possible tokens", "pass").num_tokens == 8 * 40
    assert check_of(report, f"{FIRST}: ranks", "pass").num_tokens == 160
    levels = [float(check.demanded[5:]) for check in checks_of(report) if check.demanded.startswith("p >= ")]
    assert sum(levels) == pytest.approx(1e-4, rel=0.05)
    assert report.verdict.endswith("; 3 could not be asked")
    assert report.versions[address].startswith("foretoken ")


def test_an_engine_of_texts_is_judged_by_its_texts(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Outside(engine, limits={"token_ids": False}))
    report = audit(num_seeds=48)
    assert failed(checks_of(report)) == (), [str(check) for check in failed(checks_of(report))]
    found = results(report)
    assert {found[name] == {"pass"} for name in (PLAIN, CHOICE, SEEDS)} == {True}
    assert found[WHOLE] == {"not asked"}
    assert found[f"{FIRST}: sharpness"] == {"pass"}
    assert found[AGAIN] == {"pass", "not asked"}
    assert check_of(report, AGAIN).found == "outside takes one at a time"


def test_two_engines_are_compared(address: str, engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Outside(engine, limits={"plain": False})
    register(monkeypatch, backend)
    report = audit(against=BackendSource(address), temperatures=(0.0,))
    assert failed(checks_of(report)) == ()
    assert check_of(report, f"the same answers as {address}", "pass").num_tokens == 4 * 24
    assert all(drafting == Drafting("lookup", 5) for _, drafting in backend.asked)


def test_plain_answers_without_a_text_are_compared_with_nothing(
    engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's plain answers are times alone."""

    def silent(ask: Answering, question: Question, drafting: Drafting) -> Answer:
        found = ask(question)
        return found if drafting.kind is not None else replace(found, token_ids=(), text="")

    backend = Outside(engine, silent, limits={"plain_texts": False})
    register(monkeypatch, backend)
    report = audit(temperatures=(0.0,))
    assert failed(checks_of(report)) == ()
    assert "shows no text" in check_of(report, AS_PLAIN, "not asked").found
    assert {drafting.kind for _, drafting in backend.asked} == {"lookup"}


def test_tokens_are_counted_where_texts_alone_are_known(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Outside(engine, lambda ask, question, _: replace(ask(question), token_ids=())))
    check = next(one for one in checks_of(audit(target=None, temperatures=(0.0,))) if one.name == AGAIN)
    assert (check.result, check.num_tokens) == ("pass", 4 * 24)


def test_a_test_without_enough_tokens_has_no_chance() -> None:
    found = [check.found for check in judged(Evidence(), "", 1e-4) if check.result == "undecided"]
    assert found
    assert not any("p = " in one or one.startswith(",") for one in found)


# ---- broken engines


def altered(answer: Answer, place: int = 19) -> Answer:
    """An answer with another token, and another letter in its text."""
    ids = list(answer.token_ids)
    ids[place] = 5 if ids[place] != 5 else 6
    middle = len(answer.text) // 2
    letter = "x" if answer.text[middle] != "x" else "y"
    return replace(answer, token_ids=tuple(ids), text=answer.text[:middle] + letter + answer.text[middle + 1 :])


def one_token_in_fifty(ask: Answering, question: Question, drafting: Drafting) -> Answer:
    answer = ask(question)
    return altered(answer) if drafting.kind is not None and len(answer.token_ids) > 20 else answer


@pytest.mark.parametrize("token_ids", [True, False], ids=["ids", "texts"])
def test_one_other_token_is_found(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch, token_ids: bool) -> None:
    register(monkeypatch, Outside(engine, one_token_in_fifty, {"token_ids": token_ids}))
    assert failures(audit(temperatures=(0.0,))) == {PLAIN, CHOICE}
    report = audit(temperatures=(0.0,), target=None, dtype="auto", cache_tokens=None)
    assert failures(report) == {PLAIN}
    assert check_of(report, CHOICE).found == "no target to judge by; give --target"
    detail = check_of(report, PLAIN, "fail").detail
    assert ("token 19" if token_ids else "character ") in detail
    assert detail.endswith("give --target: its logits tell near ties from errors")


@pytest.mark.parametrize(
    "token_ids", [pytest.param(True, id="ids"), pytest.param(False, marks=pytest.mark.repeated, id="texts")]
)
def test_another_temperature_is_found(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch, token_ids: bool) -> None:
    def warm(ask: Answering, question: Question, _: Drafting) -> Answer:
        return ask(replace(question, temperature=1.8 * question.temperature))

    register(monkeypatch, Outside(engine, warm, {"token_ids": token_ids}))
    found = failures(audit(num_seeds=96, temperatures=(0.8,)))
    assert f"{FIRST}: sharpness" in found
    assert (f"{WHOLE}: sharpness" in found) == token_ids
    assert {name.split(": ")[0] for name in found} <= {WHOLE, FIRST}


def test_an_engine_that_forgets_its_seeds_is_found(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(1000, 9999))

    def other(ask: Answering, question: Question, _: Drafting) -> Answer:
        return ask(replace(question, seed=next(seeds))) if question.temperature else ask(question)

    register(monkeypatch, Outside(engine, other))
    assert failures(audit(num_seeds=24)) == {SEEDS}


def test_an_engine_that_changes_its_mind_is_found(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: set[str] = set()

    def later(ask: Answering, question: Question, drafting: Drafting) -> Answer:
        if drafting.kind is None or question.text not in answered:
            answered.add(question.text)
            return ask(question)
        return altered(ask(question))

    register(monkeypatch, Outside(engine, later))
    assert AGAIN in failures(audit(temperatures=(0.0,)))


def test_a_server_that_answers_otherwise_among_others_is_found(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, running = HttpBackend.answer, set[object]()

    def confused(self: HttpBackend, question: Question, drafting: Drafting) -> Answer:
        mark = object()
        running.add(mark)
        try:
            found = answer(self, question, drafting)
            return altered(found) if len(running) > 1 else found
        finally:
            running.discard(mark)

    monkeypatch.setattr(HttpBackend, "answer", confused)
    report = audit(address, temperatures=(0.0,))
    assert [(check.name, check.where) for check in failed(checks_of(report))] == [
        (AGAIN, "temperature 0, served, among others")
    ]


def test_an_answer_that_fails_fails_its_check(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ask: Answering, question: Question, _: Drafting) -> Answer:
        if question.temperature:
            raise ForetokenError("no whole answer")
        return ask(question)

    register(monkeypatch, Outside(engine, broken))
    report = audit()
    assert failures(report) == {"distribution", "equal seeds"}
    assert failed(checks_of(report))[0].found == "the engine failed: no whole answer"


# ---- what cannot be asked


def test_an_audit_without_a_check_that_could_be_made_has_no_verdict() -> None:
    options = BackendAuditOptions(BackendSource(NAME))
    nothing = audit_report(options, (not_asked("distribution", "", "no"),), "")
    assert not nothing.passed
    assert nothing.verdict.startswith("No verdict: no check could be made; ")


def test_ids_that_were_to_come_and_did_not_leave_the_other_checks(
    engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a vLLM whose version does not know `return_token_ids`."""
    register(monkeypatch, Outside(engine, lambda ask, question, _: replace(ask(question), token_ids=())))
    report = audit(temperatures=(0.8,), num_seeds=4)
    assert {check_of(report, name).found for name in (WHOLE, FIRST)} == {_NO_IDS}
    assert results(report)[SEEDS] == {"pass"}


def test_every_question_that_cannot_be_asked_is_named(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Outside(engine, limits={"plain": False, "sampling": False}))
    report = audit()
    assert failed(checks_of(report)) == ()
    why = {(check.name, check.found) for check in checks_of(report) if check.result == "not asked"}
    assert why == {
        (PLAIN, "outside cannot be asked to answer without drafting; give --against-backend"),
        (AGAIN, "outside takes one at a time"),
        (SEEDS, "outside does not repeat a sampled answer"),
        (WHOLE, "outside is asked nothing above temperature 0"),
        (FIRST, "outside is asked nothing above temperature 0"),
        ("distribution: no bias by the draft", "a backend does not show what it drafted"),
        ("logits do not depend on the batch", "a backend does not show its logits"),
        ("all cache is released", "a backend does not show its cache"),
    }
    assert results(report)[CHOICE] == {"pass"}


def test_another_model_than_the_target_is_refused(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Outside(engine, lambda ask, question, _: replace(ask(question), token_ids=(10**6,))))
    with pytest.raises(InputError, match=r"^target=.*an answer holds token 1000000: name the model that answers"):
        audit()


def test_prompts_that_no_other_engine_takes(engine: LocalAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Outside(engine))
    source = BackendSource(NAME, TARGET)
    long: Prompt = "a b c " * 2000
    cases: list[tuple[Prompt, str]] = [
        ([1, 2], "takes no token ids"),
        (ChatPrompt([{"role": "user", "content": "a"}]), "renders no conversations"),
        (ChatPrompt([{"role": "user", "content": ["a"]}]), "whose content is a text"),
        (ChatPrompt([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "x:2"), "x:2.*tool calls"),
        (long, r"prompts='prompt 1': has \d+ tokens; the context has room for \d+: shorten it, or leave it out"),
    ]
    for prompt, message in cases:
        options = BackendAuditOptions(source, target=TARGET, dtype="float32")
        with pytest.raises(InputError, match=message):
            run_backend_audit(options, [prompt], "")
    with pytest.raises(InputError, match=r"drafter='eagle': outside drafts otherwise; choose from lookup"):
        audit(draftings=("eagle",))


# ---- the target as a judge of texts


def test_a_text_is_read_as_the_target_would_write_it() -> None:
    """Greedy tokens spelt otherwise than the tokenizer would are found again from their text."""
    options = BackendAuditOptions(BackendSource(NAME), target=TARGET, dtype="float32")
    with Judge(options) as judge:
        for prompt in PROMPTS:
            question = Question(str(prompt), max_tokens=48)
            ids = judge.prompt_ids("a prompt", question)
            output = judge.llm.generate([ids], spec=SpecConfig())[0]
            answer = Answer((), output.text, 0, 0, 0.0)
            found = judge.answer_ids(ids, answer)
            assert found is not None
            assert judge.llm.tokenizer is not None
            assert judge.llm.tokenizer.decode(found) == output.text.rstrip("\ufffd")
            assert found[:10] == tuple(output.token_ids[:10])
