"""How much to draft, and how surely: chosen before a round from the request and from what earlier rounds cost and gained."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, Draft, Verdict
from foretoken.draft.group import GRAMMAR, DrafterKey, drafter_key
from foretoken.engine.request import RequestState
from foretoken.plan.cost import seed_tables
from foretoken.plan.policy import MOST_NUM_DRAFT, BudgetPolicy, Wish
from foretoken.plan.profile import Profile

_CANDIDATES = (0.25, 0.5, 0.75, 1.0)  # draft probabilities that "auto" chooses from
_MEMORY = 0.9  # weight of the past when a new observation comes in
_WARM_ROUNDS = 4  # rounds at full probability before "auto" trusts its estimates


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

    The numbers of guesses are `plan.policy`'s; here stand the draft probabilities, and what a round looks like to the policy.
    """

    def __init__(self) -> None:
        self.policy = BudgetPolicy()
        self._estimates: dict[int, _Estimate] = {}
        self._num_probed: dict[int, int] = {}  # rows of probes that came with a request's last guesses
        self._draft_step_s = 0.0
        self._target_step_s = 0.0

    def seed(self, profile: Profile, specs: Mapping[str, SpecConfig]) -> None:
        """Begin with the costs of a profile; `specs` are what its drafters, by name, are in this engine."""
        assert isinstance(self.policy, BudgetPolicy)
        target_cost, by_name = seed_tables(profile)
        kinds = {name: _kind(spec) for name, spec in specs.items() if name in by_name}
        self.policy.seed(target_cost, {kind: by_name[name] for name, kind in kinds.items() if kind is not None})

    def plan(self, states: Sequence[RequestState]) -> list[DraftPlan]:
        """The plans of the next round of requests that decode in it."""
        budgets = self.policy.plan([self._wish(state) for state in states])
        return [DraftPlan(budget, self._draft_probability(state, budget)) for state, budget in zip(states, budgets, strict=True)]

    def observe(
        self, batch: Batch, draft: Draft, target_probs: Tensor, verdict: Verdict, draft_s: Mapping[DrafterKey, float], target_s: float
    ) -> None:
        """Learn from a round: `draft_s` is what each drafter took, `target_s` what the target's forward and the rules took."""
        if all(entry.decodes and len(entry.pending) == 1 for entry in batch.entries):
            num_probed = sum(draft.probe_lengths)
            self.policy.observe_step(draft.num_rows + num_probed, draft.num_nodes + num_probed, target_s)
        longest: dict[Hashable, int] = {}
        took_s: dict[Hashable, float] = {}
        for b, entry in enumerate(batch.decoding):
            key = drafter_key(entry.request.spec)
            if key is None or not entry.num_draft:
                self.policy.observe_rest(entry.request.request_id)
                continue
            kind = _kind(entry.request.spec)
            longest[kind], took_s[kind] = max(longest.get(kind, 0), entry.num_draft), draft_s.get(key, 0.0)
            self._num_probed[entry.request.request_id] = draft.probe_lengths[b]
            if GRAMMAR not in draft.authors(b):  # somebody else's guesses
                chances = _emission_chances(draft, verdict, b)
                parents = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
                self.policy.observe_round(entry.request.request_id, kind, entry.num_draft, chances, bool(verdict.paths[b]), parents)
        for kind, count in longest.items():
            self.policy.observe_draft(kind, count, took_s[kind])
        self._learn_probabilities(batch, draft, target_probs, verdict, sum(draft_s.values()), target_s)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._estimates.pop(request_id, None)
        self._num_probed.pop(request_id, None)
        self.policy.finish(request_id)

    def _wish(self, state: RequestState) -> Wish:
        """The first token is never drafted, see `Scheduler`."""
        num_draft = state.request.spec.num_draft
        most = max(0, min(MOST_NUM_DRAFT if num_draft == "auto" else num_draft, state.num_remaining - 1)) if state.origins else 0
        num_probe = self._num_probed.get(state.request_id, state.request.spec.num_probe)
        return Wish(state.request_id, _kind(state.request.spec), most, num_draft == "auto", num_probe)

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


def _kind(spec: SpecConfig) -> Hashable | None:
    """What tells apart guesses of different cost and worth: the drafter, and the shape of what it guesses."""
    key = drafter_key(spec)
    return None if key is None else (key, spec.tree, spec.branching)


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
