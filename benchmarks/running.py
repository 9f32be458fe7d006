"""Starts every run in a fresh process and sees to it that nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from benchmarks import processes
from benchmarks.figures import Runs, percentile
from benchmarks.systems import start_program
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
END_SECONDS = 5.0  # For the processes of a run to go away by themselves once its driver has.
KEPT_OUTPUT = 4000  # Characters of a failed run's output.
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Run(NamedTuple):
    """What one run gave."""

    workload: str
    system: str
    repeat: int
    metrics: Dict[str, float]  # Empty when it failed.
    error: str  # Empty when it did not.
    seconds: float  # The whole of it, start and end included.
    load_average: float  # Over one minute, before it.
    left_behind: List[str]  # Names of processes that had to be killed afterwards.


class RunFailedError(Exception):
    """A run gave no figures; the message says why."""


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that what a run leaves behind can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_all(
    workloads: Sequence[str],
    systems: Sequence[str],
    *,
    repeats: int,
    quick: bool,
    on_run: Callable[[Run], None],
) -> None:
    """Run every workload `repeats` times on every system, the systems taking turns within each repeat; each run goes to `on_run`."""
    for workload in workloads:
        most = WORKLOADS[workload].most_repeats
        able = [system for system in systems if system in WORKLOADS[workload].systems]
        for repeat in range(repeats if able else 0):
            turn = repeat % len(able)  # Nobody always comes after the same neighbour at the start of a repeat.
            for system in [*able[turn:], *able[:turn]]:
                if repeat < most.get(system, repeats):
                    on_run(run_once(workload, system, repeat, quick=quick))


def by_system(runs: Sequence[Run], workload: str) -> Runs:
    """The figures of one workload, of the runs that have any."""
    found: Runs = {}
    for run in runs:
        if run.workload == workload:
            repeats = found.setdefault(run.system, {})
            if run.metrics:
                repeats[run.repeat] = run.metrics
    return found


def run_once(workload: str, system: str, repeat: int, *, quick: bool) -> Run:
    """One run, bounded in time; never raises for what the system does."""
    load_average = os.getloadavg()[0]
    before = time.monotonic()
    metrics: Dict[str, float] = {}
    error = ""
    already_there = set(processes.descendants(os.getpid()))
    size = WORKLOADS[workload].size.of(system, quick=quick)
    timeout = WORKLOADS[workload].timeout_seconds
    try:
        if WORKLOADS[workload].run is None:
            metrics = _measure_starts(system, size, timeout)
        else:
            metrics = _run_child(system, workload, size, timeout)
    except RunFailedError as failure:
        error = str(failure)
    finally:
        left_behind = _clear_away(already_there)
    return Run(workload, system, repeat, metrics, error, time.monotonic() - before, load_average, left_behind)


def _run_child(system: str, workload: str, size: int, timeout: float) -> Dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        path = Path(folder, "metrics.json")
        with open(Path(folder, "output"), "w+b") as output:
            command = [sys.executable, "-m", "benchmarks.child", system, workload, str(size), str(path)]
            with _driver(command, stdout=output.fileno(), stderr=output.fileno()) as driver:
                try:
                    status: Optional[int] = driver.wait(timeout)
                except subprocess.TimeoutExpired:
                    status = None
            output.seek(0)
            said = output.read().decode(errors="replace").strip()[-KEPT_OUTPUT:]
        if status == 0 and path.exists():
            metrics: Dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
            return metrics
        how = f"did not end within {timeout:g} s" if status is None else f"exit status {status}"
        raise RunFailedError(f"{how}\n{said}".strip())


def _measure_starts(system: str, count: int, timeout: float) -> Dict[str, float]:
    seconds = [_measure_start(start_program(system), timeout) for _ in range(count)]
    return {"seconds": percentile(seconds, 50), "fastest_s": min(seconds), "slowest_s": max(seconds), "starts": count}


def _measure_start(program: str, timeout: float) -> float:
    """From before the new process exists to its first line of output."""
    with tempfile.TemporaryFile() as errors:
        before = time.perf_counter()
        with _driver([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=errors.fileno()) as driver:
            assert driver.stdout is not None
            is_ready = bool(select.select([driver.stdout], [], [], timeout)[0])
            elapsed = time.perf_counter() - before
            line = driver.stdout.readline() if is_ready else b""
            try:
                status: Optional[int] = driver.wait(timeout) if is_ready else None
            except subprocess.TimeoutExpired:
                status = None
        errors.seek(0)
        if line.strip() != b"1" or status != 0:
            said = errors.read().decode(errors="replace").strip()[-KEPT_OUTPUT:]
            raise RunFailedError(f"printed {line!r}, exit status {status}\n{said}".strip())
    return elapsed


@contextlib.contextmanager
def _driver(command: List[str], *, stdout: int, stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """A driver process in a group of its own, which is killed at the end if it still runs."""
    driver = subprocess.Popen(
        command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        yield driver
    finally:
        if driver.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()


def _environment() -> Dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("GPUMESH_", "DASK_", "RAY_", "XOSCAR_", "PYRO_"))
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


def _clear_away(already_there: set[int]) -> List[str]:
    """Wait for the run's processes, which are ours since their parents ended, and kill those that stay; their names."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        _reap()
        left = {pid: processes.start_ticks(pid) for pid in processes.descendants(os.getpid()) if pid not in already_there}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    names = []
    for pid, started in left.items():
        if started is not None and processes.start_ticks(pid) == started:
            names.append(processes.name(pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if left:
        time.sleep(0.2)
        _reap()
    return names


def _reap() -> None:
    """Collect orphans that have ended. Our own children were waited for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
