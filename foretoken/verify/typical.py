"""Typical acceptance, a lossy rule: accept tokens that are plausible under the target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import Rule, deepest_walk, draw, draws_anywhere, take, verdict_at

_EPSILON = 0.09  # a more probable token is always accepted
_DELTA = 0.3  # at high entropy, so is one above this times exp(-entropy)


class TypicalRule(Rule):
    """Accept x where p(x) > min(0.09, 0.3 exp(-H(p))); the longest accepted path counts, the next token is sampled from
    p.

    Typical acceptance of Cai et al. 2024 (Medusa, arXiv 2401.10774, section 2.3.1), with the constants its code
    generates with. CHANGES THE DISTRIBUTION: the output is plausible text, not a sample of the target.
    """

    name = "typical"
    lossless = False

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """1 if the accepted path continues with the node (among several, the one with the longest continuation), else
        0: -> [N].
        """
        (plausible,) = to_host(_plausible(draft, target_probs))
        return to_device(deepest_walk(draft, plausible)[1], target_probs.device, target_probs.dtype)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:  # noqa: ARG002 - p for any draft
        """p at each row: -> [len(rows), V]."""
        return take(target_probs, rows)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Choose the deepest path of plausible tokens of every request, then draw from the target's distribution after
        it.
        """
        weights = partial(take, target_probs)
        early = draws_anywhere(draft, target_probs, weights, uniforms)
        tokens, plausible, *drawn = to_host(draft.tokens, _plausible(draft, target_probs), *early)
        rows, steps = deepest_walk(draft, plausible)
        next_tokens = [drawn[0][row] for row in rows] if drawn else to_host(draw(weights(rows), uniforms.next))[0]
        return verdict_at(draft, tokens, rows, next_tokens, steps)


def _plausible(draft: Draft, target_probs: Tensor) -> Tensor:
    """Whether each node's token passes the test at its parent's row: -> bool [N]."""
    rows = sorted(set(draft.parent_rows))
    place = {row: i for i, row in enumerate(rows)}
    entropy = torch.special.entr(take(target_probs, rows)).sum(-1)  # [rows with children]
    bound = (_DELTA * torch.exp(-entropy)).clamp(max=_EPSILON)
    parent_rows, at_node = to_device([draft.parent_rows, [place[row] for row in draft.parent_rows]], bound.device)
    return target_probs[parent_rows, draft.tokens] > bound[at_node]
