"""What each process does to itself at birth: name, death with the parent, signals. Linux first, elsewhere what there is."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, Optional

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_NAME = 15
_libc: Optional[Any] = None


def preload() -> None:
    """Load the C library once, before forking."""
    global _libc
    if sys.platform == "linux" and _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None, use_errno=True)


def name_process(name: str) -> None:
    """Name this process for `ps` and `top` (15 characters are kept)."""
    if sys.platform == "linux":
        preload()
        assert _libc is not None
        _libc.prctl(_PR_SET_NAME, name.encode()[:15] + b"\0", 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """End this process when process `parent`, its parent, is gone, whatever it does then."""
    if sys.platform == "linux":
        preload()
        assert _libc is not None
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        return

    def watch() -> None:
        import time

        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="gpumesh-parent-watch", daemon=True).start()


def trim_memory() -> None:
    """Give freed heap pages back to the system (glibc keeps them otherwise)."""
    if sys.platform == "linux":
        preload()
        assert _libc is not None
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)
