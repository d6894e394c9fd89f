"""The body of a request: strict JSON, before any field is looked at."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import ClientDisconnect

from foretoken.server.api.errors import CLIENT_GONE, ApiError, final

_IN_THREAD_BYTES = 64 << 10  # a larger body takes milliseconds to read, for which the event loop should not wait
# While a body is parsed no other thread runs, and its values take up to thirty times its bytes. Conversations of a
# million tokens have some 100,000 objects and lists, prompts of token ids a million values.
MAX_CONTAINERS = 1 << 18
MAX_VALUES = 1 << 21
_Item = TypeVar("_Item")
# A list in a request's model. Without `fail_fast` each wrong item is an error of a kilobyte: 12 GB for a body of 30 MB.
ListOf = Annotated[list[_Item], Field(fail_fast=True)]


def read_json(data: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """The value of a JSON text as UTF-8.

    Raises:
        ApiError: no JSON; two fields of one name, a byte order mark, NaN or an infinite number, half a surrogate pair;
            more values than a request needs.
    """
    _check_counts(data)
    if data.startswith(b"\xef\xbb\xbf"):
        raise _invalid("begins with a byte order mark; leave it out")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can spell halves of surrogate pairs, which are no text
        raise _invalid("has half of a surrogate pair in a text") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"is no JSON at byte {len(text[: error.pos].encode('utf-8', 'replace'))}") from None
    except RecursionError:
        raise _invalid("is nested too deep") from None
    except ValueError:  # an integer of more digits than Python reads
        raise _invalid("has a number of too many digits") from None
    return value


def _check_counts(data: bytes) -> None:
    """Refuse more values than a request needs, before the time is taken to parse them."""
    if len(data) <= MAX_CONTAINERS or (_num_containers(data) <= MAX_CONTAINERS and data.count(b",") < MAX_VALUES):
        return
    quoted = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_count(quoted.count(b'"') // 2, MAX_VALUES, "texts")
    bare = b"".join(quoted.split(b'"')[::2])  # without the texts, which may have commas and brackets
    _check_count(_num_containers(bare), MAX_CONTAINERS, "objects and lists")
    _check_count(bare.count(b",") + 1, MAX_VALUES, "values")


def _check_count(found: int, most: int, name: str) -> None:
    if found > most:
        raise ApiError(413, "body_too_large", f"the body has {found} {name}: at most {most} are taken")


def _num_containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_json", f"the body {message}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ApiError(400, "duplicate_key", "the body has an object with two fields of one name")
    return found


def _constant(_name: str) -> float:
    raise _invalid("has a number that is not finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _invalid("has a number that is not finite")
    return number


class RequestPart(BaseModel):
    """A body, or an object in one, with types taken strictly; fields that it does not name are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ClosedPart(BaseModel):
    """The same for an object of our own: a field that it does not name is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _with_few_fields(cls, value: object) -> object:
        """Of more fields than it names one of the first is unknown, too; each unknown one would be an error."""
        most = len(cls.model_fields) + 1
        return dict(islice(value.items(), most)) if isinstance(value, dict) and len(value) > most else value


class StrictRequest(Request):
    """A request whose body is read by `read_json`, and only as uncompressed JSON."""

    async def body(self) -> bytes:
        """The body's bytes.

        Raises:
            ApiError: another content type, or a compressed body.
        """
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "unsupported_media_type", "the content type must be application/json")
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError(415, "unsupported_media_type", "the body must not be compressed")
        try:
            return await super().body()
        except ClientDisconnect:
            raise final(CLIENT_GONE, "client_gone", "the client closed the connection") from None

    async def json(self) -> Any:  # noqa: ANN401 - any JSON value
        """The body's value.

        Raises:
            ApiError: see `read_json`.
        """
        data = await self.body()
        if len(data) > _IN_THREAD_BYTES:
            return await asyncio.to_thread(read_json, data)
        return read_json(data)


class JsonRoute(APIRoute):
    """A route with a body of strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """See `APIRoute`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle


class UntypedJsonRoute(JsonRoute):
    """A route with a body of strict JSON, whatever content type it has: for an interface whose clients name none.

    A page of another site may send such a request without asking first; the guard refuses it by its `Origin`.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """See `APIRoute`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            request.scope["headers"] = [*others, (b"content-type", b"application/json")]
            return await handler(request)

        return handle
