"""`/v1/stats`: the counters of the service, with what the page needs to know of the model."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from foretoken.config import RULES
from foretoken.errors import UnavailableError
from foretoken.registry import known_drafters, traits_of
from foretoken.server.api.exchange import Api
from foretoken.server.api.speculation import offered_specs

_SHOWN = ("name", "max_model_len", "has_tokenizer", "has_chat_template")  # of the model
_OWN_GROUPS = {"predicted": "prediction"}


def stats_router(api: Api) -> APIRouter:
    """A router with the numbers of the service; the page computes rates from two readings."""
    router, service = APIRouter(), api.service

    @router.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """Counters since the engine started, gauges, and the served model; `engine` is null while there is none."""
        info = service.info
        try:
            engine = await service.stats()
        except UnavailableError:
            engine = None
        return {
            "time_s": time.monotonic(),
            "state": service.state,
            "model": None if info is None else {name: getattr(info, name) for name in _SHOWN},
            "drafters": [] if info is None else list(offered_specs(info, api.config)),
            "groups": drafter_groups(),
            "rules": list(RULES),
            "engine": engine,
        }

    return router


def drafter_groups() -> dict[str, str]:
    """Each drafter with the group of its tokens on the page: model, lookup or prediction."""
    return {name: _group(name) for name in known_drafters()}


def _group(name: str) -> str:
    if name in _OWN_GROUPS:
        return _OWN_GROUPS[name]
    return "lookup" if traits_of(name).is_lookup else "model"
