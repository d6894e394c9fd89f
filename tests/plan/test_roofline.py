"""The least a forward can take, and measured curves filled up with it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from foretoken.errors import InputError
from foretoken.plan.profile import Curve, Profile, Roofline, profile_from_mapping

LINE = Roofline(
    step_bytes=2e9, row_flops=2e9, kv_bytes_per_token=1e5, bytes_per_s=4e10, flops_per_s=4e11
)  # 50 ms; bends at 10 rows


def test_memory_first_then_arithmetic() -> None:
    assert LINE.seconds(1) == pytest.approx(0.050, rel=0.01)
    assert LINE.seconds(10) == pytest.approx(0.050 * 2**0.25)
    assert LINE.seconds(200) == pytest.approx(1.0, rel=0.01)
    seconds = [LINE.seconds(rows) for rows in range(1, 300)]
    assert seconds == sorted(seconds)
    assert all(max(0.05, rows * 0.005) <= LINE.seconds(rows) <= max(0.05, rows * 0.005) * 1.2 for rows in range(1, 300))


def test_the_past_is_read_once_for_all_rows_of_a_request() -> None:
    assert LINE.past_s(40_000) == pytest.approx(0.1)
    assert LINE.seconds(1, 40_000) == pytest.approx(0.15, rel=0.01)
    assert LINE.seconds(4, 40_000) - LINE.seconds(1, 40_000) < 0.001


def test_more_rows_read_more_experts() -> None:
    """8 of 64 experts a row: one row reads an eighth of them, many rows all of them, each once."""
    mixture = replace(LINE, step_bytes=1e9, expert_bytes=4e9, expert_share=1 / 8)
    assert mixture.read_bytes(1) == pytest.approx(1e9)
    assert mixture.read_bytes(2) == pytest.approx(0.5e9 + 4e9 * (1 - (7 / 8) ** 2))
    assert mixture.read_bytes(1000) == pytest.approx(4.5e9)
    assert mixture.seconds(8) - mixture.seconds(1) > 10 * (LINE.seconds(8) - LINE.seconds(1))
    assert replace(mixture, expert_bytes=0.0).read_bytes(8) == 1e9
    for bad in ({"expert_bytes": -1.0}, {"expert_share": 0.0}, {"expert_share": 1.5}):
        with pytest.raises(ValueError, match="experts"):
            replace(mixture, **bad)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.7])
@pytest.mark.parametrize("rows", [(1,), (1, 2, 4), (1, 2, 4, 8, 16, 32), (1, 100)])
def test_filled_curves_keep_what_was_measured_and_rise(factor: float, rows: tuple[int, ...]) -> None:
    """A machine that lies a factor off the roofline is found again at every count, from a few points of it."""
    points = tuple((count, factor * LINE.seconds(count)) for count in rows)
    filled = LINE.fill(points)
    assert set(points) <= set(filled)
    assert list(filled) == sorted(filled)
    assert [seconds for _, seconds in filled] == sorted(seconds for _, seconds in filled)
    for count in (1, 3, 11, 24, 64, 300, 2000):
        assert Curve(filled).seconds(count) == pytest.approx(factor * LINE.seconds(count), rel=0.03)


def test_where_calls_take_the_time_rows_stay_cheap() -> None:
    """A step of 20 ms whose roofline is 0.5 ms: 32 more rows may cost four rooflines, not forty."""
    fast = replace(LINE, step_bytes=2e7, row_flops=2e7)
    filled = Curve(fast.fill(((1, 0.020), (2, 0.020))))
    assert filled.seconds(34) - 0.020 < 5 * (fast.seconds(34) - fast.seconds(2))


def test_a_roofline_travels_with_its_profile() -> None:
    profile = Profile({}, {}, {}, "", "", Curve(((1, 1.0),)), roofline=LINE)
    assert profile_from_mapping(json.loads(json.dumps(profile.as_dict()))) == profile
    assert profile.step_s(1, [40_000]) == pytest.approx(1.1)
    assert replace(profile, context=Curve(((10, 1.0), (20, 1.5)))).step_s(1, [20]) == 1.5
    for bad in ({"step_bytes": 1}, 7, asdict(LINE) | {"bytes_per_s": 0}, asdict(LINE) | {"bytes_per_s": "x"}):
        with pytest.raises(InputError, match=r"profile\.roofline"):
            profile_from_mapping(profile.as_dict() | {"roofline": bad})
    with pytest.raises(InputError, match=r"drafters\.x\.about"):
        profile_from_mapping(profile.as_dict() | {"drafters": {"x": {"guesses": [[1, 1]], "about": 3}}})
