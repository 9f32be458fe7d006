"""The right to read the socket and dispatch what it brings: one thread at a time, and never lost to an interrupt."""

from __future__ import annotations

import sys
import threading
from types import CodeType
from typing import Optional

_HEAL_SECONDS = 0.1  # How long a thread that must have the role waits before it looks at who has it.


class ReceiveRole:
    """A lock with an owner.

    Ctrl-C can hit the few instructions between taking a lock and the block that gives it back. So the role can be taken from a
    thread that holds it but no longer executes any of the functions that may.
    """

    __slots__ = ("_lock", "_holders", "owner")

    def __init__(self, *holders: CodeType) -> None:
        self._lock = threading.Lock()
        own = (ReceiveRole.try_take, ReceiveRole.take, ReceiveRole.give)
        self._holders = (*holders, *(method.__code__ for method in own))
        self.owner = 0  # Thread identifier; 0: nobody.

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has it."""
        return self.owner == threading.get_ident()

    def try_take(self) -> bool:
        """Take it if nobody has it."""
        if not self._lock.acquire(blocking=False):
            return False
        self.owner = threading.get_ident()
        return True

    def take(self, timeout: Optional[float] = None) -> bool:
        """Wait for it; False after `timeout` seconds."""
        left = timeout
        while True:
            step = _HEAL_SECONDS if left is None else min(_HEAL_SECONDS, left)
            if self._lock.acquire(timeout=step):
                self.owner = threading.get_ident()
                return True
            self.heal()
            if left is not None:
                left -= step
                if left <= 0:
                    return self.try_take()

    def give(self) -> None:
        """Give it back, if the calling thread has it."""
        if self.is_mine:
            self.owner = 0
            self._lock.release()

    def heal(self) -> bool:
        """Free the role if the thread that has it was interrupted and has forgotten it; whether that was so."""
        owner = self.owner
        if not self._lock.locked():
            return False
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        # Without an owner it was hit within `try_take` or `give`: then nobody may be in there now.
        for ident in [owner] if owner else list(frames):
            frame = frames.get(ident)
            while frame is not None:
                if frame.f_code in self._holders:
                    return False
                frame = frame.f_back
        del frames
        if self.owner != owner or not self._lock.locked():
            return False
        self.owner = 0
        self._lock.release()
        return True
