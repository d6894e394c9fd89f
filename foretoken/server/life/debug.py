"""`/debug/invariants`, in test builds only: what the front and its workers hold at this moment."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from foretoken.server.life.replicas import Replicas


def debug_router(service: Replicas) -> APIRouter:
    """The route over a service."""
    router = APIRouter()

    async def read_invariants() -> dict[str, Any]:
        return await service.invariants()

    router.add_api_route("/debug/invariants", read_invariants, methods=["GET"], include_in_schema=False)
    return router
