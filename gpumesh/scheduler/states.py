"""The entities of the mesh, their states, and the legal moves as tables. No decisions.

A task has no object of its own while it waits: 100,000 pending tasks are ids in a queue, and one entry each in the table of tasks.

    (submitted) ──> READY ──assign──> ASSIGNED ──ended──> (gone)
         │            ^ │                │ │
         └─> WAITING ─┤ (its inputs exist)
                      │ └──cancelled, infeasible, client gone──> (gone)
                      └──given back, failed but may be retried──┘
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

from gpumesh.config import ROUND_TRIP_CAP_SECONDS, ROUND_TRIP_FLOOR_SECONDS
from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.resources import Requirement, WorkerFacts, lacks
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.throughput import Function

if TYPE_CHECKING:
    from gpumesh.scheduler.queues import Group

ROUND_TRIP_RISE = 0.2  # Least weight of a sample above the estimate. One below replaces it: delay only adds to the wire's own.


class TaskState(enum.Enum):
    """Where a task is; a task that has ended is in no table any more."""

    WAITING = "waiting"
    READY = "ready"
    ASSIGNED = "assigned"
    GONE = "gone"


TASK_MOVES: Dict[Tuple[TaskState, TaskState], str] = {
    (TaskState.GONE, TaskState.READY): "submitted",
    (TaskState.GONE, TaskState.WAITING): "submitted with results of other tasks among its arguments",
    (TaskState.WAITING, TaskState.READY): "the last of these results is there",
    (TaskState.WAITING, TaskState.GONE): "cancelled, one of these results will never be there, or its client left",
    (TaskState.READY, TaskState.ASSIGNED): "placed on a worker",
    (TaskState.READY, TaskState.GONE): "cancelled, infeasible for too long, or its client left",
    (TaskState.ASSIGNED, TaskState.READY): "given back without having started, or failed and may be retried",
    (TaskState.ASSIGNED, TaskState.GONE): "ended, or its client left",
}


class WorkerState(enum.Enum):
    """Whether a worker takes tasks."""

    HEALTHY = "healthy"
    PROBLEM = "problem"  # Its facts say what; it may get well.
    DRAINING = "draining"  # For good.
    LOST = "lost"  # In no table any more.


WORKER_MOVES: Dict[Tuple[WorkerState, WorkerState], str] = {
    (WorkerState.LOST, WorkerState.HEALTHY): "connected",
    (WorkerState.LOST, WorkerState.PROBLEM): "connected, but cannot run tasks",
    (WorkerState.HEALTHY, WorkerState.PROBLEM): "told of a problem, or paused by its owner",
    (WorkerState.PROBLEM, WorkerState.HEALTHY): "the problem is solved",
    (WorkerState.HEALTHY, WorkerState.DRAINING): "leaves when it has finished",
    (WorkerState.PROBLEM, WorkerState.DRAINING): "leaves when it has finished",
    (WorkerState.HEALTHY, WorkerState.LOST): "gone",
    (WorkerState.PROBLEM, WorkerState.LOST): "gone",
    (WorkerState.DRAINING, WorkerState.LOST): "gone",
}


class Client:
    """Someone who submits tasks and waits for their ends."""

    __slots__ = ("number", "name", "specs", "replaced", "pending", "noticed")

    def __init__(self, number: ClientNumber, name: str) -> None:
        self.number = number
        self.name = name
        self.specs: Dict[int, Spec] = {}  # By the client's own numbers.
        self.replaced: List[Spec] = []  # Their number means another by now; tasks of them may still be here.
        self.pending = 0  # Tasks of this client in the table of tasks.
        self.noticed: Dict[Requirement, None] = {}  # Told once that nobody can run this.


class Spec:
    """One TaskSpec of one client, with what the scheduler looks up for it."""

    __slots__ = ("client", "spec", "function", "group")

    def __init__(self, client: Client, spec: TaskSpec, function: Function, group: Group) -> None:
        self.client = client
        self.spec = spec
        self.function = function
        self.group = group


class Batch:
    """Tasks of one spec that went to a worker together, all at the same attempt: what an assigned task knows about itself."""

    __slots__ = ("spec", "attempt", "width", "assigned_at", "probe")

    def __init__(self, spec: Spec, attempt: int, width: int, assigned_at: float, probe: int) -> None:
        self.spec = spec
        self.attempt = attempt
        self.width = width  # Slots that each of them takes.
        self.assigned_at = assigned_at
        self.probe = (
            probe  # Id of the task that did not queue behind another, -1 if none: its time away measures the round trip.
        )


class Worker:
    """A connected worker."""

    __slots__ = ("id", "facts", "slots", "is_draining", "assigned", "orphans", "recalled", "load", "foreign", "functions", "round_trip",
                 "trips", "done")  # fmt: skip

    def __init__(self, ident: WorkerId, facts: WorkerFacts) -> None:
        self.id = ident
        self.facts = facts
        self.slots = facts.slots
        self.is_draining = False
        self.assigned: Dict[int, Batch] = {}  # In the order of assignment, which is the order in which the worker starts them.
        self.orphans: Dict[
            Tuple[int, int], Batch
        ] = {}  # (task id, attempt) whose client left: they hold their slots until reported.
        self.recalled: Dict[int, None] = {}  # Assigned and asked back for another worker; once per attempt.
        self.load = 0  # Slots wanted by all that is assigned here, orphans included; more than `slots` means a queue.
        self.foreign: Dict[Tuple[str, ...], int] = {}  # The part of `load` in environments, by packages; never 0.
        self.functions: Dict[Function, int] = {}  # How many of `assigned` and `orphans` are of each; never 0.
        self.round_trip = ROUND_TRIP_FLOOR_SECONDS
        self.trips = 0  # How often it was measured.
        self.done = 0  # Tasks delivered from here.

    @property
    def state(self) -> WorkerState:
        """Whether it takes tasks."""
        if self.is_draining:
            return WorkerState.DRAINING
        return WorkerState.PROBLEM if self.facts.problem else WorkerState.HEALTHY

    def width_of(self, need: Requirement) -> int:
        """Slots that a task with this requirement takes here; 0: it can never run here."""
        if lacks(self.facts, need):
            return 0
        if not need.cores:
            return 1
        return min(self.slots, max(1, math.ceil(need.cores * self.slots / self.facts.cores)))

    def load_of(self, group: Group) -> int:
        """Slots wanted here by tasks of this group's environment.

        A process of one environment runs no task of another, and takes long to make way: where several are in use, a worker has
        some tasks of each to choose from.
        """
        if group.packages:
            return self.foreign.get(group.packages, 0)
        return self.load - sum(self.foreign.values()) if self.foreign else self.load

    def is_installing(self, group: Group) -> bool:
        """Whether this group's tasks must wait until their packages are installed here."""
        return bool(group.packages) and group.packages in self.facts.installing

    def seconds(self, function: Function) -> Optional[float]:
        """Expected run time of a task of this function here."""
        return function.seconds_on(self.id, self.facts.score)

    def add(self, batch: Batch, count: int) -> None:
        """`count` tasks of a batch are here now."""
        self.load += batch.width * count
        packages = batch.spec.group.packages
        if packages:
            self.foreign[packages] = self.foreign.get(packages, 0) + batch.width * count
        function = batch.spec.function
        self.functions[function] = self.functions.get(function, 0) + count

    def remove(self, batch: Batch, count: int) -> None:
        """`count` tasks of a batch are no longer here."""
        self.load -= batch.width * count
        packages = batch.spec.group.packages
        if packages:
            self.foreign[packages] -= batch.width * count
            if not self.foreign[packages]:
                del self.foreign[packages]
        function = batch.spec.function
        left = self.functions[function] - count
        if left:
            self.functions[function] = left
        else:
            del self.functions[function]

    def observe_round_trip(self, seconds: float) -> None:
        """A task that did not queue was away for its run time and this much more."""
        sample = min(max(seconds, ROUND_TRIP_FLOOR_SECONDS), ROUND_TRIP_CAP_SECONDS)
        self.trips += 1
        rise = sample - self.round_trip
        self.round_trip += rise * max(ROUND_TRIP_RISE, 1 / (1 + self.trips)) if rise > 0 else rise

    def executing(self) -> List[int]:
        """Ids that may be executing: the first in order of assignment, as many as the slots can hold."""
        free = self.slots - sum(batch.width for batch in self.orphans.values())
        ids: List[int] = []
        for task_id, batch in self.assigned.items():
            if free <= 0:
                break
            free -= batch.width
            ids.append(task_id)
        return ids
