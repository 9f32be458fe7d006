"""The real scheduler with virtual workers in virtual time: `simulate(case)`. No sockets, no sleeping; the same case gives the same run."""

from __future__ import annotations

import heapq
import math
from collections import deque
from time import thread_time
from typing import Any, Callable, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from benchmarks.simulate_workload import Case, Machine, bound
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster

OK, NOT_RUN, CANCELLED = int(Status.OK), int(Status.NOT_RUN), int(Status.CANCELLED)
STALLED_SECONDS = 1e7  # Virtual time after which a run is given up.


class Result(NamedTuple):
    """How a run went. Times are virtual seconds, except `cpu_seconds`."""

    seconds: float  # From the first submission to the last result at the coordinator.
    bound: float
    ends: Dict[int, float]  # Task id -> when its result was delivered.
    submitted: List[List[int]]  # Task ids of each submission.
    failed: int  # Tasks that ended without a result.
    work: float  # Length of all tasks.
    extra: float  # Work done for nothing: killed, lost with a machine, or done twice.
    assigned: int  # Attempts sent out.
    cpu_seconds: float  # Inside Cluster.handle and on_time.
    busy: Dict[str, float]  # Worker -> slot seconds in which it ran something.
    done: Dict[str, List[float]]  # Worker -> when its results were delivered.

    @property
    def ratio(self) -> float:
        """Time over the bound."""
        return self.seconds / self.bound

    @property
    def extra_fraction(self) -> float:
        """Work done for nothing over the length of all tasks."""
        return self.extra / self.work if self.work else 0.0

    @property
    def decisions_per_second(self) -> float:
        """Attempts assigned per second of the scheduler's processor time."""
        return self.assigned / self.cpu_seconds if self.cpu_seconds else 0.0


class _Worker:
    """A virtual worker: tasks run in the order of their arrival, one per slot."""

    __slots__ = ("id", "machine", "pace", "free", "queue", "running", "is_alive", "busy", "done")

    def __init__(self, ident: str, machine: Machine) -> None:
        self.id = WorkerId(ident)
        self.machine = machine
        self.pace = machine.slots / machine.speed  # Seconds per unit of length on one slot.
        self.free = machine.slots
        self.queue: Deque[Tuple[int, int]] = deque()
        self.running: Dict[Tuple[int, int], float] = {}  # Attempt -> when it started.
        self.is_alive = True
        self.busy = 0.0
        self.done: List[float] = []


Call = Tuple[float, int, Callable[..., None], Tuple[Any, ...]]


class Simulation:
    """One run; `run()` once."""

    def __init__(self, case: Case, cluster: Optional[Cluster] = None) -> None:
        self.case = case
        self.cluster = Cluster() if cluster is None else cluster
        self.now = 0.0
        self.cpu_seconds = 0.0
        self.assigned = 0
        self.extra = 0.0
        self.failed = 0
        self.ends: Dict[int, float] = {}
        self.submitted: List[List[int]] = []
        self.workers: Dict[str, _Worker] = {}
        self.length: Dict[int, float] = {}
        self._heap: List[Call] = []
        self._count = 0
        self._left = sum(len(submission.lengths) for submission in case.submissions)
        self._followers: Dict[int, List[int]] = {}  # Submission -> those that wait for its end.
        self._open: List[int] = []  # By submission: tasks that have not ended. Only kept if there are followers.
        self._of: Dict[int, int] = {}  # Task id -> its submission, likewise.
        self._prepare()

    def run(self) -> Result:
        """Let time pass until every task has ended.

        Raises:
            RuntimeError: The scheduler leaves tasks lying that somebody could run.
        """
        heap = self._heap
        cluster = self.cluster
        while self._left:
            deadline = cluster.next_deadline()
            if heap and (deadline is None or heap[0][0] <= deadline):
                self.now, _, call, arguments = heapq.heappop(heap)
                call(*arguments)
            elif deadline is not None:
                self.now = max(self.now, deadline)
                begun = thread_time()
                actions = cluster.on_time(self.now)
                self.cpu_seconds += thread_time() - begun
                self._perform(actions)
            else:
                raise RuntimeError(f"{self._left} tasks are left at {self.now:.6g} s, and nothing is going to happen")
            if self.now > STALLED_SECONDS:
                raise RuntimeError(f"{self._left} tasks are left after {STALLED_SECONDS:g} s")
        return self._result()

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Do this at that time; of two at the same time the one asked for first."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, call, arguments))

    # --- what happens by itself

    def _prepare(self) -> None:
        for number in sorted({submission.client for submission in self.case.submissions}):
            self._handle(ev.ClientConnected(ClientNumber(number), f"client {number}"))
        for index, machine in enumerate(self.case.machines):
            worker = _Worker(f"w{index}", machine)
            self.workers[worker.id] = worker
            self.at(machine.joins, self._join, worker)
            if machine.dies < math.inf:
                self.at(machine.dies, self._die, worker)
        sequence: Dict[int, int] = {}
        for index, submission in enumerate(self.case.submissions):
            first = sequence.get(submission.client, 0)
            sequence[submission.client] = first + len(submission.lengths)
            base = submission.client << SEQUENCE_BITS
            ids = [base | number for number in range(first, first + len(submission.lengths))]
            self.submitted.append(ids)
            self.length.update(zip(ids, submission.lengths))
            if submission.after < 0:
                self.at(submission.at, self._submit, index)
            else:
                self._followers.setdefault(submission.after, []).append(index)
        if self._followers:
            self._open = [len(ids) for ids in self.submitted]
            self._of = {task_id: index for index, ids in enumerate(self.submitted) for task_id in ids}

    def _join(self, worker: _Worker) -> None:
        machine = worker.machine
        facts = WorkerFacts(hostname=worker.id, slots=machine.slots, cores=machine.slots, score=machine.score)
        self._handle(ev.WorkerConnected(worker.id, facts))

    def _die(self, worker: _Worker) -> None:
        worker.is_alive = False
        for attempt, started in worker.running.items():
            self._waste(worker, started, attempt)
        worker.running.clear()
        worker.queue.clear()
        self._handle(ev.WorkerLost(worker.id, "died"))

    def _submit(self, index: int) -> None:
        submission = self.case.submissions[index]
        client = ClientNumber(submission.client)
        spec = TaskSpec(
            submission.function.to_bytes(16, "big"),
            f"function {submission.function}",
            idempotent=submission.idempotent,
            priority=submission.priority,
            retries=submission.retries,
        )
        self._handle(ev.SpecDefined(client, index, spec))
        self._handle(ev.TasksSubmitted(client, index, self.submitted[index]))

    # --- the coordinator

    def _handle(self, event: ev.Event) -> None:
        begun = thread_time()
        actions = self.cluster.handle(event, self.now)
        self.cpu_seconds += thread_time() - begun
        self._perform(actions)

    def _perform(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Assign):
                worker = self.workers[action.worker]
                self.assigned += len(action.tasks)
                self.at(self.now + worker.machine.latency, self._arrive, worker, action.tasks)
            elif isinstance(action, act.Deliver):
                done = self.workers[action.worker].done
                for task_id, status, _, _ in action.results:
                    self._end(task_id, is_good=status == OK)
                    done.append(self.now)
            elif isinstance(action, act.Recall):
                worker = self.workers[action.worker]
                self.at(self.now + worker.machine.latency, self._recall, worker, action.tasks, action.kill)
            elif isinstance(action, act.Fail):
                self._end(action.task_id, is_good=False)

    def _end(self, task_id: int, *, is_good: bool) -> None:
        if task_id in self.ends:
            raise RuntimeError(f"task {task_id} has ended twice")
        self.ends[task_id] = self.now
        self._left -= 1
        self.failed += not is_good
        if self._followers:
            index = self._of[task_id]
            self._open[index] -= 1
            if not self._open[index]:
                for follower in self._followers.get(index, ()):
                    self.at(self.now, self._submit, follower)

    # --- the workers

    def _arrive(self, worker: _Worker, tasks: Sequence[Tuple[int, int]]) -> None:
        if worker.is_alive:
            worker.queue.extend(tasks)
            self._start(worker)

    def _start(self, worker: _Worker) -> None:
        while worker.free and worker.queue:
            attempt = worker.queue.popleft()
            worker.free -= 1
            worker.running[attempt] = self.now
            self.at(self.now + self.length[attempt[0]] * worker.pace, self._finish, worker, attempt)

    def _finish(self, worker: _Worker, attempt: Tuple[int, int]) -> None:
        started = worker.running.pop(attempt, None)
        if started is None:
            return  # Killed, or its machine died.
        seconds = self.now - started
        worker.busy += seconds
        worker.free += 1
        self._report(worker, [(*attempt, OK, b"", seconds)], self.length[attempt[0]])
        self._start(worker)

    def _recall(self, worker: _Worker, tasks: Sequence[Tuple[int, int]], kill: bool) -> None:
        if not worker.is_alive:
            return
        results = []
        for attempt in tasks:
            if attempt in worker.running:
                if kill:
                    started = worker.running.pop(attempt)
                    worker.free += 1
                    self._waste(worker, started, attempt)
                    results.append((*attempt, CANCELLED, {"reason": "recalled"}, self.now - started))
            elif attempt in worker.queue:
                worker.queue.remove(attempt)
                results.append((*attempt, CANCELLED if kill else NOT_RUN, {"reason": "recalled"}, 0.0))
        if results:
            self._report(worker, results, 0.0)
            self._start(worker)

    def _report(self, worker: _Worker, results: List[Tuple[int, int, int, Any, float]], done: float) -> None:
        self.at(self.now + worker.machine.latency, self._reported, worker, results, done)

    def _reported(self, worker: _Worker, results: List[Tuple[int, int, int, Any, float]], done: float) -> None:
        """`done`: the length of what ran to its end."""
        if not worker.is_alive:
            self.extra += done
            return
        if done and results[0][0] in self.ends:
            self.extra += done  # A copy that lost the race.
        self._handle(ev.AttemptsFinished(worker.id, results))

    def _waste(self, worker: _Worker, started: float, attempt: Tuple[int, int]) -> None:
        seconds = self.now - started
        worker.busy += seconds
        self.extra += seconds / worker.pace

    def _result(self) -> Result:
        for worker in self.workers.values():
            for attempt, started in worker.running.items():
                self._waste(worker, started, attempt)  # Copies that are still running.
        begin = min(submission.at for submission in self.case.submissions)
        return Result(
            seconds=max(self.ends.values(), default=begin) - begin,
            bound=bound(self.case),
            ends=self.ends,
            submitted=self.submitted,
            failed=self.failed,
            work=sum(self.length.values()),
            extra=self.extra,
            assigned=self.assigned,
            cpu_seconds=self.cpu_seconds,
            busy={worker.id: worker.busy for worker in self.workers.values()},
            done={worker.id: worker.done for worker in self.workers.values()},
        )


def simulate(case: Case, cluster: Optional[Cluster] = None) -> Result:
    """Run a case on a fresh scheduler, or on the given one.

    Raises:
        RuntimeError: The scheduler leaves tasks lying that somebody could run.
    """
    return Simulation(case, cluster).run()


def first_come_first_served(case: Case) -> float:
    """Time over the bound if whoever is free takes the next task, as pools do; for cases without joins, deaths and several submissions."""
    slots = [(machine.joins, index) for index, machine in enumerate(case.machines) for _ in range(machine.slots)]
    heapq.heapify(slots)
    end = 0.0
    for length in case.submissions[0].lengths:
        free, index = slots[0]
        machine = case.machines[index]
        finish = free + length * machine.slots / machine.speed
        end = max(end, finish + machine.latency)
        heapq.heapreplace(slots, (finish + 2 * machine.latency, index))
    return end / bound(case)
