"""The socket that the server listens on, opened before anything is loaded."""

from __future__ import annotations

import errno
import socket

from foretoken.errors import ConfigError, StorageError

_BACKLOG = 2048  # connections that wait to be accepted; the kernel's own limit cuts it


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address of this machine.

    Raises:
        ConfigError: no such address.
        StorageError: the port is in use, or needs other rights.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError("host", host, "is no address of this machine") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", host, "is no address of this machine") from error
        if error.errno == errno.EADDRINUSE:
            raise StorageError(
                f"port {port} of {host} is in use: stop the other program, or give another --port"
            ) from error
        raise StorageError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    found.setblocking(False)
    return found


def url_of(listener: socket.socket, is_tls: bool) -> str:
    """The address of the server as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
