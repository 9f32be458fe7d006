"""The one port of a coordinator: takes connections in, looks at their first byte, and hands them to who speaks that.

    accept ── first byte ── 0x89 ──> mesh
                        ├── 0x16 ──> TLS ── gpumesh/1 ──> mesh inside TLS
                        │               └── else ──────> HTTP inside TLS
                        └── a verb ─> HTTP

Promises:

1. Whoever says nothing holds a descriptor and a row of a table for HANDSHAKE_SECONDS, nothing else; there are never more than
   PENDING_HANDSHAKES such (`protocol.admission`), those in the midst of a handshake included.
2. From another machine the mesh is spoken inside TLS only, unless there is no identity or the mesh is insecure on purpose.
3. A system that has no descriptors left delays connections; it neither ends the port nor makes it spin.
4. HTTP costs nothing until somebody speaks it.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import socket
from typing import TYPE_CHECKING, Any, Awaitable, Callable, Dict, Hashable, List, Mapping, Optional, Set

from gpumesh.config import ACCEPT_BATCH, ACCEPT_PAUSE_SECONDS, GOODBYE_SECONDS, HANDSHAKE_SECONDS
from gpumesh.network.address import is_loopback, plain_ip
from gpumesh.protocol.admission import Admission, network_of
from gpumesh.protocol.connection import LATER
from gpumesh.runtime.link import PeerLink

if TYPE_CHECKING:
    from gpumesh.network.certificates import Identity

logger = logging.getLogger(__name__)

_MESH, _TLS = 0x89, 0x16
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

MakeLink = Callable[[bytes], PeerLink]
MakeWeb = Callable[[], Awaitable[Callable[[], asyncio.BaseProtocol]]]
OnRefused = Callable[[str, str], None]


class _Arrival:
    """A socket that has not been handed on."""

    __slots__ = ("sock", "host", "address", "is_piped", "timer", "is_watched")

    def __init__(self, sock: socket.socket, host: str, address: str, *, is_piped: bool) -> None:
        self.sock = sock
        self.host = host
        self.address = address  # As it is shown.
        self.is_piped = is_piped  # Through a proxy or tunnel: of another machine, whatever address it calls from.
        self.timer: Optional[asyncio.TimerHandle] = None
        self.is_watched = False


class Doorway:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        make_link: Makes the protocol of a mesh connection, given the hash that its proofs are bound to.
        make_web: Loads what speaks HTTP and returns a maker of its protocols; without one, HTTP is told what this port is.
        identity: For TLS; without one there is none.
        is_insecure: The mesh may be spoken without TLS by anybody.
        on_refused: Told (address, why) of those who are refused before they have a link.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_link: MakeLink,
        *,
        on_refused: OnRefused,
        make_web: Optional[MakeWeb] = None,
        identity: Optional[Identity] = None,
        is_insecure: bool = False,
    ) -> None:
        self.admission = Admission()
        self._loop = loop
        self._make_link = make_link
        self._make_web = make_web
        self._on_refused = on_refused
        self._is_insecure = is_insecure or identity is None
        self._identity = identity
        self._context: Any = None  # Made at the first TLS connection.
        self._tls_options = _tls_options(loop)
        self._listeners: List[socket.socket] = []
        self._arrivals: Dict[int, _Arrival] = {}  # By descriptor.
        self._links: Dict[PeerLink, str] = {}  # Strangers with a link -> the network they are counted under.
        self._tasks: Set[asyncio.Task[None]] = set()
        self._pause: Optional[asyncio.TimerHandle] = None
        self._is_closed = False

    def open(self, listener: socket.socket) -> None:
        """Take connections from a listening socket, which is ours from now on."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        """Close the port and those who have not been handed on; links are their owner's."""
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for arrival in list(self._arrivals.values()):
            self._drop(arrival)
        for task in self._tasks:
            task.cancel()

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate; b"" without TLS."""
        return self._identity.fingerprint if self._identity is not None else b""

    def strangers(self) -> List[PeerLink]:
        """Those with a link who have not shown who they are."""
        return list(self._links)

    def settle(self, link: PeerLink) -> bool:
        """This one has shown who it is, or has gone; whether it was a stranger until now."""
        network = self._links.pop(link, None)
        self.admission.leave(link)
        if network is not None and link.connection.has_failed_proof:
            self.admission.proof_failed(network, self._loop.time(), is_local=is_loopback(network))
        return network is not None

    # --- arriving

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            try:
                sock, name = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    logger.warning("a connection was lost while it was accepted: %s", error)
                    return
                self._hold(error)
                return
            host = plain_ip(str(name[0]))
            self._arrive(sock, host, f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}")

    def _hold(self, error: OSError) -> None:
        """Nothing can be accepted now; those who wait in the system's queue are not lost by that."""
        if self._pause is not None:
            return
        logger.warning("cannot accept connections at the moment: %s; raise the limit of open files (ulimit -n)", error.strerror)
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
        self._pause = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def admit(self, sock: socket.socket, address: str) -> None:
        """Somebody who has come another way (a WebSocket): the same as an accepted connection of another machine.

        Args:
            sock: A connected stream socket, ours from now on.
            address: `host:port` of who called.
        """
        host = address.rpartition(":")[0].strip("[]")
        if self._is_closed:
            sock.close()
            return
        self._arrive(sock, host, address, is_piped=True)

    def _arrive(self, sock: socket.socket, host: str, address: str, *, is_piped: bool = False) -> None:
        sock.setblocking(False)
        arrival = _Arrival(sock, host, address, is_piped=is_piped)
        network = network_of(host)
        wait = self.admission.is_shut(network, self._loop.time())
        if wait:
            self._refuse_late(arrival, wait)
            return
        self._arrivals[sock.fileno()] = arrival
        self._let_go(self.admission.arrive(arrival, network))
        arrival.timer = self._loop.call_later(HANDSHAKE_SECONDS, self._drop, arrival)
        self._look(arrival)

    def _let_go(self, gone: List[Hashable]) -> None:
        for each in gone:
            if isinstance(each, _Arrival):
                self._drop(each)
            elif isinstance(each, PeerLink):
                self._links.pop(each, None)
                each.drop("dropped for others: too many unfinished handshakes")

    def _refuse_late(self, arrival: _Arrival, wait: float) -> None:
        """Refuse who has tried too many tokens. It is told so if it speaks plainly; inside TLS that would cost a handshake."""
        self.tell(arrival.address, f"too many wrong tokens from there; refused for {wait:.0f} s more")
        try:
            arrival.sock.send(_plain_refusal(LATER, f"too many wrong tokens from your address; try again in {wait:.0f} s"))
        except OSError:
            pass
        arrival.sock.close()

    def _look(self, arrival: _Arrival) -> None:
        """Read the first byte and leave it there."""
        try:
            first = arrival.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            if not arrival.is_watched:
                arrival.is_watched = True
                self._loop.add_reader(arrival.sock.fileno(), self._look, arrival)
            return
        except OSError:
            first = b""
        if not first:
            self._drop(arrival)
            return
        self.admission.speaks(arrival)
        self._take_out(arrival)
        if first[0] == _TLS and self._identity is not None:
            self._keep(self._loop.create_task(self._tls(arrival)))
        elif first[0] == _MESH or self._make_web is None or first[0] == _TLS or not first.isalpha():
            self._keep(self._loop.create_task(self._plain(arrival)))
        else:
            self.admission.leave(arrival)  # What speaks HTTP has limits of its own.
            self._keep(self._loop.create_task(self._http(arrival)))

    def _take_out(self, arrival: _Arrival) -> None:
        if arrival.is_watched:
            self._loop.remove_reader(arrival.sock.fileno())
            arrival.is_watched = False
        if arrival.timer is not None:
            arrival.timer.cancel()
        self._arrivals.pop(arrival.sock.fileno(), None)

    def _drop(self, arrival: _Arrival) -> None:
        if arrival.sock.fileno() < 0:
            return
        self._take_out(arrival)
        self.admission.leave(arrival)
        arrival.sock.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a connection could not be taken in", exc_info=task.exception())

    # --- handing on

    def _link(self, arrival: _Arrival, binding: bytes) -> PeerLink:
        link = self._make_link(binding)
        link.come_from(arrival.address, is_piped=arrival.is_piped)
        return link

    def _note(self, arrival: _Arrival, link: PeerLink) -> bool:
        """The stranger is this link from now on; False: it was let go meanwhile."""
        if arrival not in self.admission:
            return False
        self.admission.rename(arrival, link)
        self._links[link] = network_of(arrival.host)
        return True

    async def _plain(self, arrival: _Arrival) -> None:
        link = self._link(arrival, b"")
        if not self._is_insecure and (arrival.is_piped or not is_loopback(arrival.host)):
            link.connection.requires_tls = True
        if not self._note(arrival, link):
            arrival.sock.close()
            return
        try:
            await self._loop.connect_accepted_socket(lambda: link, arrival.sock)
        except OSError:
            self._forget(link, arrival)

    async def _tls(self, arrival: _Arrival) -> None:
        inside = _Inside(self, arrival)
        try:
            await self._loop.connect_accepted_socket(lambda: inside, arrival.sock, ssl=self._tls_context(), **self._tls_options)
        except (OSError, asyncio.TimeoutError) as error:  # ssl.SSLError is an OSError.
            if self.admission.leave(arrival):
                self.tell(
                    arrival.address, f"the TLS handshake failed ({getattr(error, 'reason', None) or error or 'timed out'})"
                )
            arrival.sock.close()

    async def _http(self, arrival: _Arrival) -> None:
        assert self._make_web is not None
        try:
            make = await self._make_web()
            await self._loop.connect_accepted_socket(make, arrival.sock)
        except OSError:
            arrival.sock.close()

    def _tls_context(self) -> Any:
        if self._context is None:
            from gpumesh.network.tls import server_context

            assert self._identity is not None
            self._context = server_context(self._identity)
        return self._context

    def _forget(self, link: PeerLink, arrival: _Arrival) -> None:
        self._links.pop(link, None)
        self.admission.leave(link)
        link.abort()
        arrival.sock.close()

    def tell(self, address: str, why: str) -> None:
        """Somebody is refused: tell it, unless the same was told of the same address lately."""
        more = self.admission.line(network_of(address.rpartition(":")[0].strip("[]")), why.partition(";")[0], self._loop.time())
        if more is not None:
            self._on_refused(address, why + more)


class _Inside(asyncio.Protocol):
    """The first moments of a connection inside TLS: hands it on by the name that both sides have agreed on."""

    def __init__(self, door: Doorway, arrival: _Arrival) -> None:
        self._door = door
        self._arrival = arrival
        self._transport: Any = None
        self._waiting: List[bytes] = []

    def connection_made(self, transport: Any) -> None:
        door, arrival = self._door, self._arrival
        self._transport = transport
        chosen = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        if chosen == "gpumesh/1":
            link = door._link(arrival, door.fingerprint)
            if not door._note(arrival, link):
                transport.abort()
                return
            transport.set_protocol(link)
            link.connection_made(transport)
            return
        door.admission.leave(arrival)
        if door._make_web is None:
            transport.close()
            return
        transport.pause_reading()
        door._keep(door._loop.create_task(self._to_web(transport)))

    async def _to_web(self, transport: Any) -> None:
        assert self._door._make_web is not None
        protocol = (await self._door._make_web())()
        if transport.is_closing():
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._waiting:
            protocol.data_received(data)  # type: ignore[attr-defined]
        transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._waiting.append(data)


def _plain_refusal(reason: str, text: str) -> bytes:
    """The bytes by which a listener refuses a dialer of which it has not read anything."""
    from gpumesh.protocol import codec, frames
    from gpumesh.protocol.messages import Refused

    tag, body, _ = codec.Encoder().encode(Refused(reason, text))
    return frames.PREAMBLE + b"".join(bytes(part) for part in frames.encode_frame(tag, body))


def _tls_options(loop: asyncio.AbstractEventLoop) -> Dict[str, Any]:
    options: Dict[str, Any] = {"ssl_handshake_timeout": HANDSHAKE_SECONDS}
    known: Mapping[str, Any]
    try:
        known = inspect.signature(loop.connect_accepted_socket).parameters
    except (TypeError, ValueError):  # uvloop's is compiled; it knows the parameter.
        known = {"ssl_shutdown_timeout": None}
    if "ssl_shutdown_timeout" in known:  # Python 3.11 and newer.
        options["ssl_shutdown_timeout"] = GOODBYE_SECONDS
    return options
