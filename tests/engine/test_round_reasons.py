"""Why a round drafted nothing, as observers of rounds are told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from foretoken import LLM, RoutingRules, SamplingParams, SpecConfig
from foretoken.control.candidates import DrafterOption, NoDraftReason, Preview, Previews, RequestView
from foretoken.control.chooser import Chooser
from foretoken.control.policy import BudgetPolicy
from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView
from tests.helpers.checkpoints import token_ids
from tests.helpers.control import observe, options_of, plan
from tests.helpers.faults import Fault

REPEATING = [5, 6, 7, 8, 9] * 4
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


class Reasons:
    """A watcher that keeps the reasons, and how many tokens were drafted."""

    def __init__(self) -> None:
        self.all: list[NoDraftReason | None] = []
        self.num_drafted: list[int] = []

    def begin(self, state: RequestState) -> None: ...

    def end(self, state: RequestState) -> None: ...

    def between_steps(self) -> None: ...

    def close(self) -> None: ...

    def round(self, view: RoundView) -> None:
        self.all.append(view.why_none)
        self.num_drafted.append(view.draft.lengths[view.b])


def reasons(llm: LLM, prompts: Sequence[Sequence[int]], spec: SpecConfig, params: SamplingParams = SHORT) -> Reasons:
    """Of every round of the answers."""
    watcher = Reasons()
    llm.engine.watchers.append(watcher)
    try:
        llm.generate(prompts, params, spec)
    finally:
        llm.engine.watchers.remove(watcher)
    return watcher


def test_a_number_that_was_set(llm: LLM) -> None:
    assert set(reasons(llm, [REPEATING], SpecConfig()).all) == {None}  # plain decoding was asked for
    novel = reasons(llm, [token_ids(9, seed=3)], SpecConfig("ngram", num_draft=2))
    assert novel.all[0] == "prefill"
    assert set(novel.all[1:]) <= {"no_match", "length_clamped", None}
    assert "no_match" in novel.all
    assert [why is None for why in novel.all] == [num > 0 for num in novel.num_drafted]


def test_the_last_token_needs_no_draft(llm: LLM) -> None:
    found = reasons(llm, [REPEATING], SpecConfig("ngram", num_draft=2), SamplingParams(max_tokens=2, ignore_eos=True))
    assert found.all == ["prefill", "length_clamped"]


def test_routing_rules(pair: SimpleNamespace) -> None:
    rules = RoutingRules(min_tokens_to_speculate=3, max_speculating_requests=1)
    with LLM(pair.target, SpecConfig("ngram"), dtype="float32", cache_tokens=512, profile="off", routing=rules) as llm:
        short = reasons(llm, [REPEATING], SpecConfig("ngram"), SamplingParams(max_tokens=2, ignore_eos=True))
        assert short.all == ["prefill", "length_clamped"]
        assert set(reasons(llm, [REPEATING] * 2, SpecConfig("ngram")).all) <= {"prefill", "k0_load", "length_clamped"}
        assert "k0_load" in reasons(llm, [REPEATING] * 2, SpecConfig("ngram")).all
    shorter = RoutingRules(min_tokens_to_speculate=9)
    with LLM(
        pair.target, SpecConfig("ngram"), dtype="float32", cache_tokens=512, profile="off", routing=shorter
    ) as llm:
        assert "k0_short" in reasons(llm, [REPEATING], SpecConfig("ngram")).all


def test_a_plan_that_came_to_nothing() -> None:
    """The policy gave draft tokens, and the scheduler had no row for them."""
    chooser = Chooser(time.perf_counter)
    view = RequestView(4, (DrafterOption(0, "d"),), num_draft=2, num_tokens=9, num_remaining=5)
    assert chooser.begin([view]) == []
    chooser.plan([view], Previews())
    assert chooser.why_none(4, is_planned=True) == "budget_trimmed"
    chooser.plan([view._replace(num_remaining=1)], Previews())
    assert chooser.why_none(4, is_planned=True) == "length_clamped"
    assert chooser.why_none(5, is_planned=False) == "prefill"


def failing_draft(llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SpecConfig:
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=2)
    llm.prepare(spec)
    for drafter in llm.engine.drafters.drafters.values():
        if drafter.name == "draft_model":  # with draft models of other tests of the session
            monkeypatch.setattr(drafter, "propose", Fault(drafter.propose, once=False))
    return spec


@pytest.mark.filterwarnings("ignore:.*injected:UserWarning")
def test_a_drafter_that_fails(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, failed_drafters: list[str]
) -> None:
    spec = failing_draft(llm, pair, monkeypatch)
    found = reasons(llm, [REPEATING], spec, SamplingParams(max_tokens=8, ignore_eos=True))
    assert found.all[:5] == ["prefill", *["drafter_failed"] * 3, "drafter_disabled"]


@pytest.mark.filterwarnings("ignore:.*injected:UserWarning")
def test_a_drafter_that_fails_beside_an_answer_that_ends(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, failed_drafters: list[str]
) -> None:
    """Releasing the request that ends in a step does not forget what failed in that step for another one."""
    spec = failing_draft(llm, pair, monkeypatch)
    watcher = Reasons()
    llm.engine.watchers.append(watcher)
    try:
        ends = SamplingParams(max_tokens=2, ignore_eos=True, priority=-1)  # more urgent: emitted, and released, first
        llm.generate([token_ids(6), REPEATING], [ends, SHORT], [SpecConfig(), spec])
    finally:
        llm.engine.watchers.remove(watcher)
    assert watcher.all == [None, "prefill", None, "drafter_failed", "drafter_failed", "length_clamped"]


# ---- what the policy says


def test_the_policy_says_what_it_weighed() -> None:
    policy = BudgetPolicy()
    requests = [options_of(0, "d", 4), options_of(1, "d", 4)]
    plan(policy, requests)
    assert policy.why_none(1) == "warmup"  # the drafter's cost is found out by request 0 alone
    assert policy.why_none(7) == "warmup"  # not there when budgets were decided
    nothing = Preview()
    plan(policy, [options_of(2, "lookup", 0, preview=nothing)])
    assert policy.why_none(2) == "no_match"


def test_the_policy_tells_cost_from_acceptance() -> None:
    dear, wrong = BudgetPolicy(), BudgetPolicy()
    said: dict[str, set[str]] = {"dear": set(), "wrong": set()}
    for _ in range(200):
        for name, policy, price_s, kept in (("dear", dear, 9.0, 1.0), ("wrong", wrong, 0.0, 0.0)):
            requests = [options_of(0, "d", 4)]
            budgets = plan(policy, requests)
            if not budgets[0].num_draft:
                said[name].add(policy.why_none(0))
            took_s = 1.0 + 0.5 * budgets[0].num_draft
            observe(
                policy,
                requests,
                budgets,
                [round(kept * budgets[0].num_draft)],
                took_s,
                {"d": price_s * bool(budgets[0].num_draft)},
            )
    assert "k0_cost" in said["dear"]
    assert "k0_acceptance" not in said["dear"]
    assert {"k0_cost", "k0_acceptance"} & said["wrong"]
