"""What single tokens write."""

from __future__ import annotations

from foretoken.backend.events import Alternative, TokenEvent
from foretoken.core import TokenLogprobs
from foretoken.text.tokenizer import Tokenizer


class TokenSpellings:
    """What single tokens write, kept once looked up."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._data = None if tokenizer is None else tokenizer.token_bytes
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def of(self, token_id: int) -> tuple[str, bytes | None]:
        """Text and bytes of a token; ("", None) without a tokenizer."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def event(
        self,
        token_id: int,
        scored: TokenLogprobs | None,
        kind: str,
        drafter: str | None = None,
        step: int = 0,
        probability: float | None = None,
    ) -> TokenEvent:
        """A token with its provenance and log-probabilities."""
        text, data = self.of(token_id)
        if scored is None:
            return TokenEvent(token_id, text, data, kind, drafter, step, probability)
        top = tuple(Alternative(one, *self.of(one), logprob) for one, logprob in scored.top)
        return TokenEvent(token_id, text, data, kind, drafter, step, probability, scored.logprob, scored.rank, top)

    def _look_up(self, token_id: int) -> tuple[str, bytes | None]:
        if self._tokenizer is None:
            return "", None
        if self._data is None:
            return self._tokenizer.decode([token_id]), None
        data = self._data.get(token_id, b"")
        return data.decode("utf-8", "replace"), data
