"""Listening TCP sockets."""

from __future__ import annotations

import errno
import socket

from gpumesh.network.address import Address

BACKLOG = 512  # A whole mesh that reconnects at once.
ALL = ""  # Every address of this machine, IPv4 and IPv6.
ANY = (ALL, "0.0.0.0", "::")  # What stands for many addresses.


def near(host: str) -> str:
    """The address under which this machine reaches what listens on `host`."""
    return {ALL: "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; an address of a former run that still lingers in the kernel does not stand in the way.

    Args:
        host: An address of this machine; `ALL` for every one, those of IPv4 as `::ffff:a.b.c.d` where there is IPv6.
        port: 0 picks a free one.

    Raises:
        OSError: The port is taken, or the address is not this machine's; the message says which and what to do.
    """
    try:
        if host == ALL:
            return _listen_everywhere(port)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot bind {host!r}: {error.strerror}; use an address of this machine") from error
    except OSError as error:
        where = Address(host or "0.0.0.0", port)
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, _taken(host, port)) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(
                error.errno, f"{host} is not an address of this machine; leave --host out for all that it has"
            ) from error
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}") from error


def _taken(host: str, port: int) -> str:
    """Who has the port, and what to do."""
    from gpumesh.network.occupant import free_port_after, occupant

    found = occupant(near(host), port)
    where = f"port {port}{f' on {host}' if host != ALL else ''}"
    return f"{where} is taken by {found.text}; {found.advice(free=free_port_after(port))}"


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server((ALL, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (
                errno.EADDRNOTAVAIL,
                errno.EAFNOSUPPORT,
            ):  # Else IPv6 is known to the system, and switched off.
                raise
    return socket.create_server((ALL, port), backlog=BACKLOG)
