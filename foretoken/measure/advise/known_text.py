"""What lookups would have drafted of an answer that is known already, such as that of another engine.

The engine runs over a model that recites the answer: drafting, verification and bookkeeping are those of any run. Where
the answer is given, a draft token is accepted if it is the answer's own next token, which is what greedy verification
does, and what the lossless rules do with a draft that has no probabilities of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.engine import Engine
from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.measure.advise.rounds import AnswerRounds, RoundRecorder
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
