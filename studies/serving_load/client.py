"""A client of streams that costs little: it reads bytes, counts events by their line, and parses the last one."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_DATA, _DONE = b"data: ", b"data: [DONE]"


@dataclass
class StreamAnswer:
    """One request as its client saw it. `times_s` are those of its events; `error` is "" for a complete answer, "left"
    where the client went, the HTTP status, "cut" or "stream".
    """

    sent_s: float
    times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_tokens: int = 0
    error: str = "cut"

    @property
    def gaps_s(self) -> list[float]:
        """Times between two events."""
        return [after - before for before, after in pairwise(self.times_s)]


async def ask(
    port: int,
    body: dict[str, Any],
    key: str = "",
    leave_after: int | None = None,
    pause_s: float = 0.0,
    max_s: float = 600.0,
) -> StreamAnswer:
    """Stream one completion from this machine. The client leaves after `leave_after` events, and waits `pause_s` behind
    each read.
    """
    answer = StreamAnswer(time.perf_counter())
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(max_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(_request(body, key))
            status = (await reader.readline()).split()[1:2]
            if status != [b"200"]:
                answer.error = status[0].decode() if status else "cut"
            else:
                answer.error = await _events(reader, answer, leave_after, pause_s)
    except TimeoutError:
        answer.error = "timeout"
    except (OSError, ValueError):
        answer.error = "cut"
    finally:
        answer.ended_s = time.perf_counter()
        if writer is not None:
            writer.close()
    return answer


async def get(port: int, path: str, key: str = "") -> bytes:
    """The body of a short answer, or b"" if it is an error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Connection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return body if head.split()[1:2] == [b"200"] else b""


async def post(port: int, path: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    """The answer to a request that is not streamed.

    Raises:
        RuntimeError: it is an error.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_message(path, body, key))
    head, _, data = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    if head.split()[1:2] != [b"200"]:
        raise RuntimeError(f"{path}: {head[:15].decode()}: {data[:500].decode()}")
    return dict(json.loads(data))


def _request(body: dict[str, Any], key: str) -> bytes:
    return _message("/v1/completions", {"stream": True, "stream_options": {"include_usage": True}} | body, key)


def _message(path: str, body: dict[str, Any], key: str) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _events(reader: asyncio.StreamReader, answer: StreamAnswer, leave_after: int | None, pause_s: float) -> str:
    """Read to the end of the stream; the error, or ""."""
    last = b""
    while line := await reader.readline():
        if line.startswith(_DONE):
            answer.num_tokens = json.loads(last.removeprefix(_DATA))["usage"]["completion_tokens"]
            return ""
        if not line.startswith(_DATA):
            continue
        if line.startswith(b'data: {"error"'):
            return "stream"
        last = line
        answer.times_s.append(time.perf_counter())
        if leave_after is not None and len(answer.times_s) >= leave_after:
            return "left"
        if pause_s:
            await asyncio.sleep(pause_s)
    return "cut"
