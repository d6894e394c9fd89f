"""Diagnosis of acceptance: what is read, how repairs are judged, what a server reports. Planted faults: proof/."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken.backend.http_stream import read_position_counters
from foretoken.errors import ConfigError, InputError, UnavailableError
from foretoken.heads.base import HeadBatch
from foretoken.measure.diagnose import run as run_module
from foretoken.measure.diagnose.options import DiagnoseOptions
from foretoken.measure.diagnose.reading import FileFinding, Reported, ask_endpoint
from foretoken.measure.diagnose.reference import Accepted, Sampling, windows
from foretoken.measure.diagnose.repairs import Asking, Repair, text_repairs
from foretoken.measure.diagnose.report import Diagnosis, Trial, conclusion_of, diagnose_report
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.measure.html import html_page
from foretoken.measure.report import markdown
from tests.measure.endpoint import Fake, serving, tokens

OPTIONS = DiagnoseOptions("target", "head")
METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 30.0
"""


def accepted(per_draft: float, spread: float = 0.05) -> Accepted:
    shares = [per_draft + spread * (number % 3 - 1) for number in range(9)]
    return Accepted((100,) * 9, (tuple(100 * share / 2 for share in shares),) * 2)


def trial(before: float, after: float, cause: str = "layer taps") -> Trial:
    return Trial(Repair(cause, f"{cause} put right", f"correct {cause}"), accepted(before), accepted(after))


def cause_of(found: Diagnosis) -> str | None:
    return conclusion_of(OPTIONS, found).cause


def test_the_repair_that_gains_most_names_the_cause() -> None:
    trials = (trial(0.1, 0.5, "norm flag"), trial(0.1, 1.4), trial(0.1, 0.15, "rope base"))
    found = Diagnosis(base=accepted(0.1), trials=trials)
    report = diagnose_report(OPTIONS, found, "foretoken diagnose")
    assert report.results["cause"] == "layer taps"
    assert not report.passed
    assert "0.10 accepted tokens per draft, 1.40 with layer taps put right" in report.verdict
    assert [one.repair.cause for one in found.causes] == ["layer taps", "norm flag"]
    for page in (markdown(report), html_page(report)):
        assert "correct layer taps" in page
    assert json.loads(report.json_line())["remedy"] == "correct layer taps"


def test_a_gain_that_chance_explains_names_nothing() -> None:
    noisy = Trial(Repair("BOS", "BOS", ""), accepted(1.0, 0.0), accepted(1.2, 0.9))
    found = Diagnosis(base=accepted(1.0), trials=(noisy,))
    assert cause_of(found) is None
    report = diagnose_report(OPTIONS, found, "foretoken diagnose")
    assert report.passed
    assert report.verdict.startswith("Nothing wrong found; this head accepts 1.00")


def test_what_was_read_counts_where_no_repair_helps() -> None:
    finding = FileFinding("other target", "other weights", "take its own head")
    assert cause_of(Diagnosis((finding,), accepted(0.6), (trial(0.6, 0.6),))) == "other target"
    assert cause_of(Diagnosis((finding,), accepted(0.6), (trial(0.6, 1.6),))) == "layer taps"
    assert cause_of(Diagnosis((), accepted(0.05), (trial(0.05, 0.06),))) == "other target", "near chance"


def test_a_server_far_below_the_head_is_the_cause() -> None:
    reported = Reported(0.4, (0.3, 0.1), "counters", "vllm 1")
    found = Diagnosis(base=accepted(1.5), trials=(trial(1.5, 0.4),), reported=reported)
    report = diagnose_report(OPTIONS, found, "foretoken diagnose")
    assert report.results["cause"] == "endpoint"
    assert "the server 0.40" in report.verdict
    assert cause_of(Diagnosis(base=accepted(0.4), reported=reported)) is None


def test_a_server_is_read_by_position_or_in_total_and_asked_to_draft() -> None:
    """A metrics page that grows with every answer; draft tokens told with the answers; nothing told."""
    prompts = [EvalPrompt(f"p{number}", "s", f"text {number}") for number in range(3)]

    def counted() -> str:
        totals = "vllm:spec_decode_num_draft_tokens_total 200.0\nvllm:spec_decode_num_accepted_tokens_total 30.0\n"
        return re.sub(r"\d+\.0", lambda found: str(float(found[0]) * len(fake.asked)), METRICS + totals)

    fake = Fake(metrics=counted)
    with serving(fake):
        found = ask_endpoint(replace(OPTIONS, url=fake.url, num_draft=2), prompts, "foretoken diagnose")
        with pytest.raises(InputError, match=r"num_draft=4: the server counts 2 tokens of a draft; give that"):
            ask_endpoint(replace(OPTIONS, url=fake.url), prompts, "foretoken diagnose")
    assert (found.places, found.per_draft) == ((0.6, 0.2), 0.8)
    with serving(Fake(lambda *_: tokens("a", timings={"draft_n": 8, "draft_n_accepted": 2}))) as fake:
        found = ask_endpoint(replace(OPTIONS, url=fake.url), prompts, "foretoken diagnose")
    assert (found.places, found.per_draft) == ((), 2 / 8 * OPTIONS.num_draft)
    with (
        serving(Fake(lambda *_: tokens("a", timings={}))) as fake,
        pytest.raises(InputError, match=r"url=.*reports no drafted"),
    ):
        ask_endpoint(replace(OPTIONS, url=fake.url), prompts, "foretoken diagnose")


def test_a_server_that_is_not_there_is_found_before_the_target_answers(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "LLM", None)
    with pytest.raises(UnavailableError, match="is the server running"):
        run_module.diagnose(str(pair.target), draft=str(pair.draft), url="http://127.0.0.1:9", num_prompts=2)


def test_positions_of_a_metrics_page() -> None:
    found = read_position_counters(METRICS)
    assert found is not None
    assert (found.num_drafts, found.accepted) == (50.0, (30.0, 10.0))
    since = found.since(found)
    assert (since.num_drafts, since.accepted) == (0.0, (0.0, 0.0))
    assert read_position_counters("x_total 3\n") is None


def test_windows_hold_every_wanted_token_once() -> None:
    tokens = torch.arange(41)[None]
    states = torch.arange(40.0).view(1, 40, 1)
    parts = windows(HeadBatch(tokens, tokens >= 5, {1: states}, states), 16)
    wanted = [token for part in parts for token in part.tokens[part.wanted].tolist()]
    assert wanted == list(range(5, 41))
    for part in parts:
        assert part.states[1].flatten().tolist() == part.tokens[0, :-1].tolist()
        assert len(part.tokens[0]) <= 17


def test_texts_are_asked_otherwise_where_that_can_be() -> None:
    kinds = [one.cause for one in text_repairs(Asking(), Sampling(1.0, True), has_template=True)]
    assert kinds == ["chat template", "BOS", "temperature", "greedy drafts"]
    assert [one.cause for one in text_repairs(Asking(), Sampling(), has_template=False)] == ["BOS"]


def test_a_head_or_a_draft_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--draft"):
        DiagnoseOptions("target")
    with pytest.raises(ConfigError, match="model"):
        DiagnoseOptions("target", "head", model="name", out=tmp_path / "x.html")
