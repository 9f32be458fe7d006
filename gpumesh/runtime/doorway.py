"""The one port of a coordinator: takes connections in, looks at their first byte, and hands them to who speaks that.

    accept ── first byte ── 0x89 ──> mesh
                        ├── 0x16 ──> TLS ── gpumesh/1 ──> mesh inside TLS
                        │               └── else ──────> HTTP inside TLS
                        └── a verb ─> HTTP ── its head ──> runtime.web ── WebSocket ── admit ──> first byte ...

Promises:

1. Whoever says nothing holds a descriptor and a row of a table for HANDSHAKE_SECONDS, nothing else. There are never more than
   PENDING_HANDSHAKES strangers (`protocol.admission`): who has not shown that it is a member of the mesh, and who asks by HTTP.
2. From another machine the mesh is spoken inside TLS only, unless there is no identity or the mesh is insecure on purpose.
3. A system that has no descriptors left delays connections; it neither ends the port nor makes it spin.
4. HTTP costs nothing until somebody has sent the whole head of a request.
5. A descriptor is closed by who has it: by its transport, from the moment that there is one.
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
from gpumesh.protocol.connection import LATER, TLS
from gpumesh.runtime.doorway_http import Asking
from gpumesh.runtime.link import PeerLink

if TYPE_CHECKING:
    from gpumesh.network.certificates import Identity

logger = logging.getLogger(__name__)

_TLS = 0x16  # The first byte of its handshake.
NEEDS_TLS = (
    "this mesh speaks TLS with other machines; write http:// in its address, not insecure://; if something on your machine, such as "
    "ssh -L, passes you on, write https://"
)
CROWDED_OUT = "dropped for others: too many unfinished handshakes"
FROM_TUNNEL = "127.0.0.2"  # Whom a tunnel or proxy on this machine passes on counts as this; its own programs are others.
TOO_MANY_TRIES = "too many wrong tokens from this address"

MakeLink = Callable[[bytes], PeerLink]
MakeWeb = Callable[[], Awaitable[Callable[[], asyncio.BaseProtocol]]]
OnRefused = Callable[[str, str], None]


class Arrival:
    """Somebody at the door: a socket, then what is made of it."""

    __slots__ = ("sock", "host", "address", "network", "is_piped", "timer", "is_watched", "task", "has_begun", "link", "asking")

    def __init__(self, sock: socket.socket, host: str, address: str, *, is_piped: bool) -> None:
        self.sock = sock
        self.host = host
        self.address = address  # As it is shown.
        self.network = network_of(host)
        self.is_piped = is_piped  # Through a proxy or tunnel: of another machine, whatever address it calls from.
        self.timer: Optional[asyncio.TimerHandle] = None
        self.is_watched = False
        self.task: Optional[asyncio.Task[None]] = None  # Makes a transport of it.
        self.has_begun = False  # It does: the descriptor is the transport's.
        self.link: Optional[PeerLink] = None
        self.asking: Optional[Asking] = None  # By HTTP.


class Doorway:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        make_link: Makes the protocol of a mesh connection, given the hash that its proofs are bound to.
        make_web: Loads what speaks HTTP and returns a maker of its protocols; without one, HTTP is told what this port is.
        identity: For TLS; without one there is none.
        is_insecure: The mesh may be spoken without TLS by anybody.
        on_refused: Told (address, why) of those who are refused before they are members.
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
        self._arrivals: Set[Arrival] = set()  # Those that are no members.
        self._links: Dict[PeerLink, Arrival] = {}  # Of those, who speaks the mesh.
        self._asking: Set[Asking] = set()  # Who has an HTTP connection, WebSockets too.
        self._tasks: Set[asyncio.Task[None]] = set()
        self._pause: Optional[asyncio.TimerHandle] = None
        self._is_crowded = False  # That is why there is a pause.
        self._is_closed = False

    def open(self, listener: socket.socket) -> None:
        """Take connections from a listening socket, which is ours from now on."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    async def close(self) -> None:
        """Close the port and those who are no members of the mesh; links are their owner's to close."""
        self._is_closed = True
        self._end_pause()
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for arrival in list(self._arrivals):
            if arrival.link is None:
                self._drop(arrival)
        for asking in list(self._asking):
            if asking.arrival in self._arrivals:  # Else it is a WebSocket, and ends with what it carries.
                asking.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # One more turn: their transports are closed.

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate; b"" without TLS."""
        return self._identity.fingerprint if self._identity is not None else b""

    def strangers(self) -> List[PeerLink]:
        """Those with a link who have not shown who they are."""
        return list(self._links)

    def settle(self, link: PeerLink) -> bool:
        """This one has shown who it is, or has gone; whether it was a stranger until now."""
        arrival = self._links.pop(link, None)
        if arrival is None:
            return False
        self._leave(arrival)
        if link.connection.has_failed_proof:
            self.admission.proof_failed(arrival.network, self._loop.time(), is_local=is_loopback(arrival.host))
        return True

    def upgraded(self, transport: Any) -> None:
        """This HTTP connection has become a WebSocket: its pipe, which comes to `admit`, is the stranger now."""
        for asking in self._asking:
            if asking.transport is transport:
                asking.stay()
                self._leave(asking.arrival)

    def tell(self, address: str, why: str) -> None:
        """Somebody is refused: say so, unless the same was said of the same address lately."""
        network = network_of(address.rpartition(":")[0].strip("[]"))
        more = self.admission.line(network, why.partition(";")[0], self._loop.time())
        if more is not None:
            self._on_refused(address, why + more)

    # --- arriving

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            crowded = self.admission.crowded_for(self._loop.time())
            if crowded:
                self._is_crowded = True
                self._hold(crowded)
                return
            try:
                sock, name = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self.admission.own_trouble(str(error.errno), self._loop.time()):
                    is_full = error.errno in (errno.EMFILE, errno.ENFILE)
                    hint = "; is the limit of open files (ulimit -n) too low?" if is_full else ""
                    logger.warning("cannot accept connections now: %s%s", error, hint)
                self._hold(ACCEPT_PAUSE_SECONDS)
                return
            host = plain_ip(str(name[0]))
            self._arrive(Arrival(sock, host, f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}", is_piped=False))

    def _hold(self, seconds: float) -> None:
        """Nobody can be taken in now; those who wait in the system's queue are not lost by that."""
        if self._pause is None:
            for listener in self._listeners:
                self._loop.remove_reader(listener.fileno())
            self._pause = self._loop.call_later(seconds, self._go_on)

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._pause = None
        self._is_crowded = False

    def _go_on(self) -> None:
        self._end_pause()
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def admit(self, sock: socket.socket, address: str) -> None:
        """Somebody who has come another way (a WebSocket): the same as an accepted connection of another machine.

        Args:
            sock: A connected stream socket, ours from now on.
            address: `host:port` of who called.
        """
        if self._is_closed:
            sock.close()
            return
        self._arrive(Arrival(sock, plain_ip(address.rpartition(":")[0].strip("[]")), address, is_piped=True))

    def _arrive(self, arrival: Arrival) -> None:
        arrival.sock.setblocking(False)
        for each in self.admission.arrive(arrival, arrival.network, self._loop.time()):
            self._crowd_out(each)
        self._arrivals.add(arrival)
        arrival.timer = self._loop.call_later(HANDSHAKE_SECONDS, self._drop, arrival)
        self._look(arrival)

    def _crowd_out(self, arrival: Hashable) -> None:
        assert isinstance(arrival, Arrival)
        self.tell(arrival.address, CROWDED_OUT)
        self._drop(arrival)

    def _look(self, arrival: Arrival) -> None:
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
        self._unwatch(arrival)
        if first[0] == _TLS and self._identity is not None:
            self._begin(arrival, self._tls(arrival))
        elif first.isalpha() and self._make_web is not None and not arrival.is_piped:
            self._begin(arrival, self._http(arrival))
        else:
            self._begin(arrival, self._plain(arrival))

    def _unwatch(self, arrival: Arrival) -> None:
        if arrival.is_watched:
            self._loop.remove_reader(arrival.sock.fileno())
            arrival.is_watched = False
        if arrival.timer is not None:
            arrival.timer.cancel()
            arrival.timer = None

    def _leave(self, arrival: Arrival) -> None:
        """It is no stranger any more."""
        self._arrivals.discard(arrival)
        if self.admission.leave(arrival) and self._is_crowded and self._pause is not None:
            self._go_on()

    def _drop(self, arrival: Arrival) -> None:
        """Close it, whatever has become of it."""
        self._unwatch(arrival)
        self._leave(arrival)
        if arrival.link is not None:
            self._links.pop(arrival.link, None)
            arrival.link.drop(CROWDED_OUT)
        elif arrival.asking is not None:
            arrival.asking.abort()
        elif arrival.task is not None:
            arrival.task.cancel()
        else:
            arrival.sock.close()

    # --- handing on

    def _begin(self, arrival: Arrival, handing: Any) -> None:
        task = arrival.task = self._loop.create_task(handing)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(arrival, task))

    def _ended(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not arrival.has_begun:  # It was cancelled before its first line.
            arrival.sock.close()
        if not task.cancelled() and task.exception() is not None:
            logger.error("a connection could not be taken in", exc_info=task.exception())

    async def _connect(self, arrival: Arrival, protocol: asyncio.BaseProtocol, **options: Any) -> None:
        arrival.has_begun = True
        await self._loop.connect_accepted_socket(lambda: protocol, arrival.sock, **options)

    def now(self) -> float:
        """The loop's time, in seconds."""
        return self._loop.time()

    def dismiss(self, arrival: Arrival) -> None:
        """There is nothing for it here; its transport is closed."""
        self._leave(arrival)

    def link_for(self, arrival: Arrival, *, is_encrypted: bool) -> PeerLink:
        """What speaks the mesh with it."""
        link = arrival.link = self._make_link(self.fingerprint if is_encrypted else b"")
        link.come_from(arrival.address, is_piped=arrival.is_piped)
        self._links[link] = arrival
        wait = self.admission.is_shut(arrival.network, self._loop.time())
        if wait:
            link.connection.turned_away = (LATER, f"{TOO_MANY_TRIES}; try again in {wait:.0f} s")
        elif not is_encrypted and not self._is_insecure and (arrival.is_piped or not is_loopback(arrival.host)):
            link.connection.turned_away = (TLS, NEEDS_TLS)
        return link

    async def _plain(self, arrival: Arrival) -> None:
        link = self.link_for(arrival, is_encrypted=False)
        try:
            await self._connect(arrival, link)
        except OSError:
            self._drop(arrival)

    async def _tls(self, arrival: Arrival) -> None:
        try:
            await self._connect(arrival, _Inside(self, arrival), ssl=self._tls_context(), **self._tls_options)
        except (OSError, asyncio.TimeoutError) as error:  # ssl.SSLError is an OSError.
            if arrival in self.admission:
                self._leave(arrival)
                why = getattr(error, "reason", None) or str(error) or "it took too long"
                self.tell(arrival.address, f"the TLS handshake failed; {why}")

    async def _http(self, arrival: Arrival) -> None:
        try:
            await self._connect(arrival, self.asking_for(arrival))
        except OSError:
            self._drop(arrival)

    def asking_for(self, arrival: Arrival) -> Asking:
        """What takes in its HTTP."""
        assert self._make_web is not None
        asking = arrival.asking = Asking(self._loop, arrival, self._make_web, self._on_asked, self._on_stranger)
        self._asking.add(asking)
        return asking

    @property
    def has_web(self) -> bool:
        """HTTP is spoken here."""
        return self._make_web is not None

    def _on_asked(self, asking: Asking) -> None:
        self._asking.discard(asking)
        self._leave(asking.arrival)

    def _on_stranger(self, arrival: Arrival, why: str) -> None:
        self.tell(arrival.address, why)

    def _tls_context(self) -> Any:
        if self._context is None:
            from gpumesh.network.tls import server_context

            assert self._identity is not None
            self._context = server_context(self._identity)
        return self._context


class _Inside(asyncio.Protocol):
    """A connection inside TLS until both sides have agreed on what is inside: hands it on."""

    def __init__(self, door: Doorway, arrival: Arrival) -> None:
        self._door = door
        self._arrival = arrival

    def connection_made(self, transport: Any) -> None:
        door, arrival = self._door, self._arrival
        protocol: Any
        if arrival not in door.admission:  # It was dropped in this very turn.
            transport.abort()
            return
        door.admission.advances(arrival, door.now())
        if transport.get_extra_info("ssl_object").selected_alpn_protocol() == "gpumesh/1":
            protocol = door.link_for(arrival, is_encrypted=True)
        elif door.has_web and not arrival.is_piped:
            protocol = door.asking_for(arrival)
        else:
            transport.abort()
            door.dismiss(arrival)
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


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
