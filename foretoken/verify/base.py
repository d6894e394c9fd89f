"""What every rule shares: the interface, the draw from weights, the one residual law.

A rule is split so that it can be proved. `accept_probabilities` and `next_law` are the probabilities of every branch, and
`verify` only compares them with uniforms; a test can therefore sum over all branches with their exact weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from foretoken.core import Draft, NextKind, Uniforms, Verdict


class Rule(ABC):
    """Decides which drafted tokens stand; holds no model, cache, clock or generator.

    Generic in dtype: float32 in production, float64 where the mathematics is tested. A rule that is not `lossless`
    changes the target's law and must never run unless the user asked for it by name.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """Probability that each node is accepted given that its ancestors were: [R, V] target law -> [N]."""

    @abstractmethod
    def next_law(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """Weights (not normalised) of the token that ends the round when the walk stops at `rows`: -> [len(rows), V]."""

    @abstractmethod
    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Choose the accepted path and the next token of every request.

        `target_probs` [R, V] is the target's law at each row after temperature and filters. The result for a request
        depends on its own rows and uniforms only.
        """


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: weights [B, V] (not normalised) and uniforms [B] in [0, 1) -> token ids [B].

    A token of weight zero is never drawn. A row without any weight yields an arbitrary valid id.
    """
    cumulative = weights.to(torch.float64).cumsum(-1)  # [B, V]
    # right=True: the first token whose cumulative weight EXCEEDS the point, so u = 0 skips leading zero weights.
    index = torch.searchsorted(cumulative, u.to(torch.float64).unsqueeze(-1) * cumulative[:, -1:], right=True)  # [B, 1]
    # A parallel prefix sum need not be monotone in its last bits, and rounding may point past the end: take the nearest
    # token at or after the index that has weight, else the last one that has.
    ids = torch.arange(weights.shape[-1], device=weights.device)  # [V]
    usable = weights > 0
    last = torch.where(usable, ids, 0).amax(-1, keepdim=True)  # [B, 1]
    return torch.where(usable & (ids >= index), ids, last).amin(-1)


def residual_law(draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
    """Weights (p - mu)_+ left for the target at `rows` where nothing was accepted: -> [len(rows), V].

    mu is the law of the row when a child was, or could have been, sampled there; a point at its deterministic child;
    zero when nothing could have been proposed. At most one child per row. Leviathan et al. 2023 (arXiv 2211.17192) for
    mu = q; any sub-probability mu works the same way.
    """
    at_rows = target_probs[torch.tensor(rows, dtype=torch.int64, device=target_probs.device)]  # [B, V]
    laws = [draft.mass.law_of_row[row] if draft.mass is not None else -1 for row in rows]
    child_of_row = {row: node for node, row in enumerate(draft.parent_rows)}
    weights = at_rows
    with_law = [b for b, law in enumerate(laws) if law >= 0]
    if with_law and draft.mass is not None:
        mu = draft.mass.laws[[laws[b] for b in with_law]]
        weights = at_rows.clone()
        weights[with_law] = (at_rows[with_law] - mu).clamp_(min=0).to(weights.dtype)
    fixed = [b for b, row in enumerate(rows) if laws[b] < 0 and row in child_of_row]
    if fixed:
        weights = weights.clone()
        weights[fixed, draft.tokens[[child_of_row[rows[b]] for b in fixed]]] = 0
    # p <= mu everywhere is reachable by rounding only; p itself is then as near as floating point gets.
    empty = weights.sum(-1, keepdim=True) == 0
    return torch.where(empty, at_rows, weights)


def next_kinds(draft: Draft, rows: Sequence[int]) -> tuple[NextKind, ...]:
    """ "bonus" where nothing stood at the row the walk stopped at (no child, no law), else "residual"."""
    with_child = set(draft.parent_rows)
    with_law = {row for row, law in enumerate(draft.mass.law_of_row) if law >= 0} if draft.mass is not None else set()
    return tuple("residual" if row in with_child or row in with_law else "bonus" for row in rows)
