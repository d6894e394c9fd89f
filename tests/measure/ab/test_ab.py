"""A/B replays: what is asked of whom in which order, what the figures and the verdict are, what is kept."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken.backend.answering import Answer, Capabilities, Drafting, Question
from foretoken.errors import ConfigError, InputError, UnavailableError
from foretoken.measure.ab.options import AbOptions
from foretoken.measure.ab.pairs import Observed, Pair, PairPlan, block_means, paired, plan_pairs
from foretoken.measure.ab.report import ab_report, verdict_line
from foretoken.measure.ab.rows import metric_rows, order_effect, outcome_of, slice_rows
from foretoken.measure.ab.run import AbSide, run_ab
from foretoken.measure.html import html_page
from foretoken.measure.prompts import read_prompts
from foretoken.measure.report import markdown
from foretoken.measure.sides import OpenSide
from tests.measure.endpoint import Fake, Reply, serving, tokens

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


def replay_of(folder: Path, count: int = 8, **fields: Any) -> Path:
    path = folder / "replay.jsonl"
    lines = [{"prompt": f"p{number}", "slice": "xy"[number % 2], **fields} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options_of(folder: Path, count: int = 8, **given: Any) -> AbOptions:
    return AbOptions(*URLS, replay_of(folder, count), **given)


def pairs_of(options: AbOptions, b_times_s: float, noise: float = 0.02, **b: Any) -> list[Pair]:
    """Pairs in which A takes 1 s, more or less, and B `b_times_s`."""
    found = []
    for plan in plan_pairs(options, read_prompts(options.replay)):
        sign = 1 if plan.index // 2 % 2 else -1
        a = Observed(1 + sign * noise, 10, 0.1, 0.09, "same")
        found.append(
            Pair(plan, a, Observed(**{"e2e_s": b_times_s, "num_tokens": 10, "ttft_s": 0.1, "text": "same"} | b))
        )
    return found


# ---- what is asked


def test_half_of_every_block_begins_with_a_and_requests_are_shuffled(tmp_path: Path) -> None:
    options = options_of(tmp_path, 10, repeats=3)
    plans = plan_pairs(options, read_prompts(options.replay))
    blocks = Counter(plan.block for plan in plans)
    assert sorted(blocks.values()) == [2, 2, 2, 4, 4, 4, 4, 4, 4]
    for block, count in blocks.items():
        assert sum(plan.a_first for plan in plans if plan.block == block) == count // 2
    assert [plan.name for plan in plans[:10]] != [plan.name for plan in plans[10:20]]
    assert Counter(plan.name for plan in plans) == Counter({f"replay:{n}": 3 for n in range(1, 11)})
    assert plans == plan_pairs(options, read_prompts(options.replay))
    assert plans != plan_pairs(options_of(tmp_path, 10, repeats=3, seed=1), read_prompts(options.replay))


def test_a_request_keeps_its_own_length_and_temperature(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 7, "temperature": 0.5}\n{"prompt": "b"}\n')
    options = AbOptions(*URLS, path, max_tokens=9, seed=40)
    asked = {plan.question.text: plan.question for plan in plan_pairs(options, read_prompts(path))}
    assert (asked["a"].max_tokens, asked["a"].temperature, asked["a"].seed) == (7, 0.5, 40)
    assert (asked["b"].max_tokens, asked["b"].temperature, asked["b"].seed) == (9, 0.0, None)


# ---- what follows from the pairs


@pytest.mark.parametrize(
    ("b_s", "noise", "verdict"),
    [(0.8, 0.02, "faster"), (1.25, 0.02, "slower"), (1.0, 0.002, "equivalent"), (0.99, 0.3, "go on")],
)
def test_the_verdict_follows_the_times(tmp_path: Path, b_s: float, noise: float, verdict: str) -> None:
    options = options_of(tmp_path, 64, pairs_per_block=2)
    pairs = pairs_of(options, b_s, noise)
    found = outcome_of(block_means(pairs, "e2e"), options.margin)
    assert found.verdict == verdict
    assert found.num_blocks == 32
    assert found.speedup is not None
    assert found.speedup.low < 1 / b_s * 1.05
    assert found.speedup.high > 1 / b_s / 1.05
    assert (found.blocks_to_decide is None) == (verdict != "go on")
    assert verdict.split()[0] in verdict_line(found, len(pairs), options).lower()


def test_few_blocks_never_decide(tmp_path: Path) -> None:
    options = options_of(tmp_path, 28)  # seven blocks
    found = outcome_of(block_means(pairs_of(options, 0.2, 0.0), "e2e"), 0.03)
    assert (found.verdict, found.speedup.low if found.speedup else 0) == ("go on", None)
    assert "8 blocks are the fewest" in verdict_line(found, 28, options)


def test_answers_of_other_lengths_are_compared_per_token(tmp_path: Path) -> None:
    options = options_of(tmp_path, 8)
    (pair, *_) = pairs_of(options, 1.0, 0.0, num_tokens=20)
    assert pair.log_ratio("e2e") == pytest.approx(math.log(2))
    assert pair.log_ratio("tokens_per_s") == pytest.approx(math.log(2))
    assert pair.log_ratio("ttft") == pytest.approx(0)
    assert pair.log_ratio("itl") is None  # B does not say it
    failed = Pair(pair.plan, pair.a, Observed(0.1, 0, error="timeout"))
    assert failed.log_ratio("e2e") is None
    assert block_means([failed], "e2e") == []


def test_pieces_of_a_server_that_counts_no_tokens_are_not_taken_for_tokens(tmp_path: Path) -> None:
    """Both send the same text in the same time: B, which speculates, in fewer pieces, and without a usage."""
    options = options_of(tmp_path, 40)
    text = "word" * 40
    a = Observed(1.0, 40, 0.1, 0.9 / 39, text)
    b = Observed(1.0, 10, 0.1, 0.9 / 9, text, is_counted=False)
    pairs = [paired(plan, a, b) for plan in plan_pairs(options, read_prompts(options.replay))]
    assert {pair.log_ratio(metric) for pair in pairs for metric in ("e2e", "tokens_per_s")} == {0.0}
    assert pairs[0].b.num_tokens == 40
    assert pairs[0].log_ratio("itl") == pytest.approx(0.0, abs=0.15)
    report = ab_report(options, {}, pairs, [], "ab", (), 0.0, False, False)
    assert any("In 40 of 40 pairs a server did not say how many tokens" in one for one in report.caveats)
    assert paired(pairs[0].plan, a, a).b == a


def test_rows_say_ratios_equal_texts_errors_and_costs(tmp_path: Path) -> None:
    options = options_of(tmp_path, 40, price_per_hour=(3.6, 7.2))
    pairs = pairs_of(options, 0.5, text="other")
    pairs[0] = Pair(pairs[0].plan, pairs[0].a, Observed(0.1, 0, error="ForetokenError: refused"))
    rows = slice_rows(pairs, options)
    assert [row.slice for row in rows] == ["", "x", "y"]
    every = rows[0]
    assert (every.num_pairs, every.num_ok, every.errors) == (40, 39, {"a": 0, "b": 1})
    assert every.equal_texts == 0.0
    assert every.equal_lengths == 1.0
    assert every.ratio is not None
    assert every.ratio.ratio == pytest.approx(2, rel=0.01)
    assert every.cost_per_million is not None
    assert every.cost_per_million["a"].value == pytest.approx(100, rel=0.01)  # 0.1 s a token at 0.001 a second
    assert every.cost_per_million["b"].value == pytest.approx(100, rel=0.01)  # half the time at twice the price
    e2e = metric_rows(pairs, options)[0]
    assert e2e.quantiles["p50"].value == pytest.approx(2, rel=0.05)
    report = ab_report(options, ABOUT, pairs, [], "foretoken ab", (), 0.0, False, False)
    assert any("B failed 1 of 40 requests" in caveat for caveat in report.caveats)
    assert report.results["verdict"] == "faster"
    page = html_page(report)
    assert "B is faster" in page
    assert "<svg" in page
    assert "per 1M tokens" in markdown(report)
    assert json.loads(report.json_line())["pairs"][1]["equal_text"] is False


def test_requests_that_share_a_name_are_prompts_of_their_own(tmp_path: Path) -> None:
    """As those of two batch files do: the interval is that of as many prompts as were asked."""
    options = options_of(tmp_path, 12, repeats=2)
    pairs = pairs_of(options, 0.5)
    named_alike = [replace(pair, plan=replace(pair.plan, name="request-0")) for pair in pairs]
    assert slice_rows(named_alike, options)[0].ratio == slice_rows(pairs, options)[0].ratio


def test_costs_count_the_tokens_of_answers_in_time_and_pay_for_all(tmp_path: Path) -> None:
    """A takes 0.1 s a token in every other answer, and too long for the rest; B always does."""
    options = options_of(tmp_path, 40, price_per_hour=(3.6,), slo_ms=100.0)
    pairs = [
        Pair(pair.plan, Observed(1.0, 10, itl_s=0.1 if place % 2 else 0.11), Observed(1.0, 10, itl_s=0.11))
        for place, pair in enumerate(pairs_of(options, 1.0))
    ]
    every = slice_rows(pairs, options)[0]
    assert every.cost_per_million is not None
    assert every.cost_per_million["a"].value == pytest.approx(200)  # 2 s are paid for 10 tokens
    assert every.cost_per_million["a"].low is None
    assert "b" not in every.cost_per_million
    assert "never in time" in markdown(ab_report(options, ABOUT, pairs, [], "foretoken ab", (), 0.0, False, False))


ABOUT = {side: {"name": "n", "version": "v", "model": "m", "drafter": "plain"} for side in ("A", "B")}


def test_the_order_effect_is_seen_apart_from_the_difference(tmp_path: Path) -> None:
    options = options_of(tmp_path, 64)
    pairs = []
    for pair in pairs_of(options, 0.8, 0.01):  # the second answer of a pair takes half the time
        a, b = pair.a.e2e_s * (1.0 if pair.plan.a_first else 0.5), pair.b.e2e_s * (0.5 if pair.plan.a_first else 1.0)
        pairs.append(Pair(pair.plan, Observed(a, 10), Observed(b, 10)))
    effect = order_effect(pairs)
    assert effect is not None
    assert effect.speedup == pytest.approx(2, rel=0.02)
    found = outcome_of(block_means(pairs, "e2e"), 0.03)
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(1.25, rel=0.02)
    report = ab_report(options, ABOUT, pairs, [], "c", (), 0.0, False, False)
    assert any("a cache is shared" in caveat for caveat in report.caveats)


def test_a_difference_of_a_with_itself_is_said(tmp_path: Path) -> None:
    options = options_of(tmp_path, 64)
    pairs = pairs_of(options, 0.8)
    report = ab_report(options, ABOUT, pairs, pairs, "c", (), 0.0, False, False)
    assert any("no verdict of this run can be relied on" in caveat for caveat in report.caveats)


# ---- runs


def test_both_are_asked_the_same_with_the_same_seed(tmp_path: Path) -> None:
    path = replay_of(tmp_path, 8, temperature=0.7)
    with serving(Fake()) as one, serving(Fake(owner="vllm")) as other:
        one.owner = "foretoken"
        report = run_ab(AbOptions(one.url, other.url, path, warmup=1, a_drafter="plain"))
    asked = [Counter((body["prompt"], body["seed"]) for _, _, body in fake.asked[1:]) for fake in (one, other)]
    assert asked[0] == asked[1]
    assert len(asked[0]) == 8
    assert one.asked[0][2]["spec"] == {"drafter": None}
    assert "spec" not in other.asked[0][2]
    assert report.results["sides"]["A"]["drafter"] == "plain"
    assert report.results["sides"]["B"]["drafter"] == "served"
    assert report.results["verdict"] == "go on"  # two blocks
    assert report.results["slices"][0].equal_texts == 1.0


class Told:
    """A backend that says what its answer took, whatever the call takes."""

    name = "told"

    def __init__(self, plain_texts: bool = True) -> None:
        self.capabilities = Capabilities(True, True, False, False, "total", False, plain_texts)

    def reset(self) -> None:
        pass

    def answer(self, _question: Question, _drafting: Drafting) -> Answer:
        return Answer((), "text", 4, 3, 0.6, ttft_s=0.2, e2e_s=0.8)


def test_an_answer_takes_what_its_backend_says_and_not_what_the_call_does() -> None:
    """The call also reads the counters of a server, or the checkpoint that a program of llama.cpp runs on."""
    side = AbSide(OpenSide("A", Told(), Drafting(), {}))  # type: ignore[arg-type]
    assert side.ask(Question("x")) == Observed(0.8, 4, 0.2, pytest.approx(0.2), "text")


def test_texts_that_nobody_showed_are_not_compared(tmp_path: Path) -> None:
    """llama.cpp's plain answers are times alone."""
    told = Told(plain_texts=False)
    plain, drafted = (
        AbSide(OpenSide("A", told, Drafting(kind), {})).ask(Question("x"))  # type: ignore[arg-type]
        for kind in (None, "lookup")
    )
    options = options_of(tmp_path)
    plan = next(iter(plan_pairs(options, read_prompts(options.replay))))
    pairs = [Pair(plan, plain, drafted)]
    assert [row.equal_texts for row in slice_rows(pairs, options)] == [None]
    assert [pair.has_equal_texts for pair in (*pairs, Pair(plan, drafted, drafted))] == [None, True]


def test_a_run_goes_on_from_its_file_and_stops_at_a_verdict(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    with serving(Fake()) as fake:
        options = AbOptions(fake.url, fake.url, replay_of(tmp_path, 8), warmup=1, resume=kept, aa_blocks=1)
        run_ab(options)
        assert len(fake.asked) == 2 + 2 * 4 + 2 * 8
        again = run_ab(options)
        assert len(fake.asked) == 2 + 2 * 4 + 2 * 8 + 2  # the warm-up alone
    assert "resumed" in " ".join(again.caveats)
    assert len(again.results["pairs"]) == 8
    assert len(again.results["aa_pairs"]) == 4


def test_a_run_stops_as_soon_as_it_is_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.measure.ab.run._is_decided", lambda _, pairs: len(pairs) >= 12)
    with serving(Fake()) as fake:
        path = replay_of(tmp_path, 24)
        assert len(run_ab(AbOptions(fake.url, fake.url, path)).results["pairs"]) == 12
        every = run_ab(AbOptions(fake.url, fake.url, path, stop_early=False))
    assert len(every.results["pairs"]) == 24


def test_failures_are_counted_and_a_dead_side_ends_the_run(tmp_path: Path) -> None:
    refused = Reply(status=500, body=b'{"error": "no"}')
    path = replay_of(tmp_path, 8)
    with serving(Fake()) as one, serving(Fake(lambda number, _: refused if number % 3 == 2 else tokens("a"))) as other:
        report = run_ab(AbOptions(one.url, other.url, path))
        assert any("B failed 3 of 8 requests" in caveat for caveat in report.caveats)
        other.answer = lambda _number, _body: refused
        with pytest.raises(UnavailableError, match=r"warm-up to B .* failed .*status 500: no"):
            run_ab(AbOptions(one.url, other.url, path))
        other.asked.clear()
        other.answer = lambda number, _: tokens("a") if number < 2 else refused
        with pytest.raises(UnavailableError, match=r"B .* failed 5 times in a row"):
            run_ab(AbOptions(one.url, other.url, path))


def test_the_library_call_takes_names_and_options(tmp_path: Path) -> None:
    with serving(Fake()) as fake:
        report = foretoken.ab(fake.url, fake.url, str(replay_of(tmp_path, 4)), warmup=1, out=tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == report.results["verdict"] == "go on"


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"a": "nobody"}, InputError, "a='nobody': choose from local"),
        ({"b": "http://"}, InputError, "b='http://'"),
        ({"a": "local"}, ConfigError, "target=None: a=local runs in this process"),
        ({"a": "local", "target": "t", "a_model": "m"}, ConfigError, "a_model"),
        ({"target": "t"}, ConfigError, "target='t': is of an engine in this process"),
        ({"dtype": "float32"}, ConfigError, "dtype='float32': is of an engine in this process"),
        ({"device": "cpu"}, ConfigError, "device='cpu': is of an engine in this process"),
        ({"pairs_per_block": 3}, InputError, "pairs_per_block=3: must be even"),
        ({"margin": 0.0}, InputError, "margin"),
        ({"price_per_hour": (1.0, 2.0, 3.0)}, InputError, "price_per_hour"),
        ({"price_per_hour": (-1.0,)}, InputError, "price_per_hour"),
        ({"slo_ms": 50.0}, InputError, "slo_ms"),
        ({"temperature": -1.0}, InputError, "temperature"),
        ({"warmup": 0}, InputError, "warmup"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, given: dict[str, Any], error: type, named: str) -> None:
    usual: dict[str, Any] = {"a": URLS[0], "b": URLS[1], "replay": replay_of(tmp_path)}
    with pytest.raises(error, match=named):
        AbOptions(**usual | given)


def test_a_server_that_always_drafts_cannot_be_asked_plainly(tmp_path: Path) -> None:
    with serving(Fake()) as fake, pytest.raises(ConfigError, match=r"a_drafter='plain': .* start it without"):
        run_ab(AbOptions(fake.url, fake.url, replay_of(tmp_path), a_drafter="plain"))


@pytest.mark.parametrize("dead", ["a", "b"])
def test_a_side_that_is_not_there_is_told_its_own_options(tmp_path: Path, dead: str) -> None:
    with serving(Fake()) as fake:
        urls = {"a": fake.url, "b": fake.url, dead: "http://127.0.0.1:9"}
        with pytest.raises(UnavailableError, match=f"name into --{dead}-model"):
            run_ab(AbOptions(urls["a"], urls["b"], replay_of(tmp_path)))


def test_a_plan_is_a_value(tmp_path: Path) -> None:
    assert isinstance(plan_pairs(options_of(tmp_path), read_prompts(replay_of(tmp_path)))[0], PairPlan)
