"""Log-probabilities in the two shapes of OpenAI: of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.backend.events import TokenEvent

_LEAST = -9999.0  # OpenAI's number for a token that could not be drawn; JSON has no minus infinity


def chat_logprobs(tokens: Sequence[TokenEvent]) -> dict[str, Any]:
    """The object of a chat's choice."""
    return {"content": [_chat_entry(token) for token in tokens], "refusal": None}


def _chat_entry(token: TokenEvent) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": _bounded(token.logprob),
        "bytes": _bytes(token.data),
        "top_logprobs": [
            {"token": one.text, "logprob": _bounded(one.logprob), "bytes": _bytes(one.data)} for one in token.top
        ],
    }


def completion_logprobs(tokens: Sequence[TokenEvent], offset: int) -> dict[str, Any]:
    """The object of a completion's choice; `offset` is where the first token's text begins."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if token.logprob is None else _bounded(token.logprob) for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_tops(token) for token in tokens],
    }


def _tops(token: TokenEvent) -> dict[str, float] | None:
    """The likeliest texts, and the token's own; of two tokens with one text the likelier counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for one in token.top:
        found.setdefault(one.text, _bounded(one.logprob))
    found.setdefault(token.text, _bounded(token.logprob))
    return found


def _bounded(logprob: float | None) -> float:
    return _LEAST if logprob is None else max(logprob, _LEAST)


def _bytes(data: bytes | None) -> list[int] | None:
    return None if data is None else list(data)
