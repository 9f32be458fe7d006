"""The page that a runner and its agent share: what runs now, what may not start, what is to be interrupted.

A runner that is busy in user code answers no message, and a dead one none at all; the page is how the agent still knows which
task it had started. Each word has one writer and is written by one aligned 8-byte store.

    word  writer  meaning
    0     runner  STARTED    number of the task started last (1, 2, ... since the runner's start)
    1     runner  FINISHED   number of the task finished last
    2     runner  SENT       number of the task whose result was sent last
    3     runner  SINCE      monotonic time of the start, a float
    4     agent   REVOKED    tasks with this number and above must not start; 0: none
    5     agent   INTERRUPT  the task with this number is to be interrupted when SIGINT comes
    6     agent   FLUSH      counts requests to send finished results at once, made by SIGINT
    7     runner  KEPT       1 + bytes that finished tasks have left on the fullest of its cards; 0: not known
    8     runner  GROUP      process group of the script that runs, which ends with the runner; 0: none
    9     agent   ORDERS     counts what was sent to the process of an actor that it takes in before it starts another call
    10    runner  CONCURRENT 1: the process of an actor that runs calls side by side, and watches their time limits itself
    11    runner  HELD       bytes, behind the words, of results that wait for company: sent by the runner, or read when it has died
    12    runner  WRITTEN    counts writes to sys.stdout and sys.stderr, each after it was done; not those past Python

Taking back tasks that were fed but have not started is safe without a lock: the runner stores STARTED before it reads REVOKED;
the agent stores REVOKED, waits `REVOKE_SETTLE_SECONDS` (a store is visible to another core after well under a microsecond),
then reads STARTED. Whatever is above STARTED then will see the mark before it runs. Proved by tests/integration/test_pool.py.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Any, List, Tuple

PAGE_BYTES = mmap.PAGESIZE

STARTED, FINISHED, SENT, SINCE, REVOKED, INTERRUPT, FLUSH, KEPT, GROUP, ORDERS, CONCURRENT, HELD, WRITTEN = range(13)
_HELD_AT = 128
_RECORD = struct.Struct("<QIIdI")  # Task id, attempt, status, seconds, bytes of the payload that follows.


class Page:
    """A mapped page; `words` are unsigned integers, `floats` the same memory as floating point numbers."""

    __slots__ = ("words", "floats", "_bytes", "_map")

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        view = memoryview(self._map)
        self._bytes = view
        self.words: Any = view.cast("Q")
        self.floats: Any = view.cast("d")

    def hold(self, task_id: int, attempt: int, status: int, payload: bytes, seconds: float) -> bool:
        """Write down a result that is not sent yet, so that it is not lost with the process; False when there is no room for it.

        All are forgotten by `words[HELD] = 0`.
        """
        begin = _HELD_AT + self.words[HELD] + _RECORD.size
        end = begin + len(payload)
        if end > PAGE_BYTES:
            return False
        _RECORD.pack_into(self._bytes, begin - _RECORD.size, task_id, attempt, status, seconds, len(payload))
        self._bytes[begin:end] = payload
        self.words[HELD] = end - _HELD_AT
        return True

    def held(self) -> List[Tuple[int, int, int, bytes, float]]:
        """What was written down and perhaps not sent, in order, by a process that is gone."""
        found = []
        at, end = _HELD_AT, min(_HELD_AT + self.words[HELD], PAGE_BYTES)
        while at + _RECORD.size <= end:
            task_id, attempt, status, seconds, size = _RECORD.unpack_from(self._bytes, at)
            at += _RECORD.size
            found.append((task_id, attempt, status, bytes(self._bytes[at : at + size]), seconds))
            at += size
        return found

    def close(self) -> None:
        """Unmap; the other side keeps its own mapping."""
        self._bytes.release()
        self.words.release()
        self.floats.release()
        try:
            self._map.close()
        except BufferError:  # A view is still on its way to the collector, which then unmaps.
            pass


def create_page_fd() -> int:
    """A descriptor of anonymous shared memory of one page; nothing of it is left in any folder."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("gpumesh-page", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="gpumesh-page-")
        os.unlink(path)
    os.ftruncate(fd, PAGE_BYTES)
    return fd
