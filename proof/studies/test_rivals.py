"""Rules of other engines: their draft length, when they change it, and that a round's own tokens do not count."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from foretoken.control.candidates import DraftBudget, DrafterOption, Preview, RequestView, RoundOutcome
from foretoken.control.chooser import Policy
from foretoken.control.policy import BudgetPolicy
from foretoken.errors import InputError
from foretoken.measure.load.options import LoadOptions
from foretoken.measure.load.run import run_batches
from studies.changing_load.options import ChangingLoadOptions, LoadPhase
from studies.rivals import __main__ as study_module
from studies.rivals.__main__ import main, measure_table
from studies.rivals.policies import BatchTable, EmaPolicy, HeuristicPolicy, measured_table, parse_table, rival_policies
from tests.helpers.control import observe, options_of, plan

MAKERS: list[Callable[[], Policy]] = [BatchTable, EmaPolicy, HeuristicPolicy, BudgetPolicy]


def requests_of(batch: int, most: int = 24, is_open: bool = True) -> list[RequestView]:
    return [options_of(request, "d", most, is_open) for request in range(batch)]


def numbers(policy: Policy, asked: list[RequestView]) -> list[int]:
    return [budget.num_draft for budget in plan(policy, asked)]


def run(policy: Policy, batch: int, rounds: int, accepted: Callable[[int, int], int]) -> list[list[int]]:
    """Plans of some rounds in which `accepted(round, num_draft)` draft tokens of every request are accepted."""
    plans = []
    for turn in range(rounds):
        requests = requests_of(batch)
        given = plan(policy, requests)
        plans.append([budget.num_draft for budget in given])
        kept = [min(budget.num_draft, accepted(turn, budget.num_draft)) for budget in given]
        observe(policy, requests, given, kept, 1.0, {"d": 0.1})
    return plans


@pytest.mark.parametrize("make", MAKERS)
def test_a_number_that_the_caller_set_stands(make: Callable[[], Policy]) -> None:
    mixed = [
        options_of(0, "d", 9, False),
        options_of(1, None, 0, True),
        options_of(2, "d", 0, True),
        options_of(3, "d", 2, True),
    ]
    budgets = numbers(make(), mixed)
    assert budgets[:3] == [9, 0, 0]
    assert budgets[3] <= 2


def test_a_table_goes_by_the_size_of_the_batch() -> None:
    rule = BatchTable({4: 3, 1: 5, 16: 1, 32: 0})
    assert [numbers(rule, requests_of(batch))[0] for batch in (1, 3, 4, 15, 16, 31, 32, 100)] == [
        5,
        5,
        3,
        3,
        1,
        1,
        0,
        0,
    ]
    assert numbers(rule, requests_of(2, most=2)) == [2, 2]
    assert numbers(BatchTable({8: 2}), requests_of(1)) == [2]


@pytest.mark.parametrize("table", [{}, {0: 1}, {1: -1}])
def test_a_table_must_make_sense(table: dict[int, int]) -> None:
    with pytest.raises(InputError, match="table"):
        BatchTable(table)


def test_a_measured_table_takes_the_fastest_number() -> None:
    assert measured_table({1: {0: 1.0, 3: 2.5, 5: 2.0}, 8: {0: 3.0, 1: 3.0, 3: 1.0}}) == {1: 3, 8: 0}


def test_the_mean_moves_the_number_of_draft_tokens_after_warm_up_every_fifth_round() -> None:
    plans = [budgets[0] for budgets in run(EmaPolicy(), 1, 60, lambda turn, budget: budget)]
    assert set(plans[:15]) == {3}
    assert plans[15] == 5  # the mean is near 3 then: above 2.5, below 4.5
    assert plans[-1] == 7
    changes = [turn for turn in range(1, 60) if plans[turn] != plans[turn - 1]]
    assert all(turn % 5 == 0 for turn in changes)


def test_the_mean_brings_the_number_down_to_the_least_of_its_set() -> None:
    assert run(EmaPolicy(), 1, 60, lambda turn, budget: 0)[-1] == [1]
    assert numbers(EmaPolicy({1: (2,)}), requests_of(1)) == [2]


def test_after_an_interval_without_drafting_the_least_number_is_tried() -> None:
    plans = [budgets[0] for budgets in run(EmaPolicy(), 8, 80, lambda turn, budget: 0)]
    assert 0 in plans
    zero = plans.index(0)
    assert plans[zero : zero + 10] == [0] * 5 + [1] * 5
    assert run(EmaPolicy(), 64, 30, lambda turn, budget: 0) == [[0] * 64] * 30


def test_every_size_of_the_batch_has_a_mean_of_its_own() -> None:
    rule = EmaPolicy()
    run(rule, 1, 60, lambda turn, budget: budget)
    assert numbers(rule, requests_of(8)) == [3] * 8
    assert numbers(rule, requests_of(1)) == [7]


def test_an_empty_step_set_is_refused() -> None:
    with pytest.raises(InputError, match="step_sets"):
        EmaPolicy({1: ()})


def test_two_more_after_full_acceptance_and_one_less_otherwise() -> None:
    rule = HeuristicPolicy()
    results = iter([5, 7, 0, 3, 8])
    assert [budgets[0] for budgets in run(rule, 1, 5, lambda turn, budget: next(results))] == [5, 7, 9, 8, 7]
    assert run(rule, 1, 20, lambda turn, budget: 0)[-1] == [1]
    rule.observe_round("d", RoundOutcome(0, DraftBudget(0, 1), [], [], [], [7]))  # the drafter found nothing: no news
    assert numbers(rule, requests_of(1)) == [1]
    rule.finish(0)
    assert numbers(rule, requests_of(1)) == [5]
    with pytest.raises(InputError, match="first"):
        HeuristicPolicy(0)


@pytest.mark.parametrize("make", MAKERS)
def test_a_plan_does_not_depend_on_what_its_round_brings(make: Callable[[], Policy]) -> None:
    """Two pasts alike up to round n, then others are accepted in it: plans up to that of round n are the same."""
    for cut in (1, 12, 33):
        ways = []
        for seed in (0, 1):
            rng = random.Random(seed)
            ways.append(
                run(make(), 4, 40, lambda turn, budget, rng=rng, cut=cut: turn % 3 if turn < cut else rng.randrange(8))
            )
        assert ways[0][: cut + 1] == ways[1][: cut + 1]


def test_draft_tokens_that_a_drafter_shows_count_as_far_as_they_were_used() -> None:
    """Five are shown, three used: the fourth one, right too, is no news."""
    preview = Preview((-1, 0, 1, 2, 3), (0.9,) * 5, (7,) * 5)
    asked = [RequestView(0, (DrafterOption(1, "d", 5, preview=preview), DrafterOption(0, "other", 9)))]
    heuristic, ema = HeuristicPolicy(3), EmaPolicy({1: (3,)})
    for rule in (heuristic, ema):
        (budget,) = plan(rule, asked)
        assert budget == DraftBudget(1, 3)
        rule.observe_preview(0, "d", preview, [True, True, True, True, False])
    assert numbers(heuristic, requests_of(1)) == [5]
    assert ema._accepted == [3]
    heuristic.observe_preview(0, "d", preview, [False, None, None, None, None])
    assert numbers(heuristic, requests_of(1)) == [4]


def test_a_table_as_text() -> None:
    assert parse_table("4:3, 1:5") == {1: 5, 4: 3}
    assert parse_table("measured") is None
    for wrong in ("", "1", "a:b", "1:-2", "0:3"):
        with pytest.raises(InputError, match="table"):
            parse_table(wrong)


def options(pair: SimpleNamespace, **values: object) -> LoadOptions:
    small = {"batches": (1, 2), "slices": ("chat",), "prompt_tokens": 16, "max_tokens": 8, "repeats": 1, "warmup": 0}
    return LoadOptions(str(pair.target), str(pair.draft), dtype="float32", threads=1, **(small | values))


def test_answers_are_plains_under_rival_policies(text_pair: SimpleNamespace) -> None:
    """In one run with the engine's own policy; float32 leaves no near ties."""
    names = ("table", "ema", "heuristic", "ngram-ema", "draft_model-auto")
    report = run_batches(options(text_pair, settings=names), policies=rival_policies())
    assert {row.setting for row in report.rows} == {
        "plain", "draft_model-table", "draft_model-ema", "draft_model-heuristic", "ngram-ema", "draft_model-auto"
    }  # fmt: skip
    assert all(row.same == row.num_answers for row in report.rows)
    drafting = {row.setting for row in report.rows if row.num_draft > 0}
    assert {"draft_model-table", "draft_model-ema", "draft_model-heuristic"} <= drafting


def test_a_table_is_measured_at_the_batch_sizes_of_the_run(text_pair: SimpleNamespace) -> None:
    assert sorted(measure_table(options(text_pair))) == [1, 2]
    phases = (LoadPhase(3, "chat"), LoadPhase(1, "chat"))
    found = measure_table(ChangingLoadOptions(**vars(options(text_pair, max_tokens=4)), phases=phases))
    assert sorted(found) == [1, 3]
    assert set(found.values()) <= {0, 1, 3, 5}


def test_a_measured_table_has_the_fastest_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By batch size, over all slices: 3 at batch 1, where 5 is faster on one slice alone; none at batch 8."""
    speeds = {
        (1, "a"): {"plain": 1.0, "ngram-1": 2.0, "ngram-3": 5.0, "ngram-5": 6.0},
        (1, "b"): {"plain": 1.0, "ngram-1": 2.0, "ngram-3": 5.0, "ngram-5": 1.0},
        (8, "a"): {"plain": 3.0, "ngram-1": 2.0, "ngram-3": 2.0, "ngram-5": 1.0},
    }
    rows = [
        SimpleNamespace(setting=name, batch=batch, tokens_per_s=speed)
        for (batch, _), own in speeds.items()
        for name, speed in own.items()
    ]
    monkeypatch.setattr(study_module, "run_batches", lambda _options: SimpleNamespace(results={"rows": rows}))
    assert measure_table(LoadOptions("t")) == {1: 3, 8: 0}


def test_the_study_from_its_command_line(
    text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv",
        [
            *("rivals", "--target", str(text_pair.target), "--load", "1:chat,2:chat", "--phase-s", "0.01", "--json"),
            *("--settings", "ema,ngram-auto", "--table", "1:2", "--repeats", "1", "--max-tokens", "4"),
        ],
    )
    assert main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["setting"] for row in found["rows"]] == ["plain", "ngram-ema", "ngram-auto"]
    assert any("1:2" in caveat for caveat in found["caveats"])
    assert found["command"].startswith("python -m studies.rivals")
