"""What was accepted of a candidate's drafts, and what shorter drafts would have made of the same answers.

One run with the longest drafts tells what all shorter ones do. What is drafted behind a text does not depend on where
the round began: where a draft of ten has four accepted tokens, a draft of two has two, and the next round begins behind
them and their bonus token, inside of the same draft. So the rounds of any length follow from those of the longest,
exactly for the chain of a draft model at temperature 0 and under the coupled rule, whose noise belongs to the position.

It is supposed that a smaller tree is the beginning of a larger one, which is so but for ties; that a bonus token behind
a draft accepted whole would have been drafted too, where the next round drafts; and for heads, which predict better
from the target's states than from their own, it is a lower bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView, RoundWatcher
from foretoken.errors import InputError


@dataclass(frozen=True)
class DraftRound:
    """One round: how many tokens were drafted, and the places of the accepted ones among them, ascending."""

    num_drafted: int
    path: tuple[int, ...] = ()

    @property
    def num_emitted(self) -> int:
        """The accepted tokens and the one behind them."""
        return len(self.path) + 1

    def behind(self, count: int) -> DraftRound:
        """What is left of it behind its first `count` accepted tokens."""
        if not count:
            return self
        begin = self.path[count - 1] + 1
        return DraftRound(self.num_drafted - begin, tuple(place - begin for place in self.path[count:]))

    def first(self, num_draft: int) -> DraftRound:
        """The same with at most `num_draft` draft tokens."""
        return DraftRound(min(num_draft, self.num_drafted), self.path[: bisect_left(self.path, num_draft)])


@dataclass(frozen=True)
class AnswerRounds:
    """One answer's decoding rounds, behind the one that read the prompt."""

    prompt: str
    slice: str
    num_prompt_tokens: int
    rounds: tuple[DraftRound, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the rounds emit, the whole of the last one counted."""
        return sum(one.num_emitted for one in self.rounds)


def read_rounds(values: Mapping[str, Any]) -> AnswerRounds:
    """An answer that a file holds as plain values."""
    rounds = tuple(DraftRound(one["num_drafted"], tuple(one["path"])) for one in values["rounds"])
    return AnswerRounds(**{**values, "rounds": rounds})


def answered(found: Sequence[AnswerRounds], num_prompts: int) -> list[AnswerRounds]:
    """Those answers to `num_prompts` prompts that went on behind their first token.

    Raises:
        InputError: none did: nothing was there to draft.
    """
    kept = [one for one in found if one.rounds]
    if not kept:
        remedy = "answers to all of them end with their first token: give others, --chat, or leave out --stop-at-eos"
        raise InputError("prompts", num_prompts, remedy)
    return kept


def shortened(rounds: Sequence[DraftRound], num_draft: int) -> list[DraftRound]:
    """What drafts of at most `num_draft` tokens would make of the answer with these rounds; see the module."""
    found: list[DraftRound] = []
    place, inside = 0, 0  # the recorded round, and how many of its tokens are emitted already
    while place < len(rounds):
        here, behind = rounds[place], rounds[place + 1] if place + 1 < len(rounds) else DraftRound(0)
        left = here.behind(inside)
        if inside and not left.num_drafted and behind.num_drafted:
            left = DraftRound(behind.num_drafted + 1, (0, *(one + 1 for one in behind.path)))
        found.append(left.first(num_draft))
        inside += found[-1].num_emitted
        while place < len(rounds) and inside >= rounds[place].num_emitted:
            inside -= rounds[place].num_emitted
            place += 1
    return found


@dataclass
class RoundRecorder(RoundWatcher):
    """Observer that keeps the rounds of the last request; requests come one at a time."""

    rounds: list[DraftRound] = field(default_factory=list)
    num_prompt_tokens: int = 0

    def begin(self, state: RequestState) -> None:
        """A new answer."""
        self.rounds, self.num_prompt_tokens = [], len(state.request.prompt_ids)

    def round(self, view: RoundView) -> None:
        """Keep one round."""
        offsets, b = view.draft.offsets, view.b
        self.rounds.append(DraftRound(offsets[b + 1] - offsets[b], tuple(sorted(view.verdict.paths[b]))))

    def answer(self, prompt: str, slice_name: str) -> AnswerRounds:
        """The answer that has ended; its first round read the prompt and is part of no decoding."""
        return AnswerRounds(prompt, slice_name, self.num_prompt_tokens, tuple(self.rounds[1:]))
