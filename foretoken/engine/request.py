"""One request on its way through the engine: its tokens, its text, and when it must stop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.core import FinishReason, Request, TokenOrigin
from foretoken.engine.stats import RequestStats


class TextDecoder(Protocol):
    """Turns tokens into text, never half a character at a time."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""

    def flush(self) -> str:
        """What is left at the end."""


class TextAssembler:
    """Grows the text of an answer, holds back what may become a stop string, and cuts exactly before one."""

    def __init__(self, decoder: TextDecoder | None, stop_strings: tuple[str, ...]) -> None:
        self._decoder, self._stop_strings = decoder, stop_strings
        self._text, self._released = "", 0
        self._longest = max((len(s) for s in stop_strings), default=0)

    @property
    def text(self) -> str:
        """The answer so far, held-back characters included."""
        return self._text

    def push(self, token_id: int) -> bool:
        """Add a token; True when a stop string is complete. The text then ends right before it."""
        return self._add(self._decoder.push(token_id)) if self._decoder is not None else False

    def finish(self, cut: bool) -> bool:
        """End of the answer; unless it was `cut` at a stop string, the last held-back bytes still join. True as in `push`."""
        return False if cut or self._decoder is None else self._add(self._decoder.flush())

    def release(self, final: bool) -> str:
        """Text not handed out yet that can no longer become part of a stop string."""
        safe = len(self._text) if final else len(self._text) - self._held_back()
        piece = self._text[self._released : max(safe, self._released)]
        self._released += len(piece)
        return piece

    def _add(self, piece: str) -> bool:
        searched = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        found = [place for place in (self._text.find(s, searched) for s in self._stop_strings) if place >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self._stop_strings):
                return length
        return 0


@dataclass
class RequestState:
    """Everything the engine keeps for a request; `tokens` is prompt and output, `round` counts its decode rounds."""

    request: Request
    text: TextAssembler
    eos_token_ids: frozenset[int]
    max_total_tokens: int  # prompt and output together: max_tokens or the end of the context, whichever comes first
    tokens: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    num_rounds: int = 0
    arrived_s: float = field(default_factory=time.perf_counter)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def request_id(self) -> int:
        """The request's number."""
        return self.request.request_id

    @property
    def output_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_total_tokens - len(self.tokens)

    def append(self, token: int, origin: TokenOrigin) -> FinishReason | None:
        """Add one emitted token; the reason if the answer ends with it.

        An end-of-text token counts as a token but adds no text. A stop string wins over the length limit.
        """
        self.tokens.append(token)
        self.origins.append(origin)
        if token in self.eos_token_ids and not self.request.params.ignore_eos:
            self.text.finish(cut=False)
            self.finish_reason = "stop"
        elif self.text.push(token):
            self.finish_reason = "stop"
        elif self.num_remaining <= 0:
            self.finish_reason = "stop" if self.text.finish(cut=False) else "length"
        return self.finish_reason
