"""What the policy spends on finding out, on reading and on deciding, in rounds whose times are given."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from foretoken.control import policy as module
from foretoken.control.candidates import (
    DraftBudget,
    DrafterOption,
    Preview,
    Previews,
    RequestView,
    RoundOutcome,
    StepOutcome,
)
from foretoken.control.chooser import Chooser
from foretoken.control.policy import BudgetPolicy
from tests.helpers.control import observe, options_of, plan


def learn(policy: BudgetPolicy, rounds: int, num_draft: int, target_s: float, draft_s: float, request: int = 0) -> None:
    """Rounds of one request in which every draft token is accepted."""
    for _ in range(rounds):
        requests = [options_of(request, "d", 8)]
        plan(policy, requests)
        observe(
            policy, requests, [DraftBudget(0, num_draft)], [num_draft], target_s, {"d": draft_s} if num_draft else {}
        )


def plain_steps(policy: BudgetPolicy, requests: list[RequestView], rounds: int, target_s: float = 1.0) -> None:
    """Rounds in which nothing is drafted, whatever was planned."""
    for _ in range(rounds):
        plan(policy, requests)
        observe(policy, requests, [DraftBudget(None, 0)] * len(requests), [0] * len(requests), target_s)


def budgets(given: Iterable[DraftBudget]) -> list[int]:
    return [budget.num_draft for budget in given]


def test_a_drafter_of_unknown_cost_is_tried_by_one_request_and_little() -> None:
    """It may be expensive, and all would read their prompts for it; what the caller set stands beside that."""
    policy = BudgetPolicy()
    requests = [options_of(b, "d", 8) for b in range(6)]
    plain_steps(policy, requests, 3)
    found = budgets(plan(policy, requests))
    assert 1 <= max(found) <= 2
    assert sum(map(bool, found)) == 1
    mixed = budgets(plan(policy, [*requests, options_of(6, "d", 8, False)]))
    assert mixed[6] == 8
    observe(policy, requests, [DraftBudget(0, 2)] * 6, [2] * 6, 1.0, {"d": 0.01})
    assert sum(map(bool, budgets(plan(policy, requests)))) > 1


def test_a_request_that_is_almost_done_does_not_have_its_text_read() -> None:
    """A hundred tokens to read take ten steps: they pay for a long answer, not for three tokens more."""
    policy = BudgetPolicy()
    learn(policy, 20, 4, 1.0, 0.01)
    plain_steps(policy, [options_of(0, "d", 8)], 1)
    for _ in range(4):
        policy.observe_draft("d", 4, 10.01, 1, 100)
    policy.finish(0)
    found = [
        plan(policy, [options_of(n, "d", 8, num_tokens=100, num_remaining=left)])
        for n, left in ((1, 3), (2, 10_000), (3, 3), (4, 10_000))
    ]
    assert [bool(number) for number in map(sum, map(budgets, found))] == [False, True, False, True]


@pytest.mark.parametrize(("decision_s", "least", "most"), [(1e-5, 40, 40), (1e-3, 12, 22), (0.008, 2, 6)])
def test_deciding_takes_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, decision_s: float, least: int, most: int
) -> None:
    """Steps of 20 ms: cheap decisions are made in every one, others now and then, and budgets are repeated
    meanwhile.
    """
    policy, calls, allocate = BudgetPolicy(), [], module.allocate
    monkeypatch.setattr(module, "allocate", lambda *arguments: calls.append(1) or allocate(*arguments))
    requests = [options_of(b, "d", 8) for b in range(4)]

    def rounds(count: int) -> list[int]:
        found = []
        for _ in range(count):
            given = plan(policy, requests)
            found.append(sum(budgets(given)))
            decided_s = decision_s if policy._mode == "decide" else 0.0
            observe(policy, requests, given, budgets(given), 0.02, {"d": 1e-6}, decision_s=decided_s)
        return found

    rounds(60)
    calls.clear()
    found = rounds(40)
    assert least <= len(calls) <= most
    assert sum(map(bool, found)) >= 38  # but where a step without a draft is measured


def test_decoding_does_not_fall_behind_plain_whatever_is_expected() -> None:
    """Draft tokens are said to be accepted and bring no tokens, as of a drafter whose chances are wrong."""
    policy, lost_s, total_s, made = BudgetPolicy(), 0.0, 0.0, 0
    preview = Preview((-1,), (0.95,), (7,))
    for _ in range(400):
        requests = [options_of(b, "d", 1, preview=preview) for b in range(4)]
        given = plan(policy, requests)
        nodes = sum(budgets(given))
        observe(policy, requests, given, [0] * 4, 1.0 + 0.1 * nodes)
        lost_s, total_s, made = lost_s + 0.1 * nodes, total_s + 1.0, made + nodes
    assert made > 0
    assert lost_s <= 0.04 * total_s


def test_what_the_host_takes_longer_for_draft_tokens_is_charged() -> None:
    """Every second draft token is emitted and pays for its row; scheduling, committing and emitting take a fifth of a
    step more where there are any.
    """
    policy, time_s, tokens, made = BudgetPolicy(), 0.0, 0, 0
    preview = Preview((-1,), (0.95,), (7,))
    for turn in range(400):
        requests = [options_of(b, "d", 1, preview=preview) for b in range(4)]
        given = plan(policy, requests)
        kept = [budget.num_draft * ((turn + b) % 2) for b, budget in enumerate(given)]
        nodes = sum(budgets(given))
        observe(policy, requests, given, kept, 1.0 + 0.12 * nodes)
        host_s = 0.3 if nodes else 0.1
        policy.observe_host(host_s)
        time_s, tokens, made = time_s + 1.0 + 0.12 * nodes + host_s, tokens + 4 + sum(kept), made + nodes
    assert made > 0
    assert time_s <= 1.03 * 1.1 * tokens / 4


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    """Steps of three requests took no time by a coarse clock, steps of twelve did."""
    policy = BudgetPolicy()
    for batch, step_s in ((3, 0.0), (12, 1e-3), (3, 0.0)):
        requests = [options_of(b, "d", 4, False) for b in range(batch)]
        for _ in range(5):
            given = plan(policy, requests)
            assert budgets(given) == [4] * batch
            observe(policy, requests, given, [1] * batch, step_s, {"d": 1e-3})


def test_numbers_that_were_set_are_not_charged_to_those_left_open() -> None:
    """Draft tokens that the caller set gain nothing; which of two drafters makes them is decided in every round all the
    same.
    """
    policy = BudgetPolicy()
    options = tuple(DrafterOption(number, drafter, 4) for number, drafter in enumerate("ab"))
    requests = [RequestView(0, options, num_draft=4)]
    for turn in range(60):
        policy.begin([0])
        assert turn < 8 or policy._mode == "decide"  # but for the first step without open draft tokens
        (given,) = policy.plan(requests)
        assert given.num_draft == 4
        observe(policy, requests, [given], [0], 1.0, {"ab"[given.option or 0]: 0.3})


def test_a_number_that_was_set_stands_as_far_as_lookups_show_draft_tokens() -> None:
    """Of two lookups that both show fewer the one with more drafts, as much as it shows."""
    policy = BudgetPolicy()
    shown = [Preview((-1,), (0.9,), (7,)), Preview((-1, 0), (0.1, 0.1), (8, 9))]
    options = tuple(DrafterOption(number, number, 6, 0, True, one) for number, one in enumerate(shown))
    nothing = tuple(option._replace(preview=Preview()) for option in options)
    for usable, expected in ((options, (1, 2)), (nothing, (None, 0))):
        policy.begin([0])
        policy._mode = "decide"
        (given,) = policy.plan([RequestView(0, usable, num_draft=6)])
        assert given[:2] == expected


@pytest.mark.parametrize("is_forced", [True, False])
def test_rounds_in_which_a_drafter_did_not_run_tell_nothing_of_what_it_takes(is_forced: bool) -> None:
    """A grammar forced the tokens, or its cache had no room: what it takes, and how many probes come with its draft
    tokens, stands. Without room it is passed over for that request alone.
    """
    policy, chooser = BudgetPolicy(), Chooser(lambda: 0.0)
    chooser.reset(policy)
    request = options_of(0, "d", 4)
    for has_run in [True] * 3 + [False] * 20:
        chooser.begin([request])
        chooser.plan([request], Previews())
        count = 4 if has_run or is_forced else 0
        chances = None if not has_run and is_forced else [1.0] * count
        came = range(-1, count - 1), range(count), (0,) * (count + 1)
        round_ = RoundOutcome(0, DraftBudget(0, 4), chances, *came, 2 if has_run else 0, has_run or is_forced)
        chooser.observe(StepOutcome([round_], True, 1 + count, count, 1.0, {"d": 0.1 if has_run else 1e-6}))
    assert policy.draft_costs.seconds("d", 4) == pytest.approx(0.1)
    assert chooser._num_probed == {0: 2}
    policy.acceptance.begin(1, "")
    own, other = (policy.acceptance.of_places(number, "d", 1)[0][0] for number in (0, 1))
    assert own == pytest.approx(1.0 if is_forced else 0.33, abs=0.1)
    assert other == pytest.approx(1.0)


def test_one_slow_decision_is_enough_for_repeats() -> None:
    """The first decision of a batch, in the step that reads the prompts, takes next to nothing: it must not hide the
    next one.
    """
    policy = BudgetPolicy()
    for decision_s, num_repeats in ((2e-5, 0), (0.26, 10), (2e-5, 0)):
        policy.observe_step(StepOutcome([], True, 1, 0, target_s=1.0), decision_s)
        assert policy._repeats_left == num_repeats
