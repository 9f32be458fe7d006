"""A coordinator with a certificate in this process, and what those who may not come in try on it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import ssl
import time
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

from gpumesh.network.certificates import Identity, load_or_make_identity
from gpumesh.network.tcp import listen
from gpumesh.network.tls import binding_of, client_context
from gpumesh.protocol.connection import Connection
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.runtime.loop import LoopThread
from tests.support.peers import FACTS, connect

TOKEN = "a token of sufficient length, known to friends only"


class Canary:
    """Unpickling one leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def about(self, word: str) -> List[str]:
        """Those with this word in them."""
        return [line for line in self.lines if word in line]


class Guarded:
    """See the module's docstring.

    Attributes:
        coordinator: Whose tables are looked at.
        log: What it has logged, errors of its event loop included.
        canary: A pickle; `sung` exists once anybody has loaded it.
    """

    def __init__(self, folder: Path, *, token: str = TOKEN) -> None:
        self.token = token
        self.identity: Identity = load_or_make_identity(str(folder / "state"))
        self.sung = folder / "unpickled"
        self.canary = pickle.dumps(Canary(self.sung), protocol=2)
        self.log = Lines()
        for name in ("gpumesh", "asyncio", "aiohttp"):
            logging.getLogger(name).addHandler(self.log)
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = LoopThread("guarded")
        self.is_over = False
        self.coordinator: Coordinator = self._thread.call(lambda: self._start(listener), timeout=10)

    async def _start(self, listener: socket.socket) -> Coordinator:
        coordinator = Coordinator(token=self.token, identity=self.identity)
        await coordinator.start(listener)
        return coordinator

    def look(self, what: Any) -> Any:
        """`what(coordinator)`, on its thread."""

        async def look() -> Any:
            return what(self.coordinator)

        return self._thread.call(look, timeout=10)

    def forgive(self) -> None:
        """As if nobody had failed before: tests of other things come from the same address."""
        self.look(lambda coordinator: coordinator.door.admission._records.clear())

    def peers(self) -> Tuple[int, int]:
        """How many clients and workers it knows."""
        return self.look(lambda coordinator: (len(coordinator._clients), len(coordinator._workers)))  # type: ignore[no-any-return]

    def strangers(self) -> int:
        """How many it has who have not shown who they are."""
        return int(self.look(lambda coordinator: len(coordinator.door.admission)))

    def close(self) -> None:
        """End it."""
        self.is_over = True
        self._thread.call(self.coordinator.stop, timeout=10)
        self._thread.stop()
        for name in ("gpumesh", "asyncio", "aiohttp"):
            logging.getLogger(name).removeHandler(self.log)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def tls_connect(port: int, protocol: str = "gpumesh/1") -> ssl.SSLSocket:
    """A connection inside TLS, as a dialer of the mesh makes it."""
    return client_context([protocol]).wrap_socket(connect(port), server_hostname="gpumesh")


def shake(sock: Any, token: str, *, role: str = "client", nonce: Optional[bytes] = None) -> Tuple[Connection, List[Any]]:
    """A whole handshake on a connected socket; the connection, and its events until it was open or over."""
    binding = binding_of(sock) if isinstance(sock, ssl.SSLSocket) else b""
    connection = Connection.dial(
        role=role, token=token, nonce=nonce or os.urandom(32), now=time.monotonic(), facts=FACTS, binding=binding
    )
    events: List[Any] = []
    while not events:
        data = b""
        with contextlib.suppress(ConnectionError):
            for part in connection.data_to_send():
                sock.sendall(part)
        with contextlib.suppress(ConnectionError):
            data = sock.recv(65536)
        events = connection.receive_data(data, time.monotonic()) if data else connection.receive_eof(time.monotonic())
    return connection, events


def ask(port: int, data: bytes, *, tls: bool = False, timeout: float = 10.0) -> bytes:
    """Send, say that this was all, and read until the other side closes."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(tls_connect(port) if tls else connect(port))
        sock.settimeout(timeout)
        received = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            sock.sendall(data)
            if not tls:
                sock.shutdown(socket.SHUT_WR)
            while True:
                more = sock.recv(65536)
                if not more:
                    break
                received += more
        return received


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """A peer that is cut off may see a reset."""
    with contextlib.suppress(OSError):
        yield
