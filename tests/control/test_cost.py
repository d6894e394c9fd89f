"""What a cost table says between, beyond and before its measurements."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from foretoken.control.cost import CostTable, DraftCosts, HostCosts, StepCosts, priors_of
from foretoken.plan.profile import Curve, DrafterCost, Profile, Roofline


def test_measured_between_beyond_and_before() -> None:
    table = CostTable()
    assert table.is_empty
    assert table.seconds(5) == 0.0
    table.observe(4, 2.0)
    table.observe(8, 3.0)
    assert table.seconds(4) == pytest.approx(2.0, rel=0.01)
    assert table.seconds(5) == pytest.approx(2.25, rel=0.01)
    assert 3.0 < table.seconds(9) < 3.2
    assert 1.8 < table.seconds(1) < 2.0
    assert table.as_dict() == pytest.approx({4: 2.0, 8: 3.0}, rel=0.01)


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
    counts = [count for count in range(1, 2000) for _ in range(4)]
    random.Random(0).shuffle(counts)
    for count in counts:
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


@pytest.mark.parametrize("full", [16, 32])
def test_a_row_beyond_full_tiles_leaves_the_cost_of_full_ones_alone(full: int) -> None:
    """In one bucket the first draft token of as many requests would seem to cost nothing."""
    table = CostTable(Curve(((1, 1.0), (full, 10.0), (full + 4, 13.0))))
    for _ in range(20):
        table.observe(full, 10.0)
        table.observe(full + 1, 13.0)
    assert table.seconds(full) == pytest.approx(10.0, rel=0.02)
    assert table.seconds(full + 1) > 1.25 * table.seconds(full)


def test_a_table_is_its_prior_until_something_ran() -> None:
    table = CostTable(PRIOR)
    assert not table.is_empty
    assert [table.seconds(count) for count in (1, 3, 32, 48)] == [PRIOR.seconds(count) for count in (1, 3, 32, 48)]
    assert table.as_dict() == {}
    assert CostTable(Curve(((2, 0.01),)), grows=True).seconds(6) == pytest.approx(0.03)


@pytest.mark.parametrize("slower", [0.4, 1.0, 1.7, 2.5])
def test_a_slower_machine_rescales_counts_that_never_ran(slower: float) -> None:
    """Two counts run in turns: after 20 steps every other count has followed, and none is a mix of two speeds."""
    for seed in range(10):
        table, take = CostTable(PRIOR), world(slower, seed)
        for step in range(20):
            count = (1, 5)[step % 2]
            table.observe(count, take(count))
        assert off_by(table, lambda count: slower * PRIOR.seconds(count)) < 0.15
        assert (table.seconds(17) / table.seconds(1)) == pytest.approx(PRIOR.seconds(17) / PRIOR.seconds(1), rel=0.15)


def test_counts_that_do_not_run_follow_a_change_of_speed() -> None:
    """The machine slows down to half its speed while only one count runs."""
    table = CostTable(PRIOR)
    for step in range(200):
        count = (1, 5, 9)[step % 3]
        table.observe(count, PRIOR.seconds(count))
    for _ in range(60):
        table.observe(5, 2 * PRIOR.seconds(5))
    assert table.speed_factor > 1.6
    assert table.seconds(5) == pytest.approx(2 * PRIOR.seconds(5), rel=0.05)
    assert table.seconds(1) > 1.6 * PRIOR.seconds(1)
    assert table.seconds(17) > 1.6 * PRIOR.seconds(17)


def test_a_wrong_prior_is_soon_outweighed() -> None:
    """The real machine pays for every row beyond the second: steps say so within a few of each count, whatever the
    profile said.
    """

    def truth(count: int) -> float:
        return 0.05 * (1 + 0.3 * max(0, count - 2))

    for seed in range(5):
        rng = random.Random(seed)
        table = CostTable(PRIOR)
        for step in range(48):
            count = (1, 3, 5, 9)[step % 4]
            table.observe(count, truth(count) * rng.gauss(1.0, 0.05))
        assert off_by(table, truth, (1, 3, 5, 9)) < 0.15


def test_one_pause_moves_a_seeded_table_little() -> None:
    table = CostTable(PRIOR)
    for _ in range(30):
        table.observe(5, PRIOR.seconds(5))
    table.observe(5, 1000.0)
    assert table.seconds(5) < 1.1 * PRIOR.seconds(5)
    assert table.seconds(1) < 1.1 * PRIOR.seconds(1)


@pytest.mark.parametrize("at", [0, 1, 7])
def test_pauses_at_the_start_are_made_good(at: int) -> None:
    """A first step of five times the usual length, say: forty later it is forgotten."""
    table, take = CostTable(PRIOR), world(1.0, 3)
    for step in range(40):
        count = (1, 5)[step % 2]
        table.observe(count, take(count) * (5.0 if step == at else 1.0))
    assert off_by(table, PRIOR.seconds) < 0.1


def test_tables_of_a_profile() -> None:
    """Rows filled by the roofline, drafters by name, growing by the draft token."""
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
    rows, drafters = priors_of(replace(profile, roofline=line))
    assert (rows.seconds(1), rows.seconds(4)) == (0.05, 0.06)
    # 100 rows are 1 s of arithmetic on this machine, and the step lay 16 % above the roofline: a straight line through
    # two points says 0.38.
    assert rows.seconds(100) == pytest.approx(1.15, abs=0.1)
    assert priors_of(profile)[0].seconds(100) == pytest.approx(0.38)
    assert DraftCosts(drafters).seconds("draft_model", 8) == pytest.approx(0.032)
    assert priors_of(replace(profile, drafters={"x": DrafterCost(Curve())}))[1] == {}


def test_steps_of_more_requests_have_a_table_of_their_own() -> None:
    """The first step of sixteen requests takes 5 ms more than as many rows of one: so do all counts, until they ran."""
    costs = StepCosts(PRIOR)
    assert costs.at(16).seconds(20) == PRIOR.seconds(20)
    for _ in range(3):
        costs.observe(16, 16, PRIOR.seconds(16) + 0.005)
    assert costs.at(16).seconds(16) == pytest.approx(PRIOR.seconds(16) + 0.005)
    assert costs.at(16).seconds(32) > PRIOR.seconds(32)
    assert costs.at(1).seconds(16) == PRIOR.seconds(16)
    assert costs.at(14) is costs.at(16)  # about as many


def test_the_first_step_begins_a_table_where_nothing_was_measured() -> None:
    costs = StepCosts()
    assert costs.at(1).is_empty
    costs.observe(4, 4, 1.0)
    assert costs.at(4).seconds(4) == 1.0
    assert costs.at(1) is costs.at(4)


def test_drafting_for_many_has_a_table_of_its_own_and_reading_a_price() -> None:
    costs = DraftCosts()
    assert not costs.knows("d")
    assert costs.seconds("d", 4) == costs.read_s("d", 100) == 0.0
    costs.observe("d", 4, 0.4, num_requests=1, num_read_tokens=0)
    costs.observe("d", 4, 0.8, num_requests=8, num_read_tokens=0)
    assert [costs.seconds("d", n, 1) for n in (2, 4, 8)] == pytest.approx([0.2, 0.4, 0.8])
    assert costs.seconds("d", 4, 8) == pytest.approx(0.8)
    costs.observe("d", 4, 10.4, num_requests=1, num_read_tokens=100)
    assert costs.read_s("d", 50) == pytest.approx(5.0)
    assert costs.seconds("d", 4, 1) == pytest.approx(0.4)  # a round that reads says nothing of drafting


def test_what_draft_tokens_cost_the_host_follows_its_pace_while_nothing_is_drafted() -> None:
    """Steps with draft tokens took twice as long as those without; then the machine got twice as fast."""
    costs = HostCosts()
    assert costs.extra_s(4) == 0.0
    for _ in range(40):
        costs.observe(4, 1.0, has_draft=False)
        costs.observe(4, 2.0, has_draft=True)
    assert costs.extra_s(4) == pytest.approx(1.0, rel=0.02)
    for _ in range(40):
        costs.observe(4, 0.5, has_draft=False)
    assert costs.extra_s(4) == pytest.approx(0.5, rel=0.05)
    assert costs.plain_s(4) == pytest.approx(0.5, rel=0.05)
