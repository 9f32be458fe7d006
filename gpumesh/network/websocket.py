"""The mesh's bytes as binary WebSocket messages: the way through proxies and tunnels that let only HTTPS pass.

    dialer ══ socketpair ══ pump ── binary messages ── proxy ── pump ══ socketpair ══ listener

A pipe knows nothing of what it carries. Whoever dials speaks TLS inside it (`network.tls`), bound to the proof of the token; the TLS of the
outer connection ends at the proxy and proves nothing, so its certificate is not verified.

Promises:

1. The bytes that come out of one end are those that went into the other, in order; both directions push back, and what is on the way
   is bounded by the buffers of two sockets and QUEUED_BYTES at each end.
2. When one side ends, the other ends, after everything that the first had sent before.
3. A side that does not read what the other has sent before its end is waited for GOODBYE_SECONDS, not longer.
4. Life is looked after by the mesh's own heartbeats; nobody pings here.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from typing import TYPE_CHECKING, Any, Callable, Optional, Set, Tuple

from gpumesh.config import GOODBYE_SECONDS, WEBSOCKET_MESSAGE_BYTES, WEBSOCKET_READ_BYTES
from gpumesh.errors import MeshError, MeshUnavailableError, ProtocolError
from gpumesh.network import reasons
from gpumesh.network.address import WEBSOCKET, Address
from gpumesh.network.connecting import proxy_for
from gpumesh.version import __version__

if TYPE_CHECKING:
    from gpumesh.network.forward_proxy import Proxy

PATH = "/mesh"


async def open_pipe(address: Address, *, timeout: float, on_end: Optional[Callable[[], object]] = None) -> socket.socket:
    """Connect to the WebSocket of the coordinator that is, or stands behind, `address`; for the running loop.

    Goes by `ws://` where the address says so, else by `wss://`, and then through the HTTP proxy of this machine's network where one is named
    (`network.forward_proxy`). The outer certificate is not verified: proxies before a mesh have any, and what is inside is protected end to
    end, whoever stands between.

    Args:
        timeout: Seconds for the name, the connection and the outer handshakes together.
        on_end: Called on the loop when the pipe has ended.

    Returns:
        One end of a socketpair, blocking; the mesh's bytes, the first ones included, go in and come out there. Shutting it down or
        closing it ends the other side; the loop moves the bytes until then.

    Raises:
        MeshUnavailableError: Nobody answers, or a proxy does and cannot reach the coordinator.
        ProtocolError: There is no mesh behind this address, or the proxy of this network does not let us through.
    """
    session, ws = await _connect(address, timeout)
    mine, theirs = socket.socketpair()
    task = asyncio.get_running_loop().create_task(_carry_for(session, ws, theirs))
    _running.add(task)
    task.add_done_callback(_running.discard)
    if on_end is not None:
        task.add_done_callback(lambda _: on_end())
    return mine


async def finish() -> None:
    """Before the running loop ends: wait until all pipes, which were closed before, have told what was sent, and end those that cannot."""
    loop = asyncio.get_running_loop()
    mine = [task for task in list(_running) if task.get_loop() is loop]
    if mine:
        _, late = await asyncio.wait(mine, timeout=2 * GOODBYE_SECONDS)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


async def carry(ws: Any, sock: socket.socket, *, abort: Callable[[], object]) -> None:
    """Move bytes between a WebSocket and a socket until one of them ends; both are closed then.

    Args:
        ws: aiohttp's, of either side, connected.
        sock: One end of a socketpair, ours from now on.
        abort: Closes what is under the WebSocket at once.
    """
    await _Pump(ws, sock).run()
    try:
        await asyncio.wait_for(ws.close(), GOODBYE_SECONDS)
    except (OSError, asyncio.TimeoutError):
        pass
    finally:
        abort()


_running: Set[asyncio.Task[None]] = set()


class _Pump:
    """Both directions of one pipe, until one of them has ended and what came before has been handed on."""

    def __init__(self, ws: Any, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._ws = ws
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._sends_since: Optional[float] = None  # A message has been waiting for room on the way since then.

    async def run(self) -> None:
        directions = [self._loop.create_task(self._outward()), self._loop.create_task(self._inward())]
        ended: Set[Any] = set()
        try:
            while not ended and not self._is_stuck():
                ended, _ = await asyncio.wait(directions, timeout=GOODBYE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
            await asyncio.wait(directions)
            _shut_down(self._sock)  # Closing is not enough where a child of this process has a copy.
            self._sock.close()
        for task in ended:
            task.result()

    def _is_stuck(self) -> bool:
        """Whether the socket's other end has closed while the way is too full for what it had sent."""
        since = self._sends_since
        return since is not None and self._loop.time() - since > GOODBYE_SECONDS and _is_hung_up(self._sock)

    async def _outward(self) -> None:
        """What comes out of the socket goes into messages, until it ends."""
        from aiohttp import ClientError

        while True:
            try:
                data = await self._loop.sock_recv(self._sock, WEBSOCKET_READ_BYTES)
                if not data:
                    return
                self._sends_since = self._loop.time()
                await self._ws.send_bytes(data)
            except (OSError, ClientError):
                return
            self._sends_since = None

    async def _inward(self) -> None:
        """What comes in messages goes into the socket, until there are no more."""
        from aiohttp import WSMsgType

        while True:
            message = await self._ws.receive()
            if message.type is not WSMsgType.BINARY:
                return  # The end, or something that is not ours.
            try:
                await self._loop.sock_sendall(self._sock, message.data)
            except OSError:
                return


def _is_hung_up(sock: socket.socket) -> bool:
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


# --- dialing


async def _connect(address: Address, timeout: float) -> Tuple[Any, Any]:
    """(session, WebSocket), connected."""
    import aiohttp
    from yarl import URL

    proxy = proxy_for(address)
    scheme = "ws" if address.way == WEBSOCKET else "wss"
    url = URL.build(scheme=scheme, host=address.host, port=address.port, path=PATH)
    session = aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
    try:
        ws = await asyncio.wait_for(
            session.ws_connect(
                url,
                ssl=_outer_context() if scheme == "wss" else True,
                proxy=None if proxy is None else URL(proxy.url),
                proxy_headers=None if proxy is None else proxy.headers(),
                compress=0,
                max_msg_size=WEBSOCKET_MESSAGE_BYTES,
                headers={"User-Agent": f"gpumesh/{__version__}"},
            ),
            timeout,
        )
    except BaseException as error:
        await session.close()
        known = _meaning(error, address, proxy, timeout)
        if known is None:
            raise
        raise known from None
    return session, ws


def _outer_context() -> Any:
    from gpumesh.network.tls import HTTP_PROTOCOL, client_context

    return client_context([HTTP_PROTOCOL])


def _meaning(error: BaseException, address: Address, proxy: Optional[Proxy], timeout: float) -> Optional[MeshError]:
    """What a failure to connect means to whoever wants to join; None: it is none of those that happen."""
    import aiohttp

    from gpumesh.network import forward_proxy

    shown = f"{address.url}{PATH}" if proxy is None else f"{address.url}{PATH} (through the HTTP proxy {proxy.url})"
    if proxy is not None and isinstance(error, aiohttp.ClientHttpProxyError):
        schemes = error.headers.getall("Proxy-Authenticate", []) if error.headers is not None else []
        return forward_proxy.refused(proxy, address, error.status, schemes)
    if proxy is not None and isinstance(error, aiohttp.ClientProxyConnectionError):
        return forward_proxy.unreachable(proxy, address, reasons.said(error.os_error))
    if isinstance(error, asyncio.TimeoutError):
        return MeshUnavailableError(
            f"no answer from {shown} within {timeout:g} s; check the address, the network and the proxy, "
            "and that the coordinator behind it runs"
        )
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return _meaning_of_status(error.status, shown)
    if isinstance(error, (aiohttp.ClientConnectorSSLError, aiohttp.ServerFingerprintMismatch)):
        return ProtocolError(f"what answers at {address} does not speak TLS; use ws://{address} if it is a proxy without TLS")
    if isinstance(error, aiohttp.ClientConnectorError):
        return MeshUnavailableError(
            f"cannot connect to {shown} ({reasons.said(error.os_error)}); check the address, and that the proxy runs"
        )
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        return MeshUnavailableError(f"{shown} closed the connection before it answered; check the address and the proxy")
    if isinstance(error, (aiohttp.ClientError, ValueError)):
        return ProtocolError(f"what answers at {shown} does not speak HTTP; check the address")
    return None


def _meaning_of_status(status: int, shown: str) -> MeshError:
    if status == 101:
        return ProtocolError(f"what answers at {shown} does not speak WebSocket as it should; check the address and the proxy")
    if status in (401, 407):
        return ProtocolError(f"what answers at {shown} wants a login of its own (status {status}); let the mesh through there")
    if status in (429, 503):
        return MeshUnavailableError(f"{shown} takes no connections at the moment (status {status}); try again later")
    if status in (500, 502, 504) or 520 <= status < 530:
        return MeshUnavailableError(
            f"the proxy at {shown} does not reach a coordinator (status {status}); start it with `gpumesh serve`, "
            "or check where the proxy sends its connections"
        )
    return ProtocolError(
        f"there is HTTP at {shown}, but no mesh behind it (status {status}); check the address, "
        f"and that the proxy lets WebSockets through to {PATH}"
    )


async def _carry_for(session: Any, ws: Any, sock: socket.socket) -> None:
    under = ws.get_extra_info("socket")
    try:
        await carry(ws, sock, abort=lambda: _cut(under))
    finally:
        await session.close()


def _cut(under: Any) -> None:
    """End a connection whose transport is out of reach; what is under it may wait minutes for room otherwise."""
    try:
        with socket.socket(fileno=os.dup(under.fileno())) as twin:
            _shut_down(twin)
    except (OSError, ValueError, AttributeError):
        pass  # It is closed.


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The other side was first.
