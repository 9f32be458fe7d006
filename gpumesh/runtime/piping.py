"""Pipes through WebSockets for programs without an event loop: a thread that moves their bytes, while there are any.

The thread is a daemon's, since whoever has pipes may end without closing them. But when the interpreter takes itself apart it must have
ended: a loop that is written in C would go on in the middle of that, and crash.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from typing import TYPE_CHECKING, Any, Optional

from gpumesh.config import GOODBYE_SECONDS, WEBSOCKET_IDLE_SECONDS
from gpumesh.network.address import Address

if TYPE_CHECKING:
    import asyncio


def open_pipe(address: Address, *, timeout: float) -> socket.socket:
    """As `network.websocket.open_pipe`, for a program without a loop; blocks until it is connected.

    Whoever wants what was sent last to arrive before the interpreter ends calls `drain`.

    Raises:
        MeshUnavailableError, ProtocolError: As there.
    """
    return _beside.open(address, timeout)


def drain(timeout: float = GOODBYE_SECONDS) -> None:
    """Wait until all pipes, which were closed before, have told what was sent through them, but no longer than this."""
    _beside.drain(timeout)


def end() -> None:
    """The program ends: no pipe is needed any more, and the thread neither."""
    _beside.end(even_if_open=True)


class _Beside:
    """A daemon thread with a loop; begins with the first pipe and ends a moment after the last."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._thread: Optional[threading.Thread] = None
        self._count = 0  # Pipes that are open, or being opened, on this loop.

    def open(self, address: Address, timeout: float) -> socket.socket:
        import asyncio

        from gpumesh.network import websocket

        async def connect() -> socket.socket:
            try:
                return await websocket.open_pipe(address, timeout=timeout, on_end=self._one_less)
            except BaseException:
                self._one_less()
                raise

        with self._changed:
            if self._loop is None:
                self._start()
            self._count += 1
            assert self._loop is not None
            future = asyncio.run_coroutine_threadsafe(connect(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Interrupted: a pipe that is connected nevertheless ends as nobody has its end.
            raise

    def _one_less(self) -> None:
        """On the loop's thread."""
        with self._changed:
            self._count -= 1
            if not self._count and self._loop is not None:
                self._loop.call_later(WEBSOCKET_IDLE_SECONDS, self._end_if_idle, self._loop)
            self._changed.notify_all()

    def _end_if_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            if not self._count and self._loop is loop:
                loop.stop()
                self._loop = self._thread = None

    def end(self, *, even_if_open: bool = False) -> None:
        with self._changed:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None or (self._count and not even_if_open):
                return
            self._loop = self._thread = None
        try:
            loop.call_soon_threadsafe(loop.stop)
        except RuntimeError:
            pass  # It has just ended by itself.
        thread.join(GOODBYE_SECONDS)

    def drain(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._count, timeout)

    def _start(self) -> None:
        from gpumesh.runtime.loop import new_event_loop

        self._loop = loop = new_event_loop()
        self._thread = threading.Thread(target=_run, args=(loop,), name="gpumesh-websocket", daemon=True)
        self._thread.start()


def _run(loop: Any) -> None:
    import asyncio

    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    try:
        loop.close()
    except OSError:
        pass  # uvloop: a connection is still being closed. It goes with the process.


_beside = _Beside()


@atexit.register
def _at_exit() -> None:
    """Where no session has pipes; those that are open are still used: `client.session` closes its own and then calls `end`."""
    _beside.end()


def _after_fork_in_child() -> None:
    """The thread is the parent's, and the pipes too."""
    global _beside
    _beside = _Beside()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
