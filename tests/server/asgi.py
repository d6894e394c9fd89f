"""A small client for ASGI applications: requests as bytes in messages, with any path, header and order of events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = (b"host", b"localhost:8000")


@dataclass
class Reply:
    """What an application sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


def scope_of(method: str, path: str, headers: Sequence[tuple[bytes, bytes]] = (HOST,)) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }


async def ask(app: Any, scope: dict[str, Any], *parts: bytes) -> Reply:
    """One request with its body in `parts`; then the client waits for the answer."""
    reply, waiting = Reply(), list(parts) or [b""]

    async def receive() -> dict[str, Any]:
        if not waiting:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: dict[str, Any]) -> None:
        reply.messages.append(message)
        if message["type"] == "http.response.start":
            assert not reply.status, "two responses"
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    await app(scope, receive, send)
    return reply
