"""Ollama's interface: `/api/chat`, `/api/generate`, and what its clients ask about models."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.backend.call import AnswerEnded, Call, ModelInfo, TokenEvent
from foretoken.server.api.body import UntypedJsonRoute
from foretoken.server.api.call import Terms, chat_call, check_model, completion_call, terms_of
from foretoken.server.api.envelopes import OLLAMA_PATH
from foretoken.server.api.errors import Responses, error_responses, json_response, object_schema
from foretoken.server.api.exchange import Api, Exchange
from foretoken.server.api.messages import shaper_of
from foretoken.server.api.ollama_request import (
    OllamaChat,
    OllamaFields,
    OllamaGenerate,
    ShowRequest,
    as_chat,
    as_completion,
    as_prompted_chat,
)
from foretoken.server.api.openai import with_suffix
from foretoken.server.api.streaming import Around, PieceGroup
from foretoken.server.api.tool_reader import MessageShaper, side_by_side
from foretoken.server.api.tools import arguments_of
from foretoken.server.api.usage import timings
from foretoken.server.api.writer import AnswerWriter, chat_logprobs

CHAT_PATH, GENERATE_PATH = f"{OLLAMA_PATH}/chat", f"{OLLAMA_PATH}/generate"
# The version of Ollama whose interface this is: some clients refuse those that are older than they know.
_INTERFACE_VERSION = "0.12.6"
_EPOCH = "1970-01-01T00:00:00Z"
_NS_PER_MS = 1_000_000
_ERRORS = error_responses(object_schema({"error": {"type": "string"}, "code": {"type": "string"}}))
_STREAMED: Responses = {200: {"content": {"application/x-ndjson": {"schema": {"type": "object"}}}}}
_Json = dict[str, Any]


def ollama_router(api: Api) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=UntypedJsonRoute, responses=_ERRORS)

    @router.post(CHAT_PATH, summary="The next message of a conversation, as Ollama has it", responses=_STREAMED)
    async def chat(body: OllamaChat, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        if body.is_load:
            return json_response(_loaded(terms.info, {"message": {"role": "assistant", "content": ""}}))
        asked = as_chat(body)
        return await _answer(api, request, body, chat_call(asked, terms), shaper_of(asked, terms.info), True)

    @router.post(GENERATE_PATH, summary="The answer to a prompt, as Ollama has it", responses=_STREAMED)
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        if body.is_load:
            return json_response(_loaded(terms.info, {"response": ""}))
        return await _answer(api, request, body, await _prompt_call(api, body, terms), MessageShaper(), False)

    @router.get(f"{OLLAMA_PATH}/tags", summary="The served models, as Ollama lists them")
    async def tags() -> Response:
        info = api.backend.info
        return json_response({"models": [] if info is None else [_listed(info) | {"modified_at": _EPOCH}]})

    @router.get(f"{OLLAMA_PATH}/ps", summary="The loaded models, as Ollama lists them")
    async def ps() -> Response:
        info = api.backend.info
        loaded = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        return json_response({"models": [] if info is None else [_listed(info) | loaded]})

    @router.post(f"{OLLAMA_PATH}/show", summary="What is known of a model, as Ollama says it")
    async def show(body: ShowRequest) -> Response:
        info = api.ready_info()
        check_model(body.model or body.name, info, api.config)
        return json_response(_shown(info))

    @router.get(f"{OLLAMA_PATH}/version", summary="The version of Ollama whose interface this is")
    async def version() -> Response:
        return json_response({"version": _INTERFACE_VERSION})

    return router


async def _prompt_call(api: Api, body: OllamaGenerate, terms: Terms) -> Call:
    """A prompt is the message of a user, where the model has a chat template and nothing says that it is whole."""
    if body.raw or body.suffix or not terms.info.has_chat_template:
        completion = await with_suffix(api, as_completion(body), terms)
        return completion_call(completion, terms, terms.config.default_max_tokens)
    return chat_call(as_prompted_chat(body), terms)


async def _answer(
    api: Api, request: Request, body: OllamaFields, call: Call, shaper: MessageShaper, is_chat: bool
) -> Response:
    info = api.ready_info()
    exchange = Exchange(api, request.scope, call, info, body.is_stream)
    return await OllamaWriter(exchange, body, shaper, is_chat).answer(request)


class OllamaWriter(AnswerWriter):
    """One answer, whole or as lines of JSON."""

    around = Around(b"", b"\n")

    def __init__(self, exchange: Exchange, body: OllamaFields, shaper: MessageShaper, is_chat: bool) -> None:
        super().__init__(exchange, body)
        self._shaper, self._is_chat, self._has_logprobs = shaper, is_chat, bool(body.logprobs)
        self._calls: list[_Json] = []

    def whole(self) -> _Json:
        """See `AnswerWriter.whole`."""
        progress = self.exchange.book.answers[0]
        assert progress.ended is not None
        ended = progress.ended
        texts = [self._text(self._shaper.push(ended.text)), self._text(self._shaper.finish(ended.finish_reason)[0])]
        return self._object("".join(texts), progress.tokens, self._made_calls(ended)) | self._end(ended)

    def piece(self, group: PieceGroup) -> Iterable[bytes]:
        """See `AnswerWriter.piece`."""
        text, tokens = self._text(self._shaper.push(group.piece.text)), group.piece.tokens
        if text or (self._has_logprobs and tokens):
            yield self.encoded(self._object(text, tokens) | {"done": False})

    def ended(self, event: AnswerEnded) -> Iterable[bytes]:
        """See `AnswerWriter.ended`: what is left of the text, the calls, and what it took."""
        text = self._text(self._shaper.finish(event.finish_reason)[0])
        yield self.encoded(self._object(text, (), self._made_calls(event)) | self._end(event))

    def _text(self, deltas: Sequence[_Json]) -> str:
        """The text of deltas; their calls are kept until the answer ends, for Ollama's are whole."""
        delta = side_by_side(deltas)
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                self._calls.append({"name": part["function"]["name"], "arguments": ""})
            self._calls[-1]["arguments"] += part["function"]["arguments"] or ""
        return delta.get("content") or ""

    def _made_calls(self, event: AnswerEnded) -> list[_Json]:
        is_cut = event.finish_reason == "length" or self.exchange.stop_string(event) is not None
        return [
            {"function": call | {"index": place, "arguments": arguments_of(call["arguments"], is_cut)}}
            for place, call in enumerate(self._calls)
        ]

    def _object(self, text: str, tokens: Sequence[TokenEvent], calls: Sequence[_Json] = ()) -> _Json:
        own: _Json = {"response": text}
        if self._is_chat:
            own = {"message": {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})}
        if self._has_logprobs:
            own["logprobs"] = chat_logprobs(tokens)["content"]
        return {"model": self.exchange.info.name, "created_at": _now(), **own}

    def _end(self, event: AnswerEnded) -> _Json:
        """The fields of the last object; times in nanoseconds."""
        found, stats = timings(self.exchange), event.stats
        return {
            "done": True,
            "done_reason": event.finish_reason,
            "total_duration": int(stats["total_s"] * 1000 * _NS_PER_MS),
            "load_duration": 0,
            "prompt_eval_count": self.exchange.num_prompt_tokens,
            "prompt_eval_duration": int(found["prompt_ms"] * _NS_PER_MS),
            "eval_count": event.num_tokens,
            "eval_duration": int(found["predicted_ms"] * _NS_PER_MS),
            **self.reports(),
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _loaded(info: ModelInfo, empty: _Json) -> _Json:
    """The answer to a request that asks nothing: Ollama's clients load a model so, and this one is loaded."""
    return {"model": info.name, "created_at": _now(), **empty, "done": True, "done_reason": "load"}


def _listed(info: ModelInfo) -> _Json:
    return {"name": info.name, "model": info.name, "size": 0, "digest": "", "details": _details(info)}


def _details(info: ModelInfo) -> _Json:
    millions = "" if info.num_parameters is None else f"{info.num_parameters / 1e6:.1f}M"
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": millions,
        "quantization_level": "",
    }


def _shown(info: ModelInfo) -> _Json:
    capabilities = ["completion"]
    capabilities += ["tools"] if info.tool_style is not None else []
    capabilities += ["insert"] if info.fim_tokens is not None else []
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "modified_at": _EPOCH,
        "details": _details(info),
        "model_info": {
            "general.architecture": "foretoken",
            "general.parameter_count": info.num_parameters,
            "foretoken.context_length": info.max_model_len,
            "foretoken.vocab_size": info.vocab_size,
        },
        "capabilities": capabilities,
    }
