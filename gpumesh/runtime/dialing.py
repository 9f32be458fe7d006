"""From an address to a connection on an event loop: the way, the IPs, TLS, and why not. Waits for nobody else on the loop.

DIRECT  ── TCP ── loopback, or insecure:// ──> plain        (refused with "tls": once more, inside TLS)
              └── else: TLS ── gpumesh/1 ────> mesh inside TLS
https://               └── anything else ────> PIPE    (TCP and PIPE by the HTTP proxy of this network, where one is named)
ws://   ── PIPE: WebSocket ── TLS inside ────> mesh inside TLS
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, TypeVar

from gpumesh.config import CONNECT_SECONDS
from gpumesh.errors import MeshError
from gpumesh.network import connecting
from gpumesh.network.address import HTTPS, PORT, WEBSOCKET, Address, is_loopback
from gpumesh.protocol.connection import TLS
from gpumesh.runtime.loop import take_over

T = TypeVar("T")
MakeProtocol = Callable[[bytes], asyncio.BaseProtocol]
"""Given the hash that proofs are bound to, nothing without TLS: the protocol of a connection that is there."""


class Dialer:
    """Every connection of one agent to one coordinator. Every method runs on the loop's thread.

    Args:
        address: Of the coordinator, and the way there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        self.address = address
        self._loop = loop
        self._needs_tls = False  # The next time, also where it would be plain.

    async def dial(self, make: MakeProtocol) -> None:
        """Connect, within CONNECT_SECONDS; `make` and its protocol's `connection_made` are called once, when it may speak.

        Raises:
            MeshError: There is no connection; the message says why. `make` has not been called.
        """
        needs_tls, self._needs_tls = self._needs_tls, False
        deadline = self._loop.time() + CONNECT_SECONDS
        try:
            if self.address.way == WEBSOCKET:
                await self._pipe(make, deadline)
            else:
                await self._direct(make, deadline, needs_tls=needs_tls)
        except asyncio.TimeoutError:
            raise connecting.unanswered(self.address, CONNECT_SECONDS) from None

    def wants_tls(self, error: Optional[BaseException]) -> bool:
        """Whether a connection has ended because it was plain: the next one is inside TLS, and worth being tried at once."""
        if getattr(error, "refusal", "") != TLS or self.address.way != PORT:
            return False
        self._needs_tls = True
        return True

    async def _direct(self, make: MakeProtocol, deadline: float, *, needs_tls: bool) -> None:
        address = self.address
        sock = await self._connect(deadline)
        if connecting.is_plain(address, sock) and not needs_tls:
            await take_over(self._loop, lambda: make(b""), sock)
            return
        protocols = connecting.protocols_for(address)
        if await self._secure(sock, make, protocols, deadline) == connecting.MESH_PROTOCOL:
            return
        if address.way != HTTPS:
            raise connecting.foreign(address)
        await self._pipe(make, deadline)

    async def _connect(self, deadline: float) -> socket.socket:
        address = self.address
        if is_loopback(address.host):  # At once, or not at all.
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                try:
                    await asyncio.wait_for(self._loop.sock_connect(sock, (address.host, address.port)), CONNECT_SECONDS)
                    connecting.settle(sock)
                except BaseException:
                    sock.close()
                    raise
            except asyncio.TimeoutError:
                raise connecting.no_connection(address, None, CONNECT_SECONDS) from None
            except OSError as error:
                raise connecting.no_connection(address, error, CONNECT_SECONDS) from None
            connecting.prepare(sock)
            return sock
        left = max(0.001, deadline - self._loop.time())
        return await _beside(self._loop, lambda: connecting.connect(address, left), lambda made: made.close())

    async def _pipe(self, make: MakeProtocol, deadline: float) -> None:
        from gpumesh.network.websocket import open_pipe

        sock = await open_pipe(self.address, timeout=max(0.001, deadline - self._loop.time()))
        sock.setblocking(False)
        if await self._secure(sock, make, (connecting.MESH_PROTOCOL,), deadline) != connecting.MESH_PROTOCOL:
            raise connecting.foreign(self.address)

    async def _secure(self, sock: socket.socket, make: MakeProtocol, protocols: Sequence[str], deadline: float) -> str:
        """TLS, and the mesh inside where the other side speaks it: the protocol that it has chosen."""
        from gpumesh.network.tls import client_context

        inside = _Inside(make)
        left = max(0.001, deadline - self._loop.time())
        options: Dict[str, Any] = {
            "sock": sock,
            "ssl": client_context(protocols),
            "server_hostname": "",
            "ssl_handshake_timeout": left,
        }
        create: Any = self._loop.create_connection
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            create = self._loop.create_unix_connection
        try:
            await asyncio.wait_for(create(lambda: inside, **options), left)
        except (OSError, asyncio.TimeoutError) as error:  # ssl.SSLError is one.
            sock.close()
            is_late = isinstance(error, (TimeoutError, asyncio.TimeoutError)) or "too long" in str(error)
            cause = None if is_late else error
            explain = functools.partial(connecting.explain, self.address, cause, CONNECT_SECONDS)
            raise await _beside(self._loop, explain) from None
        return inside.chosen


class _Inside(asyncio.Protocol):
    """The first moment inside TLS: only now the other side's certificate is known."""

    def __init__(self, make: MakeProtocol) -> None:
        self.chosen = ""
        self._make = make

    def connection_made(self, transport: Any) -> None:
        from gpumesh.network.tls import binding_of

        tls = transport.get_extra_info("ssl_object")
        self.chosen = tls.selected_alpn_protocol() or ""
        if self.chosen != connecting.MESH_PROTOCOL:
            transport.abort()
            return
        protocol = self._make(binding_of(tls))
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


async def _beside(
    loop: asyncio.AbstractEventLoop, work: Callable[[], T], unwanted: Callable[[T], object] = lambda made: None
) -> T:
    """Do something that blocks on a thread of its own, which nobody waits for when the program ends.

    Args:
        unwanted: Called with what came out after the waiting was cancelled.
    """
    future: asyncio.Future[Tuple[Optional[T], Optional[MeshError]]] = loop.create_future()

    def deliver(result: Optional[T], error: Optional[MeshError]) -> None:
        if not future.done():
            future.set_result((result, error))
        elif result is not None:
            unwanted(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except MeshError as failure:
            error = failure
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # The loop has ended.
            if result is not None:
                unwanted(result)

    threading.Thread(target=run, name="gpumesh-dial", daemon=True).start()
    made, error = await future
    if error is not None:
        raise error
    assert made is not None
    return made
