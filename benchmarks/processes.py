"""What /proc says about processes: descendants, memory, processor time. Linux only; measures, decides nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Dict, Iterable, List, Optional

SHARED_MEMORY = "/dev/shm"

_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> Optional[List[str]]:
    """The fields of /proc/PID/stat from the third on: the second, the name, may hold spaces."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def descendants(pid: int) -> List[int]:
    """Ids of the children, their children and so on, in ascending order; zombies and `pid` itself are left out."""
    children: Dict[int, List[int]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat_fields(int(entry)) if entry.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found: List[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.extend(below)
        waiting.extend(below)
    return sorted(child for child in found if is_running(child))


def parent(pid: int) -> int:
    """The process that has started this one.

    Raises:
        ProcessLookupError: There is no such process.
    """
    fields = _stat_fields(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return int(fields[1])


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def named(*names: str) -> List[int]:
    """Ids of our descendants that have one of these names."""
    return [pid for pid in descendants(os.getpid()) if name(pid) in names]


def start_ticks(pid: int) -> Optional[int]:
    """When the process started: with its id this names it beyond doubt, also after the id was given to another."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[19])


def name(pid: int) -> str:
    """The short name that the process has or gave itself; empty when it has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def pss_bytes(pid: int) -> int:
    """Memory of a process, with each shared page divided by the number of processes that share it; 0 when it has ended."""
    return _rollup_bytes(pid).get("Pss", 0)


def own_pss_bytes(pid: int) -> int:
    """The same without pages of shared memory, which `shared_memory_bytes` counts, mapped or not."""
    found = _rollup_bytes(pid)
    return found.get("Pss", 0) - found.get("Pss_Shmem", 0)


def _rollup_bytes(pid: int) -> Dict[str, int]:
    """The sums that begin with "Pss" over all mappings of a process; empty when it has ended."""
    found: Dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss"):
                    key, value, _ = line.split()
                    found[key[:-1]] = int(value) * 1024
    except OSError:
        return {}
    return found


def shared_memory_bytes(folder: str = SHARED_MEMORY) -> int:
    """What the files of all processes take up on the file system of shared memory, those included that have no name any more."""
    state = os.statvfs(folder)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, threads that ended included, in steps of a clock tick (10 ms)."""
    fields = _stat_fields(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) * _TICK_SECONDS


def fine_cpu_seconds(pid: int) -> float:
    """Time on a processor of the threads alive, in nanosecond steps: for idle processes, whose threads stay."""
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
    except OSError:
        return cpu_seconds(pid)
    return total * 1e-9


class PeakMemory:
    """Watches the memory of some processes from a process of its own, ten times a second, until the block ends.

    Attributes, known when the block has ended:
        peak_bytes: Their summed PSS.
        shared_bytes: Growth of shared memory, whoever uses it.
        resident_bytes: Both at the same moment, pages of shared memory counted once: what keeping objects costs, mapped or not.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self.peak_bytes = 0
        self.shared_bytes = 0
        self.resident_bytes = 0

    def __enter__(self) -> PeakMemory:
        command = [sys.executable, "-S", "-m", "benchmarks.watch_memory", *map(str, self._pids)]
        self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._watcher.stdout is not None
        self._watcher.stdout.readline()  # The first sample is taken.
        return self

    def __exit__(self, *exc_info: object) -> None:
        output, _ = self._watcher.communicate()
        self.peak_bytes, self.shared_bytes, self.resident_bytes = map(int, output.split())
