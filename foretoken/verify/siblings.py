"""Residuals of the target over the children of a row, after each rejected drafted token.

Shared by `tree` (top down) and `traversal` (bottom up). Proposals are ordered, each with the mass it was sampled from
given the earlier ones; each is tested against the residual that the earlier ones left.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import Rule, accept_ratio, draw, left_over, node_terms, or_target, pieces, take, verdict_at


@dataclass(frozen=True)
class Proposals:
    """The proposals at one row, in the order of testing: sampled ones, then the deterministic ones."""

    distributions: tuple[int, ...]  # distribution of each sample, given the earlier samples from the same row
    drawn: tuple[int | None, ...]  # the node of each sample, None where it gave nothing
    fixed: tuple[int, ...]  # deterministic nodes

    @property
    def children(self) -> tuple[int, ...]:
        """Child nodes in the order of testing."""
        return (*(node for node in self.drawn if node is not None), *self.fixed)


@dataclass(frozen=True)
class FurtherDistribution:
    """One of the draft's distributions without some tokens, rescaled to its original sum: what `node`, a later sibling,
    was sampled from.
    """

    node: int
    distribution: int
    without: tuple[int, ...]


def read_proposals(draft: Draft, tokens: Sequence[int]) -> tuple[list[Proposals], list[FurtherDistribution]]:
    """The proposals at every row [R], from host tokens [N], and the distributions needed besides the draft's M:
    distribution M + i is further distribution i.

    Equal deterministic siblings are merged: their children are attached to the row of the first. The rows of the others
    cannot be reached.
    """
    sampled = draft.sampled or (False,) * draft.num_nodes
    distribution_of_row = draft.mass.distribution_of_row if draft.mass is not None else ()
    home = list(range(draft.num_rows))  # the row that holds the proposals of a row
    draws: list[list[tuple[int, int | None]]] = [[] for _ in home]  # distribution and node, by row
    fixed: list[dict[int, int]] = [{} for _ in home]  # token -> node
    drawn_tokens: list[tuple[int, ...]] = [() for _ in home]
    further: list[FurtherDistribution] = []
    for node, (row, parent) in enumerate(zip(node_rows(draft), draft.parent_rows, strict=True)):
        if not sampled[node]:
            first = fixed[home[parent]].setdefault(tokens[node], node)
            home[row] = home[row + first - node]
            continue
        assert draft.mass is not None
        distribution, earlier = distribution_of_row[parent], drawn_tokens[parent]
        if earlier:
            further.append(FurtherDistribution(node, distribution, earlier))
            distribution = draft.mass.distributions.shape[0] + len(further) - 1
        draws[parent].append((distribution, node))
        drawn_tokens[parent] = (*earlier, tokens[node])
    gathered: list[list[tuple[int, int | None]]] = [[] for _ in home]
    for row, distribution in enumerate(distribution_of_row):
        # In the order of the rows: the position of a sample must not depend on whether it gave a token.
        gathered[home[row]] += draws[row] or ([(distribution, None)] if distribution >= 0 else [])
    found = [
        Proposals(
            tuple(distribution for distribution, _ in gathered[row]),
            tuple(node for _, node in gathered[row]),
            tuple(fixed[row].values()),
        )
        for row in range(draft.num_rows)
    ]
    return found, further


def _pairs(places: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """An index of some (row, column) of a matrix."""
    rows, columns = to_device([[row for row, _ in places], [column for _, column in places]], device)
    return rows, columns


def node_rows(draft: Draft) -> list[int]:
    """The row of every node, [N]."""
    return [
        row
        for b in range(draft.num_requests)
        for row in range(draft.anchor_row(b) + 1, draft.anchor_row(b) + 1 + draft.lengths[b])
    ]


class Residuals:
    """The state of every row while its proposals are rejected one by one; P is 1 in a top-down walk.

    A row is reached with probability P and has the residual r = weights / total. Rejecting a proposal of mass mu leaves
    w = (P r - mu)_+ of sum Z, hence r = w / Z and P = Z / (Z + 1 - P). Weng et al. 2025 (arXiv 2505.12398); with P = 1
    it is the residual of recursive rejection sampling (Miao et al. 2024, arXiv 2305.09781). Several samples from one
    row are exact if their number was fixed before the first of them, so a distribution of sum below 1 should be sampled
    once only.
    """

    def __init__(self, draft: Draft, target_probs: Tensor, numbers: Tensor | None = None) -> None:
        self.draft, self.target_probs = draft, target_probs
        terms = node_terms(draft, target_probs)  # p and mu at the nodes' tokens
        self.tokens, self.weight, self.mass, *rest = to_host(
            draft.tokens, *terms, *(() if numbers is None else (numbers,))
        )
        self.numbers: list[float] = rest[0] if rest else []  # `numbers` [N] on the host
        self.proposals, further = read_proposals(draft, self.tokens)
        self.rows = node_rows(draft)
        if draft.mass is not None:
            self.distributions = self._with_further_distributions(draft.mass.distributions, further)
        self.reach = [1.0] * draft.num_rows  # P
        self.total = [1.0] * draft.num_rows
        self.num_refused = [0] * draft.num_rows  # samples rejected at each row
        self.step: dict[int, float] = {}  # node -> min(1, P r(x) / mu(x)) when it is tested
        self._weights: dict[int, Tensor] = {}  # row -> [V] before its last sample; the target's row if absent
        self._last_scale: dict[int, float] = {}  # row -> P / total when its last sample was rejected

    @property
    def open_rows(self) -> set[int]:
        """Rows where something was, or could have been, proposed."""
        return {row for row, one in enumerate(self.proposals) if one.drawn or one.fixed}

    def _with_further_distributions(self, distributions: Tensor, further: Sequence[FurtherDistribution]) -> Tensor:
        """The draft's `distributions` [M, V] and the further ones, [M + len(further), V]; also sets `mass` of the nodes
        sampled from the latter.
        """
        if not further:
            return distributions
        device = distributions.device
        whole = distributions[to_device([one.distribution for one in further], device)]  # [K, V]
        rest = whole.clone()
        places = [(k, token) for k, one in enumerate(further) for token in one.without]
        rest[_pairs(places, device)] = 0
        # Summed, not subtracted from the total, which would leave rounding errors after a probable token. If nothing is
        # left of a distribution, against the contract, zero times a finite number stays zero.
        left = rest.sum(-1, keepdim=True, dtype=torch.float64).clamp_(min=torch.finfo(torch.float64).tiny)
        rest *= whole.sum(-1, keepdim=True, dtype=torch.float64) / left
        own = [(k, self.tokens[one.node]) for k, one in enumerate(further)]
        (masses,) = to_host(rest[_pairs(own, device)])
        for one, mass in zip(further, masses, strict=True):
            self.mass[one.node] = mass
        return torch.cat((distributions, rest))

    def judge(self, bottom_up: bool) -> None:
        """Set `step` of every node and, bottom up, `reach` of every row to the probability of ending there once its
        children are rejected.

        Top down every row counts as reached and only what some node needs is computed; bottom up a row is reached with
        its node's step.
        """
        ready = (
            [self.draft.anchor_row(b) for b in range(self.draft.num_requests)]
            if bottom_up
            else list(range(self.draft.num_rows))
        )
        while ready:
            waiting: list[int] = []
            while ready:
                row = ready.pop()
                entered = []
                drawn, fixed, k = self.proposals[row].drawn, self.proposals[row].fixed, self.num_refused[row]
                if k < len(drawn):
                    if (node := drawn[k]) is not None:
                        entered.append(self._enter(row, node))
                    if bottom_up or fixed or k + 1 < len(drawn):
                        waiting.append(row)
                else:
                    for node in fixed:
                        entered.append(self._enter(row, node))
                        self._refuse_fixed(row, node)
                if bottom_up:
                    for node in entered:
                        self.reach[self.rows[node]] = self.step[node]
                    ready += [self.rows[node] for node in entered]
            self._refuse_draw(waiting)
            ready = waiting

    def next_weights(self, rows: Sequence[int]) -> Tensor:
        """Residual weights at `rows` once all their proposals are rejected: [len(rows), V]."""
        at_rows = take(self.target_probs, rows)
        weights = at_rows.clone()  # [B, V]
        with_draw = [i for i, row in enumerate(rows) if self.proposals[row].drawn]
        if with_draw:
            chosen = [rows[i] for i in with_draw]
            # P is 1 top down.
            scales = [self._last_scale[row] if row in self._last_scale else 1.0 / self.total[row] for row in chosen]
            distributions = take(self.distributions, [self.proposals[row].distributions[-1] for row in chosen])
            weights[to_device(with_draw, weights.device)] = left_over(self._owed(chosen), scales, distributions)
        places = [(i, self.tokens[node]) for i, row in enumerate(rows) for node in self.proposals[row].fixed]
        weights[_pairs(places, weights.device)] = 0
        return or_target(weights, at_rows)

    def _enter(self, row: int, node: int) -> int:
        self.step[node] = accept_ratio(self.reach[row] * self.weight[node], self.mass[node] * self.total[row])
        return node

    def _refuse_fixed(self, row: int, node: int) -> None:
        """Reject a token of mass 1: its weight is removed; `_weights` keeps it until `next_weights`."""
        left = self.total[row] - self.weight[node]
        self._set_reach(row, self.reach[row] * left / self.total[row] if left > 0 else 0.0)
        self.total[row] = left

    def _refuse_draw(self, rows: Sequence[int]) -> None:
        """Reject the next sample of every given row, whether it gave a token or nothing."""
        distribution_of = {row: self.proposals[row].distributions[self.num_refused[row]] for row in rows}
        ordered = sorted(rows, key=distribution_of.__getitem__)  # consecutive distributions are read without a copy
        for some in pieces(ordered, self.target_probs):
            scales = [self.reach[row] / self.total[row] for row in some]
            left = left_over(self._owed(some), scales, take(self.distributions, [distribution_of[row] for row in some]))
            nodes = [(i, node) for i, row in enumerate(some) for node in self.proposals[row].children]
            at_nodes = left[_pairs([(i, self.tokens[node]) for i, node in nodes], left.device)]
            totals, found = to_host(left.sum(-1, dtype=torch.float64), at_nodes)
            self._settle(
                some, scales, left, totals, {node: weight for (_, node), weight in zip(nodes, found, strict=True)}
            )

    def _owed(self, rows: Sequence[int]) -> Tensor:
        """Residual weights of `rows` before the last rejection that was not stored: [len(rows), V]. Must not be written
        to.
        """
        if not any(row in self._weights for row in rows):
            return take(self.target_probs, rows)
        return torch.stack([self._weights.get(row, self.target_probs[row]) for row in rows])

    def _settle(
        self,
        rows: Sequence[int],
        scales: Sequence[float],
        left: Tensor,
        totals: Sequence[float],
        at_nodes: dict[int, float],
    ) -> None:
        """Store a rejection at each of `rows` [n] that left the weights `left` [n, V] of sum `totals` [n]."""
        for i, row in enumerate(rows):
            self.num_refused[row] += 1
            self._set_reach(row, totals[i])
            last = self.num_refused[row] == len(self.proposals[row].drawn)
            if last:  # most rows never need these weights: they are computed if the path ends there
                self._last_scale[row] = scales[i]
            if totals[i] <= torch.finfo(left.dtype).tiny:
                continue  # possible by rounding only, and 1 / total would overflow: keep the previous residual
            if not last:
                self._weights[row] = left[i]
            self.total[row] = totals[i]
            for node in self.proposals[row].children:
                self.weight[node] = at_nodes[node]

    def _set_reach(self, row: int, left: float) -> None:
        """P after a rejection that left the sum `left` of P r. Z + (1 - P), not Z + 1 - P: exactly Z at P = 1."""
        whole = left + (1.0 - self.reach[row])
        self.reach[row] = left / whole if whole > 0 else 1.0


class SiblingRule(Rule):
    """A rule over the residuals of all rows, judged `bottom_up` or top down."""

    bottom_up: ClassVar[bool]

    @abstractmethod
    def stop(self, residuals: Residuals, request: int) -> int:
        """The row at which the accepted path of a request ends, by `residuals.numbers`."""

    @abstractmethod
    def shares(self, residuals: Residuals) -> list[float]:
        """Conditional probability of accepting each node given that its parent was accepted: -> [N]."""

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """See `shares`."""
        shares = self.shares(self._judged(draft, target_probs))
        return to_device(shares, target_probs.device, target_probs.dtype)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """The residual of each row once all its children are rejected: -> [len(rows), V]."""
        return self._judged(draft, target_probs).next_weights(rows)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Find where every request's path ends, then sample from the residual of that row."""
        residuals = self._judged(draft, target_probs, uniforms.accept)
        rows = [self.stop(residuals, b) for b in range(draft.num_requests)]
        (next_tokens,) = to_host(draw(residuals.next_weights(rows), uniforms.next))
        return verdict_at(draft, residuals.tokens, rows, next_tokens, self.shares(residuals), residuals.open_rows)

    def _judged(self, draft: Draft, target_probs: Tensor, numbers: Tensor | None = None) -> Residuals:
        residuals = Residuals(draft, target_probs, numbers)
        residuals.judge(self.bottom_up)
        return residuals
