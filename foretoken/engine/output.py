"""What `generate` returns, and how one prompt becomes several answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.config import SamplingParams
from foretoken.core import FinishReason, TokenLogprobs, TokenOrigin
from foretoken.engine.request import PreparedRequest, RequestState
from foretoken.engine.stats import RequestStats
from foretoken.text.randomness import derived_seed


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
    """One answer as far as it came; one that was never ended counts as aborted."""
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


def unanswered(prepared: PreparedRequest) -> GenerateOutput:
    """The answer to a request that was cancelled before the engine queued it."""
    return GenerateOutput(
        prompt_ids=prepared.prompt_ids,
        text="",
        token_ids=(),
        finish_reason="abort",
        stats=RequestStats(),
        provenance=(),
        logprobs=None if prepared.params.logprobs is None else (),
        prompt_logprobs=None if prepared.params.prompt_logprobs is None else (),
    )
