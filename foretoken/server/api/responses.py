"""`/v1/responses`: a chat in the shape of OpenAI's newer interface, its output items and the events by which they grow;
no state is kept between requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.backend.call import AnswerEnded, Piece, TokenEvent
from foretoken.server.api.body import JsonRoute
from foretoken.server.api.call import chat_call, terms_of, tier_of
from foretoken.server.api.errors import ApiError
from foretoken.server.api.exchange import Api, Exchange
from foretoken.server.api.messages import shaper_of
from foretoken.server.api.responses_request import ResponsesRequest, as_chat, functions_of, left_out, wants_logprobs
from foretoken.server.api.streaming import PieceGroup, by_token
from foretoken.server.api.token_texts import TextDivision
from foretoken.server.api.tool_reader import MessageShaper
from foretoken.server.api.usage import usage
from foretoken.server.api.writer import AnswerWriter, chat_logprobs

_Json = dict[str, Any]
PATH = "/v1/responses"


def responses_router(api: Api) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(PATH, summary="A response to a conversation")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        chat = as_chat(body, terms.info.template_roles)
        exchange = Exchange(api, request.scope, chat_call(chat, terms), terms.info, bool(body.stream))
        return await ResponsesWriter(exchange, body, shaper_of(chat, terms.info)).answer(request)

    return router


class ResponsesWriter(AnswerWriter):
    """One response, whole or as events."""

    def __init__(self, exchange: Exchange, body: ResponsesRequest, shaper: MessageShaper) -> None:
        super().__init__(exchange, body)
        self._body, self._shaper, self._items, self._num_sent = body, shaper, ResponseItems(), 0
        self._texts = TextDivision()

    def whole(self) -> _Json:
        """See `AnswerWriter.whole`."""
        progress = self.exchange.book.answers[0]
        assert progress.ended is not None
        for _ in self._piece_events(Piece(0, progress.text, tuple(progress.tokens))):
            pass
        for _ in self._end_events(progress.ended):
            pass
        return self._response(_status(progress.ended))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """See `AnswerWriter.failed`; a stream that has begun ends with `response.failed`."""
        if not self._num_sent:
            return []
        self._items.cut()
        return [self._encoded({"type": "response.failed", "response": self._response("failed", error)})]

    def begun(self) -> Iterable[bytes]:
        """See `AnswerWriter.begun`."""
        for kind in ("response.created", "response.in_progress"):
            yield self._encoded({"type": kind, "response": self._response("in_progress")})

    def piece(self, group: PieceGroup) -> Iterable[bytes]:
        """See `AnswerWriter.piece`."""
        return map(self._encoded, self._piece_events(group.piece))

    def ended(self, event: AnswerEnded) -> Iterable[bytes]:
        """See `AnswerWriter.ended`."""
        yield from map(self._encoded, self._end_events(event))
        status = _status(event)
        yield self._encoded({"type": f"response.{status}", "response": self._response(status)})

    def _piece_events(self, piece: Piece) -> Iterator[_Json]:
        """The events of a step, or of a whole answer; with log-probabilities those of each token, which then stand with
        the item that it belongs to, however many come at once.
        """
        groups = by_token(piece, self._texts) if wants_logprobs(self._body) else [PieceGroup(piece, [])]
        for one in groups:
            yield from self._items.add(self._shaper.push(one.piece.text), self._logprobs(one.piece.tokens))

    def _end_events(self, event: AnswerEnded) -> Iterator[_Json]:
        deltas, _ = self._shaper.finish(event.finish_reason)
        yield from self._items.add(deltas, [])
        yield from self._items.close(_status(event))

    def _logprobs(self, tokens: tuple[TokenEvent, ...]) -> list[_Json]:
        if not wants_logprobs(self._body):
            return []
        entries: list[_Json] = chat_logprobs(tokens)["content"]
        for entry in entries:
            for one in (entry, *entry["top_logprobs"]):
                one["bytes"] = one["bytes"] or []
        return entries

    def _encoded(self, event: _Json) -> bytes:
        """An event; padded like those of a chat where that is asked for."""
        kind, event["sequence_number"] = event["type"].encode(), self._num_sent
        self._num_sent += 1
        return b"event: %b\n%b" % (kind, self.encoded(event))

    def _response(self, status: str, error: ApiError | None = None) -> _Json:
        body, exchange, params = self._body, self.exchange, self.exchange.call.params
        has_ended = status in ("completed", "incomplete")
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        made: _Json = {
            "id": f"resp_{exchange.request_id}",
            "object": "response",
            "created_at": int(exchange.began_unix_s),
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": error.code, "message": error.detail},
            "frequency_penalty": params.frequency_penalty,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": exchange.info.name,
            "output": [] if status == "in_progress" else self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None} if body.reasoning is None else body.reasoning.model_dump(),
            "safety_identifier": body.safety_identifier,
            "service_tier": tier_of(body) or "default",
            "store": False,
            "temperature": params.temperature,
            "text": _text(body),
            "tool_choice": _choice(body),
            "tools": [
                {"type": "function", **tool.model_dump(), "strict": bool(tool.strict)} for tool in functions_of(body)
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": _usage(exchange, body.prediction is not None) if has_ended else None,
            "user": body.user,
        }
        if has_ended:
            made |= self.reports()
            if left_out(body):
                made["foretoken"]["tools_left_out"] = left_out(body)
        return made


def _status(event: AnswerEnded) -> str:
    return "incomplete" if event.finish_reason == "length" else "completed"


def _text(body: ResponsesRequest) -> _Json:
    given: _Json = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    form: _Json = given.get("format", {"type": "text"})
    if form["type"] == "json_schema":  # has these fields always, as OpenAI's has
        form = {"name": "answer", "description": None, **form, "strict": bool(form.get("strict"))}
    return {**given, "format": form}


def _choice(body: ResponsesRequest) -> Any:  # noqa: ANN401 - a word or an object
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _usage(exchange: Exchange, has_prediction: bool) -> _Json:
    found = usage(exchange, has_prediction)
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": found["prompt_tokens_details"],
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": found["completion_tokens_details"],
        "total_tokens": found["total_tokens"],
    }


class ResponseItems:
    """Makes items and events of message deltas (`MessageShaper`). Events have no sequence number yet."""

    def __init__(self) -> None:
        self.items: list[_Json] = []
        self._logprobs: list[_Json] = []  # of tokens whose text is held back
        self._is_open = False

    def add(self, deltas: Sequence[_Json], logprobs: list[_Json]) -> Iterator[_Json]:
        """The events of deltas; `logprobs` are those of their tokens."""
        self._logprobs += logprobs
        for delta in deltas:
            if "content" in delta:
                yield from self._add_text(delta["content"])
            for part in delta.get("tool_calls", ()):
                yield from self._add_call(part)
        if deltas and "tool_calls" in deltas[-1]:
            self._logprobs = []

    def close(self, status: str) -> Iterator[_Json]:
        """The events that end the last item; an answer without a text has an empty one. Tokens that wrote nothing, such
        as the end token, come with the end.
        """
        if not self.items:
            yield from self._open_message()
        if self._is_open and self.items[-1]["type"] == "message":
            self.items[-1]["content"][0]["logprobs"] += self._logprobs
        yield from self._close(status)

    def cut(self) -> None:
        """The answer failed: the item that it was writing stays as it is."""
        if self._is_open:
            self._is_open, self.items[-1]["status"] = False, "incomplete"

    def _add_text(self, text: str) -> Iterator[_Json]:
        if not self._is_open or self.items[-1]["type"] != "message":
            yield from self._close("completed")
            yield from self._open_message()
        part = self.items[-1]["content"][0]
        logprobs, self._logprobs = self._logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        yield {"type": "response.output_text.delta", **self._place(0), "delta": text, "logprobs": logprobs}

    def _add_call(self, part: _Json) -> Iterator[_Json]:
        arguments = part["function"]["arguments"]
        if "id" in part:
            yield from self._close("completed")
            call = {"type": "function_call", "call_id": part["id"], "name": part["function"]["name"], "arguments": ""}
            yield self._open("fc", call)
        self.items[-1]["arguments"] += arguments
        if arguments:
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments}

    def _open_message(self) -> Iterator[_Json]:
        yield self._open("msg", {"type": "message", "role": "assistant", "content": []})
        part: _Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield {"type": "response.content_part.added", **self._place(0), "part": _copy(part)}
        self.items[-1]["content"].append(part)

    def _open(self, prefix: str, item: _Json) -> _Json:
        self._is_open = True
        self.items.append({"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", **item})
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": _copy(self.items[-1]),
        }

    def _close(self, status: str) -> Iterator[_Json]:
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        if item["type"] == "message":
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield {"type": "response.output_text.done", **self._place(0), **done}
            yield {"type": "response.content_part.done", **self._place(0), "part": part}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **done}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _place(self, content_index: int | None = None) -> _Json:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if content_index is None else {**place, "content_index": content_index}


def _copy(value: _Json) -> _Json:
    """The item as it is now: lists in it grow later."""
    return {name: list(one) if isinstance(one, list) else one for name, one in value.items()}
