"""Ratios of settings on the same prompts, and their intervals."""

from __future__ import annotations

import pytest

from foretoken.measure.stats import MIN_GROUPS, paired_ratio, quantile_ratio

PLAIN = {(p, r): (10.0, 1.0) for p in range(12) for r in range(3)}


def test_the_same_ratio_on_every_prompt_has_an_interval_without_width() -> None:
    found = paired_ratio(dict.fromkeys(PLAIN, (10.0, 0.5)), PLAIN)
    assert found is not None
    assert (found.ratio, found.low, found.high) == (2.0, 2.0, 2.0)
    assert set(found.by_prompt.values()) == {2.0}


def test_prompts_that_differ_widen_the_interval_around_the_ratio() -> None:
    own = {(p, r): (10.0, 1.0 if p % 2 else 0.25) for p, r in PLAIN}
    found = paired_ratio(own, PLAIN)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.ratio == pytest.approx(1 / 0.625)
    assert 1.0 < found.low < found.ratio < found.high < 4.0
    assert (found.by_prompt[0], found.by_prompt[1]) == (4.0, 1.0)
    assert paired_ratio(own, PLAIN) == found
    few = {place: value for place, value in own.items() if place[0] < 6}
    wider = paired_ratio(few, PLAIN)
    assert wider is not None
    assert wider.low is not None
    assert wider.low < found.low


def test_a_prompt_is_drawn_with_its_answers_under_both_settings() -> None:
    """Prompts of very different speed do not widen the interval of a ratio that is the same on all of them."""
    plain = {(p, r): (10.0, 1.0 + 9.0 * (p % 2)) for p, r in PLAIN}
    own = {place: (amount, cost / 2) for place, (amount, cost) in plain.items()}
    found = paired_ratio(own, plain)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_the_median_over_repeats_ignores_one_disturbed_repeat() -> None:
    own = {(p, r): (10.0, 5.0 if r == 1 else 0.5) for p, r in PLAIN}
    found = paired_ratio(own, PLAIN)
    assert found is not None
    assert found.ratio == 2.0


def test_only_what_both_have_measured_counts() -> None:
    own = {(0, 0): (10.0, 0.5), (1, 0): (10.0, 0.1)}
    found = paired_ratio(own, {(0, 0): (10.0, 1.0), (0, 1): (10.0, 9.0)})
    assert found is not None
    assert (found.ratio, found.low) == (2.0, None)
    assert paired_ratio(own, {}) is None
    uneven = {(0, 0): (10.0, 0.5), (1, 0): (10.0, 0.5), (0, 1): (10.0, 0.5)}
    stopped = paired_ratio(uneven, PLAIN)
    assert stopped is not None
    assert stopped.ratio == 2.0


def test_a_quantile_under_two_settings_is_drawn_by_blocks_for_both_together() -> None:
    base = [[10.0 * block + place for place in range(1, 5)] for block in range(1, 21)]
    found = quantile_ratio(base, [[value / 2 for value in block] for block in base], 0.95)
    assert found is not None
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)  # whatever is drawn, as each block has its own half
    apart = quantile_ratio(base, base[::-1], 0.5)
    assert apart is not None
    assert apart.low is not None
    assert apart.high is not None
    assert apart.low < apart.value == 1.0 < apart.high
    few = quantile_ratio(base[:4], base[:4], 0.5)
    assert few is not None
    assert (few.value, few.low) == (1.0, None)
    assert quantile_ratio([[]], [[1.0]], 0.5) is None


def test_each_prompt_counts_once_however_often_it_was_asked() -> None:
    """A run that ended within its last repeat, or a request that a log repeats: neither stands for all prompts."""
    own = {(p, 0): (10.0, 0.5) for p in range(12)} | {(0, r): (10.0, 2.0) for r in range(6)}
    plain = dict.fromkeys(own, (10.0, 1.0))
    found = paired_ratio(own, plain)
    assert found is not None
    assert found.ratio == pytest.approx(12 / (11 * 0.5 + 2.0))


def test_few_prompts_have_no_interval() -> None:
    """The draws of two groups are three: an interval of them holds the truth in about half of all samples."""
    own = {(p, r): (10.0, 0.5 + 0.1 * p) for p, r in PLAIN}
    for count in range(1, 7):
        found = paired_ratio({key: value for key, value in own.items() if key[0] < count}, PLAIN)
        assert found is not None
        assert (found.low is None) == (found.high is None) == (count < MIN_GROUPS)
