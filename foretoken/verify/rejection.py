"""Token-level rejection sampling on chains, for any proposal given as sub-probability mass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_host
from foretoken.verify.base import Rule, draw, draws_anywhere, node_terms, require_chains, residual_weights, verdict_at


class RejectionRule(Rule):
    """Accept x iff u * mu(x) < p(x); after a rejection the next token is sampled from (p - mu)_+.

    Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318), with mu = q. Exact for every mu of
    sum <= 1 that is the distribution the token was sampled from, given everything sampled before it.
    """

    name = "rejection"
    takes_trees = False

    def accept_terms(self, draft: Draft, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        """p(x) and mu(x) of every node, both [N]."""
        require_chains(draft, self.name)
        return node_terms(draft, target_probs)

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """min(1, p(x) / mu(x)) at every node: -> [N]."""
        return _ratios(*self.accept_terms(draft, target_probs))

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """(p - mu)_+ at each row; p where nothing could have been proposed: -> [len(rows), V]."""
        return residual_weights(draft, target_probs, rows)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Accept up to the first rejection of every request, then sample from the residual of that row."""
        p, mu = self.accept_terms(draft, target_probs)
        # No division: mu(x) may be tiny. float64 uniforms keep the product exact enough for float32 distributions.
        passed = uniforms.accept * mu < p
        weights = partial(self.next_token_weights, draft, target_probs)
        early = draws_anywhere(draft, target_probs, weights, uniforms)
        tokens, passes, ratios, *drawn = to_host(draft.tokens, passed, _ratios(p, mu), *early)
        rows = []
        for b, length in enumerate(draft.lengths):
            start = draft.offsets[b]
            rows.append(
                draft.anchor_row(b) + next((node for node in range(length) if not passes[start + node]), length)
            )
        next_tokens = [drawn[0][row] for row in rows] if drawn else to_host(draw(weights(rows), uniforms.next))[0]
        return verdict_at(draft, tokens, rows, next_tokens, ratios)


def _ratios(p: Tensor, mu: Tensor) -> Tensor:
    """min(1, p / mu), and 0 where p is 0 whatever mu: both [N] -> [N]."""
    return torch.where(p < mu, p / mu, p > 0)
