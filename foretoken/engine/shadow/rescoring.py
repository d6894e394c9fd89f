"""Scoring an answer again by the target alone: the distribution of every output token, without drafts, in chunks of any
size.

A private sequence holds the text meanwhile. Private sequences have negative numbers, so they never collide with those
of requests, and their cache is released at the end, also after an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.errors import NumericsError
from foretoken.model.interface import LanguageModel, Segment
from foretoken.text.processors import RequestProcessors
from foretoken.text.sampling import check_finite, coldest, support, target_probs

# How far a logit moves with the number of rows computed at once, in rounding units of the row's largest logit. Measured
# in bfloat16: up to 2. In wide formats sums round too, not only the result.
_UNITS_16_BIT, _UNITS_WIDE = 4.0, 64.0
_NOISE = 1 / 16  # standard deviation of one logit as a share of that; measured in bfloat16 and float16
_MAX_BLUR = 0.01  # bound on the bias of a score by rounding in one row; the mean over rows is a tenth of it

_private_sequences = itertools.count(-(1 << 40), -1)


@dataclass(frozen=True)
class ScoredRows:
    """The target's logits and probabilities for `tokens` [n], the output tokens from index `first` on.

    `logits` [n, V] are taken after the request's processors, `distributions` [n, V] after all its sampling parameters.
    `rounding` [n] bounds how far two logits of a row can move against each other when the batch differs; `dtype` is
    that of the model.
    """

    first: int
    tokens: Tensor
    logits: Tensor
    distributions: Tensor
    rounding: Tensor
    dtype: torch.dtype
    params: SamplingParams

    def certain(self) -> tuple[Tensor, Tensor]:
        """What holds for the tokens under every rounding: distributions `[n, V]` and edges `[n]` bool.

        A row of the distributions is the target's, restricted to the tokens that the filters keep under every rounding;
        all 0 if there is no such token, or if rounding moves their probabilities too. Edges are the other tokens that
        may be kept: they are not evidence. A token that is neither has probability 0.
        """
        distributions, params = self.distributions, self.params
        if params.greedy or not len(self.tokens):
            return distributions, torch.zeros(len(self.tokens), dtype=torch.bool, device=distributions.device)
        chosen = self.tokens[:, None]
        found, blurred = support(self.logits, self.rounding, params), self._blurred()[:, None]
        inside = distributions * (found.certain & ~blurred)
        inside = inside / inside.sum(-1, keepdim=True).clamp(min=torch.finfo(inside.dtype).tiny)
        return inside, (found.possible & (~found.certain | blurred)).gather(-1, chosen)[:, 0]

    def _blurred(self) -> Tensor:
        """Rows `[n]` bool whose distribution depends on rounding, as at a low temperature with two nearly equal tokens.

        Noise of standard deviation s in the logits moves the mean of a bounded score by about (s / temperature)^2 times
        the share of the tokens that compete with the best one; noise larger than the temperature makes more tokens
        compete.
        """
        temperature, noise = coldest(self.params.temperature), self.rounding.double() * _NOISE
        size = (noise / temperature).square().clamp(max=1)  # [n]
        if not bool((size > _MAX_BLUR).any()):
            return torch.zeros(len(size), dtype=torch.bool, device=size.device)
        warm = torch.maximum(4 * noise, torch.full_like(noise, temperature))
        rivals = 1 - (self.logits.double() / warm[:, None]).softmax(-1).amax(-1)
        return size * rivals > _MAX_BLUR


class Rescoring:
    """Incremental scoring of one answer; holds no cache before the first `advance` and after `close`.

    `processors` must be in their initial state: they are advanced along the answer. `output_ids` may end with an
    end-of-text token.
    """

    def __init__(
        self,
        target: LanguageModel,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        processors: RequestProcessors | None = None,
    ) -> None:
        assert prompt_ids
        self._target, self._params, self.processors = target, params, processors
        self._text, self._num_prompt = (*prompt_ids, *output_ids), len(prompt_ids)
        self._num_run = 0
        self._sequence: int | None = None

    @property
    def num_remaining(self) -> int:
        """Tokens that still have to go through the target; the last one of the answer does not."""
        return len(self._text) - 1 - self._num_run if len(self._text) > self._num_prompt else 0

    @property
    def footprint_tokens(self) -> int:
        """Cache for the text while it is scored, rounded up to blocks."""
        return self._target.footprint_tokens(len(self._text) - 1)

    def advance(self, max_tokens: int) -> ScoredRows:
        """Run the next `max_tokens` tokens; returns the output rows among them, perhaps none.

        Raises:
            CapacityError: not enough cache; everything is released.
            NumericsError: logits that are not finite.
        """
        assert max_tokens > 0
        try:
            if self._sequence is None and self.num_remaining:
                assert not self._num_run, "closed before the end: the cache is released"
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
        """Release the cache, finished or not; closing again does nothing."""
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
            message = f"the target's logits are not finite when output token {first} or a later one is scored again"
            raise NumericsError(message)
        if self.processors is not None and answer:
            logits = self.processors.adjust(logits, [answer[:i] for i in range(len(answer))])
            rounding = _rounding_after(rounding, logits, self._params.repetition_penalty)
            if self.num_remaining:  # an end token has no successor, so processors need not see it
                self.processors.commit(answer)
        distributions = target_probs(logits, [self._params] * len(answer)) if answer else logits.float()
        return ScoredRows(
            first,
            torch.tensor(answer, dtype=torch.int64, device=logits.device),
            logits,
            distributions,
            rounding,
            dtype,
            self._params,
        )

    def _forward(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        if self._sequence is None:
            return torch.empty(0, self._target.vocab_size, device=self._target.device, dtype=torch.float32)
        flat = torch.tensor(tokens, dtype=torch.int64, device=self._target.device)
        logits = self._target.forward(flat, [Segment(self._sequence, len(tokens), (), num_logits)]).logits
        self._target.commit(self._sequence, len(tokens))
        return logits


def rescore(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    processors: RequestProcessors | None = None,
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
    """Bound `[n]` on how far rounding can move two logits of a row against each other."""
    units = _UNITS_16_BIT if logits.dtype in (torch.bfloat16, torch.float16) else _UNITS_WIDE
    return units * torch.finfo(logits.dtype).eps * _largest(logits)


def _rounding_after(rounding: Tensor, processed: Tensor, repetition_penalty: float) -> Tensor:
    """The same bound `[n]` after processors: a repetition penalty multiplies it, and its float32 sums round too."""
    return rounding * max(repetition_penalty, 1 / repetition_penalty) + 4 * torch.finfo(processed.dtype).eps * _largest(
        processed
    )


def _largest(logits: Tensor) -> Tensor:
    """The largest absolute finite logit of each row, `[n]`."""
    if not logits.shape[0]:
        return torch.zeros(0, device=logits.device, dtype=torch.float32)
    return torch.where(torch.isfinite(logits), logits, 0).abs().amax(-1).float()
