"""The coupled rule: the target's choice is a function of its distribution and of noise that belongs to the position."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.core import Draft, Uniforms, Verdict
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import Rule, deepest_walk, race_winners, take, verdict_at


class CoupledRule(Rule):
    """At every row y = argmin noise / p; accept the children that equal y, in any tree, and end with the first y
    without an equal child.

    The text is that of plain decoding for any drafter and tree: the draft only decides how many tokens a round yields.
    Maximal coupling by an exponential race (Gumbel-max): Daliri et al. 2025 (arXiv 2408.07978). Acceptance is highest
    for a drafter that samples its own distribution with the same noise.
    """

    name = "coupled"
    needs_race = True
    needs_uniforms = False

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """p(x) at every node, the probability over the noise; of equal siblings the first has all of it: -> [N].

        Given the noise the outcome is deterministic, so a verdict of this rule has no probabilities.
        """
        (tokens,), seen = to_host(draft.tokens), set[tuple[int, int]]()
        first = []
        for place in zip(draft.parent_rows, tokens, strict=True):
            first.append(place not in seen)
            seen.add(place)
        rows, is_first = to_device([draft.parent_rows, first], target_probs.device)
        chances: Tensor = target_probs[rows, draft.tokens] * is_first
        return chances

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """p without the row's children: -> [len(rows), V]."""
        weights = take(target_probs, rows).clone()  # [B, V]
        place = {row: b for b, row in enumerate(rows)}
        nodes = [node for node, row in enumerate(draft.parent_rows) if row in place]
        rows_of_nodes, own = to_device([[place[draft.parent_rows[node]] for node in nodes], nodes], weights.device)
        weights[rows_of_nodes, draft.tokens[own]] = 0
        return weights

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Sample every row by its noise and accept the deepest path of equal tokens."""
        noise = [own for own in uniforms.race if own is not None]
        assert len(noise) == draft.num_requests, "the coupled rule needs the noise of every row"
        best, tokens = to_host(race_winners(target_probs, noise), draft.tokens)
        return self.verify_winners(draft, tokens, best)

    def verify_winners(self, draft: Draft, tokens: Sequence[int], winners: Sequence[int]) -> Verdict:
        """`verify` by the choice at each row, `winners` [R] (-1 where no path of equal tokens arrives), and the host's
        copy of the draft's tokens [N].
        """
        rows = deepest_walk(draft, [tokens[node] == winners[row] for node, row in enumerate(draft.parent_rows)])[0]
        return verdict_at(draft, tokens, rows, [winners[row] for row in rows], None)
