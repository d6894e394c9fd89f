"""Addresses of OpenAI-compatible servers."""

from __future__ import annotations

from urllib.parse import urlsplit

from foretoken.errors import InputError
from foretoken.params import check_text

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
_PREFIXES = ("/v1", "/v3")  # the second is that of OpenVINO Model Server


def check_address(field: str, url: str, key_variable: str = DEFAULT_KEY_VARIABLE) -> None:
    """Refuse what is no address of a server, or holds a password.

    Raises:
        InputError: names `field`.
    """
    check_text(field, url)
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isprintable() or " " in url:
        raise InputError(field, url, "give the address of a server, such as http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise InputError(field, parts.hostname, f"holds a name or password; put the key into ${key_variable}")
    if parts.query or parts.fragment:
        raise InputError(field, url, "must end with the path: no ? and no #")


def base_of(url: str) -> str:
    """The address without the version of the API and without a slash at its end."""
    base = url.rstrip("/")
    return next((base.removesuffix(prefix) for prefix in _PREFIXES if base.endswith(prefix)), base).rstrip("/")


def prefix_of(url: str) -> str:
    """The version of the API that the address ends with, as paths begin; `/v1` where it names none."""
    return next((prefix for prefix in _PREFIXES if url.rstrip("/").endswith(prefix)), _PREFIXES[0])
