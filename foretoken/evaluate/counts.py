"""What is counted of one answer, and the observer that counts it.

A token counts as accepted if the rule accepted it, also where the answer ended before it: acceptance is the drafter's
and the rule's, the end of an answer is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView
from foretoken.verify.dispatch import rule_for


@dataclass
class AnswerCounts:
    """Counters of one answer to one prompt.

    `num_rounds` are forward passes of the target that decoded, `num_drafts` those of them with a draft. `reached[i]`
    counts rounds in which position i + 1 of the draft could be accepted: a token was drafted there behind the accepted
    ones, `passed[i]` those in which one was accepted. passed / reached is the chance of a position given the one
    before it.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    def count(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Add one round: `parents` [n] of its drafted tokens (-1: the anchor), and the accepted ones, root to leaf."""
        self.num_rounds += 1
        self.num_emitted += len(path) + 1
        if not parents:
            return
        self.num_drafts += 1
        self.num_drafted += len(parents)
        self.num_accepted += len(path)
        for position, parent in enumerate((-1, *path)):
            if parent not in parents:  # nothing was drafted behind the accepted tokens
                break
            if position == len(self.reached):
                self.reached.append(0)
                self.passed.append(0)
            self.reached[position] += 1
            self.passed[position] += position < len(path)


@dataclass
class AcceptanceCounter:
    """Observer that counts the rounds of every request, in one account at a time."""

    counts: AnswerCounts = field(default_factory=AnswerCounts)
    rules: set[str] = field(default_factory=set)

    def begin(self, state: RequestState) -> None:
        """Begin a new account: requests come one at a time."""
        self.counts, self.rules = AnswerCounts(), set() if state.rule == "auto" else {state.rule}

    def round(self, view: RoundView) -> None:
        """Count one round."""
        draft, b = view.draft, view.b
        if draft.lengths[b] and not self.rules:
            self.rules.add(rule_for(draft, b))
        self.counts.count(draft.parents[draft.offsets[b] : draft.offsets[b + 1]], view.verdict.paths[b])

    def end(self, state: RequestState) -> None:
        """Nothing to note."""

    def between_steps(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to release."""
