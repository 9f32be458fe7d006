"""From an address to a connected socket, and what it means when there is none; for whoever waits in his own thread.

Several IPs of one name are tried side by side, each a little after the one before: one that swallows packets costs CONNECT_STAGGER_SECONDS.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from gpumesh.config import CONNECT_STAGGER_SECONDS, UNSENT_KERNEL_BYTES
from gpumesh.errors import AuthenticationError, MeshError, MeshUnavailableError, ProtocolError, VersionMismatchError
from gpumesh.network import reasons
from gpumesh.network.address import HTTPS, INSECURE, PORT, Address, is_loopback
from gpumesh.protocol import strangers
from gpumesh.protocol.auth import NONCE_BYTES
from gpumesh.protocol.connection import BUSY, LATER, LOOKED, NOT_A_CLIENT, Connection, PeerFacts, State
from gpumesh.version import __version__

if TYPE_CHECKING:
    import ssl

    from gpumesh.network.forward_proxy import Proxy

MESH_PROTOCOL, HTTP_PROTOCOL = "gpumesh/1", "http/1.1"  # As in `network.tls`, which is not loaded where there is no TLS.
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK))
PROXY_VARIABLES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # The first that is set counts.
_NO_TOKEN = "-"  # noqa: S105 - for a conversation that ends before any proof.
_LOOK_SECONDS = 2.0  # At who is there instead, after the connection itself has failed.


def connect(address: Address, timeout: float) -> socket.socket:
    """A connected TCP socket, non-blocking; looking up the name and connecting share `timeout` seconds.

    Through the HTTP proxy of this machine's network, where one is named for this address.

    Raises:
        MeshUnavailableError: There is none; the message says why, and what to do.
        ProtocolError: The proxy does not let us through, or is none.
    """
    proxy = proxy_for(address)
    if proxy is not None:
        from gpumesh.network.forward_proxy import open_tunnel

        return open_tunnel(proxy, address, timeout)
    deadline = time.monotonic() + timeout
    sock = _race(resolve(address, timeout), address, deadline, timeout)
    prepare(sock)
    return sock


def prepare(sock: socket.socket) -> None:
    """Set what a mesh wants of a TCP socket; nothing on any other."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_KERNEL_BYTES)


def resolve(address: Address, timeout: float) -> List[Any]:
    """What `socket.getaddrinfo` says of it. A name is looked up on a thread of its own, as the system's resolver knows no timeout.

    Raises:
        MeshUnavailableError: The name is not known.
    """
    try:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        pass
    found: List[Any] = []
    failure: List[str] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            failure.append(error.strerror or str(error) if isinstance(error, OSError) else str(error))

    thread = threading.Thread(target=look_up, name="gpumesh-resolve", daemon=True)
    thread.start()
    thread.join(max(0.0, timeout))
    if failure:
        raise MeshUnavailableError(
            f"the host name {address.host!r} cannot be resolved ({failure[0]}); check its spelling and the DNS"
        )
    if not found:
        raise MeshUnavailableError(
            f"the host name {address.host!r} was not resolved within {timeout:g} s; use an IP address or check the DNS"
        )
    return found


def _race(candidates: List[Any], address: Address, deadline: float, timeout: float) -> socket.socket:
    """The first that connects; the next one starts when the one before has failed or taken its time."""
    waiting: Dict[socket.socket, None] = {}
    failure: Optional[OSError] = None
    try:
        with selectors.DefaultSelector() as selector:
            while True:
                now = time.monotonic()
                if now >= deadline or not (candidates or waiting):
                    break
                if candidates:
                    family, kind, protocol, _, target = candidates.pop(0)
                    try:
                        sock = socket.socket(family, kind, protocol)
                    except OSError as error:
                        failure = error
                        continue
                    waiting[sock] = None
                    sock.setblocking(False)
                    code = sock.connect_ex(target)
                    if code not in _IN_PROGRESS:
                        failure = OSError(code, os.strerror(code))
                        del waiting[sock]
                        sock.close()
                        continue
                    selector.register(sock, selectors.EVENT_WRITE)
                patience = deadline - now
                if candidates:
                    patience = min(patience, CONNECT_STAGGER_SECONDS)
                for key, _ in selector.select(patience):
                    sock = key.fileobj  # type: ignore[assignment]
                    del waiting[sock]
                    selector.unregister(sock)
                    try:
                        settle(sock)
                    except OSError as error:
                        failure = error
                        sock.close()
                        continue
                    return sock
    finally:
        for sock in waiting:
            sock.close()
    raise no_connection(address, None if waiting else failure, timeout)


def settle(sock: socket.socket) -> None:
    """Raises OSError unless it is connected, to somebody else."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    if sock.getsockname() == sock.getpeername():
        # A free port of the ephemeral range can be connected to itself.
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def no_connection(address: Address, error: Optional[OSError], timeout: float) -> MeshUnavailableError:
    """What an error of the system means, for people; None: no answer in time."""
    kind, clause, advice = reasons.why(error, address.host)
    if kind == reasons.TIMEOUT:
        clause = f"no answer from {address} within {timeout:g} s"
    elif kind == reasons.REFUSED:
        clause = f"nothing listens at {address}"
    elif kind == reasons.FAILED and error is not None:
        clause = f"cannot connect to {address}: {reasons.said(error)}"
    else:
        clause = f"cannot connect to {address}: {clause}"
    return MeshUnavailableError(f"{clause}; {advice}")


def is_plain(address: Address, sock: socket.socket) -> bool:
    """Whether the mesh is spoken without TLS at first on this connected socket: on this very machine, or where the address says so.

    Raises:
        MeshUnavailableError: Who was there has gone already; the socket is closed.
    """
    if address.way != PORT:
        return address.way == INSECURE
    try:
        return is_loopback(sock.getpeername()[0])
    except OSError as error:
        sock.close()
        raise no_connection(address, error, 0.0) from None


def protocols_for(address: Address) -> Sequence[str]:
    """ALPN names to offer at the address itself."""
    return (MESH_PROTOCOL, HTTP_PROTOCOL) if address.way == HTTPS else (MESH_PROTOCOL,)


def proxy_for(address: Address) -> Optional[Proxy]:
    """The HTTP proxy of this machine's network through which this address is reached; None: directly.

    Raises:
        ProtocolError: The environment names one that cannot be used.
    """
    if address.way != HTTPS or not any(os.environ.get(name, "").strip() for name in PROXY_VARIABLES):
        return None
    from gpumesh.network import forward_proxy

    return forward_proxy.proxy_for(address)


def secure(sock: socket.socket, protocols: Sequence[str], timeout: float) -> Tuple[ssl.SSLSocket, bytes]:
    """TLS on a connected socket, which is the new one's from now on; non-blocking afterwards.

    Returns:
        The new one, and the hash that proofs are bound to.

    Raises:
        OSError: No TLS came about (ssl.SSLError is one); `explain` knows why. The socket is closed.
    """
    from gpumesh.network.tls import binding_of, client_context

    tls: Any = sock
    try:
        sock.settimeout(max(0.001, timeout))
        tls = _wrapped(client_context(protocols), sock)
        tls.do_handshake()
        tls.setblocking(False)
        return tls, binding_of(tls)
    except BaseException:
        tls.close()
        raise


def _wrapped(context: ssl.SSLContext, sock: socket.socket) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(sock, do_handshake_on_connect=False)
    except OSError as error:  # A peer that has gone: the new socket, which has the descriptor by then, is left behind open.
        trace = error.__traceback__
        while trace is not None:
            made = trace.tb_frame.f_locals.get("self")
            if isinstance(made, socket.socket):
                made.close()
            trace = trace.tb_next
        raise


def foreign(address: Address) -> ProtocolError:
    """Somebody speaks TLS there who does not know the mesh's protocol."""
    error = ProtocolError(
        f"{address}: the other side is {strangers.TLS}, {strangers.NO_COORDINATOR}; "
        f"if a proxy or tunnel stands before a coordinator there, write https://{address}"
    )
    error.stranger = strangers.TLS
    return error


def explain(address: Address, error: Optional[BaseException], timeout: float) -> MeshError:
    """What it means that no TLS came about at an address that takes connections; looks who else is there. Blocks, for a while.

    Args:
        error: What the TLS handshake has raised; None: it was not over in time.
        timeout: Seconds there were.
    """
    if error is None:
        return unanswered(address, timeout)  # Whoever says nothing to the one says nothing to the other, and the time is over.
    reason = str(getattr(error, "reason", None) or "")
    if reason.endswith("NO_APPLICATION_PROTOCOL"):
        return foreign(address)
    found = _look(address)
    if found is None:
        return MeshUnavailableError(
            f"{address} is a gpumesh coordinator without TLS: whoever is on the way could read and change what is sent; start it with "
            f"TLS (without --insecure), or accept that and write insecure://{address}"
        )
    stranger = getattr(found, "stranger", "")
    if stranger == strangers.HTTP and address.way == HTTPS:
        return ProtocolError(
            f"{address} speaks plain HTTP, not HTTPS; if that is a proxy before a coordinator, write ws://{address}"
        )
    if stranger or isinstance(found, VersionMismatchError) or getattr(found, "refusal", "") in (LATER, BUSY):
        return at(address, found, "", b"")
    told = reason.replace("_", " ").lower() or getattr(error, "strerror", "") or str(error) or type(error).__name__
    return MeshUnavailableError(
        f"{address}{_by_proxy(address)} broke the TLS handshake off ({told}); is a gpumesh coordinator running there?"
    )


def _look(address: Address) -> Optional[MeshError]:
    """Who talks without TLS there, before any proof: None is a coordinator; an error says what else, or that nobody does."""
    connection = Connection.dial(
        role="client", token=_NO_TOKEN, nonce=os.urandom(NONCE_BYTES), now=time.monotonic(), facts=local_facts()
    )
    deadline = time.monotonic() + _LOOK_SECONDS
    try:
        with connect(address, _LOOK_SECONDS) as sock:
            sock.settimeout(_LOOK_SECONDS)
            sock.sendall(b"".join(connection.data_to_send()))
            while connection.state is not State.WELCOME:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                count = sock.recv_into(connection.get_buffer())
                now = time.monotonic()
                for event in connection.buffer_updated(count, now) if count else connection.receive_eof(now):
                    return event.error or MeshUnavailableError(event.reason)
            connection.refuse(LOOKED, "")  # Instead of a proof: nothing is wrong, and nothing to tell of.
            sock.sendall(connection.data_to_send()[-1])
            return None
    except MeshError as error:
        return error
    except OSError as error:
        return MeshUnavailableError(str(error))


def unanswered(address: Address, timeout: float) -> MeshUnavailableError:
    """Somebody has taken the connection and says nothing."""
    return MeshUnavailableError(
        f"{address}{_by_proxy(address)} {strangers.SAYS_NOTHING} within {timeout:g} s; it is no gpumesh coordinator, or it hangs"
    )


def _by_proxy(address: Address) -> str:
    """Whoever has hung up, or says nothing, may as well be the proxy."""
    proxy = proxy_for(address)
    return f" (through the HTTP proxy {proxy.url})" if proxy is not None else ""


def at(address: Address, error: Optional[MeshError], reason: str, binding: bytes) -> MeshError:
    """Why a handshake failed, with the address in front and, if the token was at fault, the certificate that was seen."""
    if error is None:
        return MeshUnavailableError(f"{address} closed the connection: {reason}")
    seen = ""
    has_seen_the_proof = str(error) == NOT_A_CLIENT
    if binding and isinstance(error, AuthenticationError) and not has_seen_the_proof:
        seen = (
            f"; if it is the right one, somebody stands between: the SHA-256 of the certificate seen here begins with {_hex(binding)}, "
            "`gpumesh serve` shows its own"
        )
    told = type(error)(f"{address}: {error}{seen}")
    if isinstance(error, MeshUnavailableError) and isinstance(told, MeshUnavailableError):
        told.refusal = error.refusal
    if isinstance(error, ProtocolError) and isinstance(told, ProtocolError):
        told.stranger = error.stranger
    return told


def _hex(fingerprint: bytes) -> str:
    return ":".join(f"{byte:02x}" for byte in fingerprint[:16])  # As `gpumesh serve` shows it.


def local_facts() -> PeerFacts:
    """What this side says of itself in the handshake."""
    return PeerFacts(__version__, f"{sys.version_info[0]}.{sys.version_info[1]}", sys.platform)
