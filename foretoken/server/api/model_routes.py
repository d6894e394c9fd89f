"""Routes that generate nothing: models, health, version, limits; and `/tokenize`, `/detokenize`, `/tokenizer_info` at
the root, where vLLM has them and lm-evaluation-harness asks.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from foretoken import __version__
from foretoken.backend.call import ModelInfo, TextToEncode
from foretoken.config import known_drafters
from foretoken.server.api.body import JsonRoute, ListOf, RequestPart
from foretoken.server.api.call import check_model, check_token_ids
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import (
    CODES,
    MAX_MESSAGE_BYTES,
    ApiError,
    invalid,
    json_response,
    unavailable,
    unsupported,
)
from foretoken.server.api.exchange import Api
from foretoken.server.api.messages import checked_messages
from foretoken.server.api.speculation import offered_specs
from foretoken.server.life.wire import plain
from foretoken.server.record import caller_of

_DEAD = ("failed", "restarting")
MAX_DETOKENIZED = 1 << 20  # tokens of one request


def status_router(api: Api) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/v1/models", summary="The served models")
    async def models() -> Response:
        info = api.backend.info
        listed = [] if info is None else [_model(info)]
        ids = [model["id"] for model in listed]
        pages = {"has_more": False, "first_id": next(iter(ids), None), "last_id": next(reversed(ids), None)}
        return json_response({"object": "list", "data": listed, **pages})

    @router.get("/v1/models/{name:path}", summary="One served model")
    async def model(name: str) -> Response:
        info = api.backend.info
        if info is None or name != info.name:
            raise ApiError(404, "model_not_found", "model: is not served here; see /v1/models", "model")
        return json_response(_model(info))

    @router.get("/health", summary="Whether the engine lives")
    async def health() -> Response:
        if api.backend.state in _DEAD:
            raise unavailable(api.backend.state, api.config.retry_after_s)
        return json_response({"status": "ok", "state": api.backend.state})

    @router.get("/ready", summary="Whether requests are taken")
    async def ready() -> Response:
        api.ready_info()
        return json_response({"status": "ready"})

    @router.get("/version", summary="The version of this server")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/v1/limits", summary="Every limit in force")
    async def limits() -> Response:
        return json_response(limits_in_force(api.config, api.backend.info))

    return router


def _model(info: ModelInfo) -> dict[str, Any]:
    """OpenAI's object and Anthropic's in one, and what both lack."""
    return {
        "id": info.name,
        "object": "model",
        "created": 0,
        "owned_by": "foretoken",
        "type": "model",
        "display_name": info.name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": info.max_model_len,
        "max_tokens": info.max_model_len,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "num_parameters": info.num_parameters,
        "has_chat_template": info.has_chat_template,
        "spec": plain(info.default_spec),
    }


def limits_in_force(config: ApiConfig, info: ModelInfo | None) -> dict[str, Any]:
    """Limits and defaults by name: those of the settings, and those of the loaded model."""
    found: dict[str, Any] = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "specs"
    }
    found |= {"max_message_bytes": MAX_MESSAGE_BYTES, "error_codes": CODES}
    if info is not None:
        offered = offered_specs(info, config)
        found |= {
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "max_waiting": info.max_waiting,
            "drafters": [name for name in known_drafters() if name in offered],
        }
    return found


class TokenizeRequest(RequestPart):
    """The body of `/tokenize`: a text, or a conversation under the model's chat template."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestPart):
    """The body of `/detokenize`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Annotated[list[Any], Field(max_length=MAX_DETOKENIZED, json_schema_extra={"items": {"type": "integer"}})]


def tokenization_router(api: Api) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/tokenizer_info", summary="Special tokens of the model")
    async def tokenizer_info() -> Response:
        info = _info(api)
        return json_response(
            {
                "eos_token": info.eos_token,
                "bos_token": info.bos_token,
                "pad_token": info.pad_token,
                "eos_token_ids": info.eos_token_ids,
                "vocab_size": info.vocab_size,
                "max_model_len": info.max_model_len,
            }
        )

    if api.config.llama_cpp:
        return router  # its routes of the same paths stand in their place

    @router.post("/tokenize", summary="Token ids of a text or a conversation")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        info = _info(api)
        check_model(body.model, info, api.config)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None and not info.has_chat_template:
            raise unsupported("messages", "the model has no chat template; give a prompt")
        messages = None if body.messages is None else checked_messages(body.messages, info.template_roles)
        if body.continue_final_message and body.add_generation_prompt:
            raise invalid("continue_final_message", "and add_generation_prompt exclude each other; set one of them")
        names = ("add_generation_prompt", "continue_final_message")
        options = {name: value for name in names if (value := getattr(body, name)) is not None}
        tenant = caller_of(request.scope).tenant
        text = TextToEncode(body.prompt, messages, body.add_special_tokens, template_options=options, tenant=tenant)
        tokens = await api.backend.tokenize(text)
        spelt = await api.backend.spell(tokens) if body.return_token_strs else None
        counted = {"count": len(tokens), "max_model_len": info.max_model_len}
        return json_response({**counted, "tokens": tokens, "token_strs": spelt})

    @router.post("/detokenize", summary="The text of token ids")
    async def detokenize(body: DetokenizeRequest) -> Response:
        info = _info(api)
        check_model(body.model, info, api.config)
        check_token_ids("tokens", body.tokens, info)
        return json_response({"prompt": await api.backend.detokenize(body.tokens, has_specials=True)})

    return router


def _info(api: Api) -> ModelInfo:
    """The served model, which has a tokenizer.

    Raises:
        ApiError: it has none, or is not loaded.
    """
    info = api.ready_info()
    if not info.has_tokenizer:
        raise unsupported("model", "has no tokenizer; give token ids to /v1/completions")
    return info
