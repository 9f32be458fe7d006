"""Tasks that are ready to run: a group for each requirement, priority and environment, in it a lane for each client, in it runs of one spec.

    Queues ── Group (requirement, priority, packages) ── Lane (client) ── Run (spec, ids)

Groups are served by priority, higher first, and a step of priority is gained by waiting for `AGEING_SECONDS`. At equal priority the client goes
first that was served least, in slot seconds since all that are here now have been here. Inside a lane order is kept, but for `cost`: where it
is given, the costlier go first, since what is long and starts last decides the end.
A cancelled task leaves its id behind, which is skipped later: taking it out of the middle would cost a scan for each.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from gpumesh.config import AGEING_SECONDS, DEPTH_PRIORITY, INFEASIBLE_NOTICE_SECONDS
from gpumesh.model.ids import ClientNumber
from gpumesh.model.resources import Requirement
from gpumesh.scheduler.confinement import ANYWHERE, Confinement
from gpumesh.scheduler.states import Client, Spec, Worker, WorkerState

if TYPE_CHECKING:
    from gpumesh.scheduler.horizon import Horizon

MERGE_FRACTION = 0.05  # Of its placement timeout by which a task may fail early because it shares a run with an earlier one.
DEAD_IDS = 64  # A lane with more dead ids than this, and than living ones, is cleaned.


class Run:
    """Consecutive tasks of one spec. `since`: when the oldest began to wait for a worker that can run it."""

    __slots__ = ("spec", "ids", "since")

    def __init__(self, spec: Spec, ids: Deque[int], since: float) -> None:
        self.spec = spec
        self.ids = ids
        self.since = since


class Lane:
    """One client's ready tasks in one group."""

    __slots__ = ("client", "runs", "count", "dead")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.runs: Deque[Run] = deque()
        self.count = 0  # Living ids in `runs`; a lane without any is dropped.
        self.dead: Set[int] = set()  # Ids in `runs` that have ended meanwhile. Only asked for membership, never iterated.

    @property
    def head(self) -> Spec:
        """The spec of the next task."""
        return self.runs[0].spec

    def take(self, limit: int) -> List[int]:
        """The next ids, at most `limit`, all of the spec at the head; may be none when those were dead."""
        run = self.runs[0]
        if limit >= len(run.ids):
            ids = list(run.ids)
            self.runs.popleft()
        else:
            popleft = run.ids.popleft
            ids = [popleft() for _ in repeat(None, limit)]
        if self.dead:
            dead = self.dead
            living = [task_id for task_id in ids if task_id not in dead]
            dead.difference_update(ids)
            ids = living
        self.count -= len(ids)
        return ids

    def pick(self, run: Run, task_ids: Iterable[int]) -> None:
        """These living ids of a run leave; the nearer to its front, the cheaper."""
        wanted = set(task_ids)  # Only asked for membership.
        self.count -= len(wanted)
        passed: List[int] = []
        while wanted:
            task_id = run.ids.popleft()
            if task_id in wanted:
                wanted.remove(task_id)
            else:
                passed.append(task_id)
        run.ids.extendleft(reversed(passed))
        if not run.ids:
            self.runs.remove(run)

    def kill(self, task_id: int) -> None:
        """This ready task has ended."""
        self.dead.add(task_id)
        self.count -= 1
        if len(self.dead) > DEAD_IDS and len(self.dead) > self.count:
            self.clean()

    def clean(self) -> None:
        """Take all dead ids out."""
        dead = self.dead
        runs: Deque[Run] = deque()
        for run in self.runs:
            run.ids = deque(task_id for task_id in run.ids if task_id not in dead)
            if run.ids:
                runs.append(run)
        self.runs = runs
        dead.clear()

    def living(self) -> Iterator[int]:
        """Ids in order."""
        dead = self.dead
        for run in self.runs:
            for task_id in run.ids:
                if task_id not in dead:
                    yield task_id


GroupKey = Tuple[Requirement, int, Tuple[str, ...], Confinement]
"""Requirement, priority, packages, and who may run it at all."""


class Group:
    """Ready tasks with the same requirement, priority and packages, and the workers that can run them."""

    __slots__ = ("need", "priority", "packages", "confinement", "workers", "specs", "lanes", "count", "is_saturated", "due", "waits_since", "held_since",
                 "horizon", "repeatable", "depth")  # fmt: skip

    def __init__(
        self, need: Requirement, priority: int, packages: Tuple[str, ...] = (), confinement: Confinement = ANYWHERE
    ) -> None:
        self.need = need
        self.priority = priority
        self.depth = (priority + DEPTH_PRIORITY // 2) // DEPTH_PRIORITY  # Tasks around each of its tasks, which wait for it.
        self.packages = packages  # Of the environment that its tasks run in.
        self.confinement = confinement  # Of tasks that have failed before.
        self.workers: Dict[
            Worker, int
        ] = {}  # Healthy, able and admitted, in order of joining; the value is the slots that a task takes.
        self.specs = 0  # Specs that clients here have defined for it; without any it is dropped.
        self.lanes: Dict[ClientNumber, Lane] = {}  # Only those with ready tasks; the first is next.
        self.count = 0  # Ready tasks.
        self.is_saturated = False  # Every worker was found full, and nothing has made room or changed what comes next.
        self.due = math.inf  # While stuck: when the next notice or failure is due.
        self.waits_since = 0.0  # While it has ready tasks: when it came to have some, or was served last.
        self.held_since: Optional[float] = None  # When the tail rule began to keep its tasks from whoever had room.
        self.horizon: Optional[Horizon] = None  # As last found; for the tail rule.
        self.repeatable = (
            0  # Attempts at idempotent tasks of it that are assigned to workers, or were until they were given up.
        )

    @property
    def key(self) -> GroupKey:
        """What its tasks have in common."""
        return self.need, self.priority, self.packages, self.confinement

    def width_on(self, worker: Worker) -> Optional[int]:
        """Slots that a task takes there, 0 if it runs on cards; None: it can or may never run there, or not as things are."""
        if worker.state is not WorkerState.HEALTHY or not self.confinement.admits(worker.id):
            return None
        return worker.width_of(self.need)

    def push(self, spec: Spec, ids: Sequence[int], now: float) -> None:
        """Append new tasks."""
        lane = self._lane(spec.client)
        if not self.count:
            self.waits_since = now
        last = lane.runs[-1] if lane.runs else None
        if last is not None and spec.spec.cost > last.spec.spec.cost:
            self._push_costly(lane, spec, ids, now)
        elif last is not None and last.spec is spec and (self.workers or self._may_join(last, spec, now)):
            last.ids.extend(ids)
        else:
            lane.runs.append(Run(spec, deque(ids), now))
        lane.count += len(ids)
        self.count += len(ids)

    @staticmethod
    def _push_costly(lane: Lane, spec: Spec, ids: Sequence[int], now: float) -> None:
        """Before all that cost less, behind the rest."""
        cheaper: List[Run] = []
        while lane.runs and lane.runs[-1].spec.spec.cost < spec.spec.cost:
            cheaper.append(lane.runs.pop())
        lane.runs.append(Run(spec, deque(ids), now))
        lane.runs.extend(reversed(cheaper))

    def push_front(self, spec: Spec, task_id: int, now: float) -> None:
        """A task comes back; it goes first."""
        lane = self._lane(spec.client)
        if not self.count:
            self.waits_since = now
        first = lane.runs[0] if lane.runs else None
        if first is not None and first.spec is spec and (self.workers or self._may_join(first, spec, now)):
            first.ids.appendleft(task_id)
        else:
            lane.runs.appendleft(Run(spec, deque((task_id,)), now))
        lane.count += 1
        self.count += 1
        self.is_saturated = False

    def take(self, lane: Lane, limit: int) -> List[int]:
        """The next tasks of a lane, all of one spec."""
        ids = lane.take(limit)
        self.count -= len(ids)
        if not lane.count:
            del self.lanes[lane.client.number]
        return ids

    def pick(self, lane: Lane, run: Run, task_ids: Sequence[int]) -> None:
        """These tasks of a run leave, whatever their places in it."""
        lane.pick(run, task_ids)
        self.count -= len(task_ids)
        if not lane.count:
            del self.lanes[lane.client.number]

    def kill(self, client: Client, task_id: int) -> None:
        """This ready task has ended."""
        lane = self.lanes[client.number]
        lane.kill(task_id)
        self.count -= 1
        if not lane.count:
            del self.lanes[client.number]

    def expire(self, lane: Lane, run: Run) -> List[int]:
        """A run is given up: its ready tasks, which are no longer here."""
        ids = [task_id for task_id in run.ids if task_id not in lane.dead]
        lane.dead.difference_update(run.ids)
        lane.runs.remove(run)
        lane.count -= len(ids)
        self.count -= len(ids)
        if not lane.count:
            del self.lanes[lane.client.number]
        return ids

    def remove(self, spec: Spec, task_id: int) -> None:
        """This ready task, of this spec, leaves. Costs a look at all that are here of its client."""
        lane = self.lanes[spec.client.number]
        run = next(run for run in lane.runs if run.spec is spec and task_id in run.ids)
        self.pick(lane, run, (task_id,))

    def empty(self) -> List[Tuple[Spec, int]]:
        """All ready tasks, which are no longer here."""
        found = [
            (run.spec, task_id)
            for lane in self.lanes.values()
            for run in lane.runs
            for task_id in run.ids
            if task_id not in lane.dead
        ]
        self.lanes.clear()
        self.count = 0
        return found

    def drop(self, client: Client) -> List[int]:
        """The client is gone: its ready tasks, which are no longer here."""
        lane = self.lanes.pop(client.number, None)
        if lane is None:
            return []
        self.count -= lane.count
        return list(lane.living())

    def next_lane(self) -> Lane:
        """Whose turn it is; only while there are ready tasks."""
        lanes = iter(self.lanes.values())
        best = next(lanes)
        for lane in lanes:
            if lane.client.served < best.client.served:
                best = lane
        return best

    def least_served(self) -> float:
        """What the client has got that is next here."""
        return min(lane.client.served for lane in self.lanes.values())

    def wait_from(self, now: float) -> None:
        """From now on nobody can run these: the time to give up is counted from here."""
        for lane in self.lanes.values():
            for run in lane.runs:
                run.since = now
        self.set_due()

    def set_due(self) -> None:
        """Find the next notice or failure."""
        due = math.inf
        for lane in self.lanes.values():
            due = min(due, self.lane_due(lane))
        self.due = due

    def hasten(self, spec: Spec, now: float) -> None:
        """A task of this spec has joined those that nobody can run."""
        if self.need not in spec.client.noticed:
            self.due = min(self.due, now + INFEASIBLE_NOTICE_SECONDS)
        if spec.spec.placement_timeout >= 0:
            self.due = min(self.due, now + spec.spec.placement_timeout)

    def lane_due(self, lane: Lane) -> float:
        """When something must be said or done about this client's tasks here."""
        due = math.inf
        if self.need not in lane.client.noticed:
            due = min(run.since for run in lane.runs) + INFEASIBLE_NOTICE_SECONDS
        for run in lane.runs:
            timeout = run.spec.spec.placement_timeout
            if timeout >= 0 and run.since + timeout < due:
                due = run.since + timeout
        return due

    def _lane(self, client: Client) -> Lane:
        lane = self.lanes.get(client.number)
        if lane is None:
            lane = self.lanes[client.number] = Lane(client)
            self.is_saturated = False  # What is next may have changed.
        return lane

    @staticmethod
    def _may_join(run: Run, spec: Spec, now: float) -> bool:
        timeout = spec.spec.placement_timeout
        return timeout < 0 or now - run.since <= timeout * MERGE_FRACTION


class Queues:
    """All groups."""

    __slots__ = ("groups", "_ready")

    def __init__(self) -> None:
        self.groups: Dict[GroupKey, Group] = {}
        self._ready: Dict[Group, None] = {}  # Those with ready tasks, the next first as far as priority and clients do not say.

    def note(self, group: Group) -> None:
        """Call after each change of a group's count: keeps the list of groups with ready tasks."""
        if group.count:
            self._ready.setdefault(group)
        else:
            self._ready.pop(group, None)

    def served(self, group: Group, now: float) -> None:
        """This group has had its turn."""
        group.waits_since = now
        if len(self._ready) > 1 and group in self._ready:
            del self._ready[group]
            self._ready[group] = None

    def ready(self, now: float) -> List[Group]:
        """Groups with ready tasks, in the order in which they are to be served."""
        groups = list(self._ready)
        if len(groups) > 1:
            groups.sort(key=lambda group: (-_rank(group, now), group.least_served()))
        return groups

    def rivals(self, group: Group) -> List[Group]:
        """Other groups with ready tasks that somebody can run."""
        return [other for other in self._ready if other is not group and other.workers]

    def any_ready(self) -> bool:
        """Whether any group has ready tasks."""
        return bool(self._ready)


def _rank(group: Group, now: float) -> int:
    """Priority, and the steps gained by waiting."""
    return group.priority + int((now - group.waits_since) / AGEING_SECONDS)
