"""Who is alive and what is left behind: processes by session or by mark, shared memory, temporary files, descriptors."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Callable, List, Optional, Set, TypeVar

import psutil

T = TypeVar("T")
MARK = "MESH_TEST_MARK"  # In a program's environment, and so in that of all that it starts.
_SHARED_MEMORY = Path("/dev/shm")


def marked(mark: str) -> List[psutil.Process]:
    """Processes that carry this mark; the dead that nobody has waited for do not count."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted in environment.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def session_of(leader: int) -> List[psutil.Process]:
    """Processes in the session of this leader: a spawner, and all that it has forked."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def named(processes: List[psutil.Process], name: str) -> List[psutil.Process]:
    """Those of them with this name."""
    found = []
    for process in processes:
        try:
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == name:
                found.append(process)
        except OSError:
            continue
    return found


def until(look: Callable[[], T], timeout: float = 5.0, *, what: str = "") -> T:
    """The first true value of `look`; fails when none comes in time."""
    deadline = time.monotonic() + timeout
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come about within {timeout:g} s: {what or look}")
        time.sleep(0.02)


def until_gone(look: Callable[[], List[psutil.Process]], timeout: float = 5.0) -> None:
    """Fails, naming them, when processes are left after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        left = look()
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"still there after {timeout:g} s: {[show(process) for process in left]}")
        time.sleep(0.05)


def show(process: psutil.Process) -> str:
    """A process for people."""
    try:
        return f"{process.pid} {process.name()} {process.status()} {' '.join(process.cmdline())[:80]}"
    except psutil.Error as error:
        return str(error)


def shared_memory_files() -> Set[str]:
    """Names in the folder of shared memory that could be ours."""
    if not _SHARED_MEMORY.is_dir():
        return set()
    return {path.name for path in _SHARED_MEMORY.iterdir() if "mesh" in path.name}


def threads_idle(name: str) -> bool:
    """Whether no thread of this name is left in this process."""
    import threading

    return not any(thread.name == name for thread in threading.enumerate())


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def resident_bytes(pid: int) -> int:
    """Memory of one process."""
    size: int = psutil.Process(pid).memory_info().rss
    return size


def descriptors(pid: Optional[int] = None) -> int:
    """Open descriptors of one process."""
    return len(os.listdir(f"/proc/{pid or os.getpid()}/fd"))
