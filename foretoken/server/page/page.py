"""The page at `/`: one document with its style and script inside, and a policy that lets nothing else run or load; and
`/v1/stats`, the counters of the backend with what the page needs to know of the model.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from importlib import resources
from typing import Any

from fastapi import APIRouter, Response

from foretoken.config import RULES
from foretoken.errors import UnavailableError
from foretoken.registry import known_drafters, traits_of
from foretoken.server.api.exchange import Api
from foretoken.server.api.speculation import offered_specs

_SHOWN = ("name", "max_model_len", "has_tokenizer", "has_chat_template")  # of the model
# In the order of their imports: what a file needs comes before it.
SCRIPTS = ("stream.js", "tokens.js", "dom.js", "answer.js", "settings.js", "board.js", "app.js")
_IMPORT = re.compile(r"^import .*;\n", flags=re.MULTILINE)
_EXPORT = re.compile(r"^export ", flags=re.MULTILINE)


def page_router() -> APIRouter:
    """A router that serves the page; it is read from the package once."""
    html, policy = document(), content_policy()
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "referrer-policy": "no-referrer"}
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    return router


def document() -> str:
    """The page with style and script in it."""
    html = _read("page.html")
    return html.replace("/*{style}*/", _read("style.css")).replace("/*{script}*/", script())


def script() -> str:
    """The modules as one: without their imports, which name each other, and without `export`."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _read(name))) for name in SCRIPTS)


def content_policy() -> str:
    """The Content-Security-Policy: this script and style by their hashes, requests to this server, nothing else."""
    style = _hash(_read("style.css"))
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script())}'",
            f"style-src '{style}'",
            "connect-src 'self'",
            "img-src data:",  # the empty icon, so that a browser asks for none
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def stats_router(api: Api) -> APIRouter:
    """A router with the numbers of the backend; the page computes rates from two readings."""
    router, backend = APIRouter(), api.backend

    @router.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """Counters since the engine started, gauges, and the served model; `engine` is null while there is none."""
        info = backend.info
        try:
            engine = await backend.stats()
        except UnavailableError:
            engine = None
        return {
            "time_s": time.monotonic(),
            "state": backend.state,
            "model": None if info is None else {name: getattr(info, name) for name in _SHOWN},
            "drafters": [] if info is None else list(offered_specs(info, api.config)),
            "groups": drafter_groups(),
            "rules": list(RULES),
            "engine": engine,
        }

    return router


def drafter_groups() -> dict[str, str]:
    """Each drafter with the group of its tokens on the page: model, lookup or prediction."""
    groups = {name: "lookup" if traits_of(name).is_lookup else "model" for name in known_drafters()}
    return groups | {"predicted": "prediction"}
