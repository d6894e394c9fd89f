"""`/v1/messages`: a chat in the shape of Anthropic's interface, its content blocks and the events by which they grow;
and `/v1/messages/count_tokens`, the length of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.backend.call import AnswerEnded, TextToEncode
from foretoken.server.api.anthropic_request import MessagesRequest, TokenCountRequest, as_chat
from foretoken.server.api.body import JsonRoute
from foretoken.server.api.call import chat_call, terms_of, tier_of
from foretoken.server.api.envelopes import MESSAGES_ERROR_SCHEMA, MESSAGES_PATH, wire_of
from foretoken.server.api.errors import error_responses, json_response
from foretoken.server.api.exchange import Api, Exchange
from foretoken.server.api.messages import shaper_of
from foretoken.server.api.streaming import PieceGroup
from foretoken.server.api.tool_reader import MessageShaper
from foretoken.server.api.tools import arguments_of
from foretoken.server.api.usage import usage
from foretoken.server.api.writer import AnswerWriter

_Json = dict[str, Any]
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = error_responses(MESSAGES_ERROR_SCHEMA)


def messages_router(api: Api) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=JsonRoute, responses=_ERRORS)

    @router.post(MESSAGES_PATH, summary="The next message of a conversation, as Anthropic has it")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        chat = as_chat(body)
        exchange = Exchange(api, request.scope, chat_call(chat, terms), terms.info, bool(body.stream))
        return await MessageWriter(exchange, body, shaper_of(chat, terms.info)).answer(request)

    @router.post(f"{MESSAGES_PATH}/count_tokens", summary="The number of tokens of a conversation")
    async def count_tokens(body: TokenCountRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        call = chat_call(as_chat(body.model_copy(update={"max_tokens": 1})), terms)
        tokens = await api.backend.tokenize(TextToEncode.of(call))
        return json_response({"input_tokens": len(tokens)})

    return router


class MessageWriter(AnswerWriter):
    """One message, whole or as events."""

    def __init__(self, exchange: Exchange, body: MessagesRequest, shaper: MessageShaper) -> None:
        super().__init__(exchange, body)
        self._shaper, self._blocks = shaper, ContentBlocks()

    def whole(self) -> _Json:
        """See `AnswerWriter.whole`."""
        progress = self.exchange.book.answers[0]
        assert progress.ended is not None
        for _ in self._blocks.add(self._shaper.push(progress.text)):
            pass
        events, stop = self._ended(progress.ended)
        for _ in events:
            pass
        return {**self._message(), "content": self._blocks.content, **stop, **self._reports()}

    def begun(self) -> Iterable[bytes]:
        """See `AnswerWriter.begun`."""
        ping = wire_of(self.exchange.path).ping
        return [self._encoded({"type": "message_start", "message": self._message()}), ping]

    def piece(self, group: PieceGroup) -> Iterable[bytes]:
        """See `AnswerWriter.piece`."""
        return map(self._encoded, self._blocks.add(self._shaper.push(group.piece.text)))

    def ended(self, event: AnswerEnded) -> Iterable[bytes]:
        """See `AnswerWriter.ended`."""
        last, stop = self._ended(event)
        end = {"type": "message_delta", "delta": stop, "usage": self._usage()}
        return map(self._encoded, [*last, {**end, **self._reports()}, {"type": "message_stop"}])

    def _ended(self, event: AnswerEnded) -> tuple[list[_Json], _Json]:
        """The last events of the content, and why it ended."""
        deltas, reason = self._shaper.finish(event.finish_reason)
        found = self.exchange.stop_string(event)
        is_cut = event.finish_reason == "length" or found is not None
        made = [*self._blocks.add(deltas), *self._blocks.close(is_cut)]
        return made, {"stop_reason": _REASONS[reason] if found is None else "stop_sequence", "stop_sequence": found}

    def _encoded(self, event: _Json) -> bytes:
        """An event; padded like those of a chat where that is asked for."""
        return b"event: %b\n%b" % (event["type"].encode(), self.encoded(event))

    def _message(self) -> _Json:
        exchange = self.exchange
        return {
            "id": f"msg_{exchange.request_id}",
            "type": "message",
            "role": "assistant",
            "model": exchange.info.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _reports(self) -> _Json:
        """What the request cost, without llama.cpp's `timings`, which it leaves out here too."""
        return {name: value for name, value in self.reports().items() if name != "timings"}

    def _usage(self) -> _Json:
        """Anthropic counts prompt tokens that were found in the cache beside the others, not among them."""
        found = usage(self.exchange, self.body.prediction is not None)
        num_cached = found["prompt_tokens_details"]["cached_tokens"]
        details = found["completion_tokens_details"]
        return {
            "input_tokens": found["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": found["completion_tokens"],
            "service_tier": "priority" if tier_of(self.body) in ("priority", "fast") else "standard",
            **{name: count for name, count in details.items() if name.endswith("_prediction_tokens")},
        }


class ContentBlocks:
    """Makes content blocks and their events of message deltas (`MessageShaper`)."""

    def __init__(self) -> None:
        self.content: list[_Json] = []
        self._is_open = False
        self._arguments = ""  # of the last call

    def add(self, deltas: Iterable[_Json]) -> Iterator[_Json]:
        """The events of deltas."""
        for delta in deltas:
            if "content" in delta:
                yield from self._add_text(delta["content"])
            for part in delta.get("tool_calls", ()):
                yield from self._add_call(part)

    def close(self, is_cut: bool = False) -> Iterator[_Json]:
        """The event that ends the open block; `is_cut`: the answer was cut off in it."""
        if not self._is_open:
            return
        self._is_open = False
        if self.content[-1]["type"] == "tool_use":
            self.content[-1]["input"] = arguments_of(self._arguments, is_cut)
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _add_text(self, text: str) -> Iterator[_Json]:
        if not self._is_open or self.content[-1]["type"] != "text":
            yield from self.close()
            yield self._open({"type": "text", "text": ""})
        self.content[-1]["text"] += text
        yield self._delta({"type": "text_delta", "text": text})

    def _add_call(self, part: _Json) -> Iterator[_Json]:
        arguments = part["function"]["arguments"]
        if "id" in part:
            yield from self.close()
            call_id = "toolu_" + part["id"].removeprefix("call_")
            yield self._open({"type": "tool_use", "id": call_id, "name": part["function"]["name"], "input": {}})
        if arguments:
            self._arguments += arguments
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _open(self, block: _Json) -> _Json:
        self._is_open, self._arguments = True, ""
        self.content.append(block)
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _delta(self, delta: _Json) -> _Json:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
