"""Talking HTTP in tests: to an application in this process, and to one behind a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import httpx2
import uvicorn
from starlette.types import ASGIApp

from foretoken.server.record import RequestRecord

URL = "http://test"
_Result = TypeVar("_Result")
JSON = {"content-type": "application/json"}


def client_of(app: ASGIApp) -> httpx2.AsyncClient:
    """A client of an application in this process."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL, timeout=60)


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """What a coroutine returns; no task may be left then."""

    async def checked() -> _Result:
        result = await work
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # those that end by themselves are given a moment
            await asyncio.wait(left, timeout=30)
        assert not [task for task in left if not task.done()]
        return result

    return asyncio.run(checked())


def events_of(text: str) -> list[Any]:
    """The JSON events of a stream; the last one must be "[DONE]" or an error."""
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in parts)
    if parts[-1] == "data: [DONE]":
        parts = parts[:-1]
    else:
        assert "error" in json.loads(parts[-1].removeprefix("data: "))
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def text_of(events: Sequence[Any], index: int = 0) -> str:
    """The text of one answer, put together from a stream's events."""
    choices = [choice for event in events for choice in event.get("choices", ()) if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


class Records:
    """An observer that keeps what it is given."""

    def __init__(self) -> None:
        self.all: list[RequestRecord] = []

    def finished(self, record: RequestRecord) -> None:
        """See `RequestObserver`."""
        self.all.append(record)


class Serving:
    """Applications behind uvicorn on loopback ports, each in a thread."""

    def __init__(self) -> None:
        self._servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def __call__(self, app: ASGIApp, **options: Any) -> tuple[str, int]:
        """Host and port of an application that is served now."""
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, http="h11", ws="none", lifespan="off", log_level="critical", **options
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, name="test-server", daemon=True)
        thread.start()
        self._servers.append((server, thread))
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        return server.servers[0].sockets[0].getsockname()[:2]

    def close(self) -> None:
        """Stop all of them."""
        for server, thread in self._servers:
            server.should_exit = True
            server.force_exit = True
            thread.join(60)
            assert not thread.is_alive()


class RawClient:
    """A connection that the test itself reads and leaves."""

    def __init__(self, address: tuple[str, int], body: object, path: str = "/v1/completions", buffer: int = 0) -> None:
        self.socket = socket.socket()
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(20)
        self.socket.connect(address)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        )
        self.socket.sendall(head.encode() + b"\r\n" + data)

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to where `mark` has come."""
        data = b""
        while mark not in data:
            more = self.socket.recv(4096)
            assert more, data[-200:]
            data += more
        return data

    def close(self) -> None:
        """Close the connection both ways."""
        self.socket.close()
