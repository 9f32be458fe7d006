"""Functions that tests send to workers; cheap to import, as runners do."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List


def noop(value: Any = None) -> Any:
    """Gives its argument back."""
    return value


def where() -> int:
    """The process that runs it."""
    return os.getpid()


def sleep(seconds: float, mark: str = "") -> str:
    """Sleep in Python."""
    leave(mark)
    time.sleep(seconds)
    return "slept"


def sleep_in_c(seconds: int, mark: str = "") -> str:
    """Sleep in the C library, without the GIL and deaf to signals."""
    return _sleep_deaf("CDLL", seconds, mark)


def hold_the_gil(seconds: int, mark: str = "") -> str:
    """The same with the GIL held."""
    return _sleep_deaf("PyDLL", seconds, mark)


def _sleep_deaf(kind: str, seconds: int, mark: str) -> str:
    import ctypes

    leave(mark)
    libc = getattr(ctypes, kind)(None)
    blocked = (ctypes.c_byte * 128)()
    libc.sigfillset(blocked)
    libc.pthread_sigmask(0, blocked, None)
    libc.sleep(seconds)
    return "slept"


def count_in_c(seconds: int, mark: str = "") -> int:
    """One operation of hours in C, the GIL held, in which no Python code looks at signals."""
    leave(mark)
    return sum(itertools.repeat(1, seconds * 10**10))


def spin(seconds: float, mark: str = "") -> str:
    """Compute in Python."""
    leave(mark)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "spun"


def ignore_interrupts(seconds: float, mark: str = "") -> str:
    """Python that swallows what should end it."""
    leave(mark)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            continue
    return "survived"


def with_children(seconds: float, mark: str = "") -> str:
    """Start a program and a shell that starts another, then sleep."""
    subprocess.Popen(["sleep", str(int(seconds))])
    subprocess.Popen(["sh", "-c", f"sleep {int(seconds)}; true"])
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    leave(mark)
    time.sleep(seconds)
    return "slept"


def count_then_sleep(folder: str, name: str, seconds: float) -> str:
    """Leave one file for each start, so that a test sees what ran twice."""
    Path(folder, f"{name}.{os.getpid()}.{time.monotonic_ns()}").touch()
    time.sleep(seconds)
    return name


def die(number: int = signal.SIGKILL) -> None:
    """End this process by a signal."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def environment(names: List[str]) -> Dict[str, str]:
    """What this process was told."""
    return {name: os.environ.get(name, "") for name in names}


def leave(mark: str) -> None:
    """Say that a task has started: a file with the process's id."""
    if mark:
        part = Path(f"{mark}.{os.getpid()}.part")
        part.write_text(str(os.getpid()))
        part.rename(mark)
