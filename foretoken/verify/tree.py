"""Recursive rejection sampling on trees, top down: sampled children first, each against the residual of the earlier
ones, then the deterministic ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import Rule, draw, verdict_at
from foretoken.verify.siblings import Residuals


class TreeRule(Rule):
    """At a row with residual r = p: accept sampled child x iff u mu(x) < r(x), else r <- norm((r - mu)_+), also where a
    sample gave nothing; then accept a deterministic child x with probability r(x), else end with a token sampled from
    r.

    One sampled child and the rest deterministic is greedy+1, several sampled ones are recursive rejection without
    replacement (Yang et al. 2024, arXiv 2402.14160; Chen et al. 2024, arXiv 2402.12374), none is sample-and-compare; on
    a chain it is token-level rejection. The deterministic children are tested one by one, each with its own uniform,
    against the residual of the earlier ones: in distribution that is one shared sample y ~ r.
    """

    name = "tree"

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """Of every row's children in the order of testing, the probability that the earlier ones are rejected and this
        one is accepted: -> [N].
        """
        residuals = Residuals(draft, target_probs)
        residuals.judge(bottom_up=False)
        return to_device(_shares(residuals), target_probs.device, target_probs.dtype)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """The residual of each row without its deterministic children: -> [len(rows), V]."""
        residuals = Residuals(draft, target_probs)
        residuals.judge(bottom_up=False)
        return residuals.next_weights(rows)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Walk down every request's tree, then sample from the residual of the last row."""
        residuals = Residuals(draft, target_probs, uniforms.accept)
        residuals.judge(bottom_up=False)
        numbers, rows = residuals.numbers, []
        for b in range(draft.num_requests):
            row = draft.anchor_row(b)
            while (node := _first_passing(residuals, row, numbers)) is not None:
                row = residuals.rows[node]
            rows.append(row)
        (next_tokens,) = to_host(draw(residuals.next_weights(rows), uniforms.next))
        return verdict_at(draft, residuals.tokens, rows, next_tokens, _shares(residuals), residuals.open_rows)


def _first_passing(residuals: Residuals, row: int, numbers: Sequence[float]) -> int | None:
    """The first accepted child of `row`, None if all are rejected."""
    return next((node for node in residuals.proposals[row].children if numbers[node] < residuals.step[node]), None)


def _shares(residuals: Residuals) -> list[float]:
    """Conditional probability of accepting each node given that its parent was accepted: -> [N]."""
    shares = [0.0] * len(residuals.rows)
    for proposals in residuals.proposals:
        left = 1.0
        for node in proposals.children:
            shares[node] = left * residuals.step[node]
            left -= shares[node]
    return shares
