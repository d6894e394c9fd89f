"""Whether a worker is well: its answer to a known request, and its signs of life.

The answer of the first start is the golden one. A later start that does not repeat it, text and log-probabilities byte
for byte, computes something else than before: a damaged file, a faulty device, other code.
"""

from __future__ import annotations

import msgspec

from foretoken.backend.call import AnswerEnded, AnswerFailed, Backend, Call, ModelInfo, Piece
from foretoken.config import SamplingParams, SpecConfig

_TEXT = "def add(first, second):\n    return first"
_MAX_TOKENS = 12
_TENANT = "foretoken-canary"  # its cached prefix is nobody else's


class CanaryAnswer(msgspec.Struct, frozen=True):
    """What a worker answered; `logprobs` in hexadecimal, which rounds nothing."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[str, ...]


def canary_call(info: ModelInfo) -> Call:
    """The request: greedy, plain decoding, so that only weights and arithmetic decide."""
    params = SamplingParams(max_tokens=_MAX_TOKENS, logprobs=0, ignore_eos=True, tenant=_TENANT)
    prompt = _TEXT if info.has_tokenizer else [number % info.vocab_size for number in range(1, 9)]
    return Call(params, [prompt], spec=SpecConfig())


async def ask_canary(backend: Backend, info: ModelInfo) -> CanaryAnswer | str:
    """The answer of a worker, or why there is none.

    Raises:
        ForetokenError: the worker refuses, or dies.
    """
    token_ids: list[int] = []
    logprobs: list[str] = []
    text, failure = "", "the answer did not end"
    async for event in await backend.open(canary_call(info)):
        if isinstance(event, Piece):
            token_ids += [token.token_id for token in event.tokens]
            logprobs += ["" if token.logprob is None else token.logprob.hex() for token in event.tokens]
        elif isinstance(event, AnswerFailed):
            failure = f"{event.error}: {event.message}"
        elif isinstance(event, AnswerEnded):
            text, failure = event.text, ""
    return failure or CanaryAnswer(text, tuple(token_ids), tuple(logprobs))


def difference(golden: CanaryAnswer, found: CanaryAnswer) -> str:
    """Where two answers differ; "" where they do not."""
    if golden == found:
        return ""
    if golden.token_ids != found.token_ids:
        pairs = enumerate(zip(golden.token_ids, found.token_ids, strict=False))
        place = next((number for number, (one, other) in pairs if one != other), "the end")
        return f"other tokens, from {place} on"
    return "other text" if golden.text != found.text else "the same tokens with other log-probabilities"


class Watchdog:
    """Whether a worker is stuck, from its signs of life: how long its running step has lasted when it was sent."""

    def __init__(self, watchdog_s: float) -> None:
        self._watchdog_s = watchdog_s
        self._step_s: float | None = None
        self._beaten_s = 0.0

    def beat(self, step_s: float | None, now_s: float) -> None:
        """A sign of life."""
        self._step_s, self._beaten_s = step_s, now_s

    def reason(self, now_s: float) -> str:
        """Why the worker counts as stuck; "" while it does not."""
        silent_s = now_s - self._beaten_s
        if silent_s > self._watchdog_s:
            return f"no sign of life for {silent_s:.1f} s"
        if self._step_s is not None and self._step_s + silent_s > self._watchdog_s:
            return f"a step has lasted {self._step_s + silent_s:.1f} s"
        return ""
