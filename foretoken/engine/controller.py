"""How much to draft, and how surely: chosen before a round from the request and from what earlier rounds cost and gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core import Batch, Draft, Verdict
from foretoken.engine.request import RequestState

# A draft model pays for every guess, a lookup for none; both stay below the rows that a CPU verifies at the price of one.
_AUTO_NUM_DRAFT = {"draft_model": 4, "ngram": 8, "suffix": 8, "recycling": 7, "predicted": 12}
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
    """Chooses the plan of a round before anything in it is drawn; it learns from finished rounds only."""

    def __init__(self) -> None:
        self._estimates: dict[int, _Estimate] = {}
        self._draft_step_s = 0.0
        self._target_step_s = 0.0

    def choose(self, state: RequestState) -> DraftPlan:
        """The plan of a request's next round."""
        spec = state.request.spec
        if spec.drafter is None:
            return DraftPlan(0)
        num_draft = _AUTO_NUM_DRAFT[spec.drafter] if spec.num_draft == "auto" else spec.num_draft
        if spec.draft_probability != "auto":
            return DraftPlan(num_draft, spec.draft_probability)
        estimate = self._estimates.get(state.request_id)
        if estimate is None or estimate.num_rounds < _WARM_ROUNDS:
            return DraftPlan(num_draft)
        return DraftPlan(num_draft, best_draft_probability(estimate.accepted, num_draft, self._draft_step_s, self._target_step_s))

    def observe(self, batch: Batch, draft: Draft, target_probs: Tensor, verdict: Verdict, draft_s: float, target_s: float) -> None:
        """Learn from a round: `draft_s` and `target_s` are what its drafting and its forward took."""
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

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._estimates.pop(request_id, None)


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
