"""Live traffic divided by time: turns, what requests say, and when traffic goes back."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ConfigError, InputError
from foretoken.measure.ab.live import LiveOptions, LiveRequest, LiveTurn, fails_more, live_outcome, pair_means, turn_at

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


def test_each_pair_of_blocks_has_both_servers_in_an_order_of_its_own() -> None:
    sides = [turn_at(OPTIONS, 10 * block + 5).side for block in range(200)]
    pairs = [tuple(sides[i : i + 2]) for i in range(0, 200, 2)]
    assert set(pairs) == {("a", "b"), ("b", "a")}
    assert 30 < pairs.count(("a", "b")) < 70
    assert [turn_at(OPTIONS, at).is_counted for at in (0, 1.9, 2, 9.9, 10)] == [False, False, True, True, False]


@pytest.mark.parametrize(("speedup", "verdict"), [(1.15, "faster"), (0.87, "slower"), (1.0, "equivalent")])
def test_the_verdict_is_about_time_per_token(speedup: float, verdict: str) -> None:
    found = live_outcome(traffic(speedup, 300), 0.06)
    assert found.verdict == verdict
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(speedup, rel=0.02)


def test_what_lengths_explain_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    adjusted = pair_means(traffic(1.0))
    monkeypatch.setattr(
        "foretoken.measure.ab.live._adjusted", lambda used: [math.log(r.e2e_s / r.num_tokens) for r in used]
    )
    plain = pair_means(traffic(1.0))
    assert sum(value**2 for value in adjusted) < 0.5 * sum(value**2 for value in plain)


def test_few_requests_say_nothing_yet() -> None:
    assert live_outcome([], 0.03).speedup is None
    only_a = [one for one in traffic(1.0) if one.turn.side == "a"]
    assert live_outcome(only_a, 0.03).num_blocks == 0
    assert live_outcome(traffic(2.0, 5), 0.03).verdict == "go on"


def test_what_is_not_counted() -> None:
    good = LiveRequest(LiveTurn(0, "a", True), 1.0, 0.5, 10, 10)
    other = LiveRequest(LiveTurn(1, "b", True), 1.0, 0.5, 10, 10)
    assert pair_means([good, other]) == pytest.approx([0.0])
    for changes in ({"error": "cut"}, {"num_tokens": 0}, {"turn": LiveTurn(1, "b", False)}):
        values: dict[str, Any] = {
            "turn": other.turn,
            "e2e_s": 1.0,
            "ttft_s": 0.5,
            "num_prompt_bytes": 1,
            "num_tokens": 9,
        }
        assert pair_means([good, LiveRequest(**values | changes)]) == []


def test_errors_of_b_send_traffic_back() -> None:
    def requests(failed_a: int, failed_b: int, count: int = 100) -> list[LiveRequest]:
        return [
            LiveRequest(LiveTurn(0, side, True), 1, 1, 1, 1, "500" if place < failed else "")
            for side, failed in (("a", failed_a), ("b", failed_b))
            for place in range(count)
        ]

    assert fails_more(requests(0, 20))
    assert not fails_more(requests(0, 4))
    assert not fails_more(requests(18, 20))
    assert not fails_more(requests(20, 0))


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
