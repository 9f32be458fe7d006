"""What a script writes, on its way: read as it comes, shown to whoever looks for the result, and passed on to the agent."""

from __future__ import annotations

import os
import select
from time import monotonic
from typing import Dict, Union

from gpumesh.config import OUTPUT_READ_BYTES, SCRIPT_GATHER_SECONDS
from gpumesh.runtime.script_output import Forwarding, LastLine, Tail

PIPE_BYTES = getattr(select, "PIPE_BUF", 512)  # What a pipe that can be written to takes without a wait.
LAST_READS = 64  # Of what a script has left in its pipes: someone it has left behind may go on writing.


class Stream:
    """One of the script's standard streams, on its way to ours of the same number."""

    __slots__ = ("number", "fd", "out", "_listener", "_forward", "_gathered", "_since")

    def __init__(self, number: int, fd: int, listener: Union[LastLine, Tail]) -> None:
        self.number = number
        self.fd = fd  # Its end, here; -1: the script has closed the other.
        self.out = b""  # To be written to ours.
        self._listener = listener
        self._forward = Forwarding(monotonic())
        self._gathered = b""  # What has come since then, and goes on together: a line is often written in parts.
        self._since = 0.0

    def register(self, poll: select.poll) -> None:
        """What to wait for. As long as the agent does not take what is there, the script waits."""
        if self.out:
            poll.register(self.number, select.POLLOUT)
        elif self.fd >= 0:
            poll.register(self.fd, select.POLLIN)

    def due(self) -> float:
        """When to `move` in any case."""
        if self.out:
            return float("inf")
        return min(self._forward.due(), self._since + SCRIPT_GATHER_SECONDS) if self._gathered else self._forward.due()

    def move(self, ready: Dict[int, int]) -> None:
        """Read, or write, as far as that can be done without waiting."""
        if self.out:
            if self.number in ready:
                self._write()
            return
        if self.fd in ready:
            self.read()
        now = monotonic()
        if now >= self.due() or len(self._gathered) >= OUTPUT_READ_BYTES // 4:
            self.out = b"".join(self._forward.feed(self._gathered, now))
            self._gathered = b""

    def read(self) -> bool:
        """Take in some of it; whether there was any."""
        if self.fd < 0:
            return False
        try:
            data = os.read(self.fd, OUTPUT_READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._listener.feed(data)
        if not self._gathered:
            self._since = monotonic()
        self._gathered += data
        return True

    def read_rest(self) -> None:
        """The script has ended, and what it had written before is in the pipe."""
        for _ in range(LAST_READS):
            has_more = self.read()
            self.out += b"".join(self._forward.feed(self._gathered, monotonic()))
            self._gathered = b""
            if not has_more:
                break
        self.out += b"".join(self._forward.end())

    def close(self) -> None:
        """Read no more of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _write(self) -> None:
        try:
            self.out = self.out[os.write(self.number, self.out[:PIPE_BYTES]) :]
        except OSError:
            self.out = b""  # The agent is gone, and so are we in a moment.
