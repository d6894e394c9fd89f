"""What is known of an HTTP request, and its record once it has finished: the source of logs, metrics and history."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

CALLER_KEY = "foretoken.caller"
REQUEST_ID_HEADER = b"x-request-id"
_VALID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_NAME_KEY = "foretoken.request_id"
RECORDED_KEY = "foretoken.recorded"  # of the ASGI scope: its request has a record


@dataclass(frozen=True)
class Caller:
    """`key` is the name of the API key, never the key; `tenant` names those who share caches. "" without keys."""

    key: str = ""
    tenant: str = ""


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """The caller of an ASGI scope, under `CALLER_KEY`; nobody in particular where no layer checks keys."""
    found = scope.get(CALLER_KEY, Caller())
    assert isinstance(found, Caller)
    return found


def tenant_of(caller: Caller, cache_salt: str) -> str:
    """The key's tenant, divided by the request's salt. No name contains NUL: two pairs never give one tenant."""
    return f"{caller.tenant}\0{cache_salt}" if cache_salt else caller.tenant


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """The request's name: the one in the scope, a valid one in its header, or a new one; kept in the scope."""
    found = scope.get(_NAME_KEY)
    if not isinstance(found, str):
        sent = (value for name, value in scope.get("headers", ()) if name == REQUEST_ID_HEADER)
        given = next(sent, b"").decode("latin-1")
        found = scope[_NAME_KEY] = given if _VALID.fullmatch(given) else secrets.token_hex(12)
    return found


def name_request(scope: MutableMapping[str, Any], request_id: str) -> None:
    """Call the request as its body says."""
    scope[_NAME_KEY] = request_id


@dataclass(frozen=True)
class RequestRecord:
    """Figures of one request, never its texts. Times in seconds; `began_unix_s` is wall-clock time.

    `stats` has `RequestStats.as_dict()` of every answer that ended, in order of its index. `status` is the HTTP code
    that was sent, 499 where the client left. `reason` says why it did not succeed: "client", "slow_consumer",
    "queue_deadline", "error" or a rejection; "" if it did. `key` is the name of the API key, never the key.
    `accepted_prediction_tokens` and `rejected_prediction_tokens` are None without a prediction.
    """

    request_id: str
    route: str
    model: str
    began_unix_s: float
    duration_s: float
    status: int
    reason: str = ""
    is_stream: bool = False
    finish_reasons: tuple[str, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    ttft_s: float | None = None
    inter_token_s: tuple[float, ...] = ()  # gaps between pieces, per token
    key: str = ""
    tenant: str = ""
    slice: str = ""
    drafter: str = ""
    stats: tuple[Mapping[str, Any], ...] = ()
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters for traces, by OpenTelemetry name


class RequestObserver(Protocol):
    """Takes in finished requests. Must return at once; what it raises is logged and dropped."""

    def finished(self, record: RequestRecord) -> None:
        """A request ended, however it did."""
