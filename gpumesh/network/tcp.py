"""Listening TCP sockets."""

from __future__ import annotations

import errno
import socket

from gpumesh.network.address import Address

BACKLOG = 512  # A whole mesh that reconnects at once.


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; an address of a former run that still lingers in the kernel does not stand in the way.

    Raises:
        OSError: The port is taken, or the address is not this machine's; the message says which and what to do.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot bind {host!r}: {error.strerror}; use an address of this machine") from error
    except OSError as error:
        where = Address(host, port)
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                error.errno, f"port {port} on {host} is taken by another program; end it, or choose another port with --port"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(error.errno, f"{host} is not an address of this machine; use 0.0.0.0 for all of them") from error
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}") from error
