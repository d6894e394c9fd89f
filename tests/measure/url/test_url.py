"""Load on an endpoint: what is sent, what is counted, which figures come of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.backend.http import HttpBackend, ServerAddress
from foretoken.backend.http_stream import PositionCounters, read_position_counters, read_spec_counters
from foretoken.errors import InputError, UnavailableError
from foretoken.measure.report import markdown
from foretoken.measure.url.plan import UrlOptions, chosen_prompts, poisson_requests, trace_requests
from foretoken.measure.url.rows import UrlSample, is_good, percentiles, summarise_url, throughput, url_prices
from foretoken.measure.url.run import run_url
from tests.measure.endpoint import Fake, Reply, serving, tokens


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as found:
        yield found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "slice": "x"}\n{"prompt": "two", "slice": "x"}\n')
    return path


def options_of(fake: Fake, prompts: Path, **given: Any) -> UrlOptions:
    usual = {"rates": (1000.0,), "requests": 6, "prompts": prompts, "warmup": 0}
    return UrlOptions(fake.url, **usual | given)


def test_every_request_is_sent_and_counted(fake: Fake, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    report = run_url(options_of(fake, prompts, warmup=2, seed=5, max_tokens=9))
    (row,) = report.rows
    assert len(fake.asked) == 8  # two of them the warm-up
    path, headers, body = fake.asked[2]
    assert (path, headers["authorization"]) == ("/v1/completions", "Bearer secret-key")
    assert (body["model"], body["prompt"], body["max_tokens"], body["seed"]) == ("fake", "one", 9, 7)
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert {asked[2]["prompt"] for asked in fake.asked} == {"one", "two"}
    assert (row.num_requests, row.num_ok, row.num_good, row.errors) == (6, 6, 6, {})
    assert row.num_tokens == 36  # three events of two tokens each
    assert row.ttft_s["p50"].value > 0
    assert row.ttft_s["p50"].low <= row.ttft_s["p50"].value <= row.ttft_s["p50"].high
    assert set(row.itl_s) == set(row.tpot_s) == set(row.e2e_s) == {"mean", "p50", "p95", "p99"}
    assert row.acceptance_rate is None
    assert "not reported" in markdown(report)
    assert "secret-key" not in report.json_line()
    kept = json.loads(report.json_line())["requests"]
    assert [len(one["pieces"]) for one in kept] == [3] * 6


def test_a_chat_sends_messages(fake: Fake, prompts: Path) -> None:
    run_url(options_of(fake, prompts, chat=True, requests=1, stop_at_eos=True))
    path, _, body = fake.asked[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "one"}]
    assert "ignore_eos" not in body


@pytest.mark.parametrize(
    "last",
    [
        {"foretoken": {"spec": {"num_drafted": 10, "num_accepted": 4}}},
        {"metrics": {"speculative_decoding": {"num_draft_tokens": 10, "num_accepted_draft_tokens": 4}}},
        {"timings": {"draft_n": 10, "draft_n_accepted": 4}},
        {"choices": [{"index": 0, "meta_info": {"spec_draft_token_num": 10, "spec_accept_token_num": 4}}]},
        {"choices": [{"index": 0, "meta_info": {"spec_num_proposed_drafts": 10, "spec_num_correct_drafts": 4}}]},
    ],
    ids=["ours", "vllm", "llama.cpp", "older sglang", "sglang"],
)
def test_acceptance_in_the_shapes_that_servers_have(fake: Fake, prompts: Path, last: dict[str, Any]) -> None:
    fake.answer = lambda number, body: tokens("a", **last)
    (row,) = run_url(options_of(fake, prompts, requests=2)).rows
    assert (row.num_drafted, row.num_accepted, row.acceptance_rate) == (20, 8, 0.4)


def test_tokens_that_nobody_counted_are_said(fake: Fake, prompts: Path) -> None:
    fake.answer = lambda number, _body: tokens("a") if number else Reply(({"choices": [{"index": 0, "text": "a b"}]},))
    report = run_url(options_of(fake, prompts, requests=3))
    assert any(one.startswith("1 of 3 answers did not say how many tokens they have") for one in report.caveats)
    fake.answer = lambda _number, _body: tokens("a")
    assert not any("did not say" in one for one in run_url(options_of(fake, prompts)).caveats)


def test_acceptance_from_the_counters_of_the_server(fake: Fake, prompts: Path) -> None:
    pages = iter((10, 50))

    def metrics() -> str:
        drafted = next(pages)
        return (
            "# TYPE vllm:spec_decode_num_draft_tokens_total counter\n"
            f'vllm:spec_decode_num_draft_tokens_total{{model="m"}} {drafted}\n'
            f"vllm:spec_decode_num_accepted_tokens_total {drafted / 2}\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 99\n'
        )

    fake.metrics = metrics
    (row,) = run_url(options_of(fake, prompts)).rows
    assert (row.num_drafted, row.num_accepted) == (40, 20)


def test_counters_under_two_prefixes_count_once() -> None:
    page = "".join(
        f'{prefix}spec_decode_num_{kind}_tokens_total{{drafter="{drafter}"}} 3\n'
        for prefix in ("foretoken_", "vllm:")
        for kind in ("draft", "accepted")
        for drafter in ("ngram", "suffix")
    )
    assert read_spec_counters(page) == {"drafted": 6.0, "accepted": 6.0}
    assert read_spec_counters("up 1\n") is None


def test_the_value_of_a_sample_is_not_its_timestamp_or_exemplar() -> None:
    page = (
        "# HELP vllm:spec_decode_num_draft_tokens_total Draft tokens.\n"
        'vllm:spec_decode_num_draft_tokens_total{model="a } b",engine="0"} 8.0 1700000000000\n'
        'vllm:spec_decode_num_accepted_tokens_total 6 1700000000.5 # {trace_id="t"} 1.0 1700000000.5\n'
        "vllm:spec_decode_num_drafts_total 2 1700000000000\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1 1700000000000\n'
    )
    assert read_spec_counters(page) == {"drafted": 8.0, "accepted": 6.0}
    assert read_position_counters(page) == PositionCounters(2.0, (1.0,))


def test_errors_are_counted_by_code(fake: Fake, prompts: Path) -> None:
    replies = [
        Reply(status=429),
        Reply(status=503),
        Reply(({"error": {"message": "x"}},), has_end=False),
        replace(tokens("a"), has_end=False),
        tokens("a", "b"),
        Reply(status=429),
    ]
    fake.answer = lambda number, body: replies[body["seed"]]
    report = run_url(options_of(fake, prompts))
    (row,) = report.rows
    assert row.errors == {"429": 2, "503": 1, "cut": 1, "stream": 1}
    assert (row.num_ok, row.num_good) == (1, 1)
    assert "5 of 6 requests failed (429 2, 503 1, cut 1, stream 1)" in " ".join(report.caveats)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "ignore_eos: is not known\\nhere", "code": 3}}', "ignore_eos: is not known here"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b"<h1>Bad Gateway</h1>\x1b[31m\n", "<h1>Bad Gateway</h1> [31m"),
        (b"", ""),
        (b"[" * 5000, "[" * 197 + "..."),
        (b"\xff" * 10_000_000, "\N{REPLACEMENT CHARACTER}" * 197 + "..."),
    ],
    ids=["openai", "text", "fastapi", "vllm", "proxy", "empty", "deep", "huge"],
)
def test_b5_the_first_error_is_shown(fake: Fake, prompts: Path, body: bytes, said: str) -> None:
    fake.answer = lambda _number, _body: Reply(status=400, body=body)
    report = run_url(options_of(fake, prompts, requests=4))
    assert report.rows[0].first_error == said
    (caveat,) = [text for text in report.caveats if "failed" in text]
    assert caveat.startswith("1000/s: 4 of 4 requests failed (400 4).")
    assert caveat.endswith(f'error: "{said}".' if said else "(400 4).")


def test_b5_what_an_error_event_says_is_shown(fake: Fake, prompts: Path) -> None:
    fake.answer = lambda _number, _body: Reply(({"error": {"message": "out of blocks"}},), has_end=False)
    assert run_url(options_of(fake, prompts)).rows[0].first_error == "out of blocks"


def test_b5_a_run_whose_warm_up_fails_measures_nothing(fake: Fake, prompts: Path) -> None:
    fake.answer = lambda _number, _body: Reply(status=400, body=b'{"error": {"message": "no such model"}}')
    with pytest.raises(UnavailableError, match=r"all 2 requests of the warm-up .* failed \(400: no such model\)"):
        run_url(options_of(fake, prompts, warmup=2))
    assert len(fake.asked) == 2
    fake.answer = lambda number, _body: Reply(status=503) if number == 2 else tokens("a")
    assert run_url(options_of(fake, prompts, warmup=2)).rows[0].num_ok == 6


@pytest.mark.parametrize(("drafted", "accepted", "flagged"), [(50, 0, True), (50, 1, False), (10, 0, False)])
def test_b5_acceptance_near_zero_is_flagged(
    fake: Fake, prompts: Path, drafted: int, accepted: int, flagged: bool
) -> None:
    fake.answer = lambda _number, _body: tokens("a", timings={"draft_n": drafted, "draft_n_accepted": accepted})
    caveats = " ".join(run_url(options_of(fake, prompts, requests=2)).caveats)
    assert ("near chance" in caveats) == flagged


def test_nobody_there_is_said(prompts: Path) -> None:
    with serving(Fake()) as fake:
        pass
    with pytest.raises(UnavailableError, match="is the server running"):
        run_url(options_of(fake, prompts))
    (row,) = run_url(options_of(fake, prompts, model="m", requests=2)).rows
    assert row.errors == {"connect": 2}


def test_an_interrupt_keeps_what_was_measured(fake: Fake, prompts: Path, tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> Reply:
        if number == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return tokens("a", "b")

    fake.answer = answer
    report = run_url(options_of(fake, prompts, requests=10_000, rates=(200.0,), out=tmp_path / "out"))
    assert report.interrupted
    (row,) = report.rows
    assert 1 <= row.num_ok <= row.num_requests < 10_000
    assert "interrupted" in " ".join(report.caveats)
    (raw,) = (tmp_path / "out").glob("*.json")
    assert json.loads(raw.read_text())["rows"][0]["num_ok"] == row.num_ok


def test_a_stopped_run_goes_on_with_the_loads_that_are_missing(fake: Fake, prompts: Path, tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> Reply:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return tokens("a", "b")

    fake.answer = answer
    kept = tmp_path / "kept.jsonl"
    options = options_of(fake, prompts, rates=(500.0, 400.0), requests=3, resume=kept)
    first = run_url(options)
    assert first.interrupted
    assert len(kept.read_text().splitlines()) == 2
    fake.asked.clear()
    fake.answer = lambda number, body: tokens("a", "b")
    report = run_url(options)
    assert not report.interrupted
    assert sorted(body["seed"] for _, _, body in fake.asked) == [3, 4, 5]
    assert [(row.setting, row.num_ok) for row in report.rows] == [("500/s", 3), ("400/s", 3)]
    assert report.rows[0] == first.rows[0]
    assert "stopped and resumed" in " ".join(report.caveats)
    fake.asked.clear()
    again = run_url(options)
    assert (again.rows, fake.asked) == (report.rows, [])
    with pytest.raises(InputError, match="max_tokens=64, this run has 5"):
        run_url(replace(options, max_tokens=5))


def test_a_rate_that_comes_twice_is_measured_twice_and_resumed(fake: Fake, prompts: Path, tmp_path: Path) -> None:
    options = options_of(fake, prompts, rates=(500.0, 500.0), requests=3, resume=tmp_path / "kept.jsonl")
    report = run_url(options)
    assert len(report.rows) == 2
    fake.asked.clear()
    again = run_url(options)
    assert (again.rows, fake.asked) == (report.rows, [])


def test_a_row_for_every_rate(fake: Fake, prompts: Path) -> None:
    report = run_url(options_of(fake, prompts, rates=(500.0, 1000.0), requests=3))
    assert [(row.setting, row.num_ok) for row in report.rows] == [("500/s", 3), ("1000/s", 3)]
    assert sorted(body["seed"] for _, _, body in fake.asked) == list(range(6))
    assert "6 requests, warm-up included, share 2 prompts" in " ".join(report.caveats)
    assert "prompts" not in " ".join(run_url(options_of(fake, prompts, requests=2)).caveats)


def test_repeats_are_counted_of_conversations_and_with_the_prompts_of_the_warm_up(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [[{"role": "user", "content": text}] for text in ("one", "two", "three", "four")]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
    fake.answer = lambda _number, _body: Reply(({"choices": [{"delta": {"content": "a"}}]},))
    once = run_url(options_of(fake, path, chat=True, warmup=1, requests=3))
    assert "share" not in " ".join(once.caveats)
    twice = run_url(options_of(fake, path, chat=True, warmup=1, requests=4))
    assert "5 requests, warm-up included, share 4 prompts" in " ".join(twice.caveats)


# ---- arrivals


def test_the_seed_decides_the_arrivals_and_the_rate_scales_them(prompts: Path) -> None:
    options = UrlOptions("http://x", prompts=prompts, requests=2000)
    own = chosen_prompts(options)
    slow, fast = (poisson_requests(options, own, rate) for rate in (2.0, 4.0))
    assert [one.arrival_s for one in slow] == pytest.approx([2 * one.arrival_s for one in fast])
    assert slow[-1].arrival_s == pytest.approx(1000, rel=0.1)
    assert poisson_requests(replace(options, seed=1), own, 2.0)[0].arrival_s != slow[0].arrival_s


def test_a_trace_says_when_and_what(fake: Fake, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0.02, "prompt": "late", "max_tokens": 3}\n\n{"arrival_s": 0}\n')
    report = run_url(options_of(fake, prompts, trace=path))
    assert [(body["prompt"], body["max_tokens"]) for _, _, body in fake.asked] == [("one", 64), ("late", 3)]
    assert [row.setting for row in report.rows] == ["trace trace.jsonl"]


def test_only_a_line_feed_ends_a_line_of_a_trace(prompts: Path, tmp_path: Path) -> None:
    path, options = tmp_path / "trace.jsonl", UrlOptions("http://x", prompts=prompts)
    path.write_bytes('{"arrival_s": 0, "prompt": "a\u2028b\u0085c"}\r\n{"arrival_s": 1}\r\n'.encode())
    assert [one.text for one in trace_requests(options, chosen_prompts(options), path)] == ["a\u2028b\u0085c", "two"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[]", "must be an object"),
        ('{"arrival_s": -1}', "arrival_s"),
        ("{}", "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 3}', "unknown key"),
        ('{"arrival_s": 0, "prompt": ""}', "at least one character"),
        ('{"arrival_s": 0, "max_tokens": 0}', "max_tokens"),
        ("", "1 to"),
    ],
)
def test_a_trace_that_cannot_be_used(line: str, said: str, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    options = UrlOptions("http://x", prompts=prompts)
    with pytest.raises(InputError, match=said):
        trace_requests(options, chosen_prompts(options), path)


def test_conversations_need_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    with pytest.raises(InputError, match="--chat"):
        chosen_prompts(UrlOptions("http://x", prompts=path))
    assert chosen_prompts(UrlOptions("http://x", prompts=path, chat=True))


@pytest.mark.parametrize(
    "given",
    [
        {"url": "localhost:8000"},
        {"url": "ftp://host"},
        {"url": "http://"},
        {"url": "http://user:pass@host"},
        {"url": "http://host?key=1"},
        {"rates": (0.0,)},
        {"rates": ()},
        {"requests": 0},
        {"max_tokens": 0},
        {"ttft_deadline_s": 0.0},
        {"model": ""},
        {"name": "../x"},
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        UrlOptions(**{"url": "http://127.0.0.1:1"} | given)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_end_in_v1(url: str) -> None:
    assert UrlOptions(url).base == "http://h:1"


# ---- figures


def sample(index: int, times: tuple[float, ...], arrival_s: float = 0.0, error: str = "") -> UrlSample:
    pieces = [(time_s, 2) for time_s in times]
    ended_s = times[-1] if times else arrival_s
    place = {"index": index, "slice": "x", "arrival_s": arrival_s}
    return UrlSample(arrival_s, ended_s, pieces, 5, 2 * len(times), error=error, **place)


def test_times_of_one_request() -> None:
    one = sample(0, (1.5, 2.0, 3.0), arrival_s=1.0)
    assert (one.ttft_s, one.e2e_s, one.itl_s) == (0.5, 2.0, [0.5, 1.0])
    assert one.tpot_s == pytest.approx(1.5 / 4)  # four tokens came after the first piece
    assert sample(0, (1.0,)).tpot_s is None


def test_tokens_that_only_the_end_of_an_answer_counts_are_divided_among_its_pieces() -> None:
    """Five pieces of four tokens each: sixteen came after the first piece, and not nineteen."""
    one = sample(0, (1.0, 2.0, 3.0, 4.0, 5.0))
    one.pieces, one.num_tokens = [(at, 1) for at, _ in one.pieces], 20
    assert one.counted_pieces() == [(float(at), 4.0) for at in range(1, 6)]
    assert one.tpot_s == pytest.approx(4 / 16)


def test_a_server_that_still_loads_is_not_taken_for_one_that_is_not_there() -> None:
    class Loading(Fake):
        def reply(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
            return (
                (200, "application/json", b'{"data": []}')
                if path == "/v1/models"
                else super().reply(path, headers, body)
            )

    with serving(Loading()) as fake, pytest.raises(UnavailableError, match="it may still be loading"):
        HttpBackend(ServerAddress(fake.url))


def test_goodput_counts_answers_within_all_deadlines() -> None:
    samples = [sample(0, (0.1, 0.2)), sample(1, (0.9, 1.0)), sample(2, (0.1, 4.0)), sample(3, (), error="429")]
    options = UrlOptions("http://x", ttft_deadline_s=0.5, e2e_deadline_s=2.0)
    row = summarise_url("1/s", samples, options, None)
    assert (row.num_requests, row.num_ok, row.num_good) == (4, 3, 1)
    assert (row.span_s, row.goodput_per_s, row.requests_per_s) == (4.0, 0.25, 0.75)
    tight = summarise_url("1/s", samples, UrlOptions("http://x", tpot_deadline_s=0.01), None)
    assert tight.num_good == 0
    assert (row.num_good_tokens, row.num_tokens) == (4, 12)
    (price,) = url_prices([row], price_per_hour=3.6)
    assert price.price_per_million_tokens == pytest.approx(1000.0)  # 4 seconds are paid for 4 tokens
    silent = replace(sample(4, ()), num_tokens=3)  # tokens, and nobody saw the first
    assert [is_good(one, options) for one in (silent, sample(5, ()))] == [False, True]
    assert is_good(silent, UrlOptions("http://x"))
    (never,) = url_prices([tight], price_per_hour=3.6)
    assert never.price_per_million_tokens is None


def test_percentiles_are_those_of_the_values_and_the_interval_holds_them() -> None:
    found = percentiles([[float(value)] for value in range(1, 101)])
    assert [found[name].value for name in ("mean", "p50", "p95", "p99")] == [50.5, 50.0, 95.0, 99.0]
    assert 35 < found["p50"].low < 50 < found["p50"].high < 65
    few = percentiles([[1.0], [2.0]])
    assert (few["p99"].value, few["p99"].low) == (2.0, None)
    assert percentiles([[], []]) == {}


def test_throughput_of_an_even_stream_has_a_narrow_interval() -> None:
    even = [sample(index, (index + 0.5, index + 1.0), arrival_s=float(index)) for index in range(100)]
    found = throughput(even, 100.0)
    assert found.value == pytest.approx(4.0)
    assert found.low == pytest.approx(4.0, rel=0.1)
    assert found.high == pytest.approx(4.0, rel=0.1)


def test_the_interval_of_throughput_is_that_of_counted_tokens() -> None:
    """Where only the end says how many tokens there were, a piece counts as one of them."""
    few = [sample(index, (index + 0.5, index + 1.0), arrival_s=float(index)) for index in range(100)]
    found = throughput([replace(one, num_tokens=12) for one in few], 100.0)
    silent = throughput([replace(one, num_tokens=12, pieces=one.pieces * (one.index > 50)) for one in few], 100.0)
    for one in (found, silent):
        assert one.value == pytest.approx(12.0)
        assert 0 < one.low <= one.value <= one.high
    assert found.low == pytest.approx(12.0, rel=0.1)
    assert silent.low == pytest.approx(12.0, rel=0.1)
