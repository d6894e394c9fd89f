"""The rule for temperature 0: a drafted token is accepted if it is the argmax of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import Rule, deepest_walk, first_max, take, verdict_at


class GreedyRule(Rule):
    """Accept the children that equal the argmax (lowest id on ties), in any tree; uses no uniforms

    Equal siblings are allowed: the deepest matching path wins.
    """

    name = "greedy"
    needs_uniforms = False

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """1 where the node's token is the argmax of its parent's row (of equal siblings: the one that leads deepest),
        else 0: -> [N].
        """
        best, tokens = to_host(first_max(target_probs), draft.tokens)
        steps = deepest_walk(draft, [tokens[node] == best[row] for node, row in enumerate(draft.parent_rows)])[1]
        return to_device(steps, target_probs.device, target_probs.dtype)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:  # noqa: ARG002 - the same for any draft
        """A point mass at the argmax of each row: -> [len(rows), V]."""
        at_rows = take(target_probs, rows)  # [B, V]
        return torch.zeros_like(at_rows).scatter_(-1, first_max(at_rows)[:, None], 1)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:  # noqa: ARG002 - nothing is random
        """Choose the deepest path of argmax tokens of every request; the next token is the argmax after it."""
        return self.verify_best(draft, first_max(target_probs))

    def verify_best(self, draft: Draft, best: Tensor) -> Verdict:
        """`verify` by the argmax of each row, `best` [R]: a point mass is not made only to be read."""
        chosen, tokens = to_host(best, draft.tokens)
        rows, steps = deepest_walk(draft, [tokens[node] == chosen[row] for node, row in enumerate(draft.parent_rows)])
        return verdict_at(draft, tokens, rows, [chosen[row] for row in rows], steps)
