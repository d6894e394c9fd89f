"""Recursive rejection sampling on trees, top down: sampled children first, each against the residual of the earlier
ones, then the deterministic ones.
"""

from __future__ import annotations

from foretoken.verify.siblings import Residuals, SiblingRule


class TreeRule(SiblingRule):
    """At a row with residual r = p: accept sampled child x iff u mu(x) < r(x), else r <- norm((r - mu)_+), also where a
    sample gave nothing; then accept a deterministic child x with probability r(x), else end with a token sampled from
    r.

    One sampled child and the rest deterministic is greedy+1, several sampled ones are recursive rejection without
    replacement (Yang et al. 2024, arXiv 2402.14160; Chen et al. 2024, arXiv 2402.12374), none is sample-and-compare; on
    a chain it is token-level rejection. The deterministic children are tested one by one, each with its own uniform,
    against the residual of the earlier ones: in distribution that is one shared sample y ~ r.
    """

    name = "tree"
    bottom_up = False

    def stop(self, residuals: Residuals, request: int) -> int:
        """See `SiblingRule`: down from the anchor to each row's first accepted child."""
        row = residuals.draft.anchor_row(request)
        while (node := _first_passing(residuals, row)) is not None:
            row = residuals.rows[node]
        return row

    def shares(self, residuals: Residuals) -> list[float]:
        """See `SiblingRule`: of a row's children in the order of testing, the chance that the earlier ones are rejected
        and this one is accepted.
        """
        shares = [0.0] * len(residuals.rows)
        for proposals in residuals.proposals:
            left = 1.0
            for node in proposals.children:
                shares[node] = left * residuals.step[node]
                left -= shares[node]
        return shares


def _first_passing(residuals: Residuals, row: int) -> int | None:
    """The first accepted child of `row`, None if all are rejected."""
    children = residuals.proposals[row].children
    return next((node for node in children if residuals.numbers[node] < residuals.step[node]), None)
