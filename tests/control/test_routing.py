"""Rules before the arithmetic: each can be seen to hold, and to let go."""

from __future__ import annotations

import pytest

from foretoken import InputError, RoutingRules
from foretoken.control.routing import Routing, is_short


def test_a_draft_model_is_left_out_of_short_answers_where_others_can_draft() -> None:
    routing = Routing(RoutingRules())
    assert is_short(49, 49, routing.rules)
    assert not is_short(50, 50, routing.rules)
    assert not is_short(48, 49, routing.rules)  # reading so short a prompt takes little
    assert not is_short(9, 1, RoutingRules(min_tokens_for_draft_model=0))
    assert [routing.leaves_out(1, (False, True, True)) for _ in range(2)] == [{1, 2}] * 2
    assert routing.leaves_out(2, (True, True)) == frozenset()  # named alone, it drafts
    assert routing.leaves_out(3, (False, False)) == frozenset()
    assert routing.num_by_reason["draft model"] == 1


def test_without_rules_nobody_is_turned_away() -> None:
    routing = Routing(RoutingRules())
    assert all(routing.reason(r, 1, 1000) is None for r in range(5))
    assert not any(routing.num_by_reason.values())


def test_short_answers_are_not_speculated_for() -> None:
    routing = Routing(RoutingRules(min_tokens_to_speculate=8))
    assert routing.reason(1, 7, 1) == "short answer"
    assert routing.reason(2, 8, 1) is None
    assert routing.num_by_reason["short answer"] == 1


def test_load_holds_only_while_it_lasts_and_counts_a_request_once() -> None:
    routing = Routing(RoutingRules(max_speculating_requests=4))
    assert [routing.reason(1, 99, n) for n in (4, 5, 6, 4)] == [None, "load", "load", None]
    assert routing.num_by_reason["load"] == 1


def test_a_finished_request_is_forgotten() -> None:
    routing = Routing(RoutingRules(max_speculating_requests=0))
    routing.reason(1, 9, 5)
    routing.finish(1)
    assert not routing._counted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens_to_speculate": -1}, "min_tokens_to_speculate=-1: must be at least 0"),
        ({"min_tokens_for_draft_model": -1}, "min_tokens_for_draft_model=-1: must be at least 0"),
        ({"max_speculating_requests": 2.5}, "max_speculating_requests=2.5: must be a whole number"),
    ],
)
def test_bad_rules(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RoutingRules(**values)
