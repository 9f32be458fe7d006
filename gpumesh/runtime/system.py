"""What each process does to itself at birth: name, death with the parent, signals. Linux first, elsewhere what there is."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, Optional

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_NAME = 15
_OOM_SCORE_MAX = 1000  # linux/oom.h
OOM_SCORE_OF_RUNNERS = 500  # As if half of the machine's memory were theirs.
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


def go_first() -> None:
    """Where memory runs out, the system is to end this process rather than those that keep the machine in the mesh, or its owner's."""
    if sys.platform == "linux":
        try:
            with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
                now = int(file.read())
                file.seek(0)
                file.write(str(min(_OOM_SCORE_MAX, now + OOM_SCORE_OF_RUNNERS)))
        except (OSError, ValueError):
            pass  # It may be read only; then the largest goes first.


def trim_memory() -> None:
    """Give freed heap pages back to the system (glibc keeps them otherwise)."""
    if sys.platform == "linux":
        preload()
        assert _libc is not None
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)


def overwrite_start(secret: str) -> None:
    """Make a secret that this process was started with, as an argument or a variable, unreadable in the list of processes.

    Where the system does not tell where they are, nothing happens: whoever gives a secret like that has been told.
    """
    if sys.platform != "linux":
        return
    import ctypes

    hidden = os.fsencode(secret)
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        bounds = list(map(int, fields[45:49]))  # man 5 proc: where arguments and environment begin and end.
        for start, end in zip(bounds[::2], bounds[1::2]):
            position = start
            for part in ctypes.string_at(start, end - start).split(b"\0") if start else ():
                if part == hidden or (part.endswith(b"=" + hidden) and part.startswith((b"--token=", b"GPUMESH_TOKEN="))):
                    ctypes.memset(position + len(part) - len(hidden), ord("x"), len(hidden))
                position += len(part) + 1
    except (OSError, ValueError, IndexError):
        pass
