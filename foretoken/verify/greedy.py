"""The rule for temperature 0: a guess stands when it is the target's own choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.verify.base import Rule, next_kinds


class GreedyRule(Rule):
    """Follow the children that equal the argmax (lowest id on ties), in any tree; uses no uniforms.

    Equal siblings are allowed: the deepest matching path wins.
    """

    name = "greedy"
    lossless = True

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """1 where the node's token is the argmax of its parent's row, else 0: -> [N]."""
        parent_rows = torch.tensor(draft.parent_rows, dtype=torch.int64, device=target_probs.device)
        return (draft.tokens == target_probs.argmax(-1)[parent_rows]).to(target_probs.dtype)

    def next_law(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:  # noqa: ARG002 - a point whatever was drafted
        """A point at the argmax of each row: -> [len(rows), V]."""
        at_rows = target_probs[torch.tensor(rows, dtype=torch.int64, device=target_probs.device)]  # [B, V]
        return torch.zeros_like(at_rows).scatter_(-1, at_rows.argmax(-1, keepdim=True), 1)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:  # noqa: ARG002 - nothing is random
        """Choose the deepest path of argmax tokens of every request; the next token is the argmax after it."""
        flat: list[int] = torch.cat((target_probs.argmax(-1), draft.tokens)).tolist()
        best, tokens = flat[: draft.num_rows], flat[draft.num_rows :]
        paths, accepted, rows = [], [], []
        for b in range(draft.num_requests):
            start, anchor = draft.offsets[b], draft.anchor_row(b)
            # depth[i + 1] of node i on a path that matches so far; depth[0] is the anchor's; absent = off the path.
            depth, deepest = {-1: 0}, -1
            for node in range(draft.lengths[b]):
                parent = draft.parents[start + node]
                if parent in depth and tokens[start + node] == best[anchor + 1 + parent]:
                    depth[node] = depth[parent] + 1
                    deepest = node if depth[node] > depth[deepest] else deepest
            path: list[int] = []
            rows.append(anchor + 1 + deepest)
            while deepest >= 0:
                path.append(deepest)
                deepest = draft.parents[start + deepest]
            path.reverse()
            paths.append(tuple(path))
            accepted.append(tuple(tokens[start + node] for node in path))
        return Verdict(tuple(paths), tuple(accepted), tuple(best[row] for row in rows), next_kinds(draft, rows))
