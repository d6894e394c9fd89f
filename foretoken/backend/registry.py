"""Which backends exist: one line each in `BACKENDS`; a server is named by its address.

The table names factories by import strings, so that help is printed without torch and without other engines.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from foretoken.backend.answering import AnsweringBackend
from foretoken.errors import InputError
from foretoken.params import check_text

# ---- addresses of OpenAI-compatible servers

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


LOCAL = "local"  # the engine in this process


@dataclass(frozen=True)
class BackendOptions:
    """What a factory is given.

    `model` and `draft` are folders, files or hub ids, and `dtype` and `device` are those of `EngineConfig`. `threads`
    None: as many as the engine takes by itself. `served_model` is the name of a server's model ("": its first), and
    `model_option` what the user names that with.
    """

    name: str
    model: str
    draft: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    served_model: str = ""
    model_option: str = "--model"


Factory = Callable[[BackendOptions], AnsweringBackend]

BACKENDS: dict[str, str] = {
    LOCAL: "foretoken.backend.local_answers:open_local",
    "transformers": "foretoken.backend.transformers:open_transformers",
    "llama.cpp": "foretoken.backend.llama_cpp:open_llama_cpp",
    "openvino": "foretoken.backend.openvino:open_openvino",
}
_HTTP = "foretoken.backend.http:open_http"
_SCHEMES = ("http://", "https://")


def is_address(name: str) -> bool:
    """Whether a backend's name is the address of a server."""
    return name.startswith(_SCHEMES)


def check_backends(names: Sequence[str], field: str = "backends") -> None:
    """Refuse (`InputError`) names of no backend, before any is opened; `field` is the option that holds them."""
    if not names:
        raise InputError(field, "", f"name at least one of {_known()}")
    for name in names:
        if is_address(name):
            check_address(field, name)
        elif name not in BACKENDS:
            raise InputError(field, name, f"choose from {_known()}")


def open_backend(options: BackendOptions) -> AnsweringBackend:
    """The backend called `options.name` on a model, ready to answer.

    A server answers with the model that it serves, whatever `model` and `draft` say here.

    Raises:
        InputError: no such backend, an option that it does not have, or a package that is missing; says the remedy.
        UnavailableError: the server does not answer.
        ModelError, StorageError: the model or the engine's programs cannot be used.
    """
    check_backends((options.name,))
    module, _, function = BACKENDS.get(options.name, _HTTP).partition(":")
    factory = cast(Factory, getattr(importlib.import_module(module), function))
    return factory(options)


def _known() -> str:
    return f"{', '.join(BACKENDS)}, or the address of an OpenAI-compatible server such as http://127.0.0.1:8000"
