"""llama.cpp's own interface: `/completion`, `/infill`, `/apply-template`, `/tokenize`, `/props` and others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from foretoken.backend.call import AnswerEnded, TextToEncode, TokenEvent
from foretoken.server.api.body import JsonRoute
from foretoken.server.api.call import (
    Terms,
    chat_call,
    check_num_biases,
    check_num_prompts,
    check_token_ids,
    completion_call,
    terms_of,
)
from foretoken.server.api.envelopes import COUNT_PATH, INFILL_PATH, LLAMA_PATHS, TEMPLATE_PATH
from foretoken.server.api.errors import (
    ERROR_SCHEMA,
    ApiError,
    error_responses,
    final,
    invalid,
    json_response,
    object_schema,
)
from foretoken.server.api.exchange import Api, Exchange
from foretoken.server.api.llamacpp_request import (
    DISABLED,
    InfillRequest,
    LlamaFields,
    PiecesRequest,
    TokensRequest,
    as_completion,
    defaults,
    prompts_of,
)
from foretoken.server.api.openai import fill_ids
from foretoken.server.api.prompt_ids import TextReader
from foretoken.server.api.schemas import ChatRequest
from foretoken.server.api.streaming import PieceGroup
from foretoken.server.api.usage import timings
from foretoken.server.api.writer import BUILD, AnswerWriter, chat_logprobs
from foretoken.server.record import caller_of

_MANY_TIMES = 4  # a prompt in parts that has more times as many tokens as the context is not read to its end
_FIELDS = {"code": {"type": "integer"}, "message": {"type": "string"}}
_ERRORS = error_responses(object_schema({"error": object_schema(_FIELDS, ["code", "message", "type", "param"])}))
# The paths of /tokenize and /detokenize are our own routes' too, and so are their errors.
_OWN_ERRORS = error_responses(ERROR_SCHEMA)
_Json = dict[str, Any]


def llama_router(api: Api, openai: Sequence[APIRouter]) -> APIRouter:
    """The routes, and those of `openai` without their `/v1`, as llama.cpp has them too."""
    router = APIRouter(route_class=JsonRoute, responses=_ERRORS)
    for one in openai:
        for route in one.routes:
            if isinstance(route, APIRoute) and (bare := route.path.removeprefix("/v1")) in LLAMA_PATHS:
                methods, is_shown = sorted(route.methods or ()), route.include_in_schema
                router.add_api_route(bare, route.endpoint, methods=methods, include_in_schema=is_shown)

    async def completion(body: LlamaFields, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        parts, is_list = prompts_of(body.prompt)
        check_num_prompts(parts, api.config)
        reader = TextReader.of_prompt(api, terms)
        prompts = [await _ids(reader, one) for one in parts]
        return await _answer(api, request, body, terms, prompts, is_list)

    for path in ("/completion", "/completions"):
        router.add_api_route(
            path, completion, methods=["POST"], summary="The continuation of a text, as llama.cpp has it"
        )

    @router.post(INFILL_PATH, summary="What stands between two texts, as llama.cpp has it")
    async def infill(body: InfillRequest, request: Request) -> Response:
        terms = terms_of(api, body, request.scope)
        before = "".join(f"--- {one.filename} ---\n{one.text}\n" for one in body.input_extra) + body.input_prefix
        reader = TextReader.of_prompt(api, terms)
        filled = await fill_ids(reader, terms.info, before, body.input_suffix)
        prompt = [*filled, *await _ids(reader, [body.prompt], False)]
        return await _answer(api, request, body, terms, [prompt], False)

    _add_texts(router, api)
    _add_state(router, api)
    for path, is_there in (("/slots", api.config.slots), ("/metrics", api.config.metrics)):
        if not is_there:
            _add_closed(router, path)
    return router


def _add_closed(router: APIRouter, path: str) -> None:
    """A route that the operator has closed: 501, as llama.cpp has it, which clients should not send again."""

    @router.get(path, include_in_schema=False)
    async def closed() -> Response:
        raise final(501, "unsupported_feature", f"this server answers no {path}; start it without --no-{path[1:]}")


def _add_texts(router: APIRouter, api: Api) -> None:
    @router.post(TEMPLATE_PATH, summary="A conversation under the chat template, as llama.cpp has it")
    async def apply_template(body: ChatRequest, request: Request) -> Response:
        return json_response({"prompt": await _text(api, await _chat_ids(api, body, request))})

    async def count(body: ChatRequest, request: Request) -> Response:
        return json_response({"input_tokens": len(await _chat_ids(api, body, request))})

    for path in (COUNT_PATH, f"/v1{COUNT_PATH}"):
        router.add_api_route(
            path, count, methods=["POST"], summary="Number of a conversation's tokens, as llama.cpp has it"
        )

    @router.post("/tokenize", summary="Token ids of a text, as llama.cpp has it", responses=_OWN_ERRORS)
    async def tokenize(body: PiecesRequest, request: Request) -> Response:
        reader = TextReader(api, caller_of(request.scope).tenant)
        tokens = await _ids(reader, [body.content], body.add_special)
        if not body.with_pieces:
            return json_response({"tokens": tokens})
        pieces = await _pieces(api, set(tokens))
        return json_response({"tokens": [{"id": one, "piece": pieces[one]} for one in tokens]})

    @router.post("/detokenize", summary="The text of token ids, as llama.cpp has it", responses=_OWN_ERRORS)
    async def detokenize(body: TokensRequest) -> Response:
        check_token_ids("tokens", body.tokens, api.ready_info())
        front, place = await _front(api)
        return json_response({"content": (await _text(api, [*front, *body.tokens]))[place:]})


def _add_state(router: APIRouter, api: Api) -> None:
    """What is known of the model and of what runs."""

    @router.get("/props", summary="What is known of the model and its defaults, as llama.cpp says it")
    async def props() -> Response:
        info = api.ready_info()
        made = {
            "default_generation_settings": {"n_ctx": info.max_model_len, "params": defaults(api.config)},
            "total_slots": info.max_batch_size,
            "model_alias": info.name,
            "model_path": info.name,  # a path would tell of this machine
            "bos_token": info.bos_token or "",
            "eos_token": info.eos_token or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": BUILD,
            "is_sleeping": False,
        }
        return json_response(made)

    if not api.config.slots:
        return

    @router.get("/slots", summary="How many requests run, as slots, which llama.cpp has")
    async def slots() -> Response:
        info = api.ready_info()
        running = (await api.backend.stats()).get("invariants", {}).get("num_running", 0)
        is_speculative = info.default_spec.drafter is not None
        made = [
            {"id": place, "n_ctx": info.max_model_len, "speculative": is_speculative, "is_processing": place < running}
            for place in range(info.max_batch_size)
        ]
        return json_response(made)


async def _ids(reader: TextReader, parts: Sequence[str | int], add_special: bool = True) -> list[int]:
    """Token ids of a prompt; what begins every text stands before its first part, if that is a text.

    Raises:
        ApiError: there are more parts than the context has tokens, or one does not fit.
    """
    most = reader.api.ready_info().max_model_len
    parts = [part for place, part in enumerate(parts) if part != "" or place == 0]
    if len(parts) > most:
        message = f"prompt: has {len(parts)} parts, and the context holds {most} tokens"
        raise ApiError(400, "context_length_exceeded", message, "prompt")
    made: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            made += await reader.ids(part, add_special and place == 0)
        else:
            made.append(part)
        if len(made) > _MANY_TIMES * most:
            reader.check_fits(len(made), most)
    return made


async def _chat_ids(api: Api, body: ChatRequest, request: Request) -> list[int]:
    """Token ids of a conversation with its tools, up to where the answer begins."""
    call = chat_call(body, terms_of(api, body, request.scope))
    return await api.backend.tokenize(TextToEncode.of(call))


async def _text(api: Api, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens as they are spelt: so llama.cpp writes them."""
    return await api.backend.detokenize(ids, has_specials=True)


async def _pieces(api: Api, tokens: Collection[int]) -> dict[int, str]:
    """What each token writes inside a text."""
    front, place = await _front(api) if tokens else ([], 0)
    return {token: (await _text(api, [*front, token]))[place:] for token in tokens}


async def _front(api: Api) -> tuple[list[int], int]:
    """Tokens to stand in front of others, and the length of their text: llama.cpp joins what tokens write inside a
    text, and at its beginning SentencePiece's decoder would drop the space of a word.
    """
    front = await _ids(TextReader(api), ["a"], add_special=False)
    return front, len(await _text(api, front))


async def _biases(reader: TextReader, body: LlamaFields) -> dict[int, float]:
    """The biases by token id: a text is all of its tokens, a text of digits in an object is an id."""
    check_num_biases(body.logit_bias, reader.api.config)
    found: dict[int, float] = {}
    for key, bias in body.logit_bias or ():
        is_id = isinstance(key, int) or (key.isascii() and key.isdecimal() and len(key) <= 10)
        for token in [int(key)] if is_id else await _ids(reader, [key], False):
            if token < 0:
                raise invalid("logit_bias", "token ids must be at least 0", token)
            found[token] = bias
    return found


async def _answer(
    api: Api, request: Request, body: LlamaFields, terms: Terms, prompts: Sequence[list[int]], is_list: bool
) -> Response:
    biases = await _biases(TextReader.of_prompt(api, terms), body)
    asked = as_completion(body, prompts, biases, terms.config)
    call = completion_call(asked, terms, terms.config.default_max_tokens)
    exchange = Exchange(api, request.scope, call, terms.info, bool(body.stream))
    texts = [await _text(api, prompt) if terms.info.has_tokenizer else "" for prompt in prompts]
    return await LlamaWriter(exchange, body, texts, is_list).answer(request)


class LlamaWriter(AnswerWriter):
    """The answers, whole or as events."""

    def __init__(self, exchange: Exchange, body: LlamaFields, prompts: Sequence[str], is_list: bool) -> None:
        super().__init__(exchange, body)
        self._body, self._prompts, self._is_list = body, prompts, is_list

    def whole(self) -> object:
        """The answer that is not streamed: an object, or a list of them where the prompt was a list."""
        made = []
        for progress in self.exchange.book.answers:
            assert progress.ended is not None
            ids = [token.token_id for token in progress.tokens] if self._body.return_tokens else []
            made.append(self._selected(self._end(progress.ended, progress.text, ids, progress.tokens)))
        return made if self._is_list else made[0]

    def ended(self, event: AnswerEnded) -> Iterable[bytes]:
        """See `AnswerWriter.ended`."""
        yield self.encoded(self._selected(self._end(event, "", [], ())))

    def piece(self, group: PieceGroup) -> Iterable[bytes]:
        """See `AnswerWriter.piece`."""
        piece = group.piece
        if not piece.tokens and not piece.text:
            return
        made: _Json = {
            "index": piece.index,
            "content": piece.text,
            "tokens": [token.token_id for token in piece.tokens],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self.exchange.book.answers[piece.index].tokens),
            "tokens_evaluated": len(self.exchange.prompt_ids[piece.index]),
        }
        if self._body.timings_per_token:
            made["timings"] = timings(self.exchange)
        yield self.encoded(made | self._probabilities(piece.tokens))

    def _end(self, event: AnswerEnded, text: str, ids: list[int], tokens: Sequence[TokenEvent]) -> _Json:
        exchange = self.exchange
        num_prompt = len(exchange.prompt_ids[event.index])
        made: _Json = {
            "index": event.index,
            "content": text,
            "tokens": ids,
            "id_slot": -1,
            "stop": True,
            "model": exchange.info.name,
            "tokens_predicted": event.num_tokens,
            "tokens_evaluated": num_prompt,
            "generation_settings": self._settings(),
            "prompt": self._prompts[event.index],
            "has_new_line": "\n" in event.text,
            "truncated": event.finish_reason == "length"
            and num_prompt + event.num_tokens >= exchange.info.max_model_len,
            **self._stop(event),
            "tokens_cached": num_prompt + event.num_tokens,
            **self.reports(),
        }
        return made | self._probabilities(tokens)

    def _stop(self, event: AnswerEnded) -> _Json:
        """Why the answer ended; one whose structure is complete ends like one with an end token."""
        if event.finish_reason == "length":
            return {"stop_type": "limit", "stopping_word": ""}
        found = self.exchange.stop_string(event)
        return {"stop_type": "eos" if found is None else "word", "stopping_word": found or ""}

    def _settings(self) -> _Json:
        params = self.exchange.call.params
        biases: list[_Json] = [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()]
        if params.ignore_eos:
            biases += [{"token": token, "bias": None} for token in self.exchange.info.eos_token_ids]
        return {
            **DISABLED,
            "n_predict": params.max_tokens,
            "seed": -1 if params.seed is None else params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(params.stop or ()),
            "ignore_eos": params.ignore_eos,
            "logit_bias": biases,
            "n_probs": params.logprobs or 0,
            "stream": self.exchange.is_stream,
        }

    def _probabilities(self, tokens: Sequence[TokenEvent]) -> _Json:
        """`completion_probabilities`: the entries of a chat's log-probabilities, with the ids of their tokens."""
        if not self._body.n_probs or not tokens:
            return {}
        entries = chat_logprobs(tokens)["content"]
        for entry, token in zip(entries, tokens, strict=True):
            entry["id"] = token.token_id
            for one, alternative in zip(entry["top_logprobs"], token.top, strict=True):
                one["id"] = alternative.token_id
        return {"completion_probabilities": entries}

    def _selected(self, made: _Json) -> _Json:
        """The fields that were asked for by `response_fields`, named by their path."""
        if not self._body.response_fields:
            return made
        chosen: _Json = {}
        for path in self._body.response_fields:
            value: Any = made
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                chosen[path] = value
        return chosen
