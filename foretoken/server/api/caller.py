"""Who sent a request, as the layer in front of the application found out."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

SCOPE_KEY = "foretoken.caller"


@dataclass(frozen=True)
class Caller:
    """`key` is the name of the API key, never the key; `tenant` names those who share caches. "" without keys."""

    key: str = ""
    tenant: str = ""


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """The caller of an ASGI scope, under `SCOPE_KEY`; nobody in particular where no layer checks keys."""
    found = scope.get(SCOPE_KEY, Caller())
    assert isinstance(found, Caller)
    return found


def tenant_of(caller: Caller, cache_salt: str) -> str:
    """The tenant of a request: the key's own, divided by the salt that the request gave. No name contains NUL, so two
    pairs never give one tenant.
    """
    return f"{caller.tenant}\0{cache_salt}" if cache_salt else caller.tenant
