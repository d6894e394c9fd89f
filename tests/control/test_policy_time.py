"""What the policy spends on finding out, on reading and on thinking; seen from outside, in rounds whose times are
written down.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from foretoken.control import policy as module
from foretoken.control.candidates import DraftBudget, RequestOptions, options_of
from foretoken.control.policy import BudgetPolicy


def learn(
    policy: BudgetPolicy,
    rounds: int,
    num_draft: int,
    target_s: float,
    draft_s: float,
    stands: bool = True,
    request: int = 0,
) -> None:
    """Rounds of one request in which every guess stands, or none."""
    for _ in range(rounds):
        policy.plan([options_of(request, "d", 8, True)])
        policy.observe_step(1 + num_draft, num_draft, target_s)
        if num_draft:
            policy.observe_round(request, "d", num_draft, [float(stands)] * num_draft)
            policy.observe_draft("d", num_draft, draft_s)
        else:
            policy.observe_rest(request)


def plain_steps(policy: BudgetPolicy, wishes: list[RequestOptions], rounds: int, target_s: float = 1.0) -> None:
    """Rounds in which nothing is guessed, whatever was planned."""
    for _ in range(rounds):
        policy.plan(wishes)
        policy.observe_step(len(wishes), 0, target_s)
        for wish in wishes:
            policy.observe_rest(wish.request_id)


def budgets(grants: Iterable[DraftBudget]) -> list[int]:
    return [grant.num_draft for grant in grants]


def test_a_drafter_of_unknown_price_is_tried_by_one_request_and_little() -> None:
    """It may be dear, and all would read their prompts for it; what the caller set stands beside that."""
    policy = BudgetPolicy()
    wishes = [options_of(b, "d", 8, True) for b in range(6)]
    plain_steps(policy, wishes, 3)
    found = budgets(policy.plan(wishes))
    assert 1 <= max(found) <= 2
    assert sum(map(bool, found)) == 1
    mixed = budgets(policy.plan([*wishes, options_of(6, "d", 8, False)]))
    assert mixed[6] == 8
    for b in range(6):
        policy.observe_round(b, "d", 2, [1.0, 1.0])
    policy.observe_draft("d", 2, 0.01, 1)
    policy.observe_step(8, 2, 1.0)
    assert sum(map(bool, budgets(policy.plan(wishes)))) > 1


def test_who_is_almost_done_does_not_have_its_text_read() -> None:
    """A hundred tokens to read take ten steps: worth it for a long answer, not for three tokens more."""
    policy = BudgetPolicy()
    learn(policy, 20, 4, 1.0, 0.01)
    plain_steps(policy, [options_of(0, "d", 8, True)], 1)
    for _ in range(4):
        policy.observe_draft("d", 4, 10.01, num_read_tokens=100)
    policy.finish(0)
    grants = [
        policy.plan([options_of(n, "d", 8, True, num_tokens=100, num_remaining=left)])
        for n, left in ((1, 3), (2, 10_000), (3, 3), (4, 10_000))
    ]
    assert [bool(number) for number in map(sum, map(budgets, grants))] == [False, True, False, True]


def test_rows_that_were_dear_once_are_tried_again() -> None:
    """The target's rows were measured in a bad hour, and without guesses nothing corrects it: after a long rest they
    are tried, once.
    """
    policy = BudgetPolicy()
    learn(policy, 5, 0, 1.0, 0.0)
    learn(policy, 1, 4, 30.0, 0.0)
    learn(policy, 1, 1, 30.0, 0.0)
    found = []
    for _ in range(120):
        found += budgets(policy.plan([options_of(0, "d", 8, True)]))
        policy.observe_step(1, 0, 1.0)
        policy.observe_rest(0)
    assert found[:30] == [0] * 30
    assert any(found)
    assert sum(map(bool, found)) < 12


@pytest.mark.parametrize(
    ("batch", "step_s", "least", "most"), [(12, 1e-3, 2, 20), (12, 10.0, 40, 40), (2, 1e-3, 40, 40)]
)
def test_weighing_takes_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, batch: int, step_s: float, least: int, most: int
) -> None:
    """Many options in short steps are weighed now and then, in long steps or for few requests in every one; what stands
    meanwhile goes on.
    """
    policy, calls, choose = BudgetPolicy(), [], module.choose_budgets
    monkeypatch.setattr(module, "choose_budgets", lambda *arguments: calls.append(1) or choose(*arguments))
    wishes = [options_of(b, "d", 8, True) for b in range(batch)]

    def rounds(count: int) -> list[int]:
        found = []
        for _ in range(count):
            numbers = budgets(policy.plan(wishes))
            found.append(sum(numbers))
            policy.observe_step(batch + sum(numbers), sum(numbers), step_s)
            for b, number in enumerate(numbers):
                if number:
                    policy.observe_round(b, "d", number, [0.9**place for place in range(1, number + 1)])
                else:
                    policy.observe_rest(b)
            if sum(numbers):
                policy.observe_draft("d", max(numbers), 1e-5 * step_s, sum(map(bool, numbers)))
        return found

    rounds(60)
    calls.clear()
    found = rounds(40)
    assert least <= len(calls) <= most
    assert sum(map(bool, found)) >= 39  # but where a step without guesses is measured


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    """Steps of three requests took no time by a coarse clock, steps of twelve did."""
    policy = BudgetPolicy()
    for batch, step_s in ((3, 0.0), (12, 1e-3), (3, 0.0)):
        wishes = [options_of(b, "d", 4, False) for b in range(batch)]
        for _ in range(5):
            assert budgets(policy.plan(wishes)) == [4] * batch
            policy.observe_step(5 * batch, 4 * batch, step_s, 2 * batch, 1e-3)
            policy.observe_draft("d", 4, 1e-3, batch)
