"""Tasks that are ready to run: a group for each requirement, priority and environment, in it a lane for each client, in it runs of one spec.

    Queues ── Group (requirement, priority, packages) ── Lane (client) ── Run (spec, ids)

Groups are served by priority, higher first, and take turns at equal priority; lanes take turns; inside a lane order is kept.
A cancelled task leaves its id behind, which is skipped later: taking it out of the middle would cost a scan for each.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import repeat
from typing import Deque, Dict, Iterator, List, Sequence, Set, Tuple

from gpumesh.config import INFEASIBLE_NOTICE_SECONDS
from gpumesh.model.ids import ClientNumber
from gpumesh.model.resources import Requirement
from gpumesh.scheduler.states import Client, Spec, Worker

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


GroupKey = Tuple[Requirement, int, Tuple[str, ...]]
"""Requirement, priority, packages."""


class Group:
    """Ready tasks with the same requirement, priority and packages, and the workers that can run them."""

    __slots__ = ("need", "priority", "packages", "workers", "specs", "lanes", "count", "is_saturated", "due")

    def __init__(self, need: Requirement, priority: int, packages: Tuple[str, ...] = ()) -> None:
        self.need = need
        self.priority = priority
        self.packages = packages  # Of the environment that its tasks run in.
        self.workers: Dict[Worker, int] = {}  # Healthy and able, in order of joining; the value is the slots that a task takes.
        self.specs = 0  # Specs that clients here have defined for it; without any it is dropped.
        self.lanes: Dict[ClientNumber, Lane] = {}  # Only those with ready tasks; the first is next.
        self.count = 0  # Ready tasks.
        self.is_saturated = False  # Every worker was found full, and nothing has made room or changed what comes next.
        self.due = math.inf  # While stuck: when the next notice or failure is due.

    @property
    def key(self) -> GroupKey:
        """What its tasks have in common."""
        return self.need, self.priority, self.packages

    def push(self, spec: Spec, ids: Sequence[int], now: float) -> None:
        """Append new tasks."""
        lane = self._lane(spec.client)
        last = lane.runs[-1] if lane.runs else None
        if last is not None and last.spec is spec and (self.workers or self._may_join(last, spec, now)):
            last.ids.extend(ids)
        else:
            lane.runs.append(Run(spec, deque(ids), now))
        lane.count += len(ids)
        self.count += len(ids)

    def push_front(self, spec: Spec, task_id: int, now: float) -> None:
        """A task comes back; it goes first."""
        lane = self._lane(spec.client)
        first = lane.runs[0] if lane.runs else None
        if first is not None and first.spec is spec and (self.workers or self._may_join(first, spec, now)):
            first.ids.appendleft(task_id)
        else:
            lane.runs.appendleft(Run(spec, deque((task_id,)), now))
        lane.count += 1
        self.count += 1
        self.is_saturated = False

    def take(self, lane: Lane, limit: int) -> List[int]:
        """The next tasks of a lane, all of one spec; then it is the next lane's turn."""
        ids = lane.take(limit)
        self.count -= len(ids)
        number = lane.client.number
        if not lane.count:
            del self.lanes[number]
        elif len(self.lanes) > 1:
            del self.lanes[number]
            self.lanes[number] = lane
        return ids

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

    def drop(self, client: Client) -> List[int]:
        """The client is gone: its ready tasks, which are no longer here."""
        lane = self.lanes.pop(client.number, None)
        if lane is None:
            return []
        self.count -= lane.count
        return list(lane.living())

    def next_lane(self) -> Lane:
        """Whose turn it is; only while there are ready tasks."""
        return next(iter(self.lanes.values()))

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
        self._ready: Dict[
            int, Dict[Group, None]
        ] = {}  # By priority, highest first: groups that have ready tasks, the next first.

    def note(self, group: Group) -> None:
        """Call after each change of a group's count: keeps the list of groups with ready tasks."""
        tier = self._ready.get(group.priority)
        if group.count:
            if tier is None:
                self._ready[group.priority] = {group: None}
                if len(self._ready) > 1:
                    self._ready = dict(sorted(self._ready.items(), reverse=True))
            else:
                tier.setdefault(group)
        elif tier is not None and group in tier:
            del tier[group]
            if not tier:
                del self._ready[group.priority]

    def served(self, group: Group) -> None:
        """This group has had its turn."""
        tier = self._ready.get(group.priority)
        if tier is not None and len(tier) > 1 and group in tier:
            del tier[group]
            tier[group] = None

    def ready(self) -> List[Group]:
        """Groups with ready tasks, in the order in which they are to be served."""
        return [group for tier in self._ready.values() for group in tier]

    def rivals(self, group: Group) -> List[Group]:
        """Other groups with ready tasks that somebody can run."""
        return [other for tier in self._ready.values() for other in tier if other is not group and other.workers]
