"""Functions that tests send to workers; cheap to import, as runners do."""

from __future__ import annotations

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
    """Sleep in the C library again and again, without the GIL; no Python code in between looks at signals."""
    import ctypes

    leave(mark)
    libc = ctypes.CDLL(None)
    libc.usleep.argtypes = [ctypes.c_uint]
    left = seconds
    while left > 0:
        left = libc.sleep(left)
    return "slept"


def hold_the_gil(seconds: int, mark: str = "") -> str:
    """Block in C with the GIL held; a signal cuts one sleep short, so there are as many as it takes."""
    import ctypes

    leave(mark)
    libc = ctypes.PyDLL(None)
    blocked = (ctypes.c_byte * 128)()
    libc.sigfillset(blocked)
    libc.pthread_sigmask(0, blocked, None)
    left = seconds
    while left > 0:
        left = libc.sleep(left)
    return "slept"


def multiply_in_c(mark: str = "") -> int:
    """One operation of minutes in C, the GIL held, deaf to signals."""
    leave(mark)
    return int(pow(3, 1 << 28)).bit_length()


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


def leave_with(code: int) -> None:
    """End this process by its exit code."""
    os._exit(code)


def environment(names: List[str]) -> Dict[str, str]:
    """What this process was told."""
    return {name: os.environ.get(name, "") for name in names}


def leave(mark: str) -> None:
    """Say that a task has started: a file with the process's id."""
    if mark:
        part = Path(f"{mark}.{os.getpid()}.part")
        part.write_text(str(os.getpid()))
        part.rename(mark)
