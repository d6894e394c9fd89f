"""How much to draft, and how surely: chosen before a round from the request and from what earlier rounds cost and
gained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.control.candidates import DraftBudget, DrafterOption, RequestOptions, weight_of
from foretoken.control.cost import seed_tables
from foretoken.control.policy import MOST_NUM_DRAFT, BudgetPolicy, Policy
from foretoken.control.previews import NO_PREVIEW, Preview, PreviewThrottle, outcomes, reach
from foretoken.control.routing import Routing, RoutingRules
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import DrafterKey
from foretoken.draft.group import GRAMMAR, chosen_arm, drafter_key
from foretoken.draft.lookup_tree import LookupTree
from foretoken.engine.request import RequestState
from foretoken.plan.profile import Profile
from foretoken.verify import takes_trees

_CANDIDATES = (0.25, 0.5, 0.75, 1.0)  # draft probabilities that "auto" chooses from
_MEMORY = 0.9  # weight of the past when a new observation comes in
_WARM_ROUNDS = 4  # rounds at full probability before "auto" trusts its estimates


@dataclass(frozen=True)
class DraftPlan:
    """What a request may draft in its next round: at most `num_draft` nodes by one of its arms, each position with
    `draft_probability`.
    """

    num_draft: int
    draft_probability: float = 1.0
    arm: int | None = None


@dataclass
class _Estimate:
    """What one request's rounds showed: the chance b(a) that a position is drafted and accepted, for each candidate
    a.
    """

    accepted: dict[float, float] = field(default_factory=lambda: dict.fromkeys(_CANDIDATES, 0.0))
    num_rounds: int = 0

    def add(self, overlaps: Mapping[float, float]) -> None:
        keep = min(_MEMORY, self.num_rounds / (self.num_rounds + 1))
        self.accepted = {a: keep * self.accepted[a] + (1 - keep) * overlaps[a] for a in _CANDIDATES}
        self.num_rounds += 1


class Controller:
    """Chooses the plans of a round before anything in it is drawn; it learns from finished rounds only.

    Who guesses and how much is `control.policy`'s business; here stand what a round looks like to the policy, the rules
    that come before it (`control.routing`), and the draft probabilities. `look` shows the guesses that an arm of a
    request has ready, None if it cannot; `serves` tells whether the drafter of an arm may guess for a request at all.
    """

    def __init__(
        self,
        look: Callable[[BatchEntry, int], LookupTree | None],
        rules: RoutingRules | None,
        serves: Callable[[int, int], bool],
    ) -> None:
        self.policy: Policy = BudgetPolicy()
        self.routing = Routing(rules or RoutingRules())
        self.clock: Callable[[], float] = time.perf_counter  # that of `RequestState.arrived_s`
        self._look, self._serves = look, serves
        self._shown: dict[
            int, list[tuple[Hashable, Preview, Sequence[int]]]
        ] = {}  # what was ready in this round: drafter, guesses, their tokens
        self._last_grants: dict[int, int] = {}  # guesses that were last made for a request
        self._sights: dict[int, dict[Hashable, PreviewThrottle]] = {}
        self._estimates: dict[int, _Estimate] = {}
        self._num_probed: dict[int, int] = {}  # rows of probes that came with a request's last guesses
        self._kinds: dict[int, list[Hashable]] = {}  # by request, of its arms
        self._draft_step_s = 0.0
        self._target_step_s = 0.0

    def seed(self, profile: Profile, specs: Mapping[str, SpecConfig]) -> None:
        """Begin with the costs of a profile; `specs` are what its drafters, by name, are in this engine."""
        assert isinstance(self.policy, BudgetPolicy)
        target_cost, by_name = seed_tables(profile)
        self.policy.seed(target_cost, {_kind(spec): by_name[name] for name, spec in specs.items() if name in by_name})

    def plan(self, states: Sequence[RequestState]) -> list[DraftPlan]:
        """The plans of the next round of requests that decode in it."""
        self._shown.clear()
        grants = self.policy.plan([self._wish(state, len(states)) for state in states])
        return [
            DraftPlan(grant.num_draft, self._draft_probability(state, grant), grant.arm)
            for state, grant in zip(states, grants, strict=True)
        ]

    def observe(
        self,
        batch: Batch,
        draft: Draft,
        target_probs: Tensor,
        verdict: Verdict,
        draft_s: Mapping[DrafterKey, float],
        target_s: float,
        num_read_tokens: Mapping[DrafterKey, int] | None = None,
    ) -> None:
        """Learn from a round: `draft_s` is what each drafter took, `target_s` what the target's forward and the rules
        took.

        `num_read_tokens` are those that drafters first had to read of their texts.
        """
        if all(entry.decodes and len(entry.pending) == 1 for entry in batch.entries):
            num_probed = sum(draft.probe_lengths)
            num_tokens = draft.num_requests + sum(map(len, verdict.paths))
            self.policy.observe_step(
                draft.num_rows + num_probed, draft.num_nodes + num_probed, target_s, num_tokens, sum(draft_s.values())
            )
        drafting: dict[Hashable, list[int]] = {}
        for b, entry in enumerate(batch.decoding):
            request_id, arm = entry.request.request_id, chosen_arm(entry)
            most_right = 0
            for kind, look, tokens in self._shown.get(request_id, ()):
                found = outcomes(look, tokens, verdict.emitted(b))
                num_right = sum(right is True for right in found)
                self._sights[request_id][kind].brought(
                    max(0, num_right - most_right)
                )  # beyond what those before it showed
                most_right = max(most_right, num_right)
                self.policy.observe_preview(request_id, kind, look, found)
            if arm is None or not entry.num_draft:
                self.policy.observe_rest(request_id)
                continue
            kind = self._kinds_of(entry.request)[arm]
            self._last_grants[request_id] = entry.num_draft
            if any(shown == kind for shown, _, _ in self._shown.get(request_id, ())):
                continue  # judged above, and what it took was spent before it was chosen
            drafting.setdefault(kind, []).append(b)
            self._num_probed[request_id] = draft.probe_lengths[b]
            if GRAMMAR not in draft.authors(b):  # somebody else's guesses
                chances = _emission_chances(draft, verdict, b)
                parents = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
                self.policy.observe_round(request_id, kind, entry.num_draft, chances, parents)
        for kind, places in drafting.items():
            key = drafter_key(batch.decoding[places[0]].request.spec.arms[chosen_arm(batch.decoding[places[0]]) or 0])
            assert key is not None
            longest = max(batch.decoding[b].num_draft for b in places)
            num_read = num_read_tokens.get(key, 0) if num_read_tokens else 0
            self.policy.observe_draft(kind, longest, draft_s.get(key, 0.0), len(places), num_read)
            self._keep_accounts(batch, draft, verdict, places, draft_s.get(key, 0.0))
        self._learn_probabilities(batch, draft, target_probs, verdict, sum(draft_s.values()), target_s)

    def _keep_accounts(
        self, batch: Batch, draft: Draft, verdict: Verdict, places: Sequence[int], draft_s: float
    ) -> None:
        """What guesses took and saved, by slice."""
        cost, num_requests = self.policy.target_cost, draft.num_requests
        plain_s = cost.seconds(num_requests) / num_requests
        row_s = max(0.0, cost.seconds(draft.num_rows) - cost.seconds(num_requests)) / max(1, draft.num_nodes)
        for b in places:
            took_s = draft_s / len(places) + row_s * draft.lengths[b]
            self.routing.observe(
                batch.decoding[b].request.params.slice, took_s, len(verdict.paths[b]) * plain_s, plain_s
            )

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._estimates.pop(request_id, None)
        self._num_probed.pop(request_id, None)
        self._kinds.pop(request_id, None)
        self._shown.pop(request_id, None)
        self._sights.pop(request_id, None)
        self._last_grants.pop(request_id, None)
        self.routing.finish(request_id)
        self.policy.finish(request_id)

    def _wish(self, state: RequestState, num_running: int) -> RequestOptions:
        """What a request may do; the first token is never drafted, see `Scheduler`."""
        spec = state.request.spec
        is_open = spec.num_draft == "auto"
        most = (
            max(0, min(MOST_NUM_DRAFT if spec.num_draft == "auto" else spec.num_draft, state.num_remaining - 1))
            if state.origins
            else 0
        )
        arms: list[DrafterOption] = []
        if most and spec.arms and not (is_open and self._is_routed_away(state, num_running)):
            shown = self._see(state, most, num_running) if is_open or len(spec.arms) > 1 else {}
            num_probe = self._num_probed.get(state.request_id, spec.num_probe)
            for arm, (own, kind) in enumerate(zip(spec.arms, self._kinds_of(state.request), strict=True)):
                if not self._serves(state.request_id, arm):
                    continue
                look = shown.get(arm)
                num_draft = own.at_most(most) if look is None else len(look.parents)
                if num_draft or not is_open:
                    arms.append(DrafterOption(arm, kind, num_draft, num_probe, look))
        return RequestOptions(
            state.request_id,
            tuple(arms),
            is_open,
            state.request.params.slice,
            len(state.tokens),
            state.num_remaining,
            self._weight(state, num_running),
        )

    def _weight(self, state: RequestState, num_running: int) -> float:
        params = state.request.params
        if not params.priority and params.deadline_s is None:
            return 1.0
        left_s = None if params.deadline_s is None else state.arrived_s + params.deadline_s - self.clock()
        return weight_of(params.priority, left_s, state.num_remaining * self.policy.target_cost.seconds(num_running))

    def _is_routed_away(self, state: RequestState, num_running: int) -> bool:
        most = state.max_total_tokens - len(state.request.prompt_ids)
        return self.routing.reason(state.request_id, most, state.request.params.slice, num_running) is not None

    def _see(self, state: RequestState, most: int, num_running: int) -> dict[int, Preview]:
        """The guesses that are ready for a request, by arm; where looking takes more than it brings, none for a few
        rounds.
        """
        shown: dict[int, Preview] = {}
        token_s = self.policy.target_cost.seconds(num_running) / num_running
        takes_a_tree = takes_trees(state.rule)
        for arm, (spec, kind) in enumerate(zip(state.request.spec.arms, self._kinds_of(state.request), strict=True)):
            if not self._serves(state.request_id, arm):
                continue
            sight = self._sights.setdefault(state.request_id, {}).setdefault(kind, PreviewThrottle())
            if not sight.opens(token_s):
                shown[arm] = NO_PREVIEW
                continue
            began = time.perf_counter()
            entry = BatchEntry(
                state.request,
                len(state.tokens) - 1,
                (state.tokens[-1],),
                True,
                min(spec.at_most(most), reach(self._last_grants.get(state.request_id, 0))),
                takes_trees=takes_a_tree,
            )
            tree = self._look(entry, arm)
            if tree is None:
                continue
            sight.took(time.perf_counter() - began)
            shown[arm] = Preview(tree.parents, tree.chances)
            self._shown.setdefault(state.request_id, []).append((kind, shown[arm], tree.tokens))
        return shown

    def _kinds_of(self, request: Request) -> list[Hashable]:
        if request.request_id not in self._kinds:
            self._kinds[request.request_id] = [_kind(arm) for arm in request.spec.arms]
        return self._kinds[request.request_id]

    def _draft_probability(self, state: RequestState, grant: DraftBudget) -> float:
        spec = state.request.spec
        if spec.draft_probability != "auto":
            return spec.draft_probability
        estimate = self._estimates.get(state.request_id)
        if estimate is None or estimate.num_rounds < _WARM_ROUNDS:
            return 1.0
        return best_draft_probability(estimate.accepted, grant.num_draft, self._draft_step_s, self._target_step_s)

    def _learn_probabilities(
        self, batch: Batch, draft: Draft, target_probs: Tensor, verdict: Verdict, draft_s: float, target_s: float
    ) -> None:
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


def _kind(spec: SpecConfig) -> Hashable:
    """What tells apart guesses of different cost and worth: the drafter, and the shape of what it guesses."""
    return drafter_key(spec), spec.tree, spec.branching


def _emission_chances(draft: Draft, verdict: Verdict, b: int) -> list[float]:
    """For every node the chance with which this round emitted it: 0 unless its parent stood, and then what the rule
    says of it.
    """
    stood = {-1, *verdict.paths[b]}
    told = verdict.probabilities[b] if verdict.probabilities else (None,) * draft.lengths[b]
    chances = []
    for node, parent in enumerate(draft.parents[draft.offsets[b] : draft.offsets[b + 1]]):
        chance = told[node]
        chances.append((float(node in stood) if chance is None else chance) if parent in stood else 0.0)
    return chances


def best_draft_probability(
    accepted: Mapping[float, float], num_draft: int, draft_step_s: float, target_step_s: float
) -> float:
    """The candidate a with the most expected tokens per second when a position is drafted and accepted with chance
    `accepted[a]`.

    Positions are taken as alike: 1 + sum b^i tokens for one target step and sum a^(i-1) draft steps. Draft rows in the
    target's forward are taken as free. On a tie the larger a wins.
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
