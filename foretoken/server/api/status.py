"""What the server says of itself: models, health, version, limits."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Response

from foretoken import __version__
from foretoken.backend.events import ModelInfo
from foretoken.backend.plain import plain
from foretoken.config import known_drafters
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import CODES, MAX_MESSAGE_BYTES, ApiError, json_response, unavailable
from foretoken.server.api.exchange import Api
from foretoken.server.api.speculation import offered_specs

_DEAD = ("failed", "restarting")


def status_router(api: Api) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/v1/models", summary="The served models")
    async def models() -> Response:
        info = api.service.info
        return json_response({"object": "list", "data": [] if info is None else [_model(info)]})

    @router.get("/v1/models/{name:path}", summary="One served model")
    async def model(name: str) -> Response:
        info = api.service.info
        if info is None or name != info.name:
            raise ApiError(404, "model_not_found", "model: is not served here; see /v1/models", "model")
        return json_response(_model(info))

    @router.get("/health", summary="Whether the engine lives")
    async def health() -> Response:
        if api.service.state in _DEAD:
            raise unavailable(api.service.state, api.config.retry_after_s)
        return json_response({"status": "ok", "state": api.service.state})

    @router.get("/ready", summary="Whether requests are taken")
    async def ready() -> Response:
        api.ready_info()
        return json_response({"status": "ready"})

    @router.get("/version", summary="The version of this server")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/v1/limits", summary="Every limit in force")
    async def limits() -> Response:
        return json_response(limits_in_force(api.config, api.service.info))

    return router


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": 0,
        "owned_by": "foretoken",
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
