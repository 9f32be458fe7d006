"""Peers that do not play by the rules: raw sockets, servers of other protocols, and frames made by hand."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Any, Callable, Iterator, List, Optional, Tuple

import psutil
import pytest

from gpumesh.protocol import codec, frames
from gpumesh.protocol.connection import Connection, Established, PeerFacts

FACTS = PeerFacts("0", "3.11", "test")


def frame(kind: int, body: bytes, *, length: Optional[int] = None, flags: int = 0, buffers: int = 0) -> bytes:
    """One frame, with any length in its header."""
    return struct.pack("<IBBH", len(body) if length is None else length, kind, flags, buffers) + body


def encoded(message: Any) -> bytes:
    """A message as a whole frame."""
    tag, body, buffers = codec.Encoder().encode(message)
    return b"".join(bytes(part) for part in frames.encode_frame(tag, body, buffers))


def connect(port: int, timeout: float = 10.0) -> socket.socket:
    """A raw connection to loopback."""
    return socket.create_connection(("127.0.0.1", port), timeout)


def own_address() -> str:
    """An IPv4 address of this machine that is not loopback; skips the test where there is none."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return str(each.address)
    pytest.skip("this machine has no address but loopback")


def read_to_end(sock: socket.socket, timeout: float = 10.0) -> bytes:
    """All bytes until the peer closes; fails when it does not."""
    sock.settimeout(timeout)
    received = b""
    while True:
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            return received
        if not data:
            return received
        received += data


def handshake(port: int, token: str, *, role: str = "client") -> Tuple[socket.socket, Connection]:
    """A connection that has shown the token and not registered yet."""
    sock = connect(port)
    connection = Connection.dial(role=role, token=token, nonce=os.urandom(32), now=time.monotonic(), facts=FACTS)
    while True:
        for part in connection.data_to_send():
            sock.sendall(part)
        if connection.established:
            return sock, connection
        data = sock.recv(65536)
        assert data, "the coordinator closed the connection during the handshake"
        events = connection.receive_data(data, time.monotonic())
        assert all(isinstance(event, Established) for event in events), events


class Server:
    """Listens on loopback and gives each connection to a function on a thread of its own."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.accepted = 0
        self._open: List[socket.socket] = []
        self._threads: List[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._open.append(sock)
            thread = threading.Thread(target=self._one, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _one(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._serve(sock)

    def close(self) -> None:
        """Stop, and cut all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def stay_silent(sock: socket.socket) -> None:
    """Read, and never say a word."""
    while sock.recv(65536):
        pass


def say(greeting: bytes, *, close: bool = False) -> Callable[[socket.socket], None]:
    """Greet at once, then read."""

    def serve(sock: socket.socket) -> None:
        sock.sendall(greeting)
        if close:
            sock.close()
        else:
            stay_silent(sock)

    return serve


def trickle(data: bytes, pause: float) -> Callable[[socket.socket], None]:
    """One byte at a time."""

    def serve(sock: socket.socket) -> None:
        for position in range(len(data)):
            sock.sendall(data[position : position + 1])
            time.sleep(pause)
        stay_silent(sock)

    return serve


@contextlib.contextmanager
def http_server() -> Iterator[int]:
    """A real web server; its port."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
