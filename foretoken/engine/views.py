"""The engine's requests and steps as the control sees them: plain values, without tensors or models."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from foretoken.config import SpecConfig
from foretoken.control.candidates import (
    NO_DRAFT,
    DraftBudget,
    NoDraftReason,
    RequestView,
    RoundOutcome,
    StepOutcome,
    set_number,
)
from foretoken.control.chooser import Chooser
from foretoken.control.routing import Routing, is_short
from foretoken.core import Batch, BatchEntry, Draft, Verdict
from foretoken.draft.group import GRAMMAR, DrafterGroup
from foretoken.engine.request import RequestState
from foretoken.verify import takes_trees


def view_of(state: RequestState, drafters: DrafterGroup, now_s: float, routing: Routing) -> RequestView:
    """A request that decodes next. The first token is never drafted: then it has no options."""
    request, spec = state.request, state.request.spec
    params = request.params
    may_draft = state.has_emitted and bool(spec.drafter_options)
    num_draft = set_number(spec)
    max_new_tokens = state.max_total_tokens - len(request.prompt_ids)
    disabled = drafters.disabled(state.request_id) if may_draft else frozenset[int]()
    if may_draft and num_draft is None and is_short(len(request.prompt_ids), max_new_tokens, routing.rules):
        reads = [reads_prompt(option) for option in drafters.specs(state.request_id)]
        disabled |= routing.leaves_out(state.request_id, reads)
    return RequestView(
        request_id=state.request_id,
        options=drafters.options(state.request_id) if may_draft else (),
        num_draft=num_draft,
        slice=params.slice,
        num_tokens=len(state.tokens),
        num_remaining=state.num_remaining,
        max_new_tokens=max_new_tokens,
        priority=params.priority,
        deadline_s=None if params.deadline_s is None else state.arrived_s + params.deadline_s - now_s,
        disabled=disabled,
    )


def next_entry(state: RequestState) -> BatchEntry:
    """A decoding request's part in the coming step, as far as previews need it."""
    last = len(state.tokens) - 1
    return BatchEntry(
        state.request,
        last,
        (state.tokens[last],),
        decodes=True,
        num_draft=0,
        processors=state.processors,
        takes_trees=takes_trees(state.rule),
    )


def reads_prompt(spec: SpecConfig) -> bool:
    """Whether a drafter reads the prompt with a model of its own before it can draft."""
    return spec.draft is not None or any(reads_prompt(part) for part in spec.configs)


def budget_of(state: RequestState, budget: DraftBudget, drafters: DrafterGroup) -> DraftBudget:
    """A request's budget, with what the configuration of its option says."""
    if budget.option is None:
        return budget
    specs = drafters.specs(state.request_id)
    is_open = set_number(state.request.spec) is None or len(specs) > 1
    seeded = state.request.params.seed is not None and state.rule not in ("greedy", "coupled")
    spec = specs[budget.option]
    assert spec.draft_probability != "auto"
    return DraftBudget(*budget[:2], spec.num_probe, spec.draft_probability, is_fixed=seeded and not is_open)


def fixed_budget(state: RequestState, drafters: DrafterGroup) -> DraftBudget:
    """What a request may draft when the control raised: what its caller set stands, what is left open is nothing."""
    num_draft = set_number(state.request.spec)
    if num_draft is None or len(drafters.specs(state.request_id)) != 1:
        return NO_DRAFT
    return budget_of(state, DraftBudget(0, num_draft), drafters)


def why_none(entry: BatchEntry, num_drafted: int, chooser: Chooser, failed: Collection[int]) -> NoDraftReason | None:
    """See `RoundView.why_none`; `failed` are the requests whose drafter failed in this step."""
    request_id = entry.request.request_id
    if num_drafted or entry.request.spec.drafter is None:
        return None
    if request_id in failed:
        return "drafter_failed"
    return "no_match" if entry.num_draft else chooser.why_none(request_id, entry.option is not None)


def outcome_of(
    batch: Batch, draft: Draft, verdict: Verdict, drafters: DrafterGroup, target_s: float, is_trial: bool = False
) -> StepOutcome:
    """What came of a step; `target_s`: of the target's forward and the rules; `is_trial`: with other threads."""
    num_probed = sum(draft.probe_lengths)
    rounds = [_round(batch, draft, verdict, b) for b in range(draft.num_requests)]
    draft_s: dict[Hashable, float] = {}
    num_read: dict[Hashable, int] = {}
    for round_ in rounds:
        if round_.budget.option is not None and round_.budget.num_draft:
            key = drafters.keys(round_.request_id)[round_.budget.option]
            option = drafters.options(round_.request_id)[round_.budget.option]
            # What a lookup took to show its drafts was spent before one was chosen: the previews have that.
            draft_s[option.drafter] = drafters.spent_s.get(key, 0.0) - drafters.shown_s.get(key, 0.0)
            if not option.shows:
                num_read[option.drafter] = drafters.num_read_tokens.get(key, 0)
    return StepOutcome(
        rounds=rounds,
        only_decodes=batch.only_decodes and not is_trial,
        num_rows=draft.num_rows + num_probed,
        num_nodes=draft.num_nodes + num_probed,
        target_s=target_s,
        draft_s=draft_s,
        num_read_tokens=num_read,
    )


def _round(batch: Batch, draft: Draft, verdict: Verdict, b: int) -> RoundOutcome:
    entry = batch.decoding[b]
    parents = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
    return RoundOutcome(
        request_id=entry.request.request_id,
        budget=DraftBudget(entry.option, entry.num_draft),
        chances=None if GRAMMAR in draft.provenance_of(b) else _emission_chances(parents, verdict, b),
        parents=parents,
        path=verdict.paths[b],
        emitted=verdict.emitted(b),
        num_probed=draft.probe_lengths[b],
        has_run=draft.drafters[b] is not None,
    )


def _emission_chances(parents: Sequence[int], verdict: Verdict, b: int) -> list[float]:
    """See `RoundOutcome.chances`: what the rule says, or where it says nothing what came of it."""
    if not parents:
        return []
    emitted = {-1, *verdict.paths[b]}
    told = verdict.probabilities[b] if verdict.probabilities else (None,) * len(parents)
    return [
        (float(node in emitted) if chance is None else chance) if parent in emitted else 0.0
        for node, (parent, chance) in enumerate(zip(parents, told, strict=True))
    ]
