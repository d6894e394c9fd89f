"""What is counted of one answer: by an observer of our engine, or from what another engine reports of it.

A token counts as accepted if the rule accepted it, also where the answer ended before it: acceptance is the drafter's
and the rule's, the end of an answer is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.backend.answering import Answer
from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView, RoundWatcher
from foretoken.verify.dispatch import rule_for


@dataclass
class AnswerCounts:
    """Counters of one answer to one prompt.

    `num_rounds` are forward passes of the target that decoded, `num_drafts` those of them with a draft. `reached[i]`
    counts rounds in which position i + 1 of the draft could be accepted: a token was drafted there behind the accepted
    ones, `passed[i]` those in which one was accepted. passed / reached is the chance of a position given the one
    before it.

    `num_rounds` and `num_drafts` are None where another engine does not report them.
    """

    num_rounds: int | None = 0
    num_drafts: int | None = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    @property
    def has_positions(self) -> bool:
        """Whether the counts by position are known; where nothing was drafted there are none to know."""
        return bool(self.reached) or not self.num_drafted

    def count(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Add one round: `parents` [n] of its drafted tokens (-1: the anchor), and the accepted ones, root to leaf."""
        self.num_rounds = (self.num_rounds or 0) + 1
        self.num_emitted += len(path) + 1
        if not parents:
            return
        self.num_drafts = (self.num_drafts or 0) + 1
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


def reported_counts(answer: Answer, num_drafted: int, num_accepted: int) -> AnswerCounts:
    """The counts of an answer from what its engine reports of it, with the drafted and accepted tokens in total.

    Counts by position say how many tokens were drafted and accepted there, not how often it was reached. Where drafts
    are trees or differ in length, a position counts as reached as often as these allow, so that its chance is a lower
    bound; the number of drafts is unknown.
    """
    num_rounds, num_emitted = answer.num_steps, answer.num_emitted
    if num_rounds is None and answer.decode_steps is not None:
        num_rounds, num_emitted = answer.decode_steps, answer.decode_tokens
    places = [(drafted, accepted) for drafted, accepted in answer.positions if drafted]
    bounds = [num_drafted if num_rounds is None else num_rounds, *(accepted for _, accepted in places)]
    reached = [min(bound, drafted) for bound, (drafted, _) in zip(bounds, places, strict=False)]
    return AnswerCounts(
        num_rounds=num_rounds,
        num_drafts=None if num_drafted else 0,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_emitted=num_emitted,
        reached=reached,
        passed=[accepted for _, accepted in places],
    )


@dataclass
class AcceptanceCounter(RoundWatcher):
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
