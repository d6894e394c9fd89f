"""How a request that generates is answered: whole or as a stream, and never after its client has left."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

from fastapi import Request, Response

from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import ApiError, final, json_response
from foretoken.server.api.exchange import Exchange
from foretoken.server.api.request_id import name_request
from foretoken.server.api.schemas import SamplingFields
from foretoken.server.api.streaming import EventStream

_log = logging.getLogger("foretoken.server")
_MAX_NOTICED = 256  # a client that makes up names must not fill the memory
_noticed: set[str] = set()


async def answer(
    exchange: Exchange, request: Request, stream: Callable[[], AsyncIterator[bytes]], whole: Callable[[], object]
) -> Response:
    """Run the call and respond: with the events of `stream`, or with what `whole` returns after the call's end.

    Raises:
        ApiError: it was refused, or failed before anything was sent.
    """
    try:
        if exchange.is_stream:
            await exchange.unless_gone(request.receive, exchange.open())
            response = EventStream(exchange, stream())
            await response.start(request.receive)
            return response
        await exchange.unless_gone(request.receive, _run(exchange))
        made = json_response(whole())
    except ApiError as error:
        await exchange.closed()
        exchange.finish(error.status_code, exchange.left or error.code)
        raise
    except Exception as error:
        _log.exception("request %s broke down", exchange.request_id)
        await exchange.closed()
        exchange.finish(500, "internal_error")
        raise final(500, "internal_error", "the server failed to answer this request") from error
    except BaseException:  # the server itself stops
        exchange.finish(500, "internal_error")
        raise
    exchange.finish(200)
    return made


async def _run(exchange: Exchange) -> None:
    await exchange.open()
    async for _ in exchange.events():
        pass


def name_of(body: SamplingFields, request: Request) -> None:
    """Take over the name that the body gives the request."""
    if body.request_id is not None:
        name_request(request.scope, body.request_id)


def notice_unknown(body: SamplingFields, config: ApiConfig) -> None:
    """Warn once of each unknown field, or refuse it.

    Raises:
        ApiError: a field is unknown and the server is strict.
    """
    unknown = [*(body.model_extra or ()), *((body.stream_options and body.stream_options.model_extra) or ())]
    if not unknown:
        return
    if config.strict:
        name = unknown[0] if unknown[0].isidentifier() and len(unknown[0]) <= 64 else None
        raise ApiError(400, "unknown_field", "the body has a field that this server does not know", name)
    for name in unknown:
        if name not in _noticed and len(_noticed) < _MAX_NOTICED:
            _noticed.add(name)
            _log.warning("ignored an unknown field of a request: %.64r", name)
