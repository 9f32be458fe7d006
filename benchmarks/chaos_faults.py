"""Carries out what chaos_plan has drawn, and knows at each moment who is dead, frozen or cut off."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
from typing import Any, Callable, Dict, List, NamedTuple, Set, Tuple

from benchmarks import processes
from benchmarks.chaos_mesh import CLIENTS, WORKERS, Mesh, Program
from benchmarks.chaos_plan import Fault


class Done(NamedTuple):
    """A fault as it took place: to whom, and from when to when in seconds after the start."""

    fault: Fault
    victim: str
    begun: float
    ended: float


class Faults:
    """The plan's faults, one after the other; what is in the way of one is looked past, to the next of its kind."""

    def __init__(self, mesh: Mesh, plan: List[Fault]) -> None:
        self._mesh = mesh
        self._plan = list(reversed(plan))
        self._ends: List[Tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._busy: Set[str] = set()  # Programs and wires that something is done to.
        self.done: List[Done] = []
        self.skipped = 0

    @property
    def is_over(self) -> bool:
        """Whether everything has been done, and is over."""
        return not self._plan and not self._ends

    def counts(self) -> Dict[str, int]:
        """How many of each kind there were."""
        found: Dict[str, int] = {}
        for done in self.done:
            name = f"{done.fault.kind} {done.fault.what}".strip()
            found[name] = found.get(name, 0) + 1
        return dict(sorted(found.items()))

    def advance(self, now: float) -> None:
        """Do what is due, `now` seconds after the start."""
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2]()
        while self._plan and self._plan[-1].at <= now:
            fault = self._plan.pop()
            victim = self._do(fault, now)
            if victim:
                self.done.append(Done(fault, victim, now, now + fault.seconds))
                with open(self._mesh.folder / "faults.log", "a", encoding="utf-8") as log:
                    log.write(f"{now:.2f} s: {fault}: {victim}\n")
            else:
                self.skipped += 1

    def _do(self, fault: Fault, now: float) -> str:
        """Who it was done to; nobody when there is nobody to do it to."""
        if fault.kind == "cut":
            return self._cut(fault, now)
        if fault.kind == "coordinator":
            return self._kill(self._mesh.coordinator, fault, now)
        if fault.kind == "worker":
            return self._kill(self._choose(self._mesh.workers, fault), fault, now)
        if fault.kind == "runner":
            worker = self._choose(self._mesh.workers, fault)
            runners = _runners(worker)
            if not runners:
                return ""
            pid = _one_of(runners, fault.among)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return f"{worker.name}'s runner {pid}"
        return self._freeze(fault, now)

    def _kill(self, program: Any, fault: Fault, now: float) -> str:
        if program is None or program.name in self._busy or not program.pid:
            return ""
        self._busy.add(program.name)
        program.kill()

        def again() -> None:
            self._busy.discard(program.name)
            program.start()

        self._later(now + fault.seconds, again)
        return str(program.name)

    def _freeze(self, fault: Fault, now: float) -> str:
        if fault.what == "client":
            program = self._choose(self._mesh.clients, fault)
        elif fault.what == "coordinator":
            program = self._choose([self._mesh.coordinator], fault)
        else:
            program = self._choose(self._mesh.workers, fault)
        if program is None:
            return ""
        pids = [program.pid]
        victim = program.name
        if fault.what == "machine":
            pids = program.tree()
        elif fault.what == "runner":
            runners = _runners(program)
            if not runners:
                return ""
            pids = [_one_of(runners, fault.among)]
            victim = f"{program.name}'s runner {pids[0]}"
        else:
            self._busy.add(program.name)
        frozen = {pid: processes.start_ticks(pid) for pid in pids}
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

        def thaw() -> None:
            for pid, started in frozen.items():
                if started is not None and processes.start_ticks(pid) == started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            self._busy.discard(program.name)

        if fault.what == "machine":
            self._busy.add(program.name)
        self._later(now + fault.seconds, thaw)
        return str(victim)

    def _cut(self, fault: Fault, now: float) -> str:
        names = [program.name for program in [*self._mesh.workers, *self._mesh.clients]]
        free = [number for number in range(WORKERS + CLIENTS) if f"wire of {names[number]}" not in self._busy]
        if not free:
            return ""
        number = _one_of(free, fault.target)
        name = f"wire of {names[number]}"
        if fault.what in ("both", "up", "down"):
            self._mesh.wire(number, do="stall", way=fault.what)
        else:
            self._mesh.wire(number, do="reset", side="both" if fault.what == "reset" else fault.what)
        if fault.seconds:
            self._busy.add(name)

            def mend() -> None:
                self._busy.discard(name)
                self._mesh.wire(number, do="flow")

            self._later(now + fault.seconds, mend)
        return name

    def _choose(self, programs: List[Any], fault: Fault) -> Any:
        free = [program for program in programs if program.name not in self._busy and program.pid]
        return _one_of(free, fault.target) if free else None

    def _later(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (when, next(self._numbers), do))


def _one_of(found: List[Any], place: float) -> Any:
    return found[min(len(found) - 1, int(place * len(found)))]


def _runners(worker: Any) -> List[int]:
    if not isinstance(worker, Program):
        return []
    return [pid for pid in worker.tree() if processes.name(pid) == "gpumesh-runner"]
