"""Reading from sockets: what is asked of the C library for it, and what arrives."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from foretoken.server.guard.config import GuardConfig
from foretoken.server.guard.connection import uvicorn_options
from foretoken.server.receiving import listen, open_stream
from tests.server.test_guard_connection import echo_length

_KIB = 1 << 10
_READ_BYTES = 256 * _KIB  # what asyncio asks for by itself


async def peak_of(ask: Callable[[], bytes]) -> tuple[bytes, int]:
    """What `ask`, run in a thread, returns the second time, and the most bytes that Python held meanwhile."""
    await asyncio.to_thread(ask)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        answer = await asyncio.to_thread(ask)
        return answer, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_requests_are_read_without_large_blocks() -> None:
    async def run() -> tuple[bytes, int]:
        config = uvicorn.Config(echo_length, port=0, lifespan="off", log_config=None, **uvicorn_options(GuardConfig()))
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()

        def ask() -> bytes:
            with socket.create_connection(address) as client:
                client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello")
                return client.recv(_KIB)

        try:
            return await peak_of(ask)
        finally:
            server.should_exit = True
            await serving

    answer, peak = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert peak < _READ_BYTES


def test_messages_between_processes_are_read_without_large_blocks() -> None:
    async def run() -> tuple[bytes, int]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reader, writer = await open_stream(_READ_BYTES, sock=ours)

        async def answer() -> None:
            while data := await reader.readexactly(5):
                writer.write(data[::-1])

        def ask() -> bytes:
            theirs.sendall(b"hello")
            return theirs.recv(_KIB)

        answering = asyncio.create_task(answer())
        found = await peak_of(ask)
        answering.cancel()
        writer.close()
        theirs.close()
        return found

    answer, peak = asyncio.run(run())
    assert answer == b"olleh"
    assert peak < _READ_BYTES


def test_what_is_longer_than_the_buffer_arrives_whole_beside_others() -> None:
    async def run() -> None:
        async def one(text: bytes) -> None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            reader, writer = await open_stream(_KIB, sock=ours)
            sending = asyncio.create_task(asyncio.to_thread(theirs.sendall, text))
            assert await reader.readexactly(len(text)) == text
            await sending
            theirs.close()
            assert await reader.read() == b""
            writer.close()

        texts = [bytes([number]) * (300 * _KIB + number) for number in range(1, 4)]
        await asyncio.gather(*map(one, texts))

    asyncio.run(run())


def test_loops_of_several_threads_read_what_came_to_them() -> None:
    """Each over TCP, as a front and its replicas; a thread may run while the kernel fills the buffer of another."""

    async def run(text: bytes) -> None:
        is_over = asyncio.Event()

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(_READ_BYTES):
                writer.write(data)
            writer.close()
            await writer.wait_closed()
            is_over.set()

        server = await listen(echo, "127.0.0.1", _KIB)
        host, port = server.sockets[0].getsockname()
        reader, writer = await open_stream(_KIB, host=host, port=port)
        for _ in range(20):
            writer.write(text)
            assert await reader.readexactly(len(text)) == text
        writer.close()
        await writer.wait_closed()
        await is_over.wait()
        server.close()
        await server.wait_closed()

    texts = [bytes([number]) * 300 * _KIB for number in range(1, 4)]
    with ThreadPoolExecutor(len(texts)) as threads:
        list(threads.map(lambda text: asyncio.run(run(text)), texts))
