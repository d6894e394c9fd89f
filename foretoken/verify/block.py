"""Block verification of chains: prefixes are verified as a whole, so an early over-proposed token can be compensated
later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import (
    Rule,
    accept_ratio,
    draw,
    left_over,
    node_terms,
    pieces,
    require_chains,
    residual_weights,
    take,
    verdict_at,
)


class BlockRule(Rule):
    """Accept the longest prefix i with u_i < h_i; the next token is sampled from (P_i p - mu)_+ at its row.

    P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / mu(x_i)); Z_i = sum (P_i p - mu)_+ over the row after x_i; h_i = Z_i / (Z_i +
    1 - P_i), for every i up to the sampled length. Sun et al. 2024 (arXiv 2403.10444), with any sub-probability mass mu
    in place of the draft's distribution: their rule on the vocabulary extended by one symbol, "nothing", of target
    probability 0. No lossless rule accepts more on one sampled chain.
    """

    name = "block"
    takes_trees = False

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """P(at least i accepted) / P(at least i - 1 accepted) at every node: -> [N]."""
        require_chains(draft, self.name)
        p, mu = to_host(*node_terms(draft, target_probs))
        steps = _steps(draft, _bounds(draft, target_probs, p, _reach(draft, p, mu)))
        return to_device(steps, target_probs.device, target_probs.dtype)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """(P p - mu)_+ at each row: -> [len(rows), V]."""
        require_chains(draft, self.name)
        p, mu = to_host(*node_terms(draft, target_probs))
        reach = _reach(draft, p, mu)
        return residual_weights(draft, target_probs, rows, [reach[row] for row in rows])

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Find the longest accepted prefix of every request, then sample from the residual of its row."""
        require_chains(draft, self.name)
        tokens, numbers, p, mu = to_host(draft.tokens, uniforms.accept, *node_terms(draft, target_probs))
        reach = _reach(draft, p, mu)
        bounds = _bounds(draft, target_probs, p, reach)
        rows = []
        for b, length in enumerate(draft.lengths):
            start, anchor = draft.offsets[b], draft.anchor_row(b)
            passing = (i for i in range(length, 0, -1) if numbers[start + i - 1] < bounds[anchor + i])
            rows.append(anchor + next(passing, 0))
        weights = residual_weights(draft, target_probs, rows, [reach[row] for row in rows])
        (next_tokens,) = to_host(draw(weights, uniforms.next))
        return verdict_at(draft, tokens, rows, next_tokens, _steps(draft, bounds))


def _reach(draft: Draft, p: Sequence[float], mu: Sequence[float]) -> list[float]:
    """P at every row: -> [R]."""
    reach: list[float] = []
    for b in range(draft.num_requests):
        reach.append(1.0)
        for node in range(draft.offsets[b], draft.offsets[b + 1]):
            reach.append(accept_ratio(reach[-1] * p[node], mu[node]))
    return reach


def _bounds(draft: Draft, target_probs: Tensor, p: Sequence[float], reach: Sequence[float]) -> list[float]:
    """h at every row, the conditional probability that the path ends there: -> [R]; 1 at every anchor."""
    left = list(reach)  # [R] Z; P where nothing could have been proposed
    for node, row in enumerate(draft.parent_rows):
        left[row] *= max(0.0, 1.0 - p[node])  # as for a deterministic drafted token; a row with a distribution follows
    if draft.mass is not None:
        distribution_of_row = draft.mass.distribution_of_row
        rows = sorted(
            (row for row, distribution in enumerate(distribution_of_row) if distribution >= 0),
            key=distribution_of_row.__getitem__,
        )  # consecutive distributions are read without a copy
        for some in pieces(rows, target_probs):
            owed = left_over(
                take(target_probs, some),
                [reach[row] for row in some],
                take(draft.mass.distributions, [distribution_of_row[row] for row in some]),
            )
            (totals,) = to_host(owed.sum(-1, dtype=torch.float64))
            for row, total in zip(some, totals, strict=True):
                left[row] = total
    # Z + (1 - P), not Z + 1 - P: no cancellation where P is nearly 1.
    return [z / (z + (1.0 - reached)) if reached < 1 else 1.0 for z, reached in zip(left, reach, strict=True)]


def _steps(draft: Draft, bounds: Sequence[float]) -> list[float]:
    """P(at least i accepted) / P(at least i - 1 accepted) at every node, from the bounds of the rows: -> [N]."""
    steps: list[float] = []
    for b, length in enumerate(draft.lengths):
        anchor, longer, own = draft.anchor_row(b), 0.0, []
        for i in range(length, 0, -1):
            longer += (1.0 - longer) * bounds[anchor + i]  # at least i are accepted
            shorter = longer + (1.0 - longer) * bounds[anchor + i - 1]
            own.append(longer / shorter if shorter > 0 else 0.0)
        steps += reversed(own)
    return steps
