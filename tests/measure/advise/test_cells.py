"""The arithmetic of a prediction, on curves and rounds that are easy to follow."""

from __future__ import annotations

import pytest

from foretoken.measure.advise.cells import (
    ALL_SLICES,
    Machine,
    MemoryRoom,
    SpeedCell,
    best_cells,
    cells_of,
    cost_rows,
    predicted,
)
from foretoken.measure.advise.costs import DrafterCosts, LoadCosts, spread
from foretoken.measure.advise.rounds import AnswerRounds, DraftRound
from foretoken.measure.advise.verdict import of_cells, shortest_answer
from foretoken.plan.profile import Curve

# A plain step takes 1 s with 1 request and 2 s with 4; each draft token of all requests 0.1 s and 1 s more.
TARGET = {1: Curve(((0, 1.0), (10, 2.0))), 4: Curve(((0, 2.0), (10, 12.0)))}
FREE = DrafterCosts(False, {1: Curve(((1, 0.0), (10, 0.0))), 4: Curve(((1, 0.0), (10, 0.0)))})
MODEL = DrafterCosts(True, {1: Curve(((1, 1.5), (2, 2.0))), 4: Curve(((1, 5.0), (2, 8.0)))}, prompt_s=2.0)
COSTS = LoadCosts(16, 32, 3.0, TARGET, {"free": FREE, "model": MODEL})
ANSWER = AnswerRounds(
    "p", "code", 16, (DraftRound(2, (0, 1)), DraftRound(2, ()), DraftRound(0), DraftRound(2, (0,)))
)  # 3 + 1 + 1 + 2 tokens


def cell(name: str, concurrency: int, num_draft: int, room: MemoryRoom = MemoryRoom()) -> SpeedCell:  # noqa: B008 - frozen
    return predicted(name, ALL_SLICES, [ANSWER], COSTS, concurrency, num_draft, room)


def test_one_request_alone() -> None:
    """Seven tokens in three rounds of 1.2 s and one of 1 s, behind a prompt of 3 s."""
    found = cell("free", 1, 2)
    assert found.decode_speedup == pytest.approx(7 / 4.6)
    assert found.speedup.value == pytest.approx((3 + 7) / (3 + 4.6))
    assert found.emitted_per_step == pytest.approx(7 / 4)
    assert found.step_ratio == pytest.approx(4.6 / 4)
    assert found.accepted_per_draft == pytest.approx(1.0)
    assert found.ms_per_token == pytest.approx(1e3 * 4.6 / 7)
    assert found.tokens_per_s == pytest.approx(7 / 7.6)


def test_several_requests_share_a_step_and_wait_for_each_others_prompts() -> None:
    """At 4 the others draft 1.5 tokens on average: a step with 2 of our own has (2 + 3 * 1.5) / 4 a request."""
    found = cell("free", 4, 2)
    spent = 3 * (2 + (2 + 4.5) / 4) + (2 + 4.5 / 4)
    assert found.decode_speedup == pytest.approx(14 / spent)
    assert found.speedup.value == pytest.approx((12 + 14) / (12 + spent))
    assert found.plain_ms_per_token == pytest.approx(1e3 * (14 + 3 * 3) / 7)
    assert found.tokens_per_s == pytest.approx(4 * 7 / (12 + spent))


def test_a_model_reads_the_prompt_too_and_its_whole_steps_count() -> None:
    found = cell("model", 1, 2)
    assert found.decode_speedup == pytest.approx(7 / (3 * 2.0 + 1.5))  # a round without a draft costs as one with 1
    assert found.speedup.value == pytest.approx(10 / (3 + 2 + 7.5))


def test_memory_that_a_draft_displaces_makes_requests_wait() -> None:
    """Where 1 of 4 requests fits beside the draft, and 4 without it, throughput falls far below the speed-up."""
    found = cell("free", 4, 2, MemoryRoom(plain=4, candidate=1))
    assert (found.served, found.plain_served) == (1, 4)
    assert found.tokens_per_s == pytest.approx(7 / 7.6)
    assert found.plain_tokens_per_s == pytest.approx(4 * 7 / (12 + 14))
    assert not found.pays(0.0)
    assert cell("free", 4, 2, MemoryRoom(4, 0)).tokens_per_s == 0.0
    assert cell("free", 1, 2, MemoryRoom(4, 1)).pays(0.03)


def test_between_measured_loads_costs_are_interpolated() -> None:
    assert COSTS.plain_s(2.5) == pytest.approx(1.5)
    assert (COSTS.plain_s(1), COSTS.plain_s(9)) == (1.0, 2.0)


def test_the_best_number_of_draft_tokens_is_that_of_each_load() -> None:
    cells = cells_of({"free": [ANSWER]}, COSTS, (1, 4), (1, 2), {})
    best = {one.concurrency: one for one in best_cells(cells)}
    assert len(cells) == 4
    for load in (1, 4):
        own = {one.num_draft: one.speedup.value for one in cells if one.concurrency == load}
        assert own[best[load].num_draft] == max(own.values()) > min(own.values())


def test_two_slices_have_cells_of_their_own_and_one_together() -> None:
    other = AnswerRounds("q", "text", 16, (DraftRound(2, ()),) * 7)
    cells = cells_of({"free": [ANSWER, other]}, COSTS, (1,), (2,), {})
    by_slice = {one.slice: one.decode_speedup for one in cells}
    assert by_slice["text"] < 1 < by_slice["code"]
    assert by_slice["text"] < by_slice[ALL_SLICES] < by_slice["code"]


def test_costs_per_million_take_the_cheapest_load_in_time() -> None:
    """At 100 ms a token only one request at once is in time; on a machine of twice the speed both loads are."""
    cells = [cell("free", 1, 2), cell("free", 4, 2)]
    slow, fast = Machine("slow", 3600.0), Machine("fast", 3600.0, speed=10.0)
    limit = cells[0].plain_ms_per_token
    (one,) = cost_rows([slow], cells, limit, 0.03)
    assert (one.plain_concurrency, one.after_concurrency) == (1, 1)
    assert one.plain == pytest.approx(1e6 / cells[0].plain_tokens_per_s)
    assert one.after == pytest.approx(1e6 / cells[0].tokens_per_s)
    (other,) = cost_rows([fast], cells, limit, 0.03)
    assert (other.plain_concurrency, other.after_concurrency) == (
        4,
        1 if cells[0].tokens_per_s > cells[1].plain_tokens_per_s else 4,
    )
    (never,) = cost_rows([slow], cells, 1.0, 0.03)
    assert (never.plain, never.after) == (None, None)


def test_the_shortest_answer_that_saves_the_drafts_reading() -> None:
    """The model reads for 2 s and saves nothing: none ever pays. At no cost of reading any does."""
    assert shortest_answer("model", [cell("model", 1, 2)], COSTS) is None
    assert shortest_answer("free", [cell("free", 1, 2)], COSTS) == 0
    quick = LoadCosts(16, 32, 3.0, TARGET, {"model": DrafterCosts(True, {1: Curve(((1, 1.0), (2, 1.1)))}, 2.0)})
    own = predicted("model", ALL_SLICES, [ANSWER], quick, 1, 2, MemoryRoom())
    assert shortest_answer("model", [own], quick) == pytest.approx(2.0 / (1 - 1 / own.decode_speedup), abs=1)


def test_saturation_is_found_where_steps_grow_faster_than_answers() -> None:
    rejected = AnswerRounds("q", "text", 16, (DraftRound(2, ()),) * 7)
    cells = [predicted("free", ALL_SLICES, [rejected], COSTS, load, 2, MemoryRoom()) for load in (1, 4)]
    assert cells[0].step_ratio < 1.5 < cells[1].step_ratio
    (found,) = of_cells("free", cells, COSTS)
    assert found.topic == "load"
    assert found.rules_out
    assert "with 4 requests at once" in found.finding


def test_a_few_numbers_of_draft_tokens_are_timed() -> None:
    assert spread((1, 2, 3)) == (1, 2, 3)
    assert spread((1, 2, 3, 4, 5, 6, 8, 10)) == (1, 3, 5, 6, 10)
