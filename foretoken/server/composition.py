"""The application of a server: API, page, metrics and guard, put together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from foretoken.server.api.app import RouterMaker, create_app
from foretoken.server.config import ServerConfig
from foretoken.server.guard.app import App, guarded
from foretoken.server.guard.connection import uvicorn_options
from foretoken.server.life.debug import debug_router
from foretoken.server.life.fault_hooks import is_test_build
from foretoken.server.life.replicas import Replicas
from foretoken.server.observe.observation import Observation
from foretoken.server.page.board import stats_router
from foretoken.server.page.page import page_router


@dataclass(frozen=True)
class Composed:
    """`app` is served with `uvicorn_options`; `close` is called after the server."""

    app: App
    uvicorn_options: dict[str, Any]
    close: Callable[[], None]


def compose(service: Replicas, config: ServerConfig) -> Composed:
    """Everything over a service.

    Raises:
        ConfigError, StorageError: keys, history or tracing that cannot be used.
    """
    observation = Observation(service, config.observe)
    routers: list[APIRouter | RouterMaker] = [*observation.routers, page_router()]
    routers.append(stats_router)
    if is_test_build():
        routers.append(debug_router(service))
    app = create_app(service, config.api, observation.observers, routers)
    return Composed(observation.around(guarded(app, config.guard)), uvicorn_options(config.guard), observation.close)
