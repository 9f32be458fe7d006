"""One socket to one coordinator: moves bytes between it and a protocol Connection; decides nothing.

Sending and receiving may happen on different threads at once. `lock` guards the Connection and the order of what is written;
whoever calls `receive` must be the only one (client.channel's receive lock).
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
import time
from typing import Any, List, Optional, Sequence, Tuple

from gpumesh.config import BULK_MESSAGE_BYTES, KIB, OUTBOX_PAUSE_BYTES
from gpumesh.errors import MeshUnavailableError, ProtocolError
from gpumesh.network import connecting
from gpumesh.network.address import HTTPS, PORT, WEBSOCKET, Address
from gpumesh.network.connecting import local_facts
from gpumesh.protocol.auth import NONCE_BYTES
from gpumesh.protocol.connection import LATER, TLS, Closed, Connection, Established, PeerFacts

__all__ = ["MeshLink", "Poller", "SecureLink", "dial", "local_facts"]

_MAX_PARTS = 512  # Buffers handed to one sendmsg; systems allow 1024.
_WRITE_TURN_BYTES = 512 * KIB  # Written under one hold of the lock: a task that another thread submits waits for no more.
_READ, _WRITE = 1, 2
_LATER_SECONDS = 1.0  # Between tries, where a coordinator wants to be left alone for a while.


class MeshLink:
    """A connected socket and its Connection."""

    def __init__(self, sock: Any, connection: Connection) -> None:
        self.sock = sock  # A socket, or a TlsSocket.
        self.connection = connection
        self.lock = threading.Lock()
        self.wants_write = False  # The socket is full: whoever waits for it must call `flush` when it is writable.
        self.is_broken = False
        self._parts: List[Any] = []  # Taken from the connection, not yet by the socket.
        self._backlog = 0  # Bytes of these.
        self._poll = _SocketPoll(sock)

    # --- sending

    def send(self, messages: List[Any]) -> None:
        """Queue messages and write what the socket takes at once; large ones and objects, only if nobody is writing them already.

        Raises:
            ProtocolError: One of them cannot be put on the wire; those before it are queued.
        """
        with self.lock:
            try:
                for message in messages:
                    self.connection.send(message)
            except ProtocolError:
                self._write(bulk=not self.wants_write)
                raise
            except BaseException:
                self.cut()
                raise
            self._write(bulk=not self.wants_write)

    def queue(self, messages: Sequence[Any]) -> None:
        """Queue messages that leave with what is sent next. Raises as `send`."""
        with self.lock:
            try:
                for message in messages:
                    self.connection.send(message)
            except ProtocolError:
                raise
            except BaseException:
                self.cut()
                raise

    def flush(self) -> None:
        """Write what the socket takes."""
        with self.lock:
            self._write(bulk=True)

    def is_congested_for(self, size: int) -> bool:
        """Whether so much waits for the socket that nobody should add `size` bytes to it."""
        if not self.wants_write:
            return False
        waiting = self._backlog + self.connection.bytes_waiting + self.connection.bulk_bytes_waiting
        if waiting > OUTBOX_PAUSE_BYTES:
            return True
        return size > BULK_MESSAGE_BYTES and self.connection.has_bulk_messages

    def _write(self, *, bulk: bool) -> None:
        try:
            self._write_on(bulk)
        except BaseException:
            self.cut()  # Interrupted (Ctrl-C): nobody knows how much of it has left.
            raise

    def _write_on(self, bulk: bool) -> None:
        connection = self.connection
        budget = _WRITE_TURN_BYTES
        while not self.is_broken:
            parts = self._parts
            if not parts:
                parts = connection.data_to_send(bulk=bulk)
                if not parts:
                    self.wants_write = connection.has_data
                    return
                self._backlog = sum(map(len, parts))
            try:
                if len(parts) == 1:
                    sent = self.sock.send(parts[0])
                else:
                    sent = _send_parts(self.sock, parts)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self.is_broken = True  # The receiving side reads why.
                self._parts = []
                return
            self._backlog -= sent
            budget -= sent
            if not self._backlog:
                self._parts = []
                if budget > 0:
                    continue
                self.wants_write = connection.has_data
                return  # The receiving side needs the lock as well.
            self._parts = _after(parts, sent)
            if sent == 0:
                self.wants_write = True
                return

    # --- receiving

    def receive(self) -> Optional[List[Any]]:
        """Events from one read; None when there is nothing to read. The last event ever is Closed."""
        connection = self.connection
        buffer = connection.get_buffer()
        try:
            count = self.sock.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            count = 0
        with self.lock:
            if count:
                events = connection.buffer_updated(count, time.monotonic())
            else:
                events = connection.receive_eof(time.monotonic())
            if connection.has_data:
                self._write(bulk=not self.wants_write)
        return events

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended: nothing more will come of it."""
        return self.connection.next_deadline() is None

    def on_time(self, now: float) -> List[Any]:
        """Heartbeats and deadlines that are due."""
        with self.lock:
            events = self.connection.on_time(now)
            self._write(bulk=not self.wants_write)
        return events

    def wait(self, timeout: Optional[float], *, writable: bool = False) -> Tuple[bool, bool]:
        """Block until the socket is readable (or, if asked, writable); (readable, writable)."""
        return self._poll.wait(timeout, writable)

    def close(self, reason: str = "") -> None:
        """Say goodbye as far as the socket takes it without waiting; a thread blocked in `wait` wakes up."""
        with self.lock:
            self.connection.close(reason)
            if not self._parts:
                self._parts = self.connection.data_to_send(bulk=False)
                self._backlog = sum(map(len, self._parts))
            if self._parts and not self.is_broken:
                self._write(bulk=False)
            self._parts = []
            self.cut()

    def cut(self) -> None:
        """End both directions; the file descriptor stays until nobody can be waiting for it (`release`)."""
        self.is_broken = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def release(self) -> None:
        """Give the file descriptor back."""
        self.sock.close()


class SecureLink(MeshLink):
    """The same inside TLS."""

    def receive(self) -> Optional[List[Any]]:
        """As a MeshLink's. Leaves nothing behind that has been decrypted: nobody who waits for the socket would hear of it."""
        events = super().receive()
        while self.sock.pending() and not self.is_over:
            more = super().receive()
            if more:
                events = [*(events or ()), *more]
        return events


def _send_parts(sock: Any, parts: List[Any]) -> int:
    sent: int = sock.sendmsg(parts[:_MAX_PARTS]) if hasattr(sock, "sendmsg") else sock.send(parts[0])
    return sent


def _after(parts: List[Any], sent: int) -> List[Any]:
    """What is left of `parts` once their first `sent` bytes are gone."""
    for index, part in enumerate(parts):
        size = len(part)
        if sent < size:
            return [memoryview(part)[sent:], *parts[index + 1 :]]
        sent -= size
    return []


class _SocketPoll:
    """Waiting for one socket, by the cheapest call that the platform has."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._read: Any = None
        if hasattr(select, "poll"):
            self._read = select.poll()
            self._read.register(sock, select.POLLIN)
            self._both = select.poll()
            self._both.register(sock, select.POLLIN | select.POLLOUT)

    def wait(self, timeout: Optional[float], writable: bool) -> Tuple[bool, bool]:
        if self._read is None:
            watch = [self._sock]
            readable, can_write, failed = select.select(watch, watch if writable else [], watch, timeout)
            return bool(readable or failed), bool(can_write)
        poll = self._both if writable else self._read
        ready = poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if not ready:
            return False, False
        mask = ready[0][1]
        return bool(mask & ~select.POLLOUT), bool(mask & select.POLLOUT)


# --- connecting


def dial(address: Address, *, token: str, timeout: float, facts: PeerFacts) -> Tuple[MeshLink, Established, List[Any]]:
    """Connect and shake hands in the calling thread; name look-up, connection and all handshakes share `timeout`.

    Inside TLS, except with this very machine (unless it wants it) and where the address says so.

    Returns:
        The link, what the handshake told, and messages that came right behind it.

    Raises:
        MeshUnavailableError: Nobody answers there, or not without TLS.
        AuthenticationError, VersionMismatchError, ProtocolError: Somebody does, but not as a coordinator of this mesh.
    """
    deadline = time.monotonic() + timeout
    needs_tls = False
    while True:
        sock, binding = _open(address, deadline, timeout, needs_tls=needs_tls)
        try:
            connection = Connection.dial(
                role="client", token=token, nonce=os.urandom(NONCE_BYTES), now=time.monotonic(), facts=facts, binding=binding
            )
            link = MeshLink(sock, connection) if not binding else SecureLink(sock, connection)
            established, rest = _shake_hands(link, address, deadline, timeout, binding)
            return link, established, rest
        except MeshUnavailableError as error:
            sock.close()
            left = deadline - time.monotonic()
            if error.refusal == TLS and address.way == PORT and not needs_tls:
                needs_tls = True
            elif error.refusal == LATER and left > _LATER_SECONDS:
                threading.Event().wait(_LATER_SECONDS)  # Somebody else on this machine has tried wrong tokens.
            else:
                raise
        except BaseException:
            sock.close()
            raise


def _open(address: Address, deadline: float, timeout: float, *, needs_tls: bool) -> Tuple[Any, bytes]:
    """A connected socket, or one inside TLS with the hash that proofs are bound to."""
    if address.way == WEBSOCKET:
        return _secure(_pipe(address, deadline), (connecting.MESH_PROTOCOL,), address, deadline, timeout)
    sock = connecting.connect(address, deadline - time.monotonic())
    if connecting.is_plain(address, sock) and not needs_tls:
        return sock, b""
    tls, binding = _secure(sock, connecting.protocols_for(address), address, deadline, timeout)
    if tls.protocol == connecting.MESH_PROTOCOL:
        return tls, binding
    tls.close()
    if address.way != HTTPS:
        raise connecting.foreign(address)
    return _secure(_pipe(address, deadline), (connecting.MESH_PROTOCOL,), address, deadline, timeout)


def _pipe(address: Address, deadline: float) -> socket.socket:
    from gpumesh.runtime.piping import open_pipe

    return open_pipe(address, timeout=max(0.001, deadline - time.monotonic()))


def _secure(
    sock: socket.socket, protocols: Sequence[str], address: Address, deadline: float, timeout: float
) -> Tuple[Any, bytes]:
    from gpumesh.client.tls_socket import TlsSocket

    try:
        tls, binding = connecting.secure(sock, protocols, deadline - time.monotonic())
        return TlsSocket(tls), binding
    except OSError as error:  # ssl.SSLError is one.
        is_late = isinstance(error, socket.timeout)  # The same as TimeoutError only since Python 3.10.
        raise connecting.explain(address, None if is_late else error, timeout) from None


def _shake_hands(
    link: MeshLink, address: Address, deadline: float, timeout: float, binding: bytes
) -> Tuple[Established, List[Any]]:
    link.flush()
    while True:
        now = time.monotonic()
        if now >= deadline:
            raise connecting.unanswered(address, timeout)
        due = link.connection.next_deadline()
        readable, writable = link.wait(min(deadline, due or deadline) - now, writable=link.wants_write)
        if writable:
            link.flush()
        events = link.receive() if readable else link.on_time(time.monotonic())
        for position, event in enumerate(events or ()):
            if type(event) is Established:
                return event, (events or [])[position + 1 :]
            if type(event) is Closed:
                link.flush()
                raise connecting.at(address, event.error, event.reason, binding)


# --- the I/O thread's waiting


class Poller:
    """What the I/O thread sleeps in: one socket, and a wake-up from other threads.

    `can_hand_over` says whether another thread may switch the watching of reads off and on while the I/O thread sleeps.
    """

    def __init__(self) -> None:
        self.can_hand_over = hasattr(select, "epoll")
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wake_fd = self._reader.fileno()
        self._fd = -1
        self._mask = 0
        self._applied = 0
        self._mask_lock = threading.Lock()
        self._sock: Optional[socket.socket] = None
        if self.can_hand_over:
            self._epoll = select.epoll()
            self._epoll.register(self._wake_fd, select.EPOLLIN)
        else:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._reader, selectors.EVENT_READ)

    def wake(self) -> None:
        """Make `wait` return soon. From any thread."""
        try:
            self._writer.send(b"\0")
        except OSError:
            pass  # Full: it is being woken already. Closed: nobody sleeps there any more.

    def watch(self, sock: socket.socket) -> None:
        """Watch this socket for reads."""
        self._sock = sock
        self._fd = sock.fileno()
        self._mask = self._applied = _READ
        if self.can_hand_over:
            self._epoll.register(self._fd, select.EPOLLIN)
        else:
            self._selector.register(sock, selectors.EVENT_READ)

    def forget(self) -> None:
        """Watch no socket; call it before the socket is closed."""
        if self._fd < 0:
            return
        with self._mask_lock:
            fd, self._fd = self._fd, -1
        try:
            if self.can_hand_over:
                self._epoll.unregister(fd)
            elif self._sock is not None:
                self._selector.unregister(self._sock)
        except (OSError, ValueError, KeyError):
            pass

    def set_read(self, on: bool) -> None:
        """Watch for reads or not."""
        self._change(_READ, on)

    def set_write(self, on: bool) -> None:
        """Watch for room to write or not."""
        if bool(self._mask & _WRITE) != on:
            self._change(_WRITE, on)

    def _change(self, bit: int, on: bool) -> None:
        with self._mask_lock:
            mask = self._mask = self._mask | bit if on else self._mask & ~bit
            if mask == self._applied or self._fd < 0:
                return
            self._applied = -1  # Unknown, should the calling thread be interrupted now.
            if self.can_hand_over:
                self._epoll.modify(
                    self._fd, (select.EPOLLIN if mask & _READ else 0) | (select.EPOLLOUT if mask & _WRITE else 0)
                )
            elif self._sock is not None:
                self._selector.modify(self._sock, mask)  # _READ and _WRITE are the selectors' own numbers.
            self._applied = mask

    def wait(self, timeout: Optional[float]) -> Tuple[bool, bool, bool]:
        """(readable, writable, woken); a broken socket is readable."""
        readable = writable = woken = False
        if self.can_hand_over:
            for fd, events in self._epoll.poll(timeout):
                if fd == self._wake_fd:
                    woken = True
                elif fd == self._fd:
                    writable = bool(events & select.EPOLLOUT)
                    readable = bool(events & ~select.EPOLLOUT)
        else:
            for key, mask in self._selector.select(timeout):
                if key.fileobj is self._reader:
                    woken = True
                else:
                    readable, writable = bool(mask & _READ), bool(mask & _WRITE)
        if woken:
            try:
                self._reader.recv(4096)
            except OSError:
                pass
        return readable, writable, woken

    @property
    def is_watching_write(self) -> bool:
        """Whether `wait` returns when there is room to write."""
        return bool(self._mask & _WRITE)

    def close(self) -> None:
        """Give all file descriptors back."""
        self.forget()
        self.release()

    def release(self) -> None:
        """The same without changing what the kernel watches: in a forked child that is still the parent's."""
        if self.can_hand_over:
            self._epoll.close()
        else:
            self._selector.close()
        self._reader.close()
        self._writer.close()
