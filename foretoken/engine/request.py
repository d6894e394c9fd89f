"""One request: as it was prepared, as it runs through the engine (its tokens, its text, when it must stop), and what
`generate` returns of its answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from foretoken.config import SamplingParams
from foretoken.core import FinishReason, Request, TokenLogprobs, TokenOrigin
from foretoken.engine.stats import RequestStats
from foretoken.text.detokenizer import Detokenizer
from foretoken.text.processors import RequestProcessors
from foretoken.text.randomness import RaceNoise, derived_seed
from foretoken.verify import is_lossless


class TextAssembler:
    """Grows the text of an answer, holds back what may become a stop string, and cuts exactly before one, or behind it
    if the text `includes_stop`.
    """

    def __init__(self, decoder: Detokenizer | None, stop_strings: tuple[str, ...], includes_stop: bool = False) -> None:
        self._decoder, self._stop_strings, self._includes_stop = decoder, stop_strings, includes_stop
        self._text, self._released = "", 0
        self._passed = 0  # a stop string that begins before this came too early to count
        self._longest = max((len(s) for s in stop_strings), default=0)

    @property
    def text(self) -> str:
        """The answer so far, held-back characters included."""
        return self._text

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token; True when a stop string is complete. The text then ends there.

        A stop string that is complete while the answer may not stop yet is text like any other.
        """
        return self._decoder is not None and self._add(self._decoder.push(token_id), may_stop)

    def end(self, token_id: int) -> None:
        """End of the answer with a token that ends it."""
        if self._includes_stop:
            self.push(token_id, may_stop=False)
        self.finish(cut=False)

    def finish(self, cut: bool) -> bool:
        """End of the answer; unless it was `cut` at a stop string, held-back bytes still join. True as in `push`."""
        return False if cut or self._decoder is None else self._add(self._decoder.flush(), may_stop=True)

    def release(self, final: bool) -> str:
        """Text not handed out yet that can no longer become part of a stop string."""
        safe = len(self._text) if final or not self._stop_strings else len(self._text) - self._held_back()
        piece = self._text[self._released : max(safe, self._released)]
        self._released += len(piece)
        return piece

    def rewind(self, text: str) -> None:
        """Back to `text`, as it was before tokens that are taken back; their bytes stay in the decoder."""
        self._text = text

    def _add(self, piece: str, may_stop: bool) -> bool:
        if not self._stop_strings:
            self._text += piece
            return False
        searched = max(self._passed, len(self._text) - self._longest + 1)
        self._text += piece
        if not may_stop:
            self._passed = max(
                searched, *(place + 1 for s in self._stop_strings for place in occurrences(self._text, s, searched)), 0
            )
            return False
        found = [(self._text.find(stop, searched), len(stop)) for stop in self._stop_strings]
        first, length = min(((place, length) for place, length in found if place >= 0), default=(-1, 0))
        if first >= 0:
            self._text = self._text[: first + length * self._includes_stop]
        return first >= 0

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string.

        Only ends with the first character of a stop string are compared: this is asked for at every token, and stop
        strings may be long.
        """
        longest = 0
        for stop in self._stop_strings:
            end = self._text[max(0, len(self._text) - len(stop) + 1) :]
            for place in occurrences(end, stop[0], 0):
                if len(end) - place <= longest:
                    break
                if stop.startswith(end[place:]):
                    longest = len(end) - place
        return longest


def occurrences(text: str, wanted: str, start: int) -> Iterator[int]:
    """Every place from `start` on where `wanted` begins in `text`."""
    place = text.find(wanted, start)
    while place >= 0:
        yield place
        place = text.find(wanted, place + 1)


@dataclass(eq=False)
class PreparedRequest:
    """A request that was checked, with all that it runs with: the engine has only to number and queue it, once.

    `request.spec` is expanded for this request, `rule` is a resolved name. `processors` and `noise` are None where the
    request's distribution needs neither. `arrived_s` is when the caller asked, on the clock of `time.perf_counter`.
    """

    request: Request
    text: TextAssembler
    end_token_ids: frozenset[int]  # that end the answer: the model's, unless they are ignored, and the request's own
    max_total_tokens: int  # prompt and output together: max_tokens or the end of the context, whichever comes first
    rule: str = "auto"
    processors: RequestProcessors | None = None
    noise: RaceNoise | None = None
    arrived_s: float = field(default_factory=time.perf_counter)

    def state(self, request_id: int) -> RequestState:
        """The state of the request under its number."""
        prepared = {own.name: getattr(self, own.name) for own in fields(PreparedRequest)}
        prepared["request"] = replace(self.request, request_id=request_id)
        return RequestState(**prepared, stats=RequestStats(rule=self.rule, lossy=not is_lossless(self.rule)))


@dataclass(eq=False)
class RequestState(PreparedRequest):
    """All the engine keeps of a request; `tokens` is prompt and output, `num_rounds` counts its decode rounds."""

    tokens: list[int] = field(default_factory=list)
    provenance: list[TokenOrigin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    num_rounds: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    request_id: int = field(init=False)  # the request's, which is asked for ten times in every step

    def __post_init__(self) -> None:
        self.tokens, self.request_id = list(self.request.prompt_ids), self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.tokens)

    @property
    def has_emitted(self) -> bool:
        """Whether the answer has begun."""
        return bool(self.provenance)

    @property
    def output_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_total_tokens - len(self.tokens)

    def mark(self) -> tuple[int, int, str]:
        """Where the answer stands: tokens, log-probabilities, text."""
        return len(self.tokens), len(self.logprobs), self.text.text

    def rewind(self, mark: tuple[int, int, str]) -> None:
        """Take back what was appended since `mark`, for an answer that ends there."""
        num_tokens, num_logprobs, text = mark
        del (
            self.tokens[num_tokens:],
            self.provenance[max(0, num_tokens - len(self.request.prompt_ids)) :],
            self.logprobs[num_logprobs:],
        )
        self.text.rewind(text)

    def append(self, token: int, origin: TokenOrigin) -> FinishReason | None:
        """Add one emitted token; the reason if the answer ends with it.

        An end token counts as a token but, as a rule, adds no text. A stop string wins over the length limit; an answer
        whose structure is complete ends there, unless that is too early: then the processors hold an error and there is
        no reason.
        """
        params = self.request.params
        self.tokens.append(token)
        self.provenance.append(origin)
        if token in self.end_token_ids:
            self.text.end(token)
            self.finish_reason = "stop"
            return self.finish_reason
        if self.processors is not None:
            self.processors.commit((token,))
        if self.text.push(token, may_stop=len(self.tokens) >= len(self.request.prompt_ids) + params.min_tokens):
            self.finish_reason = "stop"
        elif self.processors is not None and self.processors.finished:
            if self.processors.error is None:
                self.text.finish(cut=False)
                self.finish_reason = "stop"
        elif self.num_remaining <= 0:
            self.finish_reason = "stop" if self.text.finish(cut=False) else "length"
        return self.finish_reason


@dataclass(frozen=True)
class GenerateOutput:
    """One answer: its text (empty without a tokenizer), tokens, why it ended, what it cost, where each token came from.

    `logprobs` holds one entry per token, `prompt_logprobs` one per prompt token (None for the first, which nothing
    precedes); both are None unless asked for. With `n` > 1 this is the first answer and `others` are the rest.
    """

    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    provenance: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: Exception | None = None
    others: tuple[GenerateOutput, ...] = ()

    @property
    def choices(self) -> tuple[GenerateOutput, ...]:
        """All answers to the prompt, `n` of them."""
        return (self, *self.others)


def each_answer(params: SamplingParams) -> Iterator[SamplingParams]:
    """The parameters of each of the `n` answers: one answer each, further ones under seeds of their own."""
    for index in range(params.n):
        seed = None if params.seed is None else derived_seed(params.seed, index)
        yield replace(params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None)


def collect(states: Sequence[RequestState], counts: Sequence[int]) -> list[GenerateOutput]:
    """One output per prompt from the states of all answers, `counts[i]` of them for prompt i."""
    answers = iter([answer_of(state) for state in states])
    outputs = []
    for count in counts:
        first, *others = (next(answers) for _ in range(count))
        outputs.append(replace(first, others=tuple(others)))
    return outputs


def answer_of(state: RequestState) -> GenerateOutput:
    """One answer as far as it came; one that was never ended, or never queued, counts as aborted."""
    params = state.request.params
    return GenerateOutput(
        prompt_ids=state.request.prompt_ids,
        text=state.text.text,
        token_ids=tuple(state.output_ids),
        finish_reason=state.finish_reason or "abort",
        stats=state.stats,
        provenance=tuple(state.provenance),
        logprobs=None if params.logprobs is None else tuple(state.logprobs),
        prompt_logprobs=None if params.prompt_logprobs is None else tuple(state.prompt_logprobs),
        error=state.error,
    )
