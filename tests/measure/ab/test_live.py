"""Live traffic divided by time: turns, what requests say, and when traffic goes back."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken.errors import ConfigError, InputError
from foretoken.measure.ab.live import (
    BIN_WIDTH,
    LiveBlock,
    LiveOptions,
    LiveRequest,
    LiveSide,
    LiveSums,
    LiveTurn,
    TimeHistogram,
    fails_more,
    live_outcome,
    live_report,
    pair_means,
    turn_at,
)

OPTIONS = LiveOptions("http://a:1", "http://b:1", block_s=10, washout_s=2)


def traffic(speedup: float, num_pairs: int = 40, seed: int = 0, noise: float = 0.1) -> list[LiveRequest]:
    """Requests whose time grows with prompt and answer, on a machine whose pace drifts from block to block."""
    rng, found = random.Random(seed), []
    for block in range(2 * num_pairs):
        side = turn_at(OPTIONS, block * OPTIONS.block_s + 5).side
        drift = rng.gauss(0, 0.05)
        for _ in range(12):
            num_bytes, num_tokens = rng.choice((100, 2000, 9000)), rng.choice((8, 40, 200))
            base_s = 0.0001 * num_bytes + 0.02 * num_tokens
            e2e_s = base_s / (speedup if side == "b" else 1) * math.exp(drift + rng.gauss(0, noise))
            found.append(LiveRequest(LiveTurn(block, side, True), e2e_s, e2e_s / 5, num_bytes, num_tokens))
    return found


def sums_of(requests: list[LiveRequest]) -> LiveSums:
    found = LiveSums()
    for one in requests:
        found.add(one)
    return found


def blocks_of(requests: list[LiveRequest]) -> list[LiveBlock]:
    return sums_of(requests).blocks()


def slow_pair_means(requests: list[LiveRequest]) -> list[float]:
    """The same from all requests at once, each adjusted for its lengths."""
    values = np.array([math.log(one.e2e_s / one.num_tokens) for one in requests])
    lengths = np.array([(math.log1p(one.num_prompt_bytes), math.log(one.num_tokens)) for one in requests])
    blocks = np.array([one.turn.block for one in requests])
    within = [column.copy() for column in (values, *lengths.T)]
    for column in within:
        for block in set(blocks):
            column[blocks == block] -= column[blocks == block].mean()
    adjusted = values - lengths @ np.linalg.lstsq(np.stack(within[1:], axis=1), within[0], rcond=None)[0]
    means = {one.turn: adjusted[blocks == one.turn.block].mean() for one in requests}
    found: dict[int, dict[str, float]] = {}
    for turn, mean in means.items():
        found.setdefault(turn.block // 2, {})[turn.side] = float(mean)
    return [sides["a"] - sides["b"] for _, sides in sorted(found.items())]


def test_sums_by_block_say_what_all_requests_do() -> None:
    requests = traffic(1.1)
    assert pair_means(blocks_of(requests)) == pytest.approx(slow_pair_means(requests), abs=1e-9)


def test_what_is_kept_does_not_grow_with_requests() -> None:
    def size(repeats: int) -> int:
        kept = sums_of(traffic(1.0, 5) * repeats)
        return len(pickle.dumps((kept.blocks(), kept.sides)))

    assert size(20) < 1.1 * size(2)


def test_quantiles_are_those_of_the_times_to_the_width_of_a_bin() -> None:
    rng, histogram = np.random.default_rng(0), TimeHistogram()
    assert histogram.quantile(0.5) is None
    times = rng.lognormal(0, 1, 2000)
    for seconds in times:
        histogram.add(seconds)
    for share in (0.01, 0.5, 0.95, 1.0):
        expected = float(np.quantile(times, share, method="inverted_cdf"))
        assert histogram.quantile(share) == pytest.approx(expected, rel=BIN_WIDTH)
    for seconds in (0.0, 1e300):
        histogram.add(seconds)


def test_each_pair_of_blocks_has_both_servers_in_an_order_of_its_own() -> None:
    sides = [turn_at(OPTIONS, 10 * block + 5).side for block in range(200)]
    pairs = [tuple(sides[i : i + 2]) for i in range(0, 200, 2)]
    assert set(pairs) == {("a", "b"), ("b", "a")}
    assert 30 < pairs.count(("a", "b")) < 70
    assert [turn_at(OPTIONS, at).is_counted for at in (0, 1.9, 2, 9.9, 10)] == [False, False, True, True, False]


@pytest.mark.parametrize(("speedup", "verdict"), [(1.15, "faster"), (0.87, "slower"), (1.0, "equivalent")])
def test_the_verdict_is_about_time_per_token(speedup: float, verdict: str) -> None:
    found = live_outcome(blocks_of(traffic(speedup, 300)), 0.06)
    assert found.verdict == verdict
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(speedup, rel=0.02)


def test_what_lengths_explain_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(traffic(1.0))
    adjusted = pair_means(blocks)
    monkeypatch.setattr("foretoken.measure.ab.live._slopes", lambda blocks: np.zeros(2))
    plain = pair_means(blocks)
    assert sum(value**2 for value in adjusted) < 0.5 * sum(value**2 for value in plain)


def test_few_requests_say_nothing_yet() -> None:
    assert live_outcome([], 0.03).speedup is None
    only_a = [one for one in traffic(1.0) if one.turn.side == "a"]
    assert live_outcome(blocks_of(only_a), 0.03).num_blocks == 0
    assert live_outcome(blocks_of(traffic(2.0, 5)), 0.03).verdict == "go on"


def test_what_is_not_counted() -> None:
    good = LiveRequest(LiveTurn(0, "a", True), 1.0, 0.5, 10, 10)
    other = LiveRequest(LiveTurn(1, "b", True), 1.0, 0.5, 10, 10)
    assert pair_means(blocks_of([good, other])) == pytest.approx([0.0])
    for changes in ({"error": "cut"}, {"num_tokens": 0}, {"turn": LiveTurn(1, "b", False)}):
        values: dict[str, Any] = {
            "turn": other.turn,
            "e2e_s": 1.0,
            "ttft_s": 0.5,
            "num_prompt_bytes": 1,
            "num_tokens": 9,
        }
        assert pair_means(blocks_of([good, LiveRequest(**values | changes)])) == []


def test_tokens_that_one_server_says_are_not_compared_with_estimates_of_the_other() -> None:
    """Equal servers, whose tokens have two characters: only A says how many there are."""
    requests = [
        replace(one, num_tokens=one.num_tokens if one.turn.side == "a" else 0, num_chars=2 * one.num_tokens)
        for one in traffic(1.0, 300)
    ]
    sums = sums_of(requests)
    found = live_outcome(sums.blocks(), 0.06)
    assert (found.verdict, sums.sides["a"].num_compared, sums.sides["b"].num_unknown) == ("equivalent", 3600, 0)
    report = live_report(OPTIONS, sums.blocks(), sums, "", "ab-live")
    assert report.caveats[0].startswith("3600 answers did not say how many tokens they have")


def test_tokens_are_those_that_are_said_where_both_servers_do() -> None:
    requests = [replace(one, num_chars=7) for one in traffic(1.1)]
    assert pair_means(blocks_of(requests)) == pair_means(blocks_of(traffic(1.1)))


def test_errors_of_b_send_traffic_back() -> None:
    def sides(failed_a: int, failed_b: int, count: int = 100) -> dict[str, LiveSide]:
        return {"a": LiveSide(count, failed_a), "b": LiveSide(count, failed_b)}

    assert fails_more(sides(0, 20))
    assert not fails_more(sides(0, 4))
    assert not fails_more(sides(18, 20))
    assert not fails_more(sides(20, 0))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"a": "nowhere"}, "a"),
        ({"washout_s": 10.0}, "washout_s"),
        ({"block_s": 0.0}, "block_s"),
        ({"port": -1}, "port"),
    ],
)
def test_options_are_checked(changes: dict[str, Any], field: str) -> None:
    with pytest.raises((ConfigError, InputError), match=field):
        LiveOptions(**{"a": "http://a:1", "b": "http://b:1", "block_s": 10.0, "washout_s": 2.0} | changes)
    assert LiveOptions("http://a:1", "http://b:1", out=Path("x.html")).out
