"""An answer scored once more by the target alone: the law of every output token, without drafts, in pieces of any size.

A private sequence holds the text while it is scored. Private sequences have negative numbers, so they never meet those of
requests, and what they hold is given back at the end, also after an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import Processors
from foretoken.errors import NumericsError
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.sampling import check_finite, target_probs

# How far a logit moves with the number of rows computed at once, in rounding units of the row's largest logit. Measured in
# bfloat16: up to 2. In wide formats sums round too, not only the result.
_UNITS_16_BIT, _UNITS_WIDE = 4.0, 64.0

_private_sequences = itertools.count(-(1 << 40), -1)


class AnswerProcessors(Processors, Protocol):
    """Processors of one request that have seen nothing of its answer yet."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Move on by tokens of the answer."""


@dataclass(frozen=True)
class ScoredRows:
    """The target's own view of `tokens` [n], the output tokens from place `first` on.

    `logits` [n, V] come after the request's processors, `laws` [n, V] after all its sampling parameters. `rounding` [n] is how
    far two logits of a row may move against each other because rows were computed in other company; `dtype` is what the model
    computes in.
    """

    first: int
    tokens: Tensor
    logits: Tensor
    laws: Tensor
    rounding: Tensor
    dtype: torch.dtype
    params: SamplingParams

    def edges(self) -> Tensor:
        """Tokens `[n]` bool that have probability 0 here, but would have some if the logits had been rounded in their favour."""
        chosen = self.tokens[:, None]
        banned = (self.laws.gather(-1, chosen)[:, 0] == 0).nonzero()[:, 0]
        found = torch.zeros(len(self.tokens), dtype=torch.bool, device=self.laws.device)
        if len(banned):
            logits, rounding = self.logits[banned].float(), self.rounding[banned, None].float()
            likelier = logits > logits.gather(-1, chosen[banned])
            moved = target_probs(torch.where(likelier, logits - rounding / 2, logits + rounding / 2), [self.params] * len(banned))
            found[banned] = moved.gather(-1, chosen[banned])[:, 0] > 0
        return found


class Rescoring:
    """One answer on its way through the target; nothing is held before the first `advance` and nothing after `close`.

    `processors` must be as new: they are moved along the answer. `output_ids` may end with an end-of-text token.
    """

    def __init__(
        self,
        target: LanguageModel,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        processors: AnswerProcessors | None = None,
    ) -> None:
        assert prompt_ids
        self._target, self._params, self._processors = target, params, processors
        self._text, self._num_prompt = (*prompt_ids, *output_ids), len(prompt_ids)
        self._num_run = 0
        self._sequence: int | None = None

    @property
    def num_remaining(self) -> int:
        """Tokens that still have to go through the target; the last one of the answer never has to."""
        return len(self._text) - 1 - self._num_run if len(self._text) > self._num_prompt else 0

    @property
    def footprint_tokens(self) -> int:
        """Cache that the text takes while it is scored, rounding included."""
        return self._target.footprint_tokens(len(self._text) - 1)

    def advance(self, max_tokens: int) -> ScoredRows:
        """Run the next `max_tokens` tokens; the output rows among them, perhaps none.

        Raises:
            CapacityError: no room in the cache; everything is given back.
            NumericsError: logits that are not finite.
        """
        assert max_tokens > 0
        try:
            if self._sequence is None and self.num_remaining:
                assert not self._num_run, "closed half-way: what was run is gone"
                self._sequence = next(_private_sequences)
                self._target.open(self._sequence)
            rows = self._run(min(max_tokens, self.num_remaining))
        except BaseException:
            self.close()
            raise
        if not self.num_remaining:
            self.close()
        return rows

    def close(self) -> None:
        """Give back the cache, finished or not; closing again does nothing."""
        if self._sequence is not None:
            sequence, self._sequence = self._sequence, None
            self._target.close(sequence)

    def _run(self, count: int) -> ScoredRows:
        start, stop = self._num_run, self._num_run + count
        first = max(0, start + 1 - self._num_prompt)  # output places whose laws these rows are
        last = max(0, stop + 1 - self._num_prompt)
        logits = self._forward(self._text[start:stop], last - first)  # [n, V]
        self._num_run = stop
        answer = self._text[self._num_prompt + first : self._num_prompt + last]
        rounding, dtype = _rounding(logits), logits.dtype
        if not bool(check_finite(logits).all()):
            raise NumericsError(f"the target's logits are not finite when output token {first} or a later one is scored again")
        if self._processors is not None and answer:
            logits = self._processors.adjust(logits, [answer[:i] for i in range(len(answer))])
            if self.num_remaining:  # what ends an answer (an end token) is never followed, so nobody has to know it
                self._processors.commit(answer)
        laws = target_probs(logits, [self._params] * len(answer)) if answer else logits.float()
        return ScoredRows(first, torch.tensor(answer, dtype=torch.int64, device=logits.device), logits, laws, rounding, dtype, self._params)

    def _forward(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        if self._sequence is None:
            return torch.empty(0, self._target.vocab_size, device=self._target.device)
        flat = torch.tensor(tokens, dtype=torch.int64, device=self._target.device)
        logits = self._target.forward(flat, [Segment(self._sequence, len(tokens), (), num_logits)]).logits
        self._target.commit(self._sequence, len(tokens))
        return logits


def rescore(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    processors: AnswerProcessors | None = None,
    chunk_tokens: int = 256,
) -> Iterator[ScoredRows]:
    """Score every output token again, `chunk_tokens` rows of the target at a time; the cache is free again when the iterator ends or is closed.

    Raises:
        CapacityError, NumericsError: as `Rescoring.advance`.
    """
    scoring = Rescoring(target, prompt_ids, output_ids, params, processors)
    try:
        while scoring.num_remaining:
            rows = scoring.advance(chunk_tokens)
            if len(rows.tokens):
                yield rows
    finally:
        scoring.close()


def _rounding(logits: Tensor) -> Tensor:
    """Distance `[n]` in logits that rounding may put between two logits of the same row."""
    units = _UNITS_16_BIT if logits.dtype in (torch.bfloat16, torch.float16) else _UNITS_WIDE
    size = torch.where(torch.isfinite(logits), logits, 0).abs().amax(-1) if logits.shape[0] else logits.new_zeros(0)
    return units * torch.finfo(logits.dtype).eps * size.float()
