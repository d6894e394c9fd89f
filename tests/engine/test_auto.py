"""drafter="auto": whoever is chosen in whatever round, answers and caches stay right; what the caller set always
stands.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from foretoken import LLM, RoutingRules, SamplingParams, SpecConfig
from foretoken.control.candidates import NO_DRAFT, DraftBudget, RequestView
from foretoken.control.policy import BudgetPolicy
from foretoken.draft.group import own_drafters
from foretoken.engine.views import view_of
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.usual import some_of

PROMPTS = [token_ids(3 + 2 * i, seed=20 + i) if i % 2 else token_ids(5 + i, seed=i) * 3 for i in range(8)]


class Whim:
    """A policy that chooses any option and any number of draft tokens, anew in every round."""

    def __init__(self, llm: LLM, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.chosen, self.policy = random.Random(seed), set[int | None](), llm.engine.chooser.policy
        self.plan_anew = self.policy.plan
        monkeypatch.setattr(self.policy, "begin", lambda request_ids, may_draft=True: "decide")
        monkeypatch.setattr(self.policy, "plan", self.plan)

    def plan(self, requests: Sequence[RequestView]) -> list[DraftBudget]:
        self.plan_anew(requests)  # registers the requests
        budgets = []
        for request in requests:
            option = self.rng.choice([None, *request.options])
            budgets.append(
                NO_DRAFT if option is None else DraftBudget(option.number, self.rng.randint(0, option.max_draft))
            )
            self.chosen.add(budgets[-1].option)
        return budgets


def fresh_policy(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> BudgetPolicy:
    """A policy that has learnt nothing, for one test."""
    policy = BudgetPolicy()
    monkeypatch.setattr(llm.engine.chooser, "policy", policy)
    return policy


def eager_policy(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> BudgetPolicy:
    """A fresh policy that always chooses the longest draft, whatever the steps of this machine take."""
    policy = fresh_policy(llm, monkeypatch)
    plan_anew = policy.plan

    def plan(requests: Sequence[RequestView]) -> list[DraftBudget]:
        plan_anew(requests)  # registers the requests
        longest = [max(request.options, key=lambda option: option.max_draft, default=None) for request in requests]
        return [NO_DRAFT if one is None else DraftBudget(one.number, one.max_draft) for one in longest]

    monkeypatch.setattr(policy, "begin", lambda request_ids, may_draft=True: "decide")
    monkeypatch.setattr(policy, "plan", plan)
    return policy


def auto(pair: SimpleNamespace, **values: object) -> SpecConfig:
    """Lookups, a draft model's chains and its trees, an exit: one drafter stands for two options."""
    draft = str(pair.draft)
    tree = SpecConfig("draft_model", draft, tree="best_first", branching=2)
    return SpecConfig(
        "auto",
        draft,
        parts=("ngram", "draft_model", "recycling", tree, "early_exit", "cascade"),
        exit_layer=1,
        **values,
    )


@pytest.mark.parametrize("temperature", some_of([0.0, 0.9], {0.9}))
def test_any_choice_gives_the_plain_answer(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Options change from round to round: those that did not draft follow the text, and no cache is left behind."""
    each = [
        SamplingParams(max_tokens=40, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    plain = [llm.generate([p], one)[0].token_ids for p, one in zip(PROMPTS, each, strict=True)]
    chosen: set[int | None] = set()
    for turn in range(4):
        whim = Whim(llm, turn, monkeypatch)
        outputs = llm.generate(PROMPTS, each, auto(pair))
        assert [out.token_ids for out in outputs] == plain
        chosen |= whim.chosen
        assert {"draft_model", "ngram", "recycling", "early_exit", "cascade"} >= {
            name for out in outputs for name in out.stats.drafted_by
        }
        monkeypatch.undo()
    assert chosen >= {None, 1, 2, 3, 4, 5}  # sampled texts seldom repeat themselves for an n-gram
    check_idle(llm.engine)


def test_all_options_of_one_model_share_it(llm: LLM, pair: SimpleNamespace) -> None:
    """Chains, trees and a request that names the draft model itself: one instance."""
    mixed = [auto(pair), SpecConfig("draft_model", str(pair.draft), num_draft=3)]
    keys = set(own_drafters(mixed[0])) | set(own_drafters(mixed[1]))
    assert sum(key.startswith("('draft_model'") for key in keys) == 1
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=8, ignore_eos=True), mixed)


def test_what_the_caller_set_stands(llm: LLM, pair: SimpleNamespace) -> None:
    """Beside `auto` in one batch: plain stays plain, a number stays that number, a drafter stays that drafter, a rule
    that rule.
    """
    draft = str(pair.draft)
    specs = [
        SpecConfig("auto", draft),
        SpecConfig(),
        SpecConfig("draft_model", draft, num_draft=3),
        SpecConfig("draft_model", draft, rule="coupled"),
        SpecConfig("ngram", num_draft=0),
        SpecConfig("auto", draft, num_draft=2, parts=("draft_model",)),
    ]
    outputs = llm.generate(PROMPTS[: len(specs)], SamplingParams(max_tokens=30, ignore_eos=True), specs)
    assert outputs[1].stats.num_drafted == outputs[4].stats.num_drafted == 0
    for out, most in ((outputs[2], 3), (outputs[5], 2)):
        assert [drafted for drafted, _ in out.stats.accepted_per_position][:most] == [out.stats.drafted_at[0]] * (
            most - 1
        ) + [out.stats.drafted_at[most - 1]]
        assert len(out.stats.drafted_at) == most
        assert set(out.stats.drafted_by) == {"draft_model"}
    assert outputs[3].stats.rule == "coupled"
    assert set(outputs[3].stats.drafted_by) <= {"draft_model"}


def test_a_preview_is_not_made_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    eager_policy(llm, monkeypatch)
    spec = SpecConfig("auto", parts=("ngram",))
    llm.prepare(spec)
    (key,) = own_drafters(spec)
    drafter, previews = llm._drafters.drafters[key], []
    look_up = drafter.look_up
    monkeypatch.setattr(drafter, "look_up", lambda entry: previews.append(entry.round_start) or look_up(entry))
    (out,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=40, ignore_eos=True), spec)
    assert len(previews) == len(set(previews))
    assert out.stats.num_drafted


def test_a_preview_is_judged_by_its_own_round_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a round for each drafter that showed something, and for nothing more: what it took was spent before it was
    chosen.
    """
    policy, judged, priced = eager_policy(llm, monkeypatch), [], []
    observe = policy.observe_preview
    monkeypatch.setattr(policy, "observe_preview", lambda *told: judged.append((told[0], told[1])) or observe(*told))
    monkeypatch.setattr(policy, "observe_draft", lambda *told: priced.append(told))
    spec, params = SpecConfig("auto", parts=("ngram", "suffix")), SamplingParams(max_tokens=30, ignore_eos=True)
    states, num_judged = [llm.submit(prompt, params, spec) for prompt in PROMPTS[:4]], 0
    while llm.engine.has_work:
        judged.clear()
        for state in states:
            if state.finish_reason is None and len(state.output_ids) > 1:
                previews = llm.engine._preview([state])  # comes to nothing, as where a request is preempted
                llm.engine.chooser.plan(llm.engine._views, previews)
        llm.engine.step()
        assert len(judged) == len(set(judged))
        num_judged += len(judged)
    assert num_judged > 20
    assert sum(state.stats.num_drafted for state in states) > 0
    assert priced == []
    check_idle(llm.engine)


@pytest.mark.parametrize(("least", "is_left_out"), [(50, True), (12, False)])
def test_a_draft_model_reads_no_prompt_for_a_short_answer(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, least: int, is_left_out: bool
) -> None:
    """Where another drafter is available: one that was named alone goes on, and whatever number was set."""
    params, draft = SamplingParams(max_tokens=12, ignore_eos=True), str(pair.draft)
    open_spec = SpecConfig("auto", draft, parts=("recycling", "draft_model"))
    named, fixed = SpecConfig("draft_model", draft), SpecConfig("auto", draft, num_draft=2)
    with LLM(
        pair.target, dtype="float32", cache_tokens=512, routing=RoutingRules(min_tokens_for_draft_model=least)
    ) as llm:
        offered: set[int] = set()  # places of the options; one with a preview is there only if the preview has tokens
        plan = llm.engine.chooser.policy.plan
        monkeypatch.setattr(llm.engine.chooser.policy, "begin", lambda request_ids, may_draft=True: "decide")
        monkeypatch.setattr(
            llm.engine.chooser.policy,
            "plan",
            lambda requests: (
                offered.update(option.number for one in requests for option in one.options) or plan(requests)
            ),
        )
        for spec in (open_spec, named, fixed):
            offered.clear()
            llm.generate([token_ids(20)], params, spec)
            places = [place for place, option in enumerate(spec.drafter_options) if option.draft is not None]
            assert len(places) == 1
            assert (places[0] in offered) == (spec is not open_spec or not is_left_out)
        assert (llm.engine.chooser.routing.num_by_reason["draft model"] > 0) == is_left_out


def test_who_is_about_to_miss_a_deadline_counts_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time since the arrival."""
    policy, weights = fresh_policy(llm, monkeypatch), []
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True))  # what a step takes is known
    plan = policy.plan
    monkeypatch.setattr(policy, "plan", lambda requests: weights.append(requests[0].weight) or plan(requests))
    state = llm.submit(
        PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True, deadline_s=9000.0), SpecConfig("ngram")
    )
    seen = set()
    while llm.engine.has_work:
        late = 3 < len(state.output_ids) < 6
        now_s = state.arrived_s + (9001.0 if late else 1.0)
        monkeypatch.setattr(
            "foretoken.engine.engine.view_of",
            lambda state, drafters, _, routing, now_s=now_s: view_of(state, drafters, now_s, routing),
        )
        weights.clear()
        llm.engine.step()
        assert weights in ([], [2.0 if late else 1.0])
        seen.update(weights)
    assert seen == {1.0, 2.0}
    assert state.finish_reason == "length"


@pytest.mark.parametrize(
    ("rules", "reason"),
    [(RoutingRules(min_tokens_to_speculate=50), "short answer"), (RoutingRules(max_speculating_requests=0), "load")],
)
def test_routing_rules_hold_unless_the_caller_set_a_number(
    pair: SimpleNamespace, rules: RoutingRules, reason: str
) -> None:
    with LLM(str(pair.target), dtype="float32", routing=rules) as llm:
        draft = str(pair.draft)
        specs = [SpecConfig("auto", draft), SpecConfig("ngram"), SpecConfig("draft_model", draft, num_draft=2)]
        outputs = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=20, ignore_eos=True), specs)
        assert outputs[0].stats.num_drafted == outputs[1].stats.num_drafted == 0
        assert outputs[2].stats.num_drafted > 0
        assert llm.engine.chooser.routing.num_by_reason[reason] == 2
