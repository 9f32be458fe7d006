"""An HTTP connection at the door: nothing is loaded for it, and nobody waits for it, until the head of a request is there.

The protocol of the transport stays this one, so that its end is known; what comes behind the first head is passed on as it is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Awaitable, Callable, Optional

from gpumesh.config import HANDSHAKE_SECONDS, HTTP_HEAD_BYTES, HTTP_SECONDS
from gpumesh.protocol import strangers

if TYPE_CHECKING:
    from gpumesh.runtime.doorway import Arrival

_BROKEN = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Asking(asyncio.Protocol):
    """Takes in one connection; see the module.

    Args:
        make_web: Loads what speaks HTTP and returns a maker of its protocols.
        on_gone: Called once, when the connection is over.
        on_stranger: Told who it is that has begun with something else than a request; the connection is closed at once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        arrival: Arrival,
        make_web: Callable[[], Awaitable[Callable[[], asyncio.BaseProtocol]]],
        on_gone: Callable[[Asking], None],
        on_stranger: Callable[[Arrival, str], None],
    ) -> None:
        self.arrival = arrival
        self.transport: Any = None
        self._loop = loop
        self._make_web = make_web
        self._on_gone = on_gone
        self._on_stranger = on_stranger
        self._head = bytearray()
        self._web: Any = None  # What speaks HTTP with it.
        self._loading: Optional[asyncio.Task[None]] = None
        self._is_over = False
        self._timer: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self._is_over:  # Meanwhile.
            transport.abort()
            return
        self._timer = self._loop.call_later(HANDSHAKE_SECONDS, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._web is not None:
            self._web.data_received(data)
            return
        self._head += data
        if self._loading is not None or self._is_over:
            return
        head = bytes(self._head)
        if not strangers.may_be_http(head):
            self._on_stranger(self.arrival, str(strangers.not_a_mesh(head, is_calling=True)))
            self.abort()
        elif strangers.is_broken_http(head):
            self.transport.write(_BROKEN)
            self.transport.close()
        elif b"\r\n\r\n" in head:
            self._restart(HTTP_SECONDS)
            self.transport.pause_reading()
            self._loading = self._loop.create_task(self._load())
        elif len(head) > HTTP_HEAD_BYTES:
            self.transport.write(_TOO_LONG)
            self.transport.close()

    async def _load(self) -> None:
        web: Any = (await self._make_web())()
        if self._is_over or self.transport.is_closing():
            return
        self._web = web
        web.connection_made(self.transport)
        web.data_received(bytes(self._head))
        self._head.clear()
        self.transport.resume_reading()

    def _restart(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort)

    def stay(self) -> None:
        """It may go on for as long as it likes: it is a WebSocket."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        """Close it at once."""
        if self.transport is not None:
            self.transport.abort()
        else:
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.stay()
            if self._loading is not None:
                self._loading.cancel()
            self._on_gone(self)

    def eof_received(self) -> Any:
        return self._web.eof_received() if self._web is not None else False

    def connection_lost(self, error: Optional[Exception]) -> None:
        self._end()
        if self._web is not None:
            self._web.connection_lost(error)

    def pause_writing(self) -> None:
        if self._web is not None:
            self._web.pause_writing()

    def resume_writing(self) -> None:
        if self._web is not None:
            self._web.resume_writing()
