"""One protocol connection on one stream of an event loop; moves bytes and time, decides nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, Callable, Dict, Iterable, List, Optional

from gpumesh.config import GOODBYE_SECONDS, OUTBOX_PAUSE_BYTES, UNSENT_KERNEL_BYTES
from gpumesh.protocol.connection import Closed, Connection

logger = logging.getLogger(__name__)

WRITE_HIGH_BYTES = 256 * 1024  # In the transport's own queue; above it no further chunk is handed over.
WRITE_LOW_BYTES = 64 * 1024
LAZY_SECONDS = 0.001  # A few round trips: what comes meanwhile leaves in the same write.
LARGE_READ_BYTES = 64 * 1024
TURN_BYTES = 256 * 1024  # Of one peer's object in one round of the loop: 0.2 ms.
SMALL_ANSWER_BYTES = 1024  # About ten tasks: whoever sends so little waits for the answer.
LOOPBACKS = ("127.", "::ffff:127.", "::1")  # Beginnings of addresses that lead nowhere but here.

OnEvents = Callable[["PeerLink", List[Any]], None]


class Turn:
    """The links of one owner, while one of them is being served: small answers leave before the turn ends.

    Waiting for the loop's next round instead costs a tenth of a round trip at each hop; large answers do wait for it, so that
    what comes from several peers at once leaves in one write.
    """

    __slots__ = ("is_running", "waiting", "open")

    def __init__(self) -> None:
        self.is_running = False
        self.waiting: List[PeerLink] = []
        self.open: Dict[PeerLink, None] = {}  # Those whose socket is open, also after their last event.

    def end(self) -> None:
        """Flush what has little to say; the others are due in the loop's next round.

        The last first: results are sent before the work that follows from them, and whoever gets work has more to do.
        """
        self.is_running = False
        waiting, self.waiting = self.waiting, []
        for link in reversed(waiting):
            link.flush_or_defer()

    async def all_gone(self, links: Iterable[PeerLink]) -> None:
        """Wait until these links and all that were closed before have no socket: their loop can be closed then.

        Whoever has not read what was sent to him within GOODBYE_SECONDS is not reading: his socket is closed then.
        """
        leaving = list(dict.fromkeys([*links, *self.open]))
        if not leaving:
            return
        _, waiting = await asyncio.wait([link.when_gone() for link in leaving], timeout=GOODBYE_SECONDS)
        for link in leaving:
            link.abort()
        if waiting:
            await asyncio.wait(waiting, timeout=GOODBYE_SECONDS)


class PeerLink(asyncio.BufferedProtocol):
    """Moves bytes between one Connection and one transport.

    `on_events` is called on the loop's thread, in order, and must not block. The last event is always Closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection, on_events: OnEvents, turn: Turn) -> None:
        self.connection = connection
        self.peer: Any = None  # Whoever owns this link keeps its side of the story here.
        self.address = ""
        self.has_ended = (
            False  # The peer's system has closed the connection, as it does when a process dies: no reset, no silence.
        )
        self.is_private = False  # Nobody on the way can read what is said: TLS, or no way out of this machine.
        self.is_local = False  # The peer has called from the address that it called: it is most likely on this host.
        self.on_drained: Optional[Callable[[], None]] = None  # Called when what was queued has left, after a congestion.
        self._is_piped = False
        self._loop = loop
        self._on_events = on_events
        self._turn = turn
        self._transport: Optional[asyncio.Transport] = None
        self._is_gone = False
        self._gone: Optional[asyncio.Future[None]] = None  # Resolved when the socket is closed, if anybody asked.
        self._is_flush_due = False
        self._is_lazy_flush_due = False
        self._is_paused = False
        self.holds_back = False  # Read nothing from a peer that does not read. On one side only: two would wait for each other.
        self._is_holding_back = False
        self._is_closed = False
        self._turn_bytes = 0  # Read in this round of the loop, in large pieces.
        self._timer: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_KERNEL_BYTES)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple) and len(name) >= 2 and not self._is_piped:
            self.address = self.address or f"{name[0]}:{name[1]}"
            mine = transport.get_extra_info("sockname")
            self.is_local = isinstance(mine, tuple) and mine[0] == name[0]
            self.is_private = str(name[0]).startswith(LOOPBACKS)
        if transport.get_extra_info("sslcontext") is not None:
            self.is_private = True
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)  # type: ignore[union-attr]
        self._turn.open[self] = None
        self._flush()
        if self._is_closed:  # While it was being accepted.
            self._close_transport()
        self._arm()

    def come_from(self, address: str, *, is_piped: bool) -> None:
        """Before it is connected: who calls, as it is shown; through a pipe of another machine, whatever the socket says."""
        self.address = address
        self._is_piped = is_piped

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.get_buffer()

    def buffer_updated(self, count: int) -> None:
        turn = self._turn
        turn.is_running = True
        try:
            self._emit(self.connection.buffer_updated(count, self._loop.time()))
        finally:
            turn.end()
        if count >= LARGE_READ_BYTES:
            self._share_the_turn(count)
        if self.holds_back and self._is_paused and self._transport is not None and self.is_congested:
            self._is_holding_back = True
            self._transport.pause_reading()

    def _share_the_turn(self, count: int) -> None:
        """An object comes in: the loop would read one socket dozens of times before it looks at the next."""
        if not self._turn_bytes:
            self._loop.call_soon(self._begin_turn)
        self._turn_bytes += count
        if self._turn_bytes >= TURN_BYTES and not self._is_holding_back and self._transport is not None:
            self._transport.pause_reading()

    def _begin_turn(self) -> None:
        is_paused = self._turn_bytes >= TURN_BYTES
        self._turn_bytes = 0
        if is_paused and not self._is_holding_back and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        self.has_ended = True
        self._emit(self.connection.receive_eof(self._loop.time()))
        return False

    def connection_lost(self, error: Optional[Exception]) -> None:
        self._transport = None
        self._turn.open.pop(self, None)
        self._is_gone = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._emit(self.connection.receive_eof(self._loop.time()))
        self._finish()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()
        if self._is_holding_back and self._transport is not None and not self.is_congested:
            self._is_holding_back = False
            self._transport.resume_reading()
        if self.on_drained is not None and not self.is_congested:
            self.on_drained()

    @property
    def bytes_waiting(self) -> int:
        """Bytes queued for this peer, here and in the transport."""
        queued = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self.connection.bytes_waiting + queued

    @property
    def is_congested(self) -> bool:
        """Whether whoever feeds this peer should hold back."""
        return self.bytes_waiting > OUTBOX_PAUSE_BYTES

    def send(self, message: Any) -> None:
        """Queue a message; it leaves with all others of this turn of the loop in one write."""
        self.connection.send(message)
        if not self._is_flush_due:
            self._flush_soon()

    def send_lazily(self, message: Any) -> None:
        """Queue a message that nobody is expected to wait for: it leaves with the next one, or a little later by itself."""
        self.connection.send(message)
        if not (self._is_flush_due or self._is_lazy_flush_due):
            self._is_lazy_flush_due = True
            self._loop.call_later(LAZY_SECONDS, self._flush_lazily)

    def _flush_lazily(self) -> None:
        self._is_lazy_flush_due = False
        self._flush()

    def flush_soon(self) -> None:
        """Something waits in the connection that `send` knows nothing of: an object's chunks."""
        if not self._is_flush_due:
            self._flush_soon()

    def _flush_soon(self) -> None:
        self._is_flush_due = True
        if self._turn.is_running:
            self._turn.waiting.append(self)
        else:
            self._loop.call_soon(self._flush)

    def flush_or_defer(self) -> None:
        """The end of a turn in which something was sent."""
        if self.connection.bytes_waiting <= SMALL_ANSWER_BYTES and not self.connection.has_bulk:
            self._flush()
        else:
            self._loop.call_soon(self._flush)

    def close(self, reason: str) -> None:
        """Say goodbye and close. No event follows."""
        self.connection.close(reason)
        self._hang_up()

    def when_gone(self) -> asyncio.Future[None]:
        """Resolved once the socket is closed, which takes as long as the peer takes to read what was sent before."""
        if self._gone is None:
            self._gone = self._loop.create_future()
            if self._is_gone:
                self._gone.set_result(None)
        return self._gone

    def refuse(self, reason: str, text: str) -> None:
        """Say why not, and close. No event follows."""
        self.connection.refuse(reason, text)
        self._hang_up()

    def abort(self) -> None:
        """Close at once. No event follows."""
        self.connection.close("")
        if self._transport is not None:
            self._transport.abort()
        self._finish()

    def drop(self, reason: str) -> None:
        """Close at once a peer that is no member of the mesh yet; its last event says why."""
        events = self.connection.receive_eof(self._loop.time())
        self.abort()
        if events:
            self._on_events(self, [Closed(None, reason)])

    def _hang_up(self) -> None:
        self._flush()
        self._finish()
        self._close_transport()

    def _close_transport(self) -> None:
        """Let the peer read what was sent, for as long as a goodbye may take."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(GOODBYE_SECONDS, self.abort)

    def _emit(self, events: List[Any]) -> None:
        if not events:
            if self.connection.has_data and not self._is_flush_due:
                self._flush_soon()
            return
        is_over = type(events[-1]) is Closed
        if is_over:
            self._flush()
            self._close_transport()
        self._on_events(self, events)
        if is_over:
            self._finish()
        elif self.connection.has_data and not self._is_flush_due:
            self._flush_soon()

    def _flush(self) -> None:
        self._is_flush_due = False
        transport = self._transport
        if transport is None:
            return
        parts = self.connection.data_to_send(bulk=not self._is_paused)
        if len(parts) == 1:
            transport.write(parts[0])
        elif parts:
            transport.writelines(parts)
        if self.connection.has_bulk and not self._is_paused and not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _arm(self) -> None:
        deadline = self.connection.next_deadline()
        if deadline is None or deadline == float("inf") or self._is_closed:
            return
        self._timer = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._emit(self.connection.on_time(self._loop.time()))
        self._arm()

    def _finish(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
