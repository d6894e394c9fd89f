"""The check before the server listens: no public address without a key."""

from __future__ import annotations

from foretoken.errors import ConfigError
from foretoken.server.guard.config import is_loopback
from foretoken.server.guard.keys import KeyRing


def refuse_public_bind(host: str, keys: KeyRing, insecure: bool) -> None:
    """Call before listening on `host`.

    Raises:
        ConfigError: others than this machine can reach it, there is no key, and `insecure` does not allow that.
    """
    if not is_loopback(host) and keys.is_open and not insecure:
        raise ConfigError(
            "host",
            host,
            "other machines can reach this address, and no key is set: give --api-key (or FORETOKEN_API_KEY, or a file "
            "of keys), listen on 127.0.0.1, or add --insecure",
        )
