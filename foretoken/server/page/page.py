"""The page at `/`: one document with its style and script inside, and a policy that lets nothing else run or load."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter, Response

# In the order of their imports: what a file needs comes before it.
SCRIPTS = (
    "stream.js",
    "tokens.js",
    "dom.js",
    "steps.js",
    "answer.js",
    "settings.js",
    "figures.js",
    "board.js",
    "turn.js",
    "app.js",
)
_IMPORT = re.compile(r"^import .*;\n", flags=re.MULTILINE)
_EXPORT = re.compile(r"^export ", flags=re.MULTILINE)


def page_router() -> APIRouter:
    """A router that serves the page; it is read from the package once."""
    html, policy = document(), content_policy()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
    }
    router = APIRouter()

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    return router


def document() -> str:
    """The page with style and script in it."""
    html = _read("page.html")
    return html.replace("/*{style}*/", _style()).replace("/*{script}*/", script())


def script() -> str:
    """The modules as one: without their imports, which name each other, and without `export`."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _read(name))) for name in SCRIPTS)


def content_policy() -> str:
    """The Content-Security-Policy: this script and style by their hashes, requests to this server, nothing else."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script())}'",
            f"style-src '{_hash(_style())}'",
            "connect-src 'self'",
            "img-src data:",  # the empty icon, so that a browser asks for none
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _style() -> str:
    return _read("style.css")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
