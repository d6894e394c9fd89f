"""Token-level rejection sampling on chains, for any proposal given as sub-probability mass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.verify.base import Rule, draw, next_kinds, residual_law


class RejectionRule(Rule):
    """Accept x iff u * mu(x) < p(x); where nothing is accepted the next token comes from (p - mu)_+.

    Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318), with mu = q. Exact for every mu
    with sum <= 1 that is the law the token was really drawn from, given all that was drawn before it.
    """

    name = "rejection"
    lossless = True

    def accept_terms(self, draft: Draft, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The two sides of the test at every node: p(x) and mu(x), both [N]."""
        _require_chains(draft)
        parent_rows = torch.tensor(draft.parent_rows, dtype=torch.int64, device=target_probs.device)
        p = target_probs[parent_rows, draft.tokens]
        if draft.mass is None:
            return p, torch.ones_like(p)
        mu = torch.ones(draft.num_nodes, dtype=draft.mass.laws.dtype, device=p.device)
        nodes = [node for node, sampled in enumerate(draft.sampled) if sampled]
        if nodes:
            laws = [draft.mass.law_of_row[draft.parent_rows[node]] for node in nodes]
            mu[nodes] = draft.mass.laws[laws, draft.tokens[nodes]]
        return p, mu

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """min(1, p(x) / mu(x)) at every node: -> [N]."""
        p, mu = self.accept_terms(draft, target_probs)
        return torch.where(p < mu, p / mu, (p > 0).to(p.dtype))

    def next_law(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """(p - mu)_+ at each row; p where nothing could have been proposed: -> [len(rows), V]."""
        return residual_law(draft, target_probs, rows)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Accept until the first failed test of every request, then draw from the law of the row it stopped at."""
        p, mu = self.accept_terms(draft, target_probs)
        # No division: mu(x) may be tiny. float64 uniforms keep the product exact enough for float32 laws.
        passed = uniforms.accept * mu < p
        tokens, passes = torch.stack((draft.tokens, passed.to(draft.tokens.dtype))).tolist()
        paths, accepted, rows = [], [], []
        for b in range(draft.num_requests):
            start, length = draft.offsets[b], draft.lengths[b]
            kept = next((node for node in range(length) if not passes[start + node]), length)
            paths.append(tuple(range(kept)))
            accepted.append(tuple(tokens[start : start + kept]))
            rows.append(draft.anchor_row(b) + kept)
        next_tokens = draw(self.next_law(draft, target_probs, rows), uniforms.next).tolist()
        return Verdict(tuple(paths), tuple(accepted), tuple(next_tokens), next_kinds(draft, rows))


def _require_chains(draft: Draft) -> None:
    """One mu per row is all this rule can subtract, so siblings, or a law beside a deterministic child, are refused."""
    for b, length in enumerate(draft.lengths):
        parents = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
        assert parents == tuple(range(-1, length - 1)), "rejection takes chains: a row has several children"
    if draft.mass is not None:
        sampled = draft.sampled or (False,) * draft.num_nodes
        for node, row in enumerate(draft.parent_rows):
            assert (draft.mass.law_of_row[row] >= 0) == sampled[node], "a row has a law exactly when its child was sampled from it"
