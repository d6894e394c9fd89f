"""API keys: kept as SHA-256 digests, compared in constant time, never logged; without one, no public address."""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.files import read_text
from foretoken.server.guard.config import GuardConfig, is_loopback
from foretoken.server.record import Caller

MIN_KEY_CHARACTERS = 8  # shorter ones can be tried out over the network
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_CHARACTERS},512}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OF_A_KEY = frozenset({"key", "sha256", "tenant", "admin"})


@dataclass(frozen=True)
class Identity:
    """Who sends a request, and whether admin routes are open to them. Without keys everybody is the same caller."""

    caller: Caller = field(default_factory=Caller)
    is_admin: bool = False


@dataclass(frozen=True)
class ApiKey:
    """One key by its SHA-256 `digest`, and what a request with it is."""

    digest: bytes = field(repr=False)
    identity: Identity


class KeyRing:
    """All keys of a server."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        names, digests = {key.identity.caller.key for key in keys}, {key.digest for key in keys}
        for what, different in (("name", names), ("key", digests)):
            if len(different) < len(keys):
                raise ConfigError("keys", len(keys), f"two keys have the same {what}: give each its own")

    @property
    def is_open(self) -> bool:
        """Whether there is no key at all: then user routes are open."""
        return not self._keys

    @property
    def has_admin(self) -> bool:
        """Whether any key opens admin routes."""
        return any(key.identity.is_admin for key in self._keys)

    def find(self, token: bytes) -> Identity | None:
        """Who `token` belongs to. Every key is compared, whichever fits, so the time tells nothing about them."""
        digest = hashlib.sha256(token).digest()
        found: Identity | None = None
        for key in self._keys:
            if secrets.compare_digest(digest, key.digest):
                found = key.identity
        return found


def key_ring(config: GuardConfig) -> KeyRing:
    """The keys of a configuration.

    Raises:
        ConfigError: a key that is malformed, or given twice; StorageError: the file of keys cannot be read.
    """
    keys = []
    if config.api_key is not None:
        keys.append(_hashed(config.api_key, "api_key", Identity(Caller("default", "default"))))
    if config.admin_key is not None:
        keys.append(_hashed(config.admin_key, "admin_key", Identity(Caller("admin", "admin"), is_admin=True)))
    if config.keys_file is not None:
        keys += read_keys(Path(config.keys_file))
    return KeyRing(keys)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a TOML file: a table `[NAME]` for each, with `key` or `sha256` (64 hexadecimal digits), and
    optionally `tenant` (the name, without one) and `admin` (false).

    Raises:
        ConfigError: something in it is malformed; names the table, never the key.
        StorageError: it cannot be read.
    """
    try:
        tables = tomllib.loads(read_text("keys_file", path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("keys_file", str(path), f"is not TOML: {_place(error)}") from None
    return [_key_of(name, table) for name, table in tables.items()]


def _place(error: tomllib.TOMLDecodeError) -> str:
    """Where the file is malformed, without its text, which may be a key."""
    found = re.search(r"\(at .*\)$", str(error))
    return found.group().strip("()") if found else "see its syntax"


def _key_of(name: str, table: Any) -> ApiKey:  # noqa: ANN401 - whatever the file holds
    where = f"keys_file [{name[:64]}]"
    if not isinstance(table, Mapping) or not _NAME.fullmatch(name):
        raise ConfigError(where, type(table).__name__, "write a table [NAME] for each key; letters, digits, . _ -")
    unknown = sorted(set(table) - _OF_A_KEY)
    if unknown:
        raise ConfigError(where, unknown[0], f"unknown; a key has {', '.join(sorted(_OF_A_KEY))}")
    tenant, is_admin = table.get("tenant", name), table.get("admin", False)
    if not isinstance(tenant, str) or not _NAME.fullmatch(tenant) or not isinstance(is_admin, bool):
        raise ConfigError(where, "tenant, admin", "tenant is a name of letters, digits, . _ -; admin is true or false")
    if ("key" in table) == ("sha256" in table):
        raise ConfigError(where, len(table), "give either key or sha256")
    identity = Identity(Caller(name, tenant), is_admin)
    if "key" in table:
        return _hashed(table["key"], where, identity)
    if not isinstance(table["sha256"], str) or not _DIGEST.fullmatch(table["sha256"].lower()):
        raise ConfigError(where, "sha256", "must be 64 hexadecimal digits")
    return ApiKey(bytes.fromhex(table["sha256"]), identity)


def _hashed(token: object, where: str, identity: Identity) -> ApiKey:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        size = len(token) if isinstance(token, str) else 0
        remedy = f"{size} characters: a key has {MIN_KEY_CHARACTERS} to 512, ASCII without spaces"
        raise ConfigError(where, "(not shown)", remedy)
    return ApiKey(hashlib.sha256(token.encode()).digest(), identity)


def refuse_public_bind(host: str, keys: KeyRing, insecure: bool) -> None:
    """Call before listening on `host`.

    Raises:
        ConfigError: others than this machine can reach it, there is no key, and `insecure` does not allow that.
    """
    if not is_loopback(host) and keys.is_open and not insecure:
        remedy = (
            "other machines can reach this address, and no key is set: give --api-key (or FORETOKEN_API_KEY, or a file "
            "of keys), listen on 127.0.0.1, or add --insecure"
        )
        raise ConfigError("host", host, remedy)
