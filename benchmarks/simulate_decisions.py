"""What the scheduler alone can do on one core: tasks assigned and finished per second of its processor time, and bytes per pending task.

100,000 tasks are pending all the time. A client submits them in batches, workers report theirs in small batches; nothing is sent or run.
"""

from __future__ import annotations

import gc
import heapq
import random
import tracemalloc
from time import thread_time
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

from benchmarks.simulate_workload import draw_speeds
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster

DECISION_BARS = {10: 60_000, 1000: 45_000, 10_000: 35_000}  # Asked of each number of workers.
MEMORY_BAR = 700  # Bytes.

CLIENT = ClientNumber(1)
SUBMIT = 1000  # Tasks in one submission.
SLOTS = 4  # Of each worker.
TASK_SECONDS = 0.01  # On a worker of the median speed: short enough that some wait at each worker.
LINK_SECONDS = 0.0005  # Between a task's arrival at a worker and the next message from there.


class Decisions(NamedTuple):
    """One measurement."""

    workers: int
    idempotent: bool
    batch: int  # Results in one report, at most.
    decisions: int
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        """Tasks assigned and finished per second of processor time."""
        return self.decisions / self.cpu_seconds


class _Shop:
    """A cluster, its virtual workers, and the processor time that the cluster has used."""

    def __init__(self, workers: int, *, idempotent: bool, batch: int, seed: int) -> None:
        self.cluster = Cluster()
        self.now = 0.0
        self.cpu_seconds = 0.0
        self.finished = 0
        self.held: Dict[str, Dict[Tuple[int, int], None]] = {}
        self.seconds: Dict[str, float] = {}
        self.batch = batch
        self.rng = random.Random(seed)
        self._reports: List[Tuple[float, str]] = []  # When a worker reports next.
        self._expected: Dict[str, None] = {}  # Those in `_reports`.
        self._sequence = 0
        self._feed(ev.ClientConnected(CLIENT, "client"))
        self._feed(ev.SpecDefined(CLIENT, 0, TaskSpec(b"f" * 16, "f", idempotent=idempotent)))
        speeds = draw_speeds(workers, self.rng)
        median = sorted(speeds)[workers // 2]
        for index, speed in enumerate(speeds):
            worker = WorkerId(f"{index:016x}")
            self.held[worker] = {}
            self.seconds[worker] = TASK_SECONDS * median / speed
            self._feed(ev.WorkerConnected(worker, WorkerFacts(slots=SLOTS, cores=SLOTS, score=speed)))

    def submit(self, count: int) -> None:
        """The client submits so many."""
        base = (CLIENT << SEQUENCE_BITS) + self._sequence
        self._sequence += count
        self._feed(ev.TasksSubmitted(CLIENT, 0, list(range(base, base + count))))

    def report(self) -> int:
        """The next worker reports, or time passes for the scheduler; the number of tasks that ended."""
        due = self.cluster.next_deadline()
        if due is not None and due < self._reports[0][0]:
            self.now = max(self.now, due)
            begun = thread_time()
            actions = self.cluster.on_time(self.now)
            self.cpu_seconds += thread_time() - begun
            self._perform(actions)
            return 0
        self.now, worker = heapq.heappop(self._reports)
        del self._expected[worker]
        held = self.held[worker]
        before = self.finished
        if held:
            count = min(len(held), self.rng.randint(1, self.batch))
            seconds = self.seconds[worker]
            attempts = [next(iter(held))] if count == 1 else list(held)[:count]
            for attempt in attempts:
                del held[attempt]
            self._feed(
                ev.AttemptsFinished(WorkerId(worker), [(*attempt, int(Status.OK), b"", seconds) for attempt in attempts])
            )
            self._expect(worker)
        return self.finished - before

    def _expect(self, worker: str) -> None:
        if worker not in self._expected and self.held[worker]:
            self._expected[worker] = None
            pause = self.seconds[worker] * self.rng.randint(1, self.batch) / SLOTS
            heapq.heappush(self._reports, (self.now + LINK_SECONDS + pause, worker))

    def _feed(self, event: ev.Event) -> None:
        begun = thread_time()
        actions = self.cluster.handle(event, self.now)
        self.cpu_seconds += thread_time() - begun
        self._perform(actions)

    def _perform(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Assign):
                self.held[action.worker].update(dict.fromkeys(action.tasks))
                self._expect(action.worker)
            elif isinstance(action, act.Deliver):
                self.finished += len(action.results)
            elif isinstance(action, act.Recall):
                held = self.held[action.worker]
                status = int(Status.CANCELLED if action.kill else Status.NOT_RUN)
                back: List[Tuple[int, int, int, Any, float]] = []
                for position, attempt in enumerate(held):
                    if attempt in action.tasks and (action.kill or position >= SLOTS):
                        back.append((*attempt, status, {}, 0.0))
                for task_id, attempt_number, *_ in back:
                    del held[task_id, attempt_number]
                if back:
                    self._feed(ev.AttemptsFinished(action.worker, back))


def measure_decisions(
    workers: int, *, idempotent: bool = False, batch: int = 4, pending: int = 100_000, decisions: int = 100_000, seed: int = 0
) -> Decisions:
    """Keep `pending` tasks pending until `decisions` more have been assigned and finished; the filling is not counted.

    Args:
        workers: How many, with scores of real cards, each with SLOTS slots.
        idempotent: Whether the tasks may run twice.
        batch: Results in one report, at most; the number is random.
        pending: Tasks that have not ended.
        decisions: Tasks to finish, and as many to submit meanwhile.
        seed: Of speeds and batches.
    """
    shop = _Shop(workers, idempotent=idempotent, batch=batch, seed=seed)
    for _ in range(0, pending, SUBMIT):
        shop.submit(SUBMIT)
    missing = 0
    warm = (
        2 * SLOTS * workers if workers < 1000 else SLOTS * workers // 2
    )  # Until lengths are known and all workers have some waiting.
    while shop.finished < warm:
        missing = _step(shop, missing)
    gc.collect()
    begin, begun = shop.finished, shop.cpu_seconds
    while shop.finished < begin + decisions:
        missing = _step(shop, missing)
    return Decisions(workers, idempotent, batch, shop.finished - begin, shop.cpu_seconds - begun)


def _step(shop: _Shop, missing: int) -> int:
    missing += shop.report()
    if missing >= SUBMIT:
        shop.submit(SUBMIT)
        missing -= SUBMIT
    return missing


def measure_memory(*, workers: int = 10, pending: int = 100_000) -> float:
    """Bytes that the scheduler allocates for one more pending task, ids included, by tracemalloc."""
    shop = _Shop(workers, idempotent=False, batch=1, seed=0)
    shop.submit(SUBMIT)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(0, pending, SUBMIT):
            shop.submit(SUBMIT)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / pending
    finally:
        tracemalloc.stop()
