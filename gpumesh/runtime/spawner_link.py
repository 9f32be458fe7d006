"""A pool's side of one spawner: requests go there, its answers and its end come back. What they mean is the pool's matter."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Tuple, Union

from gpumesh.config import OUTPUT_READ_BYTES, STDERR_TAIL_BYTES, STDERR_TAIL_LINES
from gpumesh.runtime.spawner_channel import MessageReader, send_request

logger = logging.getLogger(__name__)

Launch = Callable[[int], Tuple[int, socket.socket]]
"""Starts a spawner whose standard error is this descriptor; its process id and our side of its channel."""


class SpawnerLink:
    """One spawner: somebody else's, or one of our own, which is started when it is first asked for something, and again later.

    Args:
        source: The channel to one that is somebody else's, or what starts one of our own.
        on_answer: Called with what it answers.
        on_lost: Called when its channel has ended by itself.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: Union[socket.socket, Launch],
        *,
        on_answer: Callable[[Dict[str, Any]], None],
        on_lost: Callable[[SpawnerLink], None],
    ) -> None:
        self._loop = loop
        self._launch = None if isinstance(source, socket.socket) else source
        self._channel = source if isinstance(source, socket.socket) else None
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._pid = 0  # Of one of our own.
        self._errors = -1  # Our end of its standard error.
        self._tail: Deque[bytes] = deque()
        self._reader = MessageReader()
        if self._channel is not None:
            self._watch(self._channel)

    @property
    def is_ours(self) -> bool:
        """Whether it can be started again."""
        return self._launch is not None

    @property
    def is_open(self) -> bool:
        """Whether there is a process to ask."""
        return self._channel is not None

    @property
    def last_words(self) -> str:
        """What one of our own said last on its standard error, outside of any runner."""
        return text_of(self._tail)

    def ask(self, request: Dict[str, Any], fds: List[int]) -> None:
        """Send it a request; starts one for it if need be.

        Raises:
            OSError: It cannot be started. (One that has died is noticed at the end of its channel.)
        """
        channel = self._channel
        if channel is None:
            if request["op"] != "fork":
                return  # The runner is gone with its spawner.
            channel = self._start()
        channel.setblocking(True)
        try:
            send_request(channel, request, fds)
        except (BrokenPipeError, ConnectionResetError) as error:
            logger.debug("the spawner does not listen any more: %s", error)
        finally:
            channel.setblocking(False)

    def close(self) -> None:
        """Let go of it. It kills what belongs to this channel; one of our own is gone with all its children on return."""
        if self._channel is not None:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._pid:
            os.waitpid(self._pid, 0)
            self._pid = 0
            self._on_errors()
            self._loop.remove_reader(self._errors)
            os.close(self._errors)

    def _start(self) -> socket.socket:
        assert self._launch is not None
        errors, errors_write = os.pipe()
        try:
            self._pid, channel = self._launch(errors_write)
        except BaseException:
            os.close(errors)
            raise
        finally:
            os.close(errors_write)
        self._channel = channel
        self._watch(channel)
        self._errors = errors
        self._tail.clear()
        os.set_blocking(errors, False)
        self._loop.add_reader(errors, self._on_errors)
        return channel

    def _watch(self, channel: socket.socket) -> None:
        self._reader = MessageReader()
        channel.setblocking(False)
        self._loop.add_reader(channel.fileno(), self._on_channel, channel)

    def _on_errors(self) -> None:
        """What it says outside of any runner goes where our own errors go."""
        while True:
            try:
                data = os.read(self._errors, OUTPUT_READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._errors)
                return
            append_to(self._tail, data)
            sys.stderr.write(data.decode("utf-8", "replace"))

    def _on_channel(self, channel: socket.socket) -> None:
        try:
            data = channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_lost(self)
            return
        for message in self._reader.feed(data, []):
            self._on_answer(message)


def append_to(tail: Deque[bytes], data: bytes) -> None:
    """Keep the end of a stream."""
    tail.append(data[-STDERR_TAIL_BYTES:])
    while len(tail) > 1 and sum(len(part) for part in tail) > 2 * STDERR_TAIL_BYTES:
        tail.popleft()


def text_of(tail: Deque[bytes]) -> str:
    """The last lines of a stream."""
    text = b"".join(tail)[-STDERR_TAIL_BYTES:].decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-STDERR_TAIL_LINES:])
