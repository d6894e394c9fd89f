"""What was accepted of a candidate's drafts, and what shorter drafts would have made of the same answers.

One run with the longest drafts tells what all shorter ones do. A chain that is drafted from a text does not depend on
where the round began: where a draft of ten has four accepted tokens, a draft of two has two, and the next round begins
behind them and their bonus token, inside of the same draft. So the rounds of any length follow from the rounds of the
longest, exactly for a draft model at temperature 0 and under the coupled rule, whose noise belongs to the position. Of
a bonus token behind a draft that was accepted whole it is supposed that it would have been drafted too, where the next
round drafts. Heads guess better from the target's own states than from their guesses: for them it is a lower bound.

A drafter that drafts trees is judged at the number that it was run with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView, RoundWatcher

Rounds = tuple[tuple[int, int], ...]  # (drafted, accepted) of each round of an answer


@dataclass(frozen=True)
class AnswerRounds:
    """One answer's decoding rounds behind the prompt's; `is_chain`: no draft had branches."""

    prompt: str
    slice: str
    num_prompt_tokens: int
    rounds: Rounds
    is_chain: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens that the rounds emit, the whole of the last one counted."""
        return sum(accepted + 1 for _, accepted in self.rounds)

    def at(self, num_draft: int) -> Rounds:
        """The rounds with drafts of at most `num_draft` tokens."""
        return shortened(self.rounds, num_draft) if self.is_chain else self.rounds


def shortened(rounds: Rounds, num_draft: int) -> Rounds:
    """What drafts of at most `num_draft` tokens would make of the answer with these rounds; see the module."""
    found: list[tuple[int, int]] = []
    place, inside = 0, 0  # the recorded round, and how many of its tokens are emitted already
    while place < len(rounds):
        drafted, accepted = rounds[place]
        left, fit = drafted - inside, accepted - inside
        if left == 0 and inside and place + 1 < len(rounds) and rounds[place + 1][0]:
            left, fit = rounds[place + 1][0] + 1, rounds[place + 1][1] + 1
        taken = min(num_draft, fit)
        found.append((min(num_draft, left), taken))
        inside += taken + 1
        while place < len(rounds) and inside > rounds[place][1]:
            inside -= rounds[place][1] + 1
            place += 1
    return tuple(found)


@dataclass
class RoundRecorder(RoundWatcher):
    """Observer that keeps the rounds of the last request; requests come one at a time."""

    rounds: list[tuple[int, int]] = field(default_factory=list)
    is_chain: bool = True
    num_prompt_tokens: int = 0

    def begin(self, state: RequestState) -> None:
        """A new answer."""
        self.rounds, self.is_chain, self.num_prompt_tokens = [], True, len(state.request.prompt_ids)

    def round(self, view: RoundView) -> None:
        """Keep one round."""
        draft, b = view.draft, view.b
        parents = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
        self.rounds.append((len(parents), len(view.verdict.paths[b])))
        self.is_chain &= _is_chain(parents)

    def answer(self, prompt: str, slice_name: str) -> AnswerRounds:
        """The answer that has ended; its first round read the prompt and is part of no decoding."""
        return AnswerRounds(prompt, slice_name, self.num_prompt_tokens, tuple(self.rounds[1:]), self.is_chain)


def _is_chain(parents: Sequence[int]) -> bool:
    return all(parent == place - 1 for place, parent in enumerate(parents))
