"""How much to draft, and how surely: chosen before a round from the request and from what earlier rounds cost and gained."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core import Batch, BatchEntry, Draft, Verdict
from foretoken.draft.group import GRAMMAR, DrafterKey, drafter_key
from foretoken.engine.request import RequestState
from foretoken.plan.budget import Option, choose_budgets
from foretoken.plan.cost import CostTable
from foretoken.plan.survival import Survival

_CANDIDATES = (0.25, 0.5, 0.75, 1.0)  # draft probabilities that "auto" chooses from
_MEMORY = 0.9  # weight of the past when a new observation comes in
_WARM_ROUNDS = 4  # rounds at full probability before "auto" trusts its estimates
MOST_NUM_DRAFT = 24  # guesses per request and round that "auto" considers
_PROBE_SHARE = 0.02  # of the time goes into trying again what did not pay
_PROBE_NUM_DRAFT = 2
_MOST_CREDIT_STEPS = 4  # saved up at most, in steps of the target
_PLAIN_EVERY = 128  # steps after which a step without guesses is measured again


@dataclass(frozen=True)
class DraftPlan:
    """What a request may draft in its next round: at most `num_draft` nodes, each position with `draft_probability`."""

    num_draft: int
    draft_probability: float = 1.0


@dataclass
class _Estimate:
    """What one request's rounds showed: the chance b(a) that a position is drafted and accepted, for each candidate a."""

    accepted: dict[float, float] = field(default_factory=lambda: dict.fromkeys(_CANDIDATES, 0.0))
    num_rounds: int = 0

    def add(self, overlaps: Mapping[float, float]) -> None:
        keep = min(_MEMORY, self.num_rounds / (self.num_rounds + 1))
        self.accepted = {a: keep * self.accepted[a] + (1 - keep) * overlaps[a] for a in _CANDIDATES}
        self.num_rounds += 1


class Controller:
    """Chooses the plans of a round before anything in it is drawn; it learns from finished rounds only.

    A number of guesses that the caller set always stands. Where it is "auto", all requests of the step together get the budgets with
    the most expected tokens per second (`plan.budget`), zero included; what was given up is tried again for a small share of the time.
    """

    def __init__(self) -> None:
        self._estimates: dict[int, _Estimate] = {}
        self._draft_step_s = 0.0
        self._target_step_s = 0.0
        self.target_cost = CostTable()  # seconds of a target step by rows
        self.draft_cost: dict[DrafterKey, CostTable] = {}  # seconds of a drafter by its longest draft
        self._by_drafter: dict[DrafterKey, Survival] = {}
        self._by_request: dict[int, Survival] = {}
        self._retrying: set[int] = set()  # requests whose last trial gained something
        self._untried: dict[int, int] = {}  # rounds since a request last guessed
        self._credit_s = 0.0
        self._steps_since_plain = 0

    def plan(self, states: Sequence[RequestState]) -> list[DraftPlan]:
        """The plans of the next round of requests that decode in it."""
        options = [self._option(state) for state in states]
        automatic = [b for b, state in enumerate(states) if state.request.spec.num_draft == "auto" and options[b].drafter is not None]
        if not automatic:
            budgets = [option.at_least for option in options]
        elif self.target_cost.is_empty or self._steps_since_plain >= _PLAIN_EVERY:
            budgets = [option.at_least for option in options]  # what guesses gain is told by a step without
        else:
            budgets = list(choose_budgets(options, 0, self.target_cost.seconds, self._draft_s).budgets)
            for b in self._trials(states, options, budgets, automatic):
                budgets[b] = min(_PROBE_NUM_DRAFT, states[b].num_remaining - 1)
        return [DraftPlan(budget, self._draft_probability(state, budget)) for state, budget in zip(states, budgets, strict=True)]

    def observe(
        self, batch: Batch, draft: Draft, target_probs: Tensor, verdict: Verdict, draft_s: Mapping[DrafterKey, float], target_s: float
    ) -> None:
        """Learn from a round: `draft_s` is what each drafter took, `target_s` what the target's forward and the rules took."""
        if all(entry.decodes and len(entry.pending) == 1 for entry in batch.entries):
            self.target_cost.observe(draft.num_rows, target_s)
            self._credit_s = min(self._credit_s + _PROBE_SHARE * target_s, _MOST_CREDIT_STEPS * target_s)
            self._steps_since_plain = self._steps_since_plain + 1 if draft.num_nodes else 0
        longest: dict[DrafterKey, int] = {}
        for b, entry in enumerate(batch.decoding):
            key, request_id = drafter_key(entry.request.spec), entry.request.request_id
            if key is None or not entry.num_draft:
                self._untried[request_id] = self._untried.get(request_id, 0) + 1
                continue
            longest[key] = max(longest.get(key, 0), entry.num_draft)
            self._learn(key, entry, draft, verdict, b)
        for key, count in longest.items():
            self.draft_cost.setdefault(key, CostTable()).observe(count, draft_s.get(key, 0.0))
        self._learn_probabilities(batch, draft, target_probs, verdict, sum(draft_s.values()), target_s)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._estimates.pop(request_id, None)
        self._by_request.pop(request_id, None)
        self._untried.pop(request_id, None)
        self._retrying.discard(request_id)

    def _option(self, state: RequestState) -> Option:
        spec, key = state.request.spec, drafter_key(state.request.spec)
        most = max(0, min(MOST_NUM_DRAFT if spec.num_draft == "auto" else spec.num_draft, state.num_remaining - 1))
        if key is None or not most or not state.origins:  # the first token is never drafted, see `Scheduler`
            return Option(None)
        survival = self._by_request.get(state.request_id) or self._by_drafter.get(key) or Survival()
        drafted, emitted = survival.shares(most)
        return Option(key, tuple(drafted), tuple(emitted), 0 if spec.num_draft == "auto" else most)

    def _draft_s(self, drafter: Hashable, num_draft: int) -> float:
        cost = self.draft_cost.get(drafter) if isinstance(drafter, tuple) else None
        return 0.0 if cost is None else cost.seconds(num_draft)

    def _trials(self, states: Sequence[RequestState], options: Sequence[Option], budgets: Sequence[int], automatic: Sequence[int]) -> list[int]:
        """Requests that were given no guess and try a few all the same: while the trials gain, or when their time was saved up."""
        chosen: list[int] = []
        rows = len(states) + sum(budgets)
        for b in sorted(automatic, key=lambda b: -self._untried.get(states[b].request_id, 0)):
            if budgets[b] or not options[b].emitted:
                continue
            loss_s = self._draft_s(options[b].drafter, _PROBE_NUM_DRAFT)
            loss_s += max(0.0, self.target_cost.seconds(rows + _PROBE_NUM_DRAFT) - self.target_cost.seconds(rows))
            if states[b].request_id in self._retrying:
                chosen.append(b)
            elif loss_s <= self._credit_s:
                self._credit_s -= loss_s
                chosen.append(b)
        return chosen

    def _learn(self, key: DrafterKey, entry: BatchEntry, draft: Draft, verdict: Verdict, b: int) -> None:
        """Which guesses of a request stood, by their place."""
        request_id, gave = entry.request.request_id, draft.authors(b)
        if GRAMMAR in gave:
            return  # somebody else's guesses
        if key not in self._by_drafter:
            self._by_drafter[key] = Survival()
        if request_id not in self._by_request:
            self._by_request[request_id] = Survival(self._by_drafter[key])
        chances = _emission_chances(draft, verdict, b)
        for survival in (self._by_request[request_id], self._by_drafter[key]):
            survival.observe(entry.num_draft, chances)
        self._untried[request_id] = 0
        if verdict.paths[b]:
            self._retrying.add(request_id)
        else:
            self._retrying.discard(request_id)

    def _draft_probability(self, state: RequestState, num_draft: int) -> float:
        spec = state.request.spec
        if spec.draft_probability != "auto":
            return spec.draft_probability
        estimate = self._estimates.get(state.request_id)
        if estimate is None or estimate.num_rounds < _WARM_ROUNDS:
            return 1.0
        return best_draft_probability(estimate.accepted, num_draft, self._draft_step_s, self._target_step_s)

    def _learn_probabilities(self, batch: Batch, draft: Draft, target_probs: Tensor, verdict: Verdict, draft_s: float, target_s: float) -> None:
        learning = [b for b, entry in enumerate(batch.decoding) if entry.request.spec.draft_probability == "auto"]
        if not learning or draft.mass is None:
            return
        longest = max(draft.lengths)
        self._draft_step_s = _blend(self._draft_step_s, draft_s / max(1, longest))
        self._target_step_s = _blend(self._target_step_s, target_s)
        for b in learning:
            entry = batch.decoding[b]
            rows = [row for row in _judged_rows(draft, verdict, b) if draft.mass.law_of_row[row] >= 0]
            if rows:
                laws = draft.mass.laws[[draft.mass.law_of_row[row] for row in rows]] / entry.draft_probability
                overlaps = {a: float(torch.minimum(a * laws, target_probs[rows]).sum(-1).mean()) for a in _CANDIDATES}
                self._estimates.setdefault(entry.request.request_id, _Estimate()).add(overlaps)


def _emission_chances(draft: Draft, verdict: Verdict, b: int) -> list[float]:
    """For every node the chance with which this round emitted it: 0 unless its parent stood, and then what the rule says of it."""
    stood = {-1, *verdict.paths[b]}
    told = verdict.probabilities[b] if verdict.probabilities else (None,) * draft.lengths[b]
    chances = []
    for node, parent in enumerate(draft.parents[draft.offsets[b] : draft.offsets[b + 1]]):
        chance = told[node]
        chances.append((float(node in stood) if chance is None else chance) if parent in stood else 0.0)
    return chances


def best_draft_probability(accepted: Mapping[float, float], num_draft: int, draft_step_s: float, target_step_s: float) -> float:
    """The candidate a with the most expected tokens per second when a position is drafted and accepted with chance `accepted[a]`.

    Positions are taken as alike: 1 + sum b^i tokens for one target step and sum a^(i-1) draft steps. Draft rows in the target's
    forward are taken as free. On a tie the larger a wins.
    """

    def tokens_per_s(a: float) -> float:
        b = accepted[a]
        tokens = 1 + sum(b**place for place in range(1, num_draft + 1))
        draft_steps = sum(a**place for place in range(num_draft))
        return tokens / max(target_step_s + draft_steps * draft_step_s, 1e-12)

    return max(sorted(accepted, reverse=True), key=tokens_per_s)


def _judged_rows(draft: Draft, verdict: Verdict, b: int) -> Sequence[int]:
    """Rows whose target law is known to matter: the anchor and the accepted path."""
    anchor = draft.anchor_row(b)
    return [anchor, *(anchor + 1 + node for node in verdict.paths[b])]


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else _MEMORY * old + (1 - _MEMORY) * new
