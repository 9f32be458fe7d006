"""Machines that join and die one by one, each a worker of real processes; and tasks that say where and when they ran."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Iterator, List, NamedTuple

from gpumesh import GPUMesh
from gpumesh.runtime.embedded import WorkerHandle
from tests.support.processes import until

SPEED = "MACHINE_SPEED"  # In the environment of a worker; no part of the mesh reads it.
GATE_SECONDS = 40.0  # A task that waits for something gives up then; longer than any wait of a test.


class Machines:
    """A coordinator of this process, a client of it, and the workers that `join` adds."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        self._ends = ends
        coordinator = GPUMesh.start_coordinator(port=0)
        ends.callback(coordinator.stop)
        self.url = coordinator.url
        self.token = coordinator.token
        self.mesh = self.client()
        self.joined: List[WorkerHandle] = []

    def client(self) -> GPUMesh:
        """One more client."""
        return self._ends.enter_context(GPUMesh(self.url, self.token, fallback=False))

    def join(self, *, speed: float = 1.0, slots: int = 1) -> str:
        """Add a worker; its id, once the coordinator knows it. Its score says nothing of its speed."""
        os.environ[SPEED] = str(speed)
        try:
            worker = GPUMesh.add_worker(self.url, self.token, slots=slots, score=1.0)
        finally:
            del os.environ[SPEED]
        self._ends.callback(worker.kill)
        self.joined.append(worker)
        ident = str(worker.info["id"])
        until(lambda: ident in [known["id"] for known in self.mesh.workers()], 20, what=f"worker {ident}")
        return ident

    def kill(self, ident: str) -> None:
        """End a worker without warning: its agent by SIGKILL, and with it everything that it runs."""
        worker = next(worker for worker in self.joined if worker.info["id"] == ident)
        os.kill(worker.processes["worker"], signal.SIGKILL)

    def view(self, ident: str) -> dict[str, object]:
        """What the coordinator says of a worker."""
        return next(known for known in self.mesh.workers() if known["id"] == ident)


@contextlib.contextmanager
def machines() -> Iterator[Machines]:
    """A mesh without workers, to begin with; all of it ends with the block."""
    with contextlib.ExitStack() as ends:
        yield Machines(ends)


class Span(NamedTuple):
    """When a task ran, on this computer's monotonic clock, and in which process."""

    name: str
    pid: int
    start: float
    end: float


def work(folder: str, name: str, seconds: float, gate: str = "") -> Span:
    """Leave a file at the start, wait for a file where one is named, then take `seconds` divided by the machine's speed."""
    start = time.monotonic()
    Path(folder, f"{name}.{os.getpid()}.{time.monotonic_ns()}").touch()
    while gate and not os.path.exists(gate):
        if time.monotonic() > start + GATE_SECONDS:
            raise TimeoutError(f"{gate} never came")
        time.sleep(0.01)
    time.sleep(seconds / float(os.environ[SPEED]))
    return Span(name, os.getpid(), start, time.monotonic())


def starts(folder: Path) -> List[str]:
    """The names of the tasks of this folder that have started, once for each start, in order."""
    marks = [(int(path.name.rpartition(".")[2]), path.name.partition(".")[0]) for path in folder.iterdir()]
    return [name for _, name in sorted(marks)]
