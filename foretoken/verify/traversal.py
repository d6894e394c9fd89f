"""Traversal verification of trees, from the leaves to the root: a path is tested before its prefixes."""

from __future__ import annotations

from foretoken.verify.siblings import Residuals, SiblingRule


class TraversalRule(SiblingRule):
    """Accept the first node in post-order with u < P, with its path; the next token is sampled from the residual at it.

    A node is reached with P = min(1, P r(x) / mu(x)) of its parent's row, after that row's earlier children; every
    rejected child, and every sample that gave nothing, removes its mass from P r. Weng et al. 2025 (arXiv 2505.12398),
    extended to any ordered proposals of sub-probability mass. On a chain it equals block verification, on one level the
    rule `tree`.
    """

    name = "traversal"
    bottom_up = True

    def stop(self, residuals: Residuals, request: int) -> int:
        """See `SiblingRule`: the first accepted row in the order of testing, children before parents."""
        anchor = residuals.draft.anchor_row(request)
        order, ahead = list[int](), [anchor]
        while ahead:
            row = ahead.pop()
            order.append(row)
            ahead += [residuals.rows[node] for node in residuals.proposals[row].children]
        numbers = residuals.numbers
        return next(
            row for row in reversed(order) if row == anchor or numbers[row - request - 1] < residuals.reach[row]
        )

    def shares(self, residuals: Residuals) -> list[float]:
        """See `SiblingRule`: P(the accepted path goes through the node) / P(it goes through its parent)."""
        shares = [0.0] * len(residuals.rows)
        # [R] probability that the row or one below it is accepted, given that the row is reached
        stands = [0.0] * len(residuals.proposals)
        for row in reversed(range(len(residuals.proposals))):
            children = residuals.proposals[row].children
            for node in children:
                shares[node] = (1.0 - stands[row]) * stands[residuals.rows[node]]
                stands[row] += shares[node]
            stands[row] += (1.0 - stands[row]) * residuals.reach[row]
            for node in children:
                shares[node] = shares[node] / stands[row] if stands[row] > 0 else 0.0
        return shares
