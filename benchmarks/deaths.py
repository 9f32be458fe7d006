"""Short tasks on two workers with one slot each, while a process that runs one is killed, or a whole worker: what that costs.

The figures are the time past the ideal, all slots busy until the end, and how long the interrupted task waits until it runs again.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from benchmarks.figures import Metrics
from benchmarks.functions import noop, recorded
from benchmarks.systems import Machine, Machines, SystemOfMachines

SECONDS = 0.25  # Of a task.
MACHINES = (Machine(1.0, 1.0), Machine(1.0 + 1e-9, 1.0))  # The second, told by its speed, is the one that is killed.
KILL_AFTER = 0.4  # Of all tasks have started,
KILL_INTO = 0.1  # and so many seconds into one.
LOOK_SECONDS = 0.002


class Mark(NamedTuple):
    """One start of one task."""

    index: int
    pid: int
    is_second: bool  # It was on the second machine.
    at: float  # Seconds on this computer's monotonic clock, which all processes share.


def deaths(system: Any, count: int) -> Metrics:
    """A process is killed in one run, a whole worker in another."""
    metrics: Metrics = {"tasks": count}
    for name, whole in (("process", False), ("worker", True)):
        metrics.update({f"{name}_{key}": value for key, value in _run(system, count, whole=whole).items()})
    return metrics


def _run(system: SystemOfMachines, count: int, *, whole: bool) -> Metrics:
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, system.machines(MACHINES) as machines:
        machines.warm_up(noop)
        killer = _Killer(folder, machines, count, whole=whole)
        killer.start()
        before = time.perf_counter()
        results = machines.run(recorded, [(index, SECONDS, folder) for index in range(count)], way="", is_idempotent=False)
        elapsed = time.perf_counter() - before
        killer.join()
        if sorted(results) != list(range(count)):
            raise AssertionError("wrong results")
        if killer.victim is None:
            raise AssertionError("nothing was killed: all tasks had ended")
        marks = read_marks(folder)
        again = [mark.at for mark in marks if mark.index == killer.victim.index and mark.at > killer.killed_at]
        if not again:
            raise AssertionError("the task that was interrupted did not run again")
        return {
            "over_s": elapsed - count * SECONDS / len(MACHINES),
            "wait_s": min(again) - killer.killed_at,
            "starts": len(marks),
        }


class _Killer(threading.Thread):
    """Waits until a part of the tasks have started and one has run for a while on the second machine, then kills that one's process."""

    def __init__(self, folder: str, machines: Machines, count: int, *, whole: bool) -> None:
        super().__init__(daemon=True)
        self.victim: Optional[Mark] = None
        self.killed_at = 0.0
        self._folder = folder
        self._machines = machines
        self._count = count
        self._whole = whole

    def run(self) -> None:
        found = None
        deadline = time.monotonic() + self._count * SECONDS
        while found is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            found = choose_victim(read_marks(self._folder), time.monotonic(), self._count * KILL_AFTER)
        if found is None:
            return
        pids = [found.pid]
        if self._whole:
            pids.insert(0, self._machines.worker_of(found.pid))
        self.killed_at = time.monotonic()
        self.victim = found
        for pid in dict.fromkeys(pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It went with the worker.


def choose_victim(marks: List[Mark], now: float, least: float) -> Optional[Mark]:
    """The task of the second machine that has run for long enough, and not yet for most of its time; None until enough have started."""
    if len(marks) < least:
        return None
    newest: Dict[int, Mark] = {}
    for mark in marks:
        if mark.is_second and (mark.pid not in newest or mark.at > newest[mark.pid].at):
            newest[mark.pid] = mark
    due = [mark for mark in newest.values() if KILL_INTO <= now - mark.at < KILL_INTO + 0.05]
    return due[0] if due else None


def read_marks(folder: str) -> List[Mark]:
    """What `recorded` has left there."""
    return [_parse(name) for name in os.listdir(folder)]


def _parse(name: str) -> Mark:
    index, pid, speed, nanoseconds = name.split("-")
    fields: Tuple[int, int, bool, float] = (int(index), int(pid), float(speed) != MACHINES[0].speed, int(nanoseconds) / 1e9)
    return Mark(*fields)
