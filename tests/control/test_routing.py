"""The plain rules before the controller: each can be seen to hold, and to let go."""

from __future__ import annotations

import pytest

from foretoken import InputError, RoutingRules
from foretoken.control.routing import Routing


def test_without_rules_nobody_is_turned_away() -> None:
    routing = Routing(RoutingRules())
    assert all(routing.reason(r, 1, "", 1000) is None for r in range(5))
    assert not any(routing.num_by_reason.values())


def test_short_answers_are_not_speculated_for() -> None:
    routing = Routing(RoutingRules(min_tokens_to_speculate=8))
    assert routing.reason(1, 7, "", 1) == "short answer"
    assert routing.reason(2, 8, "", 1) is None
    assert routing.num_by_reason["short answer"] == 1


def test_load_holds_only_while_it_lasts_and_counts_a_request_once() -> None:
    routing = Routing(RoutingRules(max_speculating_requests=4))
    assert [routing.reason(1, 99, "", n) for n in (4, 5, 6, 4)] == [None, "load", "load", None]
    assert routing.num_by_reason["load"] == 1


def test_a_slice_that_lost_is_left_alone_but_for_some_that_try_again() -> None:
    routing = Routing(RoutingRules(slice_rounds=50, slice_retry=4))
    for _ in range(60):
        routing.observe("poems", took_s=0.3, saved_s=0.1, plain_s=1.0)
        routing.observe("code", took_s=0.3, saved_s=0.9, plain_s=1.0)
    assert [routing.reason(r, 99, "poems", 1) for r in range(8)] == ["slice lost", "slice lost", "slice lost", None] * 2
    assert all(routing.reason(10 + r, 99, label, 1) is None for r, label in enumerate(("code", "", "unheard of")))
    assert routing.reason(0, 99, "poems", 1) == "slice lost"  # a request's verdict stays
    for _ in range(300):  # those that tried again found that it pays now
        routing.observe("poems", took_s=0.3, saved_s=0.9, plain_s=1.0)
    assert routing.reason(30, 99, "poems", 1) is None


def test_little_loss_and_few_rounds_decide_nothing() -> None:
    routing = Routing(RoutingRules(slice_rounds=50))
    for _ in range(49):
        routing.observe("poems", 1.0, 0.0, 1.0)
    assert routing.reason(1, 99, "poems", 1) is None
    other = Routing(RoutingRules(slice_rounds=50))
    for _ in range(100):
        other.observe("poems", 0.02, 0.0, 1.0)
    assert other.reason(1, 99, "poems", 1) is None


def test_a_finished_request_is_forgotten_and_slices_are_bounded() -> None:
    routing = Routing(RoutingRules(max_speculating_requests=0))
    routing.reason(1, 9, "", 5)
    routing.finish(1)
    for number in range(1000):
        routing.observe(f"slice {number}", 1.0, 0.0, 1.0)
    assert not routing._verdicts
    assert not routing._crowded
    assert len(routing._accounts) <= 256


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens_to_speculate": -1}, "min_tokens_to_speculate=-1: must be at least 0"),
        ({"max_speculating_requests": 2.5}, "max_speculating_requests=2.5: must be a whole number"),
        ({"max_slice_loss": 2}, "max_slice_loss=2: must lie in"),
        ({"slice_rounds": 0}, "slice_rounds=0: must be at least 1"),
        ({"slice_retry": 1}, "slice_retry=1: must be at least 2"),
    ],
)
def test_bad_rules(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RoutingRules(**values)
