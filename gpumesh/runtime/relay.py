"""The way from the tasks of a worker to its coordinator: a socket in a private folder, whose connections the agent dials on.

    runner ── pid, client number ──> relay ── handshake, as a client with the agent's token ──> coordinator
           <── established, with the socket, or why not ──
           <════════════════════════ bytes, both ways ════════════════════════>

Promises:

1. The token never leaves the agent; the folder and the socket are this user's alone. Where it only lends the machine, no task is let in.
2. The runner is given the connected socket itself. Where that cannot be, the bytes go through the agent: the end of either side is the
   end of the other then, nothing that was sent before it is lost, and neither side is read faster than the other reads.
3. When a process is gone (`process_gone`), the coordinator hears a goodbye from every client that it was: what it has submitted ends
   at once, and not when the coordinator loses patience.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set

from gpumesh.config import (
    GOODBYE_SECONDS,
    RECONNECT_FIRST_DELAY_SECONDS,
    RECONNECT_MAX_DELAY_SECONDS,
    RECONNECT_SECONDS,
)
from gpumesh.errors import AuthenticationError, MeshError, MeshUnavailableError
from gpumesh.network.address import Address
from gpumesh.protocol import auth
from gpumesh.protocol.connection import Closed, Connection, Established
from gpumesh.protocol.messages import RegisterClient
from gpumesh.runtime.dialing import Dialer
from gpumesh.runtime.facts import fresh_nonce, peer_facts
from gpumesh.runtime.relay_greeting import ANSWERED, ASKED, REFUSALS

if TYPE_CHECKING:
    from gpumesh.store.segments import StoreFolder

logger = logging.getLogger("gpumesh.worker")

WRITE_HIGH_BYTES = 1024 * 1024  # Queued for one side before the other is not read any more.
BACKLOG = 128

LENDS_ONLY = (
    "this worker joined with a worker-only token: tasks on it cannot submit work, use actors or look at the mesh; "
    "submit from the client, or let this machine join with the mesh's full token"
)

OnAnswer = Callable[[Optional["_Dialed"], Optional[MeshError]], None]


class Relay:
    """See the module's promises. Every method runs on the loop's thread.

    Args:
        address: The coordinator's.
        token: Its secret.
        hands_over: Give connected sockets away, where they can be.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, token: str, *, hands_over: bool = True) -> None:
        self.hands_over = hands_over
        self.lends_only = auth.kind_of(token) != auth.FULL  # The coordinator would refuse a client, too.
        self._loop = loop
        self._address = address
        self._token = token
        self._folder: Optional[StoreFolder] = None
        self._path = ""
        self._server: Optional[asyncio.AbstractServer] = None
        self._sides: Set[_Side] = set()
        self._clients: Dict[int, Dict[int, None]] = {}  # Process -> the clients that it is.
        self._burials: Set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def path(self) -> str:
        """Where it listens; made at the first look. "" where that cannot be: tasks then have no mesh."""
        if not self._path and not self._is_closed:
            from gpumesh.store.segments import StoreFolder

            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                folder = self._folder = StoreFolder()
                path = folder.segment_path("tasks")
                listener.bind(path)
                listener.listen(BACKLOG)
                listener.setblocking(False)
            except OSError as error:
                listener.close()
                logger.warning("tasks of this worker cannot use the mesh: no socket for them: %s", error)
                return ""
            self._path = path
            self._keep(self._loop.create_task(self._listen(listener)))
        return self._path

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await self._loop.create_unix_server(lambda: _Caller(self), sock=listener)
        if self._is_closed:
            self._server.close()

    def process_gone(self, pid: int) -> None:
        """A process of this worker has ended: so have the clients that it was."""
        for number in self._clients.pop(pid, ()):
            self._keep(self._loop.create_task(self._bury(number)))

    async def close(self) -> None:
        """The worker leaves, and its processes have ended."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        for pid in list(self._clients):
            self.process_gone(pid)
        if self._burials:
            await asyncio.wait(list(self._burials), timeout=GOODBYE_SECONDS)
        for task in self._burials:
            task.cancel()
        for side in list(self._sides):
            side.abort()
        if self._folder is not None:
            self._folder.close()

    # --- for its connections

    def dial(self, on_answer: OnAnswer) -> None:
        """Connect to the coordinator and shake hands as a client; `on_answer` is told how that went."""
        self._keep(self._loop.create_task(self._dial(on_answer)))

    async def _dial(self, on_answer: OnAnswer) -> None:
        dialer = Dialer(self._loop, self._address)

        def answered(side: Optional[_Dialed], error: Optional[MeshError]) -> None:
            if dialer.wants_tls(error):
                self._keep(self._loop.create_task(attempt()))
            else:
                on_answer(side, error)

        async def attempt() -> None:
            try:
                await dialer.dial(lambda binding: _Dialed(self, self._token, binding, answered))
            except MeshError as error:
                on_answer(None, error)

        await attempt()

    def note(self, side: _Side, *, is_open: bool) -> None:
        """A connection has begun or ended."""
        (self._sides.add if is_open else self._sides.discard)(side)

    def note_client(self, pid: int, number: int) -> None:
        """A process is a client of this number."""
        self._clients.setdefault(pid, {})[number] = None

    async def _bury(self, number: int) -> None:
        """Say goodbye for a client that is dead."""
        delay = RECONNECT_FIRST_DELAY_SECONDS
        until = self._loop.time() + RECONNECT_SECONDS
        while True:
            answered: asyncio.Future[Optional[_Dialed]] = self._loop.create_future()

            def on_answer(side: Optional[_Dialed], error: Optional[MeshError], answered: Any = answered) -> None:
                if not answered.done():
                    answered.set_result(None if error is not None else side)

            await self._dial(on_answer)
            side = await answered
            if side is not None:
                side.say_goodbye(number)
                await side.gone
                return
            if self._is_closed or self._loop.time() + delay > until:
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, RECONNECT_MAX_DELAY_SECONDS)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._burials.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._burials.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the way from tasks to the mesh failed", exc_info=task.exception())


class _Side(asyncio.Protocol):
    """One of the two sockets that are joined."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.transport: Optional[asyncio.Transport] = None
        self.other: Optional[_Side] = None  # Once they are joined.
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)  # type: ignore[union-attr]
        self.relay.note(self, is_open=True)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)
        else:
            self.received(data)

    def received(self, data: bytes) -> None:
        """Bytes that came before the two were joined."""
        raise AssertionError("overridden by both sides")

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.read(on=False)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.read(on=True)

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.relay.note(self, is_open=False)
        self.transport = None
        self.is_over = True
        if self.other is not None:
            self.other.end()

    def join(self, other: _Side) -> None:
        """From now on the bytes of each go to the other."""
        self.other, other.other = other, self

    def write(self, data: bytes) -> None:
        """Pass bytes on."""
        if self.transport is not None:
            self.transport.write(data)

    def read(self, *, on: bool) -> None:
        """Read what comes, or let it wait."""
        if self.transport is not None and not self.transport.is_closing():
            (self.transport.resume_reading if on else self.transport.pause_reading)()

    def end(self) -> None:
        """Close it once what was passed on has left, for which a goodbye's time is enough."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                self.relay._loop.call_later(GOODBYE_SECONDS, self.abort)

    def abort(self) -> None:
        """Close it now."""
        if self.transport is not None:
            self.transport.abort()


class _Caller(_Side):
    """The side of a task's process."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self._asked = b""

    def received(self, data: bytes) -> None:
        self._asked += data
        if len(self._asked) < ASKED.size:
            return
        self.read(on=False)  # It says nothing more before it has its answer.
        if len(self._asked) > ASKED.size:
            self.abort()
            return
        if self.relay.lends_only:
            self.write(_answer(REFUSALS.index(AuthenticationError), 0, LENDS_ONLY))
            self.end()
            return
        pid, number = ASKED.unpack(self._asked)
        self.relay.note_client(pid, number)
        self.relay.dial(self._answer)

    def _answer(self, dialed: Optional[_Dialed], error: Optional[MeshError]) -> None:
        if self.is_over:
            if dialed is not None:
                dialed.end()
            return
        if dialed is None or error is not None:
            self.write(_answer(REFUSALS.index(type(error)) if type(error) in REFUSALS else 1, 0, str(error)))
            self.end()
            return
        connection = dialed.connection
        said = _answer(0, connection.workers, connection.mesh, connection.take_rest())
        if self.relay.hands_over and self._hand_over(dialed, said):
            return
        self.join(dialed)
        self.write(said)
        dialed.read(on=True)
        self.read(on=True)

    def _hand_over(self, dialed: _Dialed, said: bytes) -> bool:
        """Give the coordinator's socket to the runner; False if it cannot be given away: there is more to it than the socket."""
        if self.transport is None or dialed.transport is None or dialed.transport.get_extra_info("sslcontext") is not None:
            return False
        descriptors = [os.dup(side.transport.get_extra_info("socket").fileno()) for side in (self, dialed) if side.transport]
        with socket.socket(fileno=descriptors[0]) as ours:
            try:
                socket.send_fds(ours, [said], descriptors[1:])  # The first bytes on this socket: there is room.
            except OSError as error:
                logger.debug("a process was gone before it had its answer: %s", error)
            finally:
                os.close(descriptors[1])
        self.abort()
        dialed.abort()
        return True


def _answer(status: int, workers: int, text: str, rest: bytes = b"") -> bytes:
    said = text.encode("utf-8", "replace")[:1000]
    return ANSWERED.pack(status, workers, len(said), len(rest)) + said + rest


class _Dialed(_Side):
    """The side of the coordinator."""

    def __init__(self, relay: Relay, token: str, binding: bytes, on_answer: OnAnswer) -> None:
        super().__init__(relay)
        loop = relay._loop
        self.connection = Connection.dial(
            role="client",
            token=token,
            nonce=fresh_nonce(),
            now=loop.time(),
            facts=peer_facts(),
            binding=binding,
            hands_over=True,
        )
        self.gone: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._on_answer: Optional[OnAnswer] = on_answer
        self._timer: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._flush()
        due = self.connection.next_deadline()
        if due is not None:
            self._timer = self._loop.call_at(due, self._on_time)

    def received(self, data: bytes) -> None:
        self._take(self.connection.receive_data(data, self._loop.time()))

    def connection_lost(self, error: Optional[Exception]) -> None:
        if self._on_answer is not None:
            self._take(self.connection.receive_eof(self._loop.time()))
        super().connection_lost(error)
        if not self.gone.done():
            self.gone.set_result(None)

    def _on_time(self) -> None:
        self._take(self.connection.on_time(self._loop.time()))

    def _take(self, events: List[Any]) -> None:
        self._flush()
        for event in events:
            if type(event) is Established:
                self.read(on=False)
                self._tell(None)
            elif type(event) is Closed:
                self.fail(event.error or MeshUnavailableError(event.reason))

    def fail(self, error: MeshError) -> None:
        """There is no connection."""
        self._tell(error)
        self.end()
        if self.transport is None and not self.gone.done():
            self.gone.set_result(None)

    def _tell(self, error: Optional[MeshError]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(self, error)

    def _flush(self) -> None:
        for part in self.connection.data_to_send():
            self.write(part)

    def say_goodbye(self, number: int) -> None:
        """For a client that is dead."""
        self.connection.send(RegisterClient(number, "", True))
        self.connection.close(f"process {os.getpid()} has seen its end")
        self._flush()
        if self.transport is not None:
            self.transport.write_eof()
        self.read(on=True)  # Until it has hung up, too: it has heard everything then.
        self._loop.call_later(GOODBYE_SECONDS, self.abort)
