"""The ASGI application."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken import __version__
from foretoken.backend.call import Backend
from foretoken.server.api import anthropic, llamacpp, ollama, openai, responses
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.envelopes import INFILL_PATH, MESSAGES_PATH, error_response, id_headers, install_handlers
from foretoken.server.api.errors import CODE_KEY, ERROR_SCHEMA, error_responses, final
from foretoken.server.api.exchange import Api
from foretoken.server.api.model_routes import status_router, tokenization_router
from foretoken.server.record import (
    RECORDED_KEY,
    REQUEST_ID_HEADER,
    RequestObserver,
    RequestRecord,
    caller_of,
    request_id_of,
)

_log = logging.getLogger("foretoken.server")
RouterMaker = Callable[[Api], APIRouter]
GENERATING_PATHS = (
    *(openai.CHAT_PATH, openai.COMPLETION_PATH, responses.PATH, MESSAGES_PATH, ollama.CHAT_PATH, ollama.GENERATE_PATH),
    *("/completion", "/completions", "/chat/completions", "/responses", INFILL_PATH),
)


def create_app(
    backend: Backend,
    config: ApiConfig | None = None,
    observers: Sequence[RequestObserver] = (),
    routers: Sequence[APIRouter | RouterMaker] = (),
) -> FastAPI:
    """The application over a backend. `routers` are further routes: routers, or functions that make one of an `Api`."""
    api = Api(backend, config or ApiConfig(), tuple(observers))
    app = FastAPI(
        title="foretoken",
        version=__version__,
        description="Speculative decoding behind OpenAI's interface, Anthropic's, Ollama's, and llama.cpp's.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=error_responses(ERROR_SCHEMA),
    )
    app.state.api = api
    of_openai = (openai.chat_router(api), responses.responses_router(api), status_router(api))
    for router in (
        *((llamacpp.llama_router(api, of_openai),) if api.config.llama_cpp else ()),  # its /tokenize comes first
        *of_openai,
        openai.completion_router(api),
        anthropic.messages_router(api),
        tokenization_router(api),
        *((ollama.ollama_router(api),) if api.config.ollama else ()),
        *(router if isinstance(router, APIRouter) else router(api) for router in routers),
    ):
        app.include_router(router)
        app.include_router(_heads(router))
    install_handlers(app, api.config.retry_after_s)
    app.add_middleware(RequestLayer, api=api)
    return app


def _heads(router: APIRouter) -> APIRouter:
    """HEAD for every route of `router` that answers GET; servers send no body of such a response."""
    heads = APIRouter()
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            heads.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    return heads


class RequestLayer:
    """ASGI layer: a response to every request, whatever breaks, with `x-request-id` on it; and a record for every
    request for answers that was refused before it had a call.
    """

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app, self._api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id_of(scope)
        began_unix_s, began_s, status = time.time(), time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != REQUEST_ID_HEADER]
                message["headers"] = [*headers, *id_headers(scope["path"], request_id_of(scope))]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # the client gets an envelope, the log gets the traceback
            _log.exception("request %s broke down", request_id_of(scope))
            if status:
                raise
            error = final(500, "internal_error", "the server failed to answer this request")
            await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            if RECORDED_KEY not in scope and scope["path"] in GENERATING_PATHS and (status >= 400 or not status):
                self._record_refusal(scope, began_unix_s, time.perf_counter() - began_s, status or 500)

    def _record_refusal(self, scope: Scope, began_unix_s: float, duration_s: float, status: int) -> None:
        caller, info = caller_of(scope), self._api.backend.info
        self._api.tell(
            RequestRecord(
                request_id=request_id_of(scope),
                route=scope["path"],
                model="" if info is None else info.name,
                began_unix_s=began_unix_s,
                duration_s=duration_s,
                status=status,
                reason=scope.get(CODE_KEY, "internal_error"),
                key=caller.key,
                tenant=caller.tenant,
            )
        )
