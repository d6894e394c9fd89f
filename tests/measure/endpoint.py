"""A tiny OpenAI-compatible endpoint that streams what a test says, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[int, dict[str, Any]], "Reply"]


@dataclass(frozen=True)
class Reply:
    """An answer: its status, the events of its stream, and whether it ends with [DONE]."""

    events: tuple[dict[str, Any], ...] = ()
    status: int = 200
    has_end: bool = True
    body: bytes | None = None  # in place of a stream


def tokens(*texts: str, **last: Any) -> Reply:
    """A stream of one event per text, two tokens each, with running usage; `last` are fields of the usage event."""
    events = [
        {"choices": [{"index": 0, "text": text}], "usage": {"completion_tokens": 2 * number, "prompt_tokens": 7}}
        for number, text in enumerate(texts, 1)
    ]
    usage = {"completion_tokens": 2 * len(texts), "prompt_tokens": 7}
    return Reply((*events, {"choices": [], "usage": usage} | last))


@dataclass
class Fake:
    """What the endpoint answers with, and what it was asked."""

    answer: Answer = lambda _number, _body: tokens("a", "b", "c")
    metrics: Callable[[], str] | None = None
    url: str = ""
    owner: str = "someone"
    tls: ssl.SSLContext | None = None
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readline()).strip():
                path, headers = head.split()[1].decode(), {}
                while line := (await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status, kind, data = self.reply(path, headers, body)
                writer.write(
                    f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def reply(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        if path in ("/v1/models", "/v3/models"):
            return 200, "application/json", json.dumps({"data": [{"id": "fake", "owned_by": self.owner}]}).encode()
        if path in ("/version", "/server_info", "/props"):
            return 404, "text/plain", b""
        if path == "/metrics":
            return (404, "text/plain", b"") if self.metrics is None else (200, "text/plain", self.metrics().encode())
        self.asked.append((path, headers, json.loads(body)))
        reply = self.answer(len(self.asked) - 1, self.asked[-1][2])
        if reply.body is not None:
            return reply.status, "application/json", reply.body
        lines = [f"data: {json.dumps(event)}\n\n" for event in reply.events] + ["data: [DONE]\n\n"] * reply.has_end
        return reply.status, "text/event-stream", "".join([": ping\n\n", *lines]).encode()


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Serve a fake on a port of its own while the block runs."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ends = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0, ssl=fake.tls)
        fake.url = f"http{'s' * (fake.tls is not None)}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await ends.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.close()
