"""Traversal verification of trees, from the leaves to the root: a path is tested before its prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import Rule, draw, verdict_at
from foretoken.verify.siblings import Residuals


class TraversalRule(Rule):
    """Accept the first node in post-order with u < P, with its path; the next token is sampled from the residual at it.

    A node is reached with P = min(1, P r(x) / mu(x)) of its parent's row, after that row's earlier children; every
    rejected child, and every sample that gave nothing, removes its mass from P r. Weng et al. 2025 (arXiv 2505.12398),
    extended to any ordered proposals of sub-probability mass. On a chain it equals block verification, on one level the
    rule `tree`.
    """

    name = "traversal"

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """P(the accepted path goes through the node) / P(it goes through its parent): -> [N]."""
        residuals = Residuals(draft, target_probs)
        residuals.judge(bottom_up=True)
        return to_device(_shares(residuals), target_probs.device, target_probs.dtype)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """Residual weights of each row once all its children are rejected: -> [len(rows), V]."""
        residuals = Residuals(draft, target_probs)
        residuals.judge(bottom_up=True)
        return residuals.next_weights(rows)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Find the first accepted node in every request's tree, then sample from the residual of its row."""
        residuals = Residuals(draft, target_probs, uniforms.accept)
        residuals.judge(bottom_up=True)
        numbers, rows = residuals.numbers, []
        for b in range(draft.num_requests):
            anchor = draft.anchor_row(b)
            rows.append(
                next(
                    row
                    for row in _post_order(residuals, anchor)
                    if row == anchor or numbers[row - b - 1] < residuals.reach[row]
                )
            )
        (next_tokens,) = to_host(draw(residuals.next_weights(rows), uniforms.next))
        return verdict_at(draft, residuals.tokens, rows, next_tokens, _shares(residuals), residuals.open_rows)


def _post_order(residuals: Residuals, anchor: int) -> list[int]:
    """Rows below `anchor` in the order of testing, children before parents, the anchor last."""
    order, ahead = [], [anchor]
    while ahead:
        row = ahead.pop()
        order.append(row)
        ahead += [residuals.rows[node] for node in residuals.proposals[row].children]
    return order[::-1]


def _shares(residuals: Residuals) -> list[float]:
    """Conditional probability of accepting each node given that its parent was accepted: -> [N]."""
    shares = [0.0] * len(residuals.rows)
    stands = [0.0] * len(
        residuals.proposals
    )  # [R] probability that the row or one below it is accepted, given that the row is reached
    for row in reversed(range(len(residuals.proposals))):
        children = residuals.proposals[row].children
        for node in children:
            shares[node] = (1.0 - stands[row]) * stands[residuals.rows[node]]
            stands[row] += shares[node]
        stands[row] += (1.0 - stands[row]) * residuals.reach[row]
        for node in children:
            shares[node] = shares[node] / stands[row] if stands[row] > 0 else 0.0
    return shares
