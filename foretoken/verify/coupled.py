"""The rule for repeatable answers: the target's choice is a function of its law and of noise that belongs to the
position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.verify.base import Rule, deepest_walk, host_lists, race_winner, take, verdict_at


class CoupledRule(Rule):
    """At every row y = argmin noise / p; follow the children that equal y, in any tree, and end with the y that none
    equals.

    The text is the one without drafts, whoever drafted, for any tree: what was drafted only decides how much of it a
    round yields. Maximal coupling by an exponential race (Gumbel-max): Daliri et al. 2025 (arXiv 2408.07978). A drafter
    that races its own law with the same noise is right most often.
    """

    name = "coupled"
    needs_race = True
    needs_uniforms = False

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """p(x) at every node, the law of the race over the noise; of equal siblings the first has it all: -> [N].

        Once the noise is known everything is decided, so a verdict of this rule carries no probabilities.
        """
        tokens, seen = draft.tokens.tolist(), set[tuple[int, int]]()
        first = []
        for place in zip(draft.parent_rows, tokens, strict=True):
            first.append(place not in seen)
            seen.add(place)
        parent_rows = torch.tensor(draft.parent_rows, dtype=torch.int64, device=target_probs.device)
        return target_probs[parent_rows, draft.tokens] * torch.tensor(first, device=target_probs.device)

    def next_law(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """p without the row's children: -> [len(rows), V]."""
        weights = take(target_probs, rows).clone()  # [B, V]
        place = {row: b for b, row in enumerate(rows)}
        nodes = [node for node, row in enumerate(draft.parent_rows) if row in place]
        weights[[place[draft.parent_rows[node]] for node in nodes], draft.tokens[nodes]] = 0
        return weights

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Race at every row; the deepest path of winners stands."""
        noise = [own for own in uniforms.race if own is not None]
        assert len(noise) == draft.num_requests, "the coupled rule needs the noise of every row"
        winners = race_winner(target_probs, torch.cat(noise) if noise else target_probs)  # [R]
        best, tokens = host_lists(winners, draft.tokens)
        rows = deepest_walk(draft, [tokens[node] == best[row] for node, row in enumerate(draft.parent_rows)])[0]
        return verdict_at(draft, tokens, rows, [best[row] for row in rows], None)
