"""How the front and its workers read from sockets: into one buffer that all connections of a process share.

By default asyncio asks the C library for 256 KiB before each read, and gives back what was not filled. Freed blocks of
a few hundred bytes, which the library keeps for the next request of their size, then stay between the places where the
256 KiB were, so that no free place is large enough again and the heap grows at its end: by 135 bytes for each request
of a front that has 15 MB.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod

# A read of a worker's step or of a request fits; a longer message is read in several turns of the event loop.
_BUFFER = memoryview(bytearray(64 << 10))


class SharedBufferProtocol(asyncio.BufferedProtocol):
    """For protocols whose `data_received` takes bytes. The loop asks for the buffer, fills it and tells its protocol
    within one turn, so that no two connections ever hold it.
    """

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        """Where the next bytes are put."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were put there."""
        self.data_received(bytes(_BUFFER[:nbytes]))

    @abstractmethod
    def data_received(self, data: bytes) -> None:
        """Take them."""


class _StreamProtocol(asyncio.StreamReaderProtocol, SharedBufferProtocol):
    pass


async def open_stream(connection: socket.socket, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """`asyncio.open_connection` over a connected socket; `limit`: bytes that may wait to be read.

    Raises:
        OSError: the socket is no longer open.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit, loop)
    protocol = _StreamProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, sock=connection)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
