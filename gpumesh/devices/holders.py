"""Whose memory it is: processes and their parents, as the system knows them."""

from __future__ import annotations

from typing import Any, Collection, Dict, Tuple

PARENTS = 32  # Generations looked at to find out whose child a process is.


def exists(pid: int) -> bool:
    """Whether there is such a process."""
    import psutil

    return 0 < pid < 1 << 31 and psutil.pid_exists(pid)


def is_descendant(pid: int, ancestors: Collection[int]) -> bool:
    """Whether a process is one of these or was started by one of them, directly or not."""
    import psutil

    for _ in range(PARENTS):
        if pid in ancestors:
            return True
        try:
            pid = psutil.Process(pid).ppid()
        except psutil.Error:
            return False
        if pid <= 1:
            return False
    return False


def host_use(memory: int, own: Collection[int]) -> Tuple[int, int]:
    """(others, used) of memory that the card shares with the host, as far as it falls into what is offered."""
    import psutil

    held = memory - min(memory, int(psutil.virtual_memory().available))
    processes: Dict[int, Any] = {}
    for pid in own:
        try:
            process = psutil.Process(pid)
            processes.update((each.pid, each) for each in (process, *process.children(recursive=True)))
        except psutil.Error:
            continue
    ours = 0
    for process in processes.values():
        try:
            info = process.memory_info()
        except psutil.Error:
            continue
        ours += max(0, info.rss - getattr(info, "shared", 0))
    return max(0, held - ours), held
