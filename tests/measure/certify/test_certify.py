"""Certificates: an honest server passes, each planted fault is found by the check that is there for it, what cannot be
asked is named, and a run that was stopped goes on.

Here each fault meets the kind of checks that must find it; those that samples alone show, in proof/test_certify.py, and
before a release every fault meets all checks there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken.backend.requesting import ApiChoice, ApiRequest, Reply
from foretoken.errors import ConfigError, ForetokenError, InputError, UnavailableError
from foretoken.measure.certify import forms, run
from foretoken.measure.certify.asking import Asker, CertifySession, own_rules, reply_from
from foretoken.measure.certify.greedy import compared, follows, part_at_tie_of
from foretoken.measure.certify.options import CertifyOptions
from foretoken.measure.certify.run import certify_report, made_checks
from foretoken.measure.certify.whole import _stream_problem, check_stream
from foretoken.measure.checks import Check
from foretoken.measure.html import html_page
from foretoken.measure.report import markdown
from foretoken.measure.workload import SLICES, slices
from tests.helpers.certify import asker, chat_folder, server_of, session_of
from tests.helpers.faulty_proxy import FAULTS, Fault, Upstream, faulty
from tests.measure.certify.dice import Dice

SAME, STOPPED, STREAMED = (
    "the same greedy answers",
    "an answer ends before its stop string",
    "streamed text = whole text",
)
BEGIN, FOLLOW = "distribution: how answers begin", "distribution: which token follows which"
CALLS = "tool calls fit their function"
FOUND_BY = {  # fault -> kind of checks, and the check
    "presence_penalty ignored": ("parameters", "presence_penalty 2"),
    "frequency_penalty ignored": ("parameters", "frequency_penalty 2"),
    "repetition_penalty ignored": ("parameters", "repetition_penalty 1.8"),
    "logit_bias ignored": ("parameters", "logit_bias -100"),
    "top_k ignored": ("parameters", "top_k 1"),
    "top_p ignored": ("parameters", "top_p 0.000001"),
    "stop strings ignored": ("limits", STOPPED),
    "sampling where greedy was asked": ("greedy", SAME),
    "seed ignored": ("seeds", "equal seeds, equal answers"),
    "seed constant": ("seeds", "other seeds, other answers"),
    "max_tokens exceeded by a draft": ("limits", "max_tokens is the length"),
    "token lost at a stop string": ("limits", STOPPED),
    "token repeated at a stop string": ("limits", STOPPED),
    "stop string in the text": ("limits", STOPPED),
    "token lost at a draft's end": ("greedy", SAME),
    "JSON broken at a draft's end": ("forms", "JSON fits its schema"),
    "arguments of a call broken": ("forms", CALLS),
    "log-probabilities of the draft": ("greedy", "log-probabilities"),
    "usage counts steps": ("limits", "usage counts the tokens"),
    "finish_reason wrong": ("limits", "finish_reason says why"),
    "stream ends early": ("stream", STREAMED),
    "character broken between chunks": ("stream", STREAMED),
}
BY_SAMPLES = {"temperature ignored", "greedy where sampling was asked"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Asker, Upstream]]:
    """A, and the server that proxies stand before."""
    folder = chat_folder(tmp_path_factory.mktemp("certify") / "target")
    with pytest.MonkeyPatch.context() as patch, server_of(folder) as url, asker("A", url, plain=True) as a:
        patch.setattr(forms, "_NUM_SEEDS", 1)
        upstream = Upstream(url)
        yield a, upstream
        upstream.close()


def failures(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.result == "fail"}


def checked(a: Asker, b: Asker, *only: str, **options: Any) -> list[Check]:
    return list(made_checks(session_of(a, b, only=only, max_tokens=16, num_prompts=2, **options)))


# ---- a server in front of which faults stand


def test_an_honest_server_passes(stage: tuple[Asker, Upstream]) -> None:
    a, upstream = stage
    with faulty(upstream, Fault("honest")) as url, asker("B", url) as b:
        checks = checked(a, b, "greedy", "parameters", "limits", "stream", "seeds", "forms")
    assert {check.result for check in checks} == {"pass"}, [check for check in checks if check.result != "pass"]
    assert len(checks) == 23


@pytest.mark.parametrize("fault", [one for one in FAULTS if one.name in FOUND_BY], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(stage: tuple[Asker, Upstream], fault: Fault) -> None:
    a, upstream = stage
    kind, name = FOUND_BY[fault.name]
    with faulty(upstream, fault) as url, asker("B", url) as b:
        assert name in failures(checked(a, b, kind))


def test_every_fault_is_met_by_a_test() -> None:
    assert {fault.name for fault in FAULTS} == FOUND_BY.keys() | BY_SAMPLES


@dataclass
class Wobbly(Dice):
    """Ends answers otherwise: each time but the first that one is asked for, or (`by_stream`) where it is streamed."""

    by_stream: bool = False

    def ask(self, request: ApiRequest) -> Reply:
        times = sum(one.text == request.text for one in self.asked)
        (choice,) = (reply := super().ask(request)).choices
        wobbles = request.stream if self.by_stream else times > 0
        return replace(reply, choices=(replace(choice, text=choice.text[:-1] + "z", pieces=()),)) if wobbles else reply


@pytest.mark.parametrize("by_stream", [True, False])
def test_a_stream_is_not_blamed_for_answers_that_differ_anyway(by_stream: bool) -> None:
    a, b = Asker("A", Dice()), Asker("B", Wobbly(by_stream=by_stream))
    check, *_ = made_checks(session_of(a, b, only=("stream",), max_tokens=16, num_prompts=3))
    assert (check.name, check.where) == (STREAMED, "texts")
    assert check.result == ("fail" if by_stream else "pass")
    assert ("3 left out" in check.found) != by_stream


# ---- sampled answers


def sampled(alpha: float = 1e-3, **fault: Any) -> list[Check]:
    a, b = Asker("A", Dice()), Asker("B", Dice(**fault))
    return list(made_checks(session_of(a, b, only=("distribution", "seeds"), effect=0.25, alpha=alpha)))


@pytest.mark.parametrize("tells", [True, False], ids=["tokens", "texts"])
def test_sampled_answers_of_one_distribution_pass(tells: bool) -> None:
    checks = sampled(tells=tells)
    assert {check.result for check in checks} == {"pass"}
    levels = [float(check.demanded[5:]) for check in checks if check.demanded.startswith("p >= ")]
    assert sum(levels) == pytest.approx(1e-3, rel=0.05)
    (begin, *_) = [check for check in checks if check.name == BEGIN]
    assert 0.15 < float(begin.sees.split()[-1]) < 0.3  # what was asked for, and a margin
    assert begin.num_tokens == 512


@pytest.mark.parametrize(
    ("logprob", "penalties", "result"),
    [(-3.01, (2.0,), "pass"), (-3.6, (2.0,), "fail"), (-1.01, (2.0,), "pass"), (-3.01, (), "fail")],
)
def test_a_near_tie_behind_penalties_need_not_be_among_the_likeliest(
    logprob: float, penalties: tuple[float, ...], result: str
) -> None:
    a = ApiChoice("ab", "length", pieces=("a", "b"), logprobs=(-0.1, -1.0), tops=({"a": -0.1}, {"x": -0.9, "y": -0.95}))
    b = replace(a, text="ac", pieces=("a", "c"), logprobs=(-0.1, logprob))
    assert compared(SAME, "", [a], [b], 0.05, penalties).result == result


def test_prompts_are_sampled_under_seeds_of_their_own() -> None:
    """Engines draw the same numbers for a seed, whatever the prompt, and the tests take answers as independent."""
    a = Dice()
    list(made_checks(session_of(Asker("A", a), Asker("B", Dice()), only=("distribution",), effect=0.4)))
    seeds: dict[str, set[int]] = {}
    for request in a.asked:
        if (seed := request.fields.get("seed", 0)) >= 1000:
            seeds.setdefault(request.text, set()).update(range(seed, seed + request.fields.get("n", 1)))
    first, second = seeds.values()
    assert first.isdisjoint(second)


@pytest.mark.parametrize(
    ("fault", "names", "where"),
    [
        ({"twist": 0.5}, {FOLLOW}, "temperature 1"),  # a wrong residual: the first token is right
        ({"ignores": ("temperature",)}, {FOLLOW}, "temperature 0.6"),
        ({"ignores": ("top_p",)}, {BEGIN, FOLLOW}, "temperature 1, top_p 0.6"),
        ({"ignores": ("seed",)}, {BEGIN, FOLLOW}, "temperature 1"),
    ],
)
def test_another_distribution_is_found(fault: dict[str, Any], names: set[str], where: str) -> None:
    found = {check.name for check in sampled(0.05, **fault) if check.result == "fail" and check.where == where}
    assert names <= found


class Narrow(Dice):
    """A server that keeps 32 bits of a seed, and draws the further answers of a request under the next seeds."""

    def ask(self, request: ApiRequest) -> Reply:
        if "seed" not in request.fields or request.fields["temperature"] == 0:
            return super().ask(request)
        count, seed = request.fields.get("n", 1), request.fields["seed"]
        each = [
            replace(request, fields={**request.fields, "n": 1, "seed": (seed + i) % (1 << 32)}) for i in range(count)
        ]
        replies = [super(Narrow, self).ask(one) for one in each]
        return Reply(tuple(reply.choices[0] for reply in replies), replies[0].num_prompt_tokens)


def test_no_two_answers_are_one_draw() -> None:
    a, b = Narrow(), Narrow()
    checks = list(made_checks(session_of(Asker("A", a), Asker("B", b), only=("distribution",), effect=0.4)))
    seeds = [
        (one.text, one.fields["seed"], one.fields.get("top_p"), one.fields["temperature"])
        for one in (*a.asked, *b.asked)
        if one.fields["temperature"] > 0 and one.fields["seed"] >= 1000
    ]
    assert len(seeds) == len(set(seeds)) == 2 * sum(check.num_tokens for check in checks if check.name == BEGIN)


def test_answers_are_asked_one_by_one_where_n_is_refused() -> None:
    b = Dice(refuses=("n",))
    checks = list(made_checks(session_of(Asker("A", Dice()), Asker("B", b), only=("distribution",), effect=0.9)))
    assert {check.result for check in checks} == {"pass"}
    assert not any("n" in request.fields for request in b.asked[2:])  # behind what was tried


# ---- what is not asked, and what nothing can be said of


class Slots(Dice):
    """A server with four slots, as llama.cpp has."""

    def ask(self, request: ApiRequest) -> Reply:
        return Reply(refused="n is at most 4") if request.fields.get("n", 1) > 4 else super().ask(request)


def test_as_many_answers_are_asked_at_once_as_both_give() -> None:
    b = Slots()
    assert not failures(list(made_checks(session_of(Asker("A", Dice()), Asker("B", b), only=("distribution",)))))
    assert {request.fields.get("n") for request in b.asked} == {4}


def test_what_a_side_refuses_is_named_and_passes_nothing() -> None:
    b = Asker("B", Dice(refuses=("top_k", "stop", "response_format", "tools")))
    checks = list(made_checks(session_of(Asker("A", Dice()), b, only=("parameters", "limits", "forms"))))
    refused = {check.name: check.found for check in checks if check.result == "not asked"}
    assert refused["top_k 1"] == "B refuses: top_k is not known here (prompt 0)"
    assert {STOPPED, "JSON fits its schema", CALLS, "logit_bias -100"} < refused.keys()
    assert next(check for check in checks if check.name == "presence_penalty 2").result == "undecided"  # A ignores it


def test_a_prompt_that_a_side_refuses_is_named() -> None:
    class Small(Dice):
        def ask(self, request: ApiRequest) -> Reply:
            return Reply(refused="too long") if request.text == long else super().ask(request)

    prompts = session_of(Asker("A", Dice()), Asker("B", Dice())).prompts
    long = prompts[1].text
    session = session_of(Asker("A", Small()), Asker("B", Dice()), only=("greedy",))
    assert {(check.result, check.found) for check in made_checks(session)} == {
        ("not asked", f"A refuses: too long (prompt {prompts[1].name})")
    }


def test_a_rule_that_a_breaks_too_is_undecided() -> None:
    assert own_rules("n", "w", (["", "x"], ["", "y"]), 0, "").result == "undecided"
    check = own_rules("n", "w", (["", "x"], ["z", "y"]), 0, "")
    assert (check.result, check.found, check.detail) == ("fail", "0 of 2 right, 1 as wrong on A", "z")


class Broken(Dice):
    def ask(self, request: ApiRequest) -> Reply:
        raise ForetokenError("status 500")


def test_a_side_that_fails() -> None:
    def results(a: Dice, b: Dice) -> set[tuple[str, str]]:
        checks = made_checks(session_of(Asker("A", a), Asker("B", b), only=("greedy", "distribution")))
        return {(check.result, check.found) for check in checks}

    assert results(Dice(), Broken()) == {("fail", "B failed: status 500")}
    assert results(Broken(), Dice()) == {("undecided", "A failed: status 500")}


class Stopping(Dice):
    """It is gone when it is asked for the likeliest token alone, and answers nothing more."""

    is_gone = False

    def ask(self, request: ApiRequest) -> Reply:
        self.is_gone |= "top_k" in request.fields
        if self.is_gone:
            raise UnavailableError("connection refused")
        return super().ask(request)


def test_a_side_that_stops_fails_there_and_is_asked_nothing_more() -> None:
    b = Asker("B", Stopping())
    checks = list(made_checks(session_of(Asker("A", Dice()), b, only=("parameters", "limits"))))
    found = {check.name: (check.result, check.found) for check in checks}
    assert found["top_k 1"] == ("fail", "B failed: connection refused")
    assert found["min_p 1"] == found[STOPPED] == ("not asked", "B stopped before: connection refused")
    assert failures(checks) == {"top_k 1"}
    assert found["presence_penalty 2"][0] == "undecided", "it was answered"


def test_a_side_that_fails_at_the_first_request_ends_the_run() -> None:
    a, b = Asker("A", Dice()), Asker("B", Broken())
    session = session_of(a, b)
    with pytest.raises(UnavailableError, match="B failed: status 500"):
        run._session(session.options, a, b, session.prompts, ())


# ---- near ties


def answer(*pieces: str, logprob: float = -0.7, **top: float) -> ApiChoice:
    tops = tuple({piece: logprob, **top} for piece in pieces)
    return ApiChoice("".join(pieces), "length", (), pieces, (logprob,) * len(pieces), tops)


def test_a_difference_at_a_near_tie_is_none() -> None:
    a, b = answer("a", "b", "c", x=-0.8), answer("a", "x", "d")
    assert compared("n", "w", [a], [b], 0.25).result == "pass"
    assert compared("n", "w", [a], [b], 0.05).result == "fail"
    assert follows(a, b, 0.25) is None
    assert follows(a, b, 0.05) is False
    assert compared("n", "w", [a], [answer("a", "y", "d")], 0.25).result == "fail"  # A does not name it
    assert compared("n", "w", [a], [answer("a", "b")], 0.25).result == "fail"
    assert compared("n", "w", [a], [replace(a, text="abd")], 0.25).result == "fail"  # the tokens alone are the same
    texts = compared("n", "w", [replace(a, pieces=())], [replace(b, pieces=())], 0.25)
    assert (texts.result, texts.detail[:32], texts.num_tokens) == ("fail", "first differences at character 1", 0)


def test_the_tokens_of_a_comparison_are_those_of_b() -> None:
    check = compared("n", "w", [answer("a", "b", "c")] * 2, [answer("a", "b", "c")] * 2, 0.25)
    assert (check.result, check.num_tokens) == ("pass", 6)


def test_a_near_tie_is_found_behind_a_penalty_and_in_a_stream_without_pieces() -> None:
    a, b = answer("x", "y", z=-2.6), answer("x", "z")
    assert compared("n", "w", [a], [b], 0.25).result == "fail"
    assert compared("n", "w", [a], [b], 0.25, penalties=(2.0,)).result == "pass", (
        "1.9 apart, of which a penalty takes 2"
    )
    whole = answer("x", "y", z=-0.8)
    assert follows(whole, ApiChoice("xz", pieces=("z",)), 0.25) is None
    assert follows(whole, ApiChoice("xw", pieces=("w",)), 0.25) is False


def test_a_stream_that_parts_at_a_draft_token_is_judged_by_the_log_probabilities_of_a() -> None:
    """B reports nothing of the accepted draft token `y`, in whose place its stream has `z`."""
    whole = replace(answer("x", "y", "v"), tops=({"x": -0.7}, {}, {"v": -0.7}))
    stream = ApiChoice("xzw", "length", pieces=("x", "w"))
    assert follows(whole, stream, 0.25) is False
    assert part_at_tie_of(answer("x", "y", "v", z=-0.8), whole, stream, 0.25)
    assert part_at_tie_of(answer("x", "z", "w", y=-0.8), whole, stream, 0.25)
    assert not part_at_tie_of(answer("x", "y", "v", z=-2.8), whole, stream, 0.25)
    assert not part_at_tie_of(answer("q", "y", "v", x=-0.8, z=-0.8), whole, stream, 0.25), "A went another way before"
    assert not part_at_tie_of(None, whole, stream, 0.25)


def test_a_stream_that_misses_its_stop_string_by_a_near_tie_is_not_wrong() -> None:
    """The whole answer is cut before the place at which the two part."""
    session = CertifySession(CertifyOptions("http://a:1", "http://b:1"), Asker("A", Dice()), Asker("B", Dice()), ())
    whole, stream = Reply((replace(answer("x"), finish_reason="stop"),)), Reply((answer("x", "z", "w"),))
    tie, no_tie = answer("x", "y", "v", z=-0.8), answer("x", "y", "v", z=-2.8)
    assert _stream_problem(session, whole, stream, tie, None) == ""
    assert _stream_problem(session, whole, stream, no_tie, no_tie) != ""
    silent = replace(no_tie, tops=({}, {}, {}))
    assert _stream_problem(session, whole, stream, silent, tie) == ""


class Drafting(Dice):
    """Its streams take another letter, nearly as likely, in the place of a draft token that whole answers have."""

    letters = ("b", "z")

    def ask(self, request: ApiRequest) -> Reply:
        pieces = ("a", self.letters[request.stream], "c")
        tops = ({"a": -0.7}, {}, {"c": -0.7})
        return Reply((ApiChoice("".join(pieces), "length", (), pieces, (-0.7, 0.0, -0.7), tops),), 1, 3)


class Telling(Dice):
    """It reports the letters that were likely."""

    def ask(self, request: ApiRequest) -> Reply:
        tops = ({"a": -0.7}, {"b": -0.7, "z": -0.75}, {"c": -0.7})
        return Reply((ApiChoice("abc", "length", (), ("a", "b", "c"), (-0.7,) * 3, tops),), 1, 3)


def test_streams_of_a_server_that_hides_draft_tokens_are_not_failed_for_near_ties() -> None:
    a, b = Asker("A", Telling()), Asker("B", Drafting())
    session = CertifySession(CertifyOptions("http://a:1", "http://b:1"), a, b, slices(per_slice=1)[:1], 5)
    checks = {check.where: check for check in check_stream(session)}
    assert checks["texts"].result == "pass"


# ---- runs, reports, files


def test_a_run_goes_on_from_its_file(stage: tuple[Asker, Upstream], tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    with faulty(stage[1], Fault("honest")) as url:
        given: dict[str, Any] = {"num_prompts": 2, "max_tokens": 8, "resume": kept, "a_drafter": "plain"}
        report = foretoken.certify(url, url, only=("greedy",), out=tmp_path / "r.html", **given)
        lines = kept.read_text().splitlines()
        assert len(lines) == 1 + 2 * 2 + 2  # A is asked twice
        again = foretoken.certify(url, url, only=("greedy",), **given)
        assert kept.read_text().splitlines() == lines
        foretoken.certify(url, url, only=("seeds",), **given)
        with pytest.raises(InputError, match="seed"):
            foretoken.certify(url, url, seed=1, **given)
    assert report.results["passed"]
    assert again.results["checks"] == report.results["checks"]
    rows = json.loads(report.json_line())["rows"]
    assert {row["side"] for row in rows} == {"A", "B"}
    assert reply_from(rows[0]["reply"]).choices[0].pieces
    assert "PASS: 2 checks" in (tmp_path / "r.html").read_text()


def test_prompts_are_taken_from_the_slices_in_turn(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    texts = ("a1", "a2", "a3", "b1", "b2")
    own.write_text("".join(f'{{"prompt": "{text}", "slice": "{text[0]}"}}\n' for text in texts))
    options = CertifyOptions("http://127.0.0.1:1", "http://127.0.0.1:1", prompts=own, num_prompts=3)
    assert [prompt.text for prompt in run._prompts(options)] == ["a1", "b1", "a2"]
    found = run._prompts(replace(options, prompts=None, num_prompts=len(SLICES) + 2))
    assert len(found) == len(SLICES) + 2
    assert {prompt.slice for prompt in found} == set(SLICES)


def test_what_b_drafted_is_told_and_doubted_where_it_is_nothing(tmp_path: Path) -> None:
    kept, target = tmp_path / "kept.jsonl", "reference:target"
    given: dict[str, Any] = {"only": ("greedy",), "target": target, "num_prompts": 1, "max_tokens": 16}
    given |= {"draft": "reference:draft"}
    drafted = foretoken.certify("local", "local", b_drafter="draft_model", resume=kept, **given)
    again = foretoken.certify("local", "local", b_drafter="draft_model", resume=kept, **given)
    plain = foretoken.certify("local", "local", **given)
    counts = drafted.results["drafted"]
    assert counts["drafted"] >= counts["accepted"] > 0
    assert f"B drafted {counts['drafted']} tokens" in drafted.explained
    assert again.results["drafted"] == plain.results["drafted"] == {"drafted": 0, "accepted": 0}
    doubts = [[one for one in report.caveats if "says nothing" in one] for report in (drafted, again, plain)]
    assert [len(one) for one in doubts] == [0, 0, 1]


def test_the_report_says_what_failed_and_how_sure_it_is() -> None:
    options = CertifyOptions("http://a", "http://b")
    about = {side: dict.fromkeys(("name", "version", "model", "drafter"), "x") for side in "AB"}
    checks = [Check("c", "here", "fail", 3, "1 of 2", "2 of 2", detail="why")]
    report = certify_report(options, about, checks, [], None, "foretoken certify", (), False)
    assert report.verdict == "FAIL: 1 of 1 checks failed"
    assert not report.passed
    assert "on 1" in report.explained
    few = certify_report(replace(options, only=("greedy",)), about, checks, [], None, "c", (), False)
    assert few.explained.startswith("Sampled answers were not tested. The checks never fail by chance")
    for page in (markdown(report), html_page(report)):
        assert "c (here): why" in page
    stopped = certify_report(options, about, checks[:0], [], None, "foretoken certify", (), True)
    assert stopped.verdict.startswith("No verdict: the run was interrupted")
    nothing = certify_report(options, about, [replace(checks[0], result="not asked")], [], None, "c", (), False)
    assert nothing.verdict.startswith("No verdict: no check could be made")
    assert not stopped.passed
    assert not nothing.passed


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"a": "nobody"}, InputError, "a='nobody': choose from local"),
        ({"a": "local"}, ConfigError, "target=None"),
        ({"only": ("gready",)}, InputError, "only='gready': choose from greedy"),
        ({"only": ()}, InputError, "only"),
        ({"effect": 0.0}, InputError, "effect"),
        ({"alpha": 0.5}, InputError, "alpha"),
        ({"max_tokens": 4}, InputError, "max_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        CertifyOptions(**{"a": "http://a", "b": "http://b"} | given)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9/v1/models gave no model"):
        foretoken.certify("http://127.0.0.1:9", "http://127.0.0.1:9")
