"""What was accepted of a candidate's drafts, and what shorter drafts would have made of the same answers.

One run with the longest drafts tells what all shorter ones do. What is drafted behind a text does not depend on where
the round began: where a draft of ten has four accepted tokens, a draft of two has two, and the next round begins behind
them and their bonus token, inside of the same draft. So the rounds of any length follow from those of the longest,
exactly for the chain of a draft model at temperature 0 and under the coupled rule, whose noise belongs to the position.

It is supposed that a smaller tree is the beginning of a larger one, which is so but for ties, and that what is drafted
behind an accepted token of a tree is what the larger tree has below it; that a bonus token behind a draft accepted
whole would have been drafted too, where the next round drafts, and behind it what that round drafts. `recycling` learns
from the rows of its draft tokens, of which longer drafts have more: for it this says a few percent too much.
For heads, which predict better from the target's states than from their own, it is a lower bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView, RoundWatcher
from foretoken.errors import InputError
from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.model.interface import ForwardOutput, Segment
from foretoken.text.tokenizer import Tokenizer

_SPARE_TOKENS = 1024  # of context behind the text, for draft tokens that reach beyond it


class _KnownText:
    """A `LanguageModel` without weights: what follows position i of any sequence is token i + 1 of one text."""

    num_layers, num_parameters = 1, 0
    weight_bytes = step_bytes = kv_bytes_per_token = 0
    eos_token_ids: tuple[int, ...] = ()
    numerics = "strict"
    device = torch.device("cpu")

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self.text, self.vocab_size = text, vocab_size
        self.max_context_tokens = self.capacity_tokens = len(text) + _SPARE_TOKENS
        self._sequences: dict[int, int] = {}  # committed tokens of each

    def open(self, sequence: int) -> None:
        self._sequences[sequence] = 0

    def close(self, sequence: int) -> None:
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        return self._sequences[sequence]

    def num_free_tokens(self) -> int:
        return self.capacity_tokens - sum(self._sequences.values())

    def footprint_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def reserve(self, sequence: int, num_rows: int) -> bool:  # noqa: ARG002 - one sequence at a time
        return num_rows <= self.num_free_tokens()

    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:  # noqa: ARG002
        """See `LanguageModel`: a row's logits [V] are 1 at the text's next token and 0 elsewhere."""
        following: list[int] = []
        for one in segments:
            depths = list(range(one.num_pending))
            for parent in one.parents:
                depths.append(depths[one.num_pending + parent] + 1)
            places = [self._sequences[one.sequence] + depth + 1 for depth in depths[len(depths) - one.num_logits :]]
            following += [self.text[place] if place < len(self.text) else 0 for place in places]
        logits = torch.zeros(len(following), self.vocab_size, dtype=torch.float32)
        logits[torch.arange(len(following)), torch.tensor(following, dtype=torch.long)] = 1.0
        return ForwardOutput(logits, {})

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        self._sequences[sequence] += num_pending + len(path)

    def rollback(self, sequence: int, length: int) -> None:
        self._sequences[sequence] = length


def known_rounds(
    candidate: AdviseCandidate,
    prompt: EvalPrompt,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    tokenizer: Tokenizer,
    folder: Path,
) -> tuple[AnswerRounds, float]:
    """The rounds of a lookup on an answer, and the seconds that it drafted in each of them on average.

    Raises:
        ForetokenError: the drafter cannot be made.
    """
    model = _KnownText((*prompt_ids, *answer_ids), 1 + max(*prompt_ids, *answer_ids, tokenizer.vocab_size - 1))
    group, key = DrafterGroup(model), drafter_key(candidate.spec)
    assert key is not None
    group.add(key, DrafterFactory(folder, model, tokenizer, ModelOptions()).make(candidate.spec))
    engine, recorder = Engine(model, group), RoundRecorder()
    engine.watchers.append(recorder)
    params = SamplingParams(max_tokens=len(answer_ids), temperature=0.0, ignore_eos=True)
    state = engine.submit(prompt_ids, params, candidate.spec)
    while engine.has_work:
        engine.step()
    stats = state.stats
    return recorder.answer(prompt.name, prompt.slice), stats.draft_s / max(1, stats.num_steps - 1)


@dataclass(frozen=True)
class DraftRound:
    """One round: how many tokens were drafted, and the places of the accepted ones among them, ascending.

    `parents` are the places of a tree's parents, -1 for the token that it begins behind; without them it is a chain.
    """

    num_drafted: int
    path: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def num_emitted(self) -> int:
        """The accepted tokens and the one behind them."""
        return len(self.path) + 1

    def behind(self, count: int) -> DraftRound:
        """What is left of it behind its first `count` accepted tokens: of a tree, what is below them."""
        if not count:
            return self
        end = self.path[count - 1]
        if not self.parents:
            return DraftRound(self.num_drafted - end - 1, tuple(place - end - 1 for place in self.path[count:]))
        below = {end: -1}  # the tokens below, by their places here
        for place in range(end + 1, self.num_drafted):
            if self.parents[place] in below:
                below[place] = len(below) - 1
        parents = tuple(below[self.parents[place]] for place in list(below)[1:])
        return DraftRound(len(parents), tuple(below[place] for place in self.path[count:]), parents)

    def followed_by(self, later: DraftRound) -> DraftRound:
        """This chain, accepted whole, its bonus token as a draft token, and behind that the later round."""
        count = self.num_drafted + 1
        path = (*range(count), *(place + count for place in later.path))
        parents = (*range(-1, count - 1), *(place + count if place >= 0 else count - 1 for place in later.parents))
        return DraftRound(count + later.num_drafted, path, parents if later.parents else ())

    def first(self, num_draft: int) -> DraftRound:
        """The same with at most `num_draft` draft tokens."""
        path = self.path[: bisect_left(self.path, num_draft)]
        return DraftRound(min(num_draft, self.num_drafted), path, self.parents[:num_draft])


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
    rounds = [DraftRound(one["num_drafted"], tuple(one["path"]), tuple(one["parents"])) for one in values["rounds"]]
    return AnswerRounds(**{**values, "rounds": tuple(rounds)})


def answered(found: Sequence[AnswerRounds], num_prompts: int) -> list[AnswerRounds]:
    """Those of the answers that went on behind their first token.

    Raises:
        InputError: none did.
    """
    kept = [one for one in found if one.rounds]
    if not kept:
        remedy = "answers to all of them end with their first token: give others, --chat, or leave out --stop-at-eos"
        raise InputError("prompts", num_prompts, remedy)
    return kept


def shortened(rounds: Sequence[DraftRound], num_draft: int) -> list[DraftRound]:
    """What drafts of at most `num_draft` tokens would make of the answer with these rounds; see the module."""
    found: list[DraftRound] = []
    longest = max((one.num_drafted for one in rounds), default=0)
    place, inside = 0, 0  # the recorded round, and how many of its tokens are emitted already
    while place < len(rounds):
        here, behind = rounds[place], rounds[place + 1] if place + 1 < len(rounds) else DraftRound(0)
        left = here.behind(inside)
        is_whole = len(left.path) == left.num_drafted  # one that ended by its length would have gone on
        if inside and is_whole and behind.num_drafted and (not left.num_drafted or here.num_drafted == longest):
            left = left.followed_by(behind)
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
        parents = tuple(view.draft.parents[offsets[b] : offsets[b + 1]])
        is_chain = parents == tuple(range(-1, len(parents) - 1))
        self.rounds.append(DraftRound(len(parents), tuple(sorted(view.verdict.paths[b])), () if is_chain else parents))

    def answer(self, prompt: str, slice_name: str) -> AnswerRounds:
        """The answer that has ended; its first round read the prompt and is part of no decoding."""
        return AnswerRounds(prompt, slice_name, self.num_prompt_tokens, tuple(self.rounds[1:]))
