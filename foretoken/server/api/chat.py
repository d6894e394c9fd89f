"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.backend.call import AnswerEnded
from foretoken.server.api.body import JsonRoute
from foretoken.server.api.call import chat_call, terms_of
from foretoken.server.api.exchange import Api, Exchange
from foretoken.server.api.messages import shaper_of
from foretoken.server.api.schemas import ChatRequest
from foretoken.server.api.streaming import PieceGroup
from foretoken.server.api.writer import ResponseWriter, chat_logprobs

PATH = "/v1/chat/completions"


def chat_router(api: Api) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(PATH, summary="The next message of a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        exchange = Exchange(api, request.scope, chat_call(body, terms), terms.info, bool(body.stream))
        frame = ResponseWriter(exchange, body, "chatcmpl", "chat.completion", "chat.completion.chunk")
        return await frame.answer(ChatChoices(frame, body), request)

    return router


class ChatChoices:
    """See `ChoiceWriter`."""

    def __init__(self, frame: ResponseWriter, body: ChatRequest) -> None:
        self._frame, self._has_logprobs = frame, bool(body.logprobs)
        self._shapers = [shaper_of(body, frame.exchange.info) for _ in range(frame.exchange.num_answers)]

    def opening(self) -> Iterator[dict[str, Any]]:
        """See `ChoiceWriter`."""
        content = None if self._frame.exchange.api.config.llama_cpp else ""
        for index in range(len(self._shapers)):
            yield _chunk(index, {"role": "assistant", "content": content})

    def piece(self, group: PieceGroup) -> dict[str, Any] | None:
        """See `ChoiceWriter`."""
        piece = group.piece
        delta = self._shapers[piece.index].push(piece.text)
        if not delta and not (piece.tokens and (self._has_logprobs or self._frame.shows_tokens)):
            return None
        choice = _chunk(piece.index, delta)
        if self._has_logprobs:
            choice["logprobs"] = chat_logprobs(piece.tokens)
        if self._frame.shows_ids:
            choice["token_ids"] = [token.token_id for token in piece.tokens]
        return choice

    def ended(self, event: AnswerEnded) -> dict[str, Any]:
        """See `ChoiceWriter`."""
        delta, reason = self._shapers[event.index].finish(event.finish_reason)
        return _chunk(event.index, delta, reason)

    def whole(self) -> list[dict[str, Any]]:
        """See `ChoiceWriter`."""
        choices = []
        for index, progress in enumerate(self._frame.exchange.book.answers):
            assert progress.ended is not None
            shaper = self._shapers[index]
            shaper.push(progress.text)
            _, reason = shaper.finish(progress.ended.finish_reason)
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **shaper.message()},
                "logprobs": chat_logprobs(progress.tokens) if self._has_logprobs else None,
                "finish_reason": reason,
            }
            if self._frame.shows_ids:
                choice["token_ids"] = [token.token_id for token in progress.tokens]
            choices.append(choice | self._frame.of_choice(progress.ended))
        return choices


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
