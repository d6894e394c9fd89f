"""How the front and its workers read from sockets: into one buffer that all connections of an event loop share.

By default asyncio asks the C library for 256 KiB before each read, and gives back what was not filled. Freed blocks of
a few hundred bytes, which the library keeps for the next request of their size, then stay between the places where the
256 KiB were, so that no free place is large enough again and the heap grows at its end: by 135 bytes for each request
of a front that has 15 MB.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

# A read of a worker's step or of a request fits; a longer message is read in several turns of the event loop.
_BUFFER_BYTES = 64 << 10


class _OfThread(threading.local):
    """Python lets other threads run while the kernel fills a buffer: each thread, which runs one loop, has its own."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))


_here = _OfThread()


class SharedBufferProtocol(asyncio.BufferedProtocol):
    """For protocols whose `data_received` takes bytes. The loop asks for the buffer, fills it and tells its protocol
    within one turn, so that no two connections ever hold it.
    """

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        """Where the next bytes are put."""
        return _here.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were put there."""
        self.data_received(bytes(_here.buffer[:nbytes]))

    @abstractmethod
    def data_received(self, data: bytes) -> None:
        """Take them."""


class _StreamProtocol(asyncio.StreamReaderProtocol, SharedBufferProtocol):
    pass


async def open_stream(limit: int, **where: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:  # noqa: ANN401 - asyncio's
    """`asyncio.open_connection` to `where`: `sock`, or `host` and `port`; `limit`: bytes that may wait to be read.

    Raises:
        OSError: the socket is no longer open, or nobody listens there.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit, loop)
    protocol = _StreamProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, **where)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


Taken = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(taken: Taken, host: str, limit: int) -> asyncio.Server:
    """`asyncio.start_server` on a free port of `host`, see `open_stream`.

    Raises:
        OSError: no such address here.
    """
    loop = asyncio.get_running_loop()

    def protocol() -> _StreamProtocol:
        return _StreamProtocol(asyncio.StreamReader(limit, loop), taken, loop=loop)

    return await loop.create_server(protocol, host, 0)
