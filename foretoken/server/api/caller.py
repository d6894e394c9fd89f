"""Who sent a request, as the layer in front of the application found out."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

STATE_KEY = "identity"  # in `scope["state"]`


class Caller(Protocol):
    """`name` is that of the API key, never the key; `tenant` names those who share caches. "" without keys."""

    @property
    def name(self) -> str:
        """Name of the key."""

    @property
    def tenant(self) -> str:
        """Whose caches are shared."""


@dataclass(frozen=True)
class Nobody:
    """The caller where no layer checks keys."""

    name: str = ""
    tenant: str = ""


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """The caller of an ASGI scope."""
    found: Caller = scope.get("state", {}).get(STATE_KEY, Nobody())
    return found


def tenant_of(caller: Caller, cache_salt: str) -> str:
    """The tenant of a request: the key's own, divided by the salt that the request gave. No tenant of a key has a NUL
    in its name, so two pairs never give one tenant.
    """
    return f"{caller.tenant}\0{cache_salt}" if cache_salt else caller.tenant
