"""What a cost table says between, beyond and before its measurements."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from foretoken.control.cost import CostTable, SeededCost, seed_tables
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.plan.roofline import Roofline


def test_measured_between_beyond_and_before() -> None:
    table = CostTable()
    assert table.is_empty
    assert table.seconds(5) == 0.0
    table.observe(4, 2.0)
    table.observe(8, 3.0)
    assert table.seconds(4) == 2.0
    assert table.seconds(5) == 2.25
    assert 3.0 < table.seconds(9) < 3.2
    assert 1.8 < table.seconds(1) < 2.0
    assert table.as_dict() == {4: 2.0, 8: 3.0}


def test_averages_forget_and_outliers_count_little() -> None:
    table = CostTable()
    for _ in range(20):
        table.observe(1, 1.0)
    table.observe(1, 1000.0)
    assert table.seconds(1) < 1.2
    for _ in range(60):
        table.observe(1, 2.0)
    assert table.seconds(1) == pytest.approx(2.0, rel=0.01)


def test_large_counts_share_buckets() -> None:
    table = CostTable()
    for count in range(1, 2000):
        table.observe(count, float(count))
    assert len(table.as_dict()) < 90
    for count in (17, 100, 777, 1999):
        assert table.seconds(count) == pytest.approx(count, rel=0.08)
    assert list(table.as_dict()) == sorted(table.as_dict())


PRIOR = Curve(((1, 0.050), (2, 0.051), (4, 0.055), (8, 0.062), (16, 0.090), (32, 0.160)))


def world(slower: float, seed: int, noise: float = 0.05) -> Callable[[int], float]:
    """A machine that takes `slower` times the prior, with noise."""
    rng = random.Random(seed)
    return lambda count: slower * PRIOR.seconds(count) * rng.gauss(1.0, noise)


def off_by(
    table: CostTable, truth: Callable[[int], float], counts: Sequence[int] = (1, 2, 3, 5, 9, 17, 32, 40)
) -> float:
    """The largest relative error over some counts."""
    return max(abs(table.seconds(count) / truth(count) - 1) for count in counts)


def test_a_seeded_table_is_its_prior_until_something_ran() -> None:
    table = SeededCost(PRIOR)
    assert not table.is_empty
    assert [table.seconds(count) for count in (1, 3, 32, 48)] == [PRIOR.seconds(count) for count in (1, 3, 32, 48)]
    assert table.as_dict() == {}
    assert SeededCost(Curve(((2, 0.01),)), grows=True).seconds(6) == pytest.approx(0.03)


@pytest.mark.parametrize("slower", [0.4, 1.0, 1.7, 2.5])
def test_a_slower_machine_rescales_counts_that_never_ran(slower: float) -> None:
    """Two counts run in turns: after 20 steps every other count has followed, and none is a mix of two moods."""
    for seed in range(10):
        table, take = SeededCost(PRIOR), world(slower, seed)
        for step in range(20):
            count = (1, 5)[step % 2]
            table.observe(count, take(count))
        assert off_by(table, lambda count: slower * PRIOR.seconds(count)) < 0.15
        assert (table.seconds(17) / table.seconds(1)) == pytest.approx(PRIOR.seconds(17) / PRIOR.seconds(1), rel=0.15)


def test_counts_that_do_not_run_follow_a_change_of_mood() -> None:
    """The machine is slowed down to half its speed while only one count runs; a plain table keeps the others where they
    were.
    """
    seeded, plain = SeededCost(PRIOR), CostTable()
    for step in range(200):
        for table in (seeded, plain):
            count = (1, 5, 9)[step % 3]
            table.observe(count, PRIOR.seconds(count))
    for _ in range(60):
        for table in (seeded, plain):
            table.observe(5, 2 * PRIOR.seconds(5))
    assert seeded.seconds(5) == pytest.approx(2 * PRIOR.seconds(5), rel=0.05)
    assert seeded.seconds(1) > 1.6 * PRIOR.seconds(1)
    assert seeded.seconds(17) > 1.6 * PRIOR.seconds(17)
    assert plain.seconds(1) == pytest.approx(PRIOR.seconds(1))


def test_a_wrong_prior_is_soon_outweighed() -> None:
    """The real machine pays for every row beyond the second: steps say so within a few of each count, whatever the
    profile said.
    """

    def truth(count: int) -> float:
        return 0.05 * (1 + 0.3 * max(0, count - 2))

    for seed in range(5):
        rng = random.Random(seed)
        table = SeededCost(PRIOR)
        for step in range(48):
            count = (1, 3, 5, 9)[step % 4]
            table.observe(count, truth(count) * rng.gauss(1.0, 0.05))
        assert off_by(table, truth, (1, 3, 5, 9)) < 0.15


def test_one_pause_moves_a_seeded_table_little() -> None:
    table = SeededCost(PRIOR)
    for _ in range(30):
        table.observe(5, PRIOR.seconds(5))
    table.observe(5, 1000.0)
    assert table.seconds(5) < 1.1 * PRIOR.seconds(5)
    assert table.seconds(1) < 1.1 * PRIOR.seconds(1)


@pytest.mark.parametrize("at", [0, 1, 7])
def test_pauses_at_the_start_are_made_good(at: int) -> None:
    """A first step of five times the usual length, say: forty later it is forgotten."""
    table, take = SeededCost(PRIOR), world(1.0, 3)
    for step in range(40):
        count = (1, 5)[step % 2]
        table.observe(count, take(count) * (5.0 if step == at else 1.0))
    assert off_by(table, PRIOR.seconds) < 0.1


def test_tables_of_a_profile() -> None:
    """Rows filled by the roofline, drafters by name, growing by the guess."""
    line = Roofline(step_bytes=1e9, row_flops=1e9, kv_bytes_per_token=0, bytes_per_s=2e10, flops_per_s=1e11)
    profile = Profile(
        {},
        {},
        {},
        "",
        "",
        Curve(((1, 0.05), (4, 0.06))),
        drafters={"draft_model": DrafterCost(Curve(((1, 0.004), (4, 0.016))))},
    )
    target, drafters = seed_tables(replace(profile, roofline=line))
    assert (target.seconds(1), target.seconds(4)) == (0.05, 0.06)
    # 100 rows are 1 s of arithmetic on this machine, and the step lay 16 % above the roofline: a straight line through
    # two points says 0.38.
    assert target.seconds(100) == pytest.approx(1.15, abs=0.1)
    assert seed_tables(profile)[0].seconds(100) == pytest.approx(0.38)
    assert drafters["draft_model"].seconds(8) == pytest.approx(0.032)
    assert seed_tables(replace(profile, drafters={"x": DrafterCost(Curve())}))[1] == {}
