"""An answer scored once more by the target alone: the distribution of every output token, without drafts, in pieces of
any size.

A private sequence holds the text while it is scored. Private sequences have negative numbers, so they never meet those
of requests, and what they hold is given back at the end, also after an error.
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
from foretoken.model.sampling import check_finite, coldest, target_probs
from foretoken.model.support import support

# How far a logit moves with the number of rows computed at once, in rounding units of the row's largest logit. Measured
# in bfloat16: up to 2. In wide formats sums round too, not only the result.
_UNITS_16_BIT, _UNITS_WIDE = 4.0, 64.0
_NOISE = 1 / 16  # of that, the standard deviation of one logit; measured in bfloat16 and float16
_MOST_BLUR = 0.01  # of a score that rounding may move, in one row; the mean over rows is a tenth of it

_private_sequences = itertools.count(-(1 << 40), -1)


class AnswerProcessors(Processors, Protocol):
    """Processors of one request that have seen nothing of its answer yet."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Move on by tokens of the answer."""


@dataclass(frozen=True)
class ScoredRows:
    """The target's own view of `tokens` [n], the output tokens from place `first` on.

    `logits` [n, V] come after the request's processors, `laws` [n, V] after all its sampling parameters. `rounding` [n]
    is how far two logits of a row may move against each other because rows were computed in other company; `dtype` is
    what the model computes in.
    """

    first: int
    tokens: Tensor
    logits: Tensor
    laws: Tensor
    rounding: Tensor
    dtype: torch.dtype
    params: SamplingParams

    def certain(self) -> tuple[Tensor, Tensor]:
        """What can be said of the tokens whatever rounding did: distributions `[n, V]` and edges `[n]` bool.

        A row of the distributions is the target's distribution given that the token is one that the filters keep under
        every rounding; all 0 where there is no such token, or where rounding moves their probabilities too. Edges are
        the other tokens that may be kept: they say nothing. A token that is neither has probability 0.
        """
        laws, params = self.laws, self.params
        if params.greedy or not len(self.tokens):
            return laws, torch.zeros(len(self.tokens), dtype=torch.bool, device=laws.device)
        chosen = self.tokens[:, None]
        found, blurred = support(self.logits, self.rounding, params), self._blurred()[:, None]
        inside = laws * (found.certain & ~blurred)
        inside = inside / inside.sum(-1, keepdim=True).clamp(min=torch.finfo(inside.dtype).tiny)
        return inside, (found.possible & (~found.certain | blurred)).gather(-1, chosen)[:, 0]

    def _blurred(self) -> Tensor:
        """Rows `[n]` bool whose distribution hangs on rounding, as at a low temperature where two tokens are nearly as
        likely.

        Noise of deviation s in the logits moves the mean of a bounded score by about (s / temperature)^2 times the
        share of the tokens that compete with the best one; noise that is larger than the temperature makes more tokens
        compete.
        """
        temperature, noise = coldest(self.params.temperature), self.rounding.double() * _NOISE
        size = (noise / temperature).square().clamp(max=1)  # [n]
        if not bool((size > _MOST_BLUR).any()):
            return torch.zeros(len(size), dtype=torch.bool, device=size.device)
        warm = torch.maximum(4 * noise, torch.full_like(noise, temperature))
        rivals = 1 - (self.logits.double() / warm[:, None]).softmax(-1).amax(-1)
        return size * rivals > _MOST_BLUR


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
        first = max(0, start + 1 - self._num_prompt)  # output places whose distributions these rows are
        last = max(0, stop + 1 - self._num_prompt)
        logits = self._forward(self._text[start:stop], last - first)  # [n, V]
        self._num_run = stop
        answer = self._text[self._num_prompt + first : self._num_prompt + last]
        rounding, dtype = _rounding(logits), logits.dtype
        if not bool(check_finite(logits).all()):
            raise NumericsError(
                f"the target's logits are not finite when output token {first} or a later one is scored again"
            )
        if self._processors is not None and answer:
            logits = self._processors.adjust(logits, [answer[:i] for i in range(len(answer))])
            rounding = _rounding_after(rounding, logits, self._params.repetition_penalty)
            if self.num_remaining:  # what ends an answer (an end token) is never followed, so nobody has to know it
                self._processors.commit(answer)
        laws = target_probs(logits, [self._params] * len(answer)) if answer else logits.float()
        return ScoredRows(
            first,
            torch.tensor(answer, dtype=torch.int64, device=logits.device),
            logits,
            laws,
            rounding,
            dtype,
            self._params,
        )

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
    """Score every output token again, `chunk_tokens` rows of the target at a time; the cache is free again when the
    iterator ends or is closed.

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
    return units * torch.finfo(logits.dtype).eps * _largest(logits)


def _rounding_after(rounding: Tensor, processed: Tensor, repetition_penalty: float) -> Tensor:
    """The same distance `[n]` behind processors: a repetition penalty multiplies it, and their own sums in float32
    round too.
    """
    return rounding * max(repetition_penalty, 1 / repetition_penalty) + 4 * torch.finfo(processed.dtype).eps * _largest(
        processed
    )


def _largest(logits: Tensor) -> Tensor:
    """The largest finite size of a logit of each row, `[n]`."""
    if not logits.shape[0]:
        return torch.zeros(0, device=logits.device)
    return torch.where(torch.isfinite(logits), logits, 0).abs().amax(-1).float()
