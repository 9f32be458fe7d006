"""How tasks move: in from clients, out to workers, back with a result or without one. Pure; cluster.py says who is there at all.

These two are the only files that know all parts of the scheduler, and the only ones that act.

Promises (invariants.py checks what can be seen between two events):

1. A submitted task has exactly one end, a result in a Deliver or a Fail, unless its client leaves before.
2. A task is in one place: waiting for inputs or for another try, ready in one queue, or assigned to one worker; an idempotent one may be assigned to more, at
   attempts of different numbers, of which the first that ends counts. A fact with another attempt number changes nothing.
3. A task with `retries=0` is never assigned again once it may have started.
4. No slot is free on a worker that could run something that is ready, unless it would end it after everybody else has ended (horizon.py).
5. What nobody here can ever run is told to its client after a while, and fails in the end.
6. A task is ready when all its inputs have been delivered, and fails as soon as one of them has failed.
"""

from __future__ import annotations

import math
from itertools import repeat
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from gpumesh.config import (
    DEPTH_PRIORITY,
    LOOK_AGAIN_FRACTION,
    LOOK_AGAIN_GROWTH,
    LOOK_AGAIN_LEAST_SECONDS,
    LOOK_AGAIN_MOST_SECONDS,
    LOOK_SECONDS_PER_ATTEMPT,
    LOOK_SHARE,
    MAX_COPIES,
    MAX_PENDING_TASKS_PER_CLIENT,
    RECALL_AFTER_SECONDS,
)
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import (
    Action,
    Assign,
    Deliver,
    Fail,
    Forget,
    Notice,
    Recall,
    Retrying,
    WorkersChanged,
)
from gpumesh.scheduler.actor_states import Actor
from gpumesh.scheduler.confinement import ANYWHERE, Confinement, confinement, patience_seconds
from gpumesh.scheduler.copies import choose_copies
from gpumesh.scheduler.delays import Delayed, Delays, backoff_seconds
from gpumesh.scheduler.dependencies import Dependencies, Waiting
from gpumesh.scheduler.explanation import explain, is_version_mismatch
from gpumesh.scheduler.horizon import may_take
from gpumesh.scheduler.idle import Idle
from gpumesh.scheduler.locality import Locality
from gpumesh.scheduler.nearest import Rooms, choose, room_at
from gpumesh.scheduler.placement import (
    HELD,
    Placed,
    Rescue,
    allowance,
    card_room,
    place,
    room,
    rooms_for,
    space,
    surplus,
)
from gpumesh.scheduler.queues import Group, Lane, Queues
from gpumesh.scheduler.states import Batch, Client, Recovering, Spec, TaskState, Worker, WorkerState
from gpumesh.scheduler.supervision import Supervision
from gpumesh.scheduler.throughput import Throughput

RAN = frozenset((int(Status.OK), int(Status.RAISED)))
_RETRYABLE = int(Status.RETRYABLE)
_CRASHED = int(Status.CRASHED)
_NOT_RUN = int(Status.NOT_RUN)
_LOST = int(Status.LOST)
_CANCELLED = int(Status.CANCELLED)
_INFEASIBLE = int(Status.INFEASIBLE)
_REFUSED = int(Status.REFUSED)
_HANDED_BACK = int(Status.HANDED_BACK)
_OUT_OF_MEMORY = int(Status.OUT_OF_MEMORY)
_INPUT_MISSING = int(Status.INPUT_MISSING)
_INPUT_FAILED = int(Status.INPUT_FAILED)
_OK = int(Status.OK)

HELD_GROWTH = 1.25  # With so many times the tasks that were ready, who was held back is asked again.
UNCAPPED = 1 << 62  # More than any allowance.
CONFINED_SPECS = 64  # Of a client; with each so many it is looked for those that no task is of.

Returned = Tuple[Spec, int]
"""A task that goes back to the front of its queue."""

Place = Union[Spec, Worker, Waiting, Delayed, Recovering, Actor]
"""Where a task is: ready in the queue of its spec, on a worker, waiting for its inputs or for another try, or held back after a restart. The life
of an actor, and a call of one that does not wait for inputs, is at that actor."""


class Flow:
    """The tables of tasks and all that moves them. Who comes and goes is told by `Cluster`."""

    def __init__(self) -> None:
        self._workers: Dict[WorkerId, Worker] = {}
        self._clients: Dict[ClientNumber, Client] = {}
        self._tasks: Dict[int, Place] = {}
        self._dependencies = Dependencies()
        self._queues = Queues()
        self._throughput = Throughput()
        self._supervision = Supervision()
        self._delays = Delays()
        self._patience = Delays()  # Of ready tasks that wait for others than those on which they have failed.
        self._deserted: Dict[Group, None] = {}  # Confined, with ready tasks, and nobody of those who may run them is left.
        self._cancelled: Dict[int, None] = {}  # Assigned, and their client wants them ended.
        self._orphans: Dict[int, List[int]] = {}  # Task id -> attempts that still run somewhere for a client that left.
        self._stuck: Dict[Group, None] = {}  # Ready tasks and nobody who could run them.
        self._locality = Locality()
        self._has_dead = False  # Some lane may hold ids of cancelled tasks.
        self._idle = Idle()  # Healthy, with a free slot.
        self._stacked: Dict[Worker, None] = {}  # More assigned than slots.
        self._balance_at: Optional[float] = None  # When to look whether the stacked hold something for the idle.
        self._copies: Dict[int, Dict[Worker, None]] = {}  # Tasks with more than one attempt under way: all who have one.
        self._repeatable: Dict[Group, None] = {}  # With attempts under way that idle workers may repeat.
        self._held: Dict[
            Group, float
        ] = {}  # With ready tasks that a worker with room may not take; ask again when there are so many.
        self._look_at: Optional[float] = None  # When to ask the idle again about those two.
        self._copies_at = 0.0  # Not before: looking through many attempts takes its time.
        self._healthy = 0  # As last told in WorkersChanged.
        self._adopted: Dict[int, None] = {}  # Known from a worker alone: its client, who has the arguments, is not back yet.
        self._recovering: Dict[Spec, Recovering] = {}  # Tasks that are held back.
        self._awaited: Dict[Actor, None] = {}  # Without a worker: to be looked at.
        # Task -> who is about to send a result of it that is not expected, and of which attempt.
        self._announced: Dict[int, Tuple[WorkerId, int]] = {}
        self._failed_before: Dict[
            int, None
        ] = {}  # Tasks of clients that are not back: a worker has brought an end that is none.

    # --- reading

    def attempts_of(self, task_id: int) -> List[Dict[str, Any]]:
        """A pending task's failed attempts, oldest first, of very many the first and the newest; one dict each: `worker`, `status`."""
        return self._supervision.attempts(task_id)

    def assigned_count(self) -> int:
        """Attempts that workers have not reported yet."""
        return sum(len(worker.assigned) + len(worker.orphans) + len(worker.calls) for worker in self._workers.values())

    def pending_count(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def has_copies(self, task_id: int) -> bool:
        """Whether more than one attempt at it is under way."""
        return task_id in self._copies

    def compact(self) -> None:
        """Give back the memory of tables that are empty now; a dict that was emptied keeps its size."""
        if not self._tasks:
            self._tasks = {}
            self._cancelled = {}

    def slots(self) -> int:
        """Of all workers that are here."""
        return sum(worker.slots for worker in self._workers.values())

    def executing_of(self, client: ClientNumber, now: float) -> Dict[int, Tuple[WorkerId, int, float]]:
        """Tasks of a client that may be executing: (worker, attempt, seconds since they were sent there) of each."""
        found: Dict[int, Tuple[WorkerId, int, float]] = {}
        for worker in self._workers.values():
            for task_id, batch in worker.running():
                if batch.spec.client.number == client:
                    found[task_id] = (worker.id, batch.attempt, now - batch.assigned_at)
        return found

    def state_of(self, task_id: int) -> TaskState:
        """Where a task is."""
        where = self._tasks.get(task_id)
        if where is None:
            return TaskState.GONE
        if type(where) is Waiting:
            return TaskState.WAITING
        if type(where) is Delayed:
            return TaskState.DELAYED
        if type(where) is Recovering:
            return TaskState.RECOVERING
        if type(where) is Actor:
            return TaskState.ASSIGNED if where.is_housed and task_id not in where.parked else TaskState.READY
        return TaskState.ASSIGNED if type(where) is Worker else TaskState.READY

    # --- who can run what

    def _admit(self, worker: Worker, now: float) -> None:
        """Enter a worker wherever it can serve."""
        if worker.state is WorkerState.HEALTHY:
            for group in self._queues.groups.values():
                width = group.width_on(worker)
                if width is not None:
                    group.workers[worker] = width
                    group.is_saturated = False
                    group.horizon = None
                    self._stuck.pop(group, None)
                    self._deserted.pop(group, None)
        self._settle(worker, now)

    def _withdraw(self, worker: Worker, now: float) -> None:
        """Take a worker out of wherever it served."""
        for group in self._queues.groups.values():
            if group.workers.pop(worker, None) is None:
                continue
            group.horizon = None
            if group.count and not group.workers:
                self._held.pop(group, None)
                if group.confinement != ANYWHERE:
                    self._deserted[group] = None
                    continue
                self._stuck[group] = None
                group.wait_from(now)

    def _settle(self, worker: Worker, now: float) -> None:
        """Keep the tables of the idle and the stacked, after each change of a worker's load."""
        load = worker.load
        if load < worker.slots:
            self._stacked.pop(worker, None)
            if worker.state is not WorkerState.HEALTHY:
                self._idle.discard(worker)
                return
            self._idle.add(worker)
        else:
            self._idle.discard(worker)
            if load == worker.slots or worker.away_until is not None:
                self._stacked.pop(worker, None)
            else:
                self._stacked[worker] = None
        if self._balance_at is None and self._idle and self._stacked:
            self._balance_at = now + RECALL_AFTER_SECONDS

    def _tell_workers(self, worker: Worker, actions: List[Action], *, is_gone: bool = False) -> None:
        """Call after each change of a worker's state."""
        state = worker.state
        if state is WorkerState.AWAY and not is_gone:
            return  # It counts as before, until it is back or given up.
        is_healthy = not is_gone and state is WorkerState.HEALTHY
        if is_healthy is not worker.is_counted:
            worker.is_counted = is_healthy
            self._healthy += 1 if is_healthy else -1
            actions.append(WorkersChanged(self._healthy))

    # --- what cluster.py says

    def _about_to_go_on(self, clients: Iterable[ClientNumber]) -> int:
        raise AssertionError("overridden by WaitingTasks")

    def _spare(self, group: Group, now: float) -> None:
        raise AssertionError("overridden by WaitingTasks")

    def _sift(self, client: Client, spec: Spec, ids: Sequence[int], now: float, actions: List[Action]) -> List[int]:
        raise AssertionError("overridden by Cluster")

    def _may_depend_again(self, client: Client, spec: Spec, task_id: int, now: float, actions: List[Action]) -> bool:
        raise AssertionError("overridden by Cluster")

    def _on_actor_tasks(self, client: Client, spec: Spec, event: ev.TasksSubmitted, now: float, actions: List[Action]) -> None:
        raise AssertionError("overridden by Actors")

    def _take_ends(
        self, worker: Worker, results: Sequence[Tuple[int, int, int, Any, float]], now: float, actions: List[Action]
    ) -> List[Tuple[int, int, int, Any, float]]:
        raise AssertionError("overridden by Calls")

    def _line_up(self, spec: Spec, task_id: int, now: float, actions: List[Action]) -> None:
        raise AssertionError("overridden by Calls")

    def _keep_place(self, spec: Spec, task_id: int, now: float) -> None:
        raise AssertionError("overridden by Calls")

    def _give_up_place(self, task_id: int) -> None:
        raise AssertionError("overridden by Calls")

    def _inputs_came(self, spec: Spec, task_id: int) -> None:
        raise AssertionError("overridden by Calls")

    def _create(self, spec: Spec, ident: int, now: float, actions: List[Action]) -> None:
        raise AssertionError("overridden by Actors")

    def _never_created(self, ident: int, actions: List[Action]) -> None:
        raise AssertionError("overridden by Actors")

    def _look_at_actors(self, now: float, actions: List[Action]) -> None:
        raise AssertionError("overridden by Actors")

    def _cancel_at_actor(self, actor: Actor, task_id: int, *, force: bool, now: float, actions: List[Action]) -> None:
        raise AssertionError("overridden by Actors")

    def _on_unexpected(
        self,
        worker: Worker,
        task_id: int,
        attempt: int,
        status: int,
        payload: Any,
        seconds: float,
        now: float,
        actions: List[Action],
    ) -> None:
        raise AssertionError("overridden by Cluster")

    # --- attempts that nobody waits for, and specs

    def _orphan(self, worker: Worker, task_ids: List[int], actions: List[Action]) -> None:
        """Nobody waits for these any more, but they hold their slots until the worker reports them."""
        recall: List[Tuple[int, int]] = []
        for task_id in task_ids:
            batch = worker.assigned.pop(task_id)
            batch.spec.client.holding -= batch.charge
            worker.orphans[task_id, batch.attempt] = batch
            worker.recalled.pop(task_id, None)
            self._orphans.setdefault(task_id, []).append(batch.attempt)
            if task_id not in self._cancelled:  # Otherwise it has been recalled already.
                recall.append((task_id, batch.attempt))
        if recall:
            actions.append(Recall(worker.id, recall, kill=True))

    def _forget_orphan(self, task_id: int, attempt: int) -> None:
        attempts = self._orphans[task_id]
        attempts.remove(attempt)
        if not attempts:
            del self._orphans[task_id]

    def _on_spec_defined(self, event: ev.SpecDefined, now: float, actions: List[Action]) -> None:
        client = self._clients.get(event.client)
        if client is None:
            return
        spec = event.spec
        before = client.specs.get(event.number)
        if before is not None:
            if before.spec == spec:
                return
            client.replaced.append(before)
        client.specs[event.number] = self._new_spec(client, spec)

    def _new_spec(self, client: Client, spec: TaskSpec) -> Spec:
        """A spec with all that is looked up for it; it counts in its group from now on."""
        group = self._group(spec, ANYWHERE)
        function = self._throughput.function(spec.function, "gpu" if spec.requirement.needs_gpu else "")
        return Spec(client, spec, function, group)

    def _group(self, spec: TaskSpec, confined: Confinement) -> Group:
        """The group of a spec, which counts in it from now on."""
        key = (spec.requirement, spec.priority + DEPTH_PRIORITY * spec.depth, spec.packages, confined)
        group = self._queues.groups.get(key)
        if group is None:
            group = self._queues.groups[key] = Group(*key)
            for worker in self._workers.values():
                width = group.width_on(worker)
                if width is not None:
                    group.workers[worker] = width
        group.specs += 1
        return group

    def _forget_spec(self, spec: Spec) -> None:
        """It does not count in its group any more."""
        spec.group.specs -= 1
        if not spec.group.specs:
            self._queues.groups.pop(spec.group.key, None)
            self._repeatable.pop(spec.group, None)

    # --- tasks come in

    def _on_tasks_submitted(self, event: ev.TasksSubmitted, now: float, actions: List[Action]) -> None:
        number = event.client
        client = self._clients.get(number)
        ids = event.task_ids
        spec = client.specs.get(event.spec_number) if client is not None else None
        if client is None or spec is None:
            self._refuse(number, ids, f"spec {event.spec_number} was never defined", actions)
            return
        if spec.is_of_actor:
            self._on_actor_tasks(client, spec, event, now, actions)
            return
        if event.again:
            ids = self._sift(client, spec, ids, now, actions)
        elif client.confirmed is not None:
            client.confirmed.update(dict.fromkeys(ids))
        fresh: Dict[int, Place] = dict.fromkeys(ids, spec)
        if not ids:
            return
        if (
            len(fresh) != len(ids)
            or min(ids) >> SEQUENCE_BITS != number
            or max(ids) >> SEQUENCE_BITS != number
            or not self._tasks.keys().isdisjoint(fresh)
            or client.pending + len(ids) > MAX_PENDING_TASKS_PER_CLIENT
        ):
            ids = self._screen(client, ids, actions)
            fresh = dict.fromkeys(ids, spec)
            if not ids:
                return
        if self._has_dead:
            self._bury(client, fresh)
        if self._orphans:
            for task_id in ids:
                if task_id in self._orphans:
                    self._supervision.start_from(task_id, max(self._orphans[task_id]) + 1)

        self._tasks.update(fresh)
        if client.pending <= client.actors:
            self._greet(client)
        client.pending += len(ids)
        group = spec.group
        for task_id, inputs in event.inputs:
            if task_id in fresh:
                self._locality.add(task_id, group, inputs)
        group.push(spec, ids, now)
        self._note(group)
        if not group.workers:
            self._stick(group, spec, now)
        elif not group.is_saturated or group.count >= self._held.get(group, group.count + 1) or self._locality.concerns(group):
            self._distribute(group, now, actions)

    def _greet(self, client: Client) -> None:
        """A client comes with its first task: it may catch up with what the others have under way, but not with what they ever had."""
        others = [
            other.served - other.holding
            for other in self._clients.values()
            if other is not client and other.pending > other.actors
        ]
        least = min(others) if others else max(other.served for other in self._clients.values())  # All idle: they are quits.
        client.served = max(client.served, least)

    def _on_dependent_submitted(self, event: ev.DependentSubmitted, now: float, actions: List[Action]) -> None:
        client = self._clients.get(event.client)
        spec = client.specs.get(event.spec_number) if client is not None else None
        task_id = event.task_id
        if client is None or spec is None:
            self._refuse(event.client, [task_id], f"spec {event.spec_number} was never defined", actions)
            return
        if event.again and not self._may_depend_again(client, spec, task_id, now, actions):
            return
        if client.confirmed is not None:
            client.confirmed[task_id] = None
        if not self._screen(client, [task_id], actions):
            return
        for producer in event.producers:
            if producer not in self._tasks or producer >> SEQUENCE_BITS != client.number:
                actions.append(Fail(client.number, task_id, _INPUT_MISSING, {"input": producer}))
                if spec.is_of_actor:
                    self._keep_place(spec, task_id, now)
                return
        if self._has_dead:
            self._bury(client, {task_id: spec})
        if task_id in self._orphans:
            self._supervision.start_from(task_id, max(self._orphans[task_id]) + 1)
        self._tasks[task_id] = self._dependencies.add(task_id, spec, event.producers)
        self._locality.extend(task_id, event.inputs)
        if client.pending <= client.actors:
            self._greet(client)
        client.pending += 1
        if spec.is_of_actor:
            self._line_up(spec, task_id, now, actions)

    def _on_result_stored(self, event: ev.ResultStored, now: float, actions: List[Action]) -> None:
        for task_id in self._dependencies.dependents(event.task_id):
            self._locality.extend(task_id, event.inputs)

    def _on_news_of_objects(self, event: ev.ObjectNews, now: float, actions: List[Action]) -> None:
        """Nothing follows at once: the next who looks for work sees it."""
        if isinstance(event, ev.StoreShared):
            self._locality.share(event.worker, event.is_shared)
        elif isinstance(event, ev.CopyMade):
            self._locality.copied(event.worker, event.oid)
        elif isinstance(event, ev.CopiesGone):
            self._locality.dropped(event.worker, event.oids)
        else:
            self._locality.moved(event.worker, event.nbytes, event.seconds)

    def _screen(self, client: Client, ids: Sequence[int], actions: List[Action]) -> List[int]:
        """Refuse what cannot be taken, return the rest."""
        good: Dict[int, None] = {}
        bad: List[int] = []
        known: List[int] = []
        room = MAX_PENDING_TASKS_PER_CLIENT - client.pending
        too_many: List[int] = []
        for task_id in ids:
            if task_id >> SEQUENCE_BITS != client.number:
                bad.append(task_id)
            elif task_id in self._tasks or task_id in good:
                known.append(task_id)
            elif len(good) >= room:
                too_many.append(task_id)
            else:
                good[task_id] = None
        self._refuse(client.number, bad, "its id belongs to another client", actions)
        self._refuse(client.number, known, "a task with this id is pending already", actions)
        limit = f"this client has {MAX_PENDING_TASKS_PER_CLIENT} tasks pending already; wait for some results first"
        self._refuse(client.number, too_many, limit, actions)
        return list(good)

    @staticmethod
    def _refuse(client: ClientNumber, ids: Iterable[int], reason: str, actions: List[Action]) -> None:
        for task_id in ids:
            actions.append(Fail(client, task_id, _REFUSED, {"reason": reason, "attempts": []}))

    def _bury(self, client: Client, fresh: Dict[int, Place]) -> None:
        """Ids of cancelled tasks that are used again must be out of the queues first."""
        self._has_dead = False
        for group in self._queues.groups.values():
            for lane in group.lanes.values():
                if lane.dead:
                    if lane.client is client and not lane.dead.isdisjoint(fresh):
                        lane.clean()
                    else:
                        self._has_dead = True

    def _note(self, group: Group) -> None:
        """Call after each change of a group's count."""
        self._queues.note(group)
        if not group.count:
            self._held.pop(group, None)

    # --- tasks go out

    def _distribute(self, group: Group, now: float, actions: List[Action]) -> None:
        """Place what is ready in one group, on whoever has room."""
        rivals = self._queues.rivals(group)
        self._held.pop(group, None)
        if self._locality.matters and self._locality.concerns(group):
            self._distribute_near(group, rivals, now, actions)
            return
        while group.count:
            lane = group.next_lane()
            spec = lane.head
            answer = place(group, spec, len(lane.runs[0].ids), rivals, self._idle, now)
            if not isinstance(answer, Placed):
                group.is_saturated = True
                if answer is HELD:
                    self._hold(group, spec, now)
                break
            for worker, count in answer.shares:
                if group.lanes.get(spec.client.number) is not lane or lane.head is not spec:
                    break  # Fewer were alive than the run is long.
                taken = group.take(lane, count)
                if taken:
                    self._assign(worker, spec, group.workers[worker], taken, now, actions)
                    self._settle(worker, now)
        self._note(group)

    def _refill(self, worker: Worker, now: float, actions: List[Action], *, above: int = -1) -> None:
        """Give one worker what it should have: groups in their order, in each the client that has had least.

        A group whose next task has to wait for room here caps what the ones after it may send ahead; otherwise long tasks, which
        are not sent ahead, would wait for ever behind short ones, which are. With `above`, only what is deeper than that.
        """
        cap = UNCAPPED
        if self._awaited:
            self._look_at_actors(now, actions)
        groups = self._queues.ready(now)
        for group in groups:
            width = group.workers.get(worker)
            if width is None:
                continue
            if group.depth <= above:
                self._spare(group, now)
                continue
            if self._locality.matters and self._locality.concerns(group):
                cap = self._refill_near(worker, group, cap, now, actions)
                continue
            is_served = False
            turn = 0  # What a lane may send before it is the next one's turn.
            while group.count:
                lane = group.next_lane()
                spec = lane.head
                if width:
                    allowed = min(cap, allowance(worker, spec, worker.slots))
                    count = space(worker, group, allowed, width) if turn else room(worker, group, allowed, width)
                else:
                    allowed = allowance(worker, spec, 1)
                    count = card_room(worker, group, allowed)
                if count <= 0 and worker.waits and width == 1 and not turn and spec.spec.retries:
                    count = int(worker.is_short_of(group, groups))
                if count <= 0:
                    if width:
                        cap = allowed or cap  # What has to wait for an installer here caps nothing.
                    break
                if not may_take(worker, group, spec, now):
                    self._hold(group, spec, now)
                    break
                turn = turn or max(1, count // len(group.lanes))
                taken = group.take(lane, min(count, turn))
                if taken:
                    is_served = True
                    self._assign(worker, spec, width, taken, now, actions)
            if is_served:
                if not group.count:
                    self._note(group)
                self._queues.served(group, now)
        self._settle(worker, now)
        if self._repeatable and worker.load < worker.slots:
            self._look_for_copies(now, actions)

    def _distribute_near(self, group: Group, rivals: Sequence[Group], now: float, actions: List[Action]) -> None:
        """The same where some of the tasks have large inputs."""

        def rooms_of(spec: Spec) -> Rooms:
            return rooms_for(group, spec, group.workers, rivals, now, any_end=True)[0]

        while group.count and self._hand_out(group, rooms_of, now, actions):
            pass
        group.is_saturated = bool(group.count)
        self._note(group)

    def _refill_near(self, worker: Worker, group: Group, cap: int, now: float, actions: List[Action]) -> int:
        """The same; returns the cap for the groups behind this one."""
        is_served = False
        next_cap = cap

        def rooms_of(spec: Spec) -> Rooms:
            nonlocal next_cap
            count, allowed = room_at(worker, group, spec, cap, is_next_turn=is_served)
            if count <= 0:
                if group.workers[worker]:
                    next_cap = min(next_cap, allowed or next_cap)
                return []
            return [(worker, count)]

        while group.count and self._hand_out(group, rooms_of, now, actions):
            is_served = True
        if is_served:
            self._note(group)
            self._queues.served(group, now)
        return next_cap

    def _hand_out(self, group: Group, rooms_of: Callable[[Spec], Rooms], now: float, actions: List[Action]) -> bool:
        """Assign some tasks of a group to the workers that will end them first; whether there were any."""
        choice = choose(group, self._locality, rooms_of, now)
        spec = choice.run.spec
        for task_id in choice.kept:
            self._locality.keep(task_id, now)
        if not choice.shares:
            if choice.is_held:
                self._hold(group, spec, now)
            return False
        for task_id in choice.passed:
            self._locality.overtake(task_id)
        for worker, ids in choice.shares:
            group.pick(choice.lane, choice.run, ids)
            self._assign(worker, spec, group.workers[worker], ids, now, actions)
            self._settle(worker, now)
        return True

    def _assign(self, worker: Worker, spec: Spec, width: int, ids: List[int], now: float, actions: List[Action]) -> None:
        """The one way into ASSIGNED for tasks that were ready; the worker's load is settled afterwards by who calls."""
        spec.group.held_since = None
        if len(ids) == 1:
            self._tasks[ids[0]] = worker
        else:
            self._tasks.update(dict.fromkeys(ids, worker))
        if width:
            is_alone = worker.load < worker.slots and ids[0] not in self._locality  # Nor waits for its inputs.
            probe = ids[0] if is_alone else -1
            self._send(worker, Batch(spec, 1, width, now, probe, self._charge(worker, spec, width)), ids, actions)
        else:
            self._assign_leased(worker, spec, ids, now, actions)

    def _assign_leased(self, worker: Worker, spec: Spec, ids: List[int], now: float, actions: List[Action]) -> None:
        """The same on a worker's cards."""
        assert worker.cards is not None, worker.id
        need = spec.group.need
        allowed = allowance(worker, spec, 1)
        charge = self._charge(worker, spec, 1)
        rest = ids
        while rest:  # First one task for each lease that can be had, then what is sent ahead.
            opened = worker.cards.open(need, spec.group.depth)
            if opened is None:
                break
            self._send(worker, Batch(spec, 1, 0, now, rest[0], charge, opened), rest[:1], actions)
            rest = rest[1:]
        for lease, load in list(worker.leases.items()):
            if rest and lease.need == need and load < allowed and not lease.is_lent:
                self._send(worker, Batch(spec, 1, 0, now, -1, charge, lease), rest[: allowed - load], actions)
                rest = rest[allowed - load :]
        assert not rest, f"{worker.id} was found to have room for {need}"

    def _charge(self, worker: Worker, spec: Spec, width: int) -> float:
        """Slot seconds that a client is charged for a task, until it is known what it took."""
        return width * (worker.seconds(spec) if spec.function.is_known else 1.0)

    def _send(self, worker: Worker, batch: Batch, ids: List[int], actions: List[Action]) -> None:
        """Enter attempts wherever a worker's are kept."""
        spec = batch.spec
        count = len(ids)
        if count == 1:
            worker.assigned[ids[0]] = batch
            tasks = [(ids[0], batch.attempt)]
        else:
            worker.assigned.update(dict.fromkeys(ids, batch))
            tasks = list(zip(ids, repeat(batch.attempt)))
        if self._locality.matters:
            self._locality.sent(worker, ids)
        worker.add(batch, count)
        charge = batch.charge * count
        spec.client.served += charge
        spec.client.holding += charge
        if spec.is_repeatable:
            self._count_repeatable(spec, count)
        supervision = self._supervision
        if supervision:
            for index, task_id in enumerate(ids):
                if task_id in supervision:
                    attempt = supervision.attempt_of(task_id)
                    if attempt != batch.attempt:
                        tasks[index] = (task_id, attempt)
                        other = Batch(spec, attempt, batch.width, batch.assigned_at, -1, batch.charge, batch.lease)
                        worker.assigned[task_id] = other
        lease = batch.lease
        if lease is None:
            actions.append(Assign(worker.id, spec.spec, tasks))
        else:
            actions.append(Assign(worker.id, spec.spec, tasks, lease.cards, lease.ordinal))

    def _enter(self, worker: Worker, batch: Batch, task_id: int) -> None:
        """The one way into ASSIGNED for a task that a worker has already."""
        self._tasks[task_id] = worker
        worker.assigned[task_id] = batch
        worker.add(batch, 1)
        if self._locality.matters:
            self._locality.sent(worker, [task_id])
        batch.spec.client.served += batch.charge
        batch.spec.client.holding += batch.charge
        self._count_repeatable(batch.spec, 1)

    # --- the last tasks

    def _hold(self, group: Group, spec: Spec, now: float) -> None:
        """Somebody has room for a ready task and must not take it: ask again when things may look different."""
        self._held[group] = group.count * HELD_GROWTH + 1
        fastest = group.horizon.fastest if group.horizon is not None and spec.function.is_known else LOOK_AGAIN_MOST_SECONDS
        if group.held_since is None:
            group.held_since = now
        wait = max(LOOK_AGAIN_FRACTION * fastest, LOOK_AGAIN_GROWTH * (now - group.held_since))
        self._look_again(now + min(LOOK_AGAIN_MOST_SECONDS, max(LOOK_AGAIN_LEAST_SECONDS, wait)))

    def _look_again(self, when: float) -> None:
        if self._look_at is None or when < self._look_at:
            self._look_at = when

    def _look(self, now: float, actions: List[Action]) -> None:
        """Ask the idle again whether they want what they were not allowed to take, or a copy of what runs."""
        self._look_at = None
        for group in list(self._held):
            self._distribute(group, now, actions)
        self._look_for_copies(now, actions)

    def _look_for_copies(self, now: float, actions: List[Action]) -> None:
        """Let idle workers repeat what would end last."""
        if not self._repeatable:
            return
        if now < self._copies_at:
            self._look_again(self._copies_at)
            return
        seen = 0
        unwanted = {**self._cancelled, **self._supervision.failed(), **self._adopted}
        for group in list(self._repeatable):
            if self._queues.groups.get(group.key) is not group:
                del self._repeatable[group]  # Its clients have left.
                continue
            if group.count:
                continue  # What waits goes first.
            found = choose_copies(group, self._workers.values(), unwanted, now, self._locality.fetch_seconds)
            seen += found.seen
            for worker, spec, task_id in found.starts:
                self._start_copy(worker, spec, task_id, now, actions)
            if found.look_again_seconds is not None:
                self._look_again(now + found.look_again_seconds)
        self._copies_at = now + seen * LOOK_SECONDS_PER_ATTEMPT / LOOK_SHARE

    def _start_copy(self, worker: Worker, spec: Spec, task_id: int, now: float, actions: List[Action]) -> None:
        """A further attempt at a task that is assigned already."""
        first = self._tasks[task_id]
        assert isinstance(first, Worker), task_id
        assert task_id not in worker.assigned, task_id
        if len(self._copies.get(task_id, ())) > MAX_COPIES:
            return  # Some of them wait, at workers that have fewer slots than they had.
        width = spec.group.workers[worker]
        lease = None
        if not width:
            lease = worker.cards.open(spec.group.need, spec.group.depth) if worker.cards is not None else None
            if lease is None:
                return
        attempt = self._supervision.give_back(task_id)
        self._copies.setdefault(task_id, {first: None})[worker] = None
        charge = self._charge(worker, spec, width or 1)
        self._send(worker, Batch(spec, attempt, width, now, -1, charge, lease), [task_id], actions)
        self._settle(worker, now)

    def _drop_copy(self, worker: Worker, task_id: int) -> bool:
        """This worker's attempt has come to nothing; whether another is under way and goes on."""
        places = self._copies[task_id]
        del places[worker]
        if self._tasks[task_id] is worker:
            self._tasks[task_id] = next(iter(places))
        if len(places) == 1:
            del self._copies[task_id]
        return True

    def _end_copies(self, worker: Worker, task_id: int, now: float, actions: List[Action]) -> None:
        """This worker's attempt was the first to end: the others are not wanted any more."""
        for other in self._copies.pop(task_id):
            if other is worker:
                continue
            batch = other.assigned[task_id]
            spec = batch.spec
            spec.function.observe_at_least(other.id, other.prior(spec.group.need), (now - batch.assigned_at) / spec.scale)
            self._orphan(other, [task_id], actions)

    def _count_repeatable(self, spec: Spec, count: int) -> None:
        if spec.is_repeatable:
            group = spec.group
            group.repeatable += count
            if group.repeatable:
                self._repeatable[group] = None
            else:
                self._repeatable.pop(group, None)

    # --- attempts come back

    def _on_attempts_finished(self, event: ev.AttemptsFinished, now: float, actions: List[Action]) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        reports = event.results
        if worker.actors:
            reports = self._take_ends(worker, reports, now, actions)
            if not reports:
                return
        assigned = worker.assigned
        tasks = self._tasks
        is_odd = bool(
            self._cancelled
            or worker.recalled
            or self._dependencies
            or self._copies
            or self._locality
            or self._supervision
            or self._adopted
        )  # Some table has more to be told than those below.
        awaited: List[Tuple[int, bool]] = []  # Tasks that others wait for, and whether they have a result.
        delivered: Dict[ClientNumber, List[Tuple[int, int, Any, float]]] = {}
        returned: List[Returned] = []
        batch: Optional[Batch] = None  # That of the results before this one; what they sum up to is booked when it changes.
        probe = -1
        attempt_due = 0
        out: List[Tuple[int, int, Any, float]] = []
        count = ended = ran = 0
        seconds_ran = 0.0
        for task_id, attempt, status, payload, seconds in reports:
            found = assigned.get(task_id)
            if found is not batch:
                if found is None:
                    self._on_late(worker, task_id, attempt, status, payload, seconds, now, actions)
                    continue
                if batch is not None:
                    self._book(worker, batch, count, ended, ran, seconds_ran)
                    count = ended = ran = 0
                    seconds_ran = 0.0
                batch = found
                probe = batch.probe
                attempt_due = batch.attempt
                number = batch.spec.client.number
                if number in delivered:
                    out = delivered[number]
                else:
                    out = delivered[number] = []
            if found is None or attempt != attempt_due:
                self._on_late(worker, task_id, attempt, status, payload, seconds, now, actions)
                continue
            del assigned[task_id]
            count += 1
            if status != _NOT_RUN:
                worker.ended_at = now
            if status in RAN:
                ran += 1
                seconds_ran += seconds
                if task_id == probe:
                    worker.observe_round_trip(now - found.assigned_at - seconds)
            elif not self._ends(worker, found, task_id, status, returned, now, actions):
                continue
            if is_odd and task_id in self._copies:
                self._end_copies(worker, task_id, now, actions)
            ended += 1
            del tasks[task_id]
            out.append((task_id, status, payload, seconds))
            if is_odd or attempt != 1:
                self._cancelled.pop(task_id, None)
                worker.recalled.pop(task_id, None)
                self._supervision.forget(task_id)
                self._locality.forget(task_id)
                self._adopted.pop(task_id, None)
                if task_id in self._dependencies:
                    awaited.append((task_id, status == _OK))
        if batch is not None:
            self._book(worker, batch, count, ended, ran, seconds_ran)
        for number, results in delivered.items():
            if results:
                actions.append(Deliver(number, worker.id, results))
        if returned:
            self._return(returned, now, actions)
        groups = self._release(awaited, now, actions) if awaited else ()
        above = self._about_to_go_on(delivered) if worker.waits else -1
        self._refill(worker, now, actions, above=above)  # First: it has the results that were waited for.
        for group in groups:
            if group.count and group.workers and not group.is_saturated:
                self._distribute(group, now, actions)

    def _release(self, awaited: Sequence[Tuple[int, bool]], now: float, actions: List[Action]) -> Iterable[Group]:
        """Tasks that others wait for have ended: those become ready, or fail as well; the groups with ready ones."""
        groups: Dict[Group, None] = {}
        for producer, has_result in awaited:
            if not has_result:
                self._fail_dependents(producer, actions)
                continue
            for task_id in self._dependencies.arrived(producer):
                waiting = self._tasks[task_id]
                assert type(waiting) is Waiting, task_id
                spec = waiting.spec
                group = spec.group
                if spec.is_of_actor:
                    self._locality.forget(task_id)
                    if spec.spec.plan is None:
                        self._inputs_came(spec, task_id)
                    else:
                        self._create(spec, task_id, now, actions)
                    continue
                self._tasks[task_id] = spec
                self._locality.settle(task_id, group)
                group.push(spec, (task_id,), now)
                self._note(group)
                groups[group] = None
                if not group.workers:
                    self._stick(group, spec, now)
        return groups

    def _fail_dependents(self, producer: int, actions: List[Action]) -> None:
        """What waits for this task can never run, and neither can what waits for that."""
        failed = [(task_id, producer) for task_id in self._dependencies.failed(producer)]
        while failed:
            task_id, culprit = failed.pop()
            waiting = self._tasks.pop(task_id)
            assert type(waiting) is Waiting, task_id
            client = waiting.spec.client
            client.pending -= 1
            self._supervision.forget(task_id)
            self._locality.forget(task_id)
            actions.append(Fail(client.number, task_id, _INPUT_FAILED, {"input": culprit}))
            if waiting.spec.spec.plan is not None:
                self._never_created(task_id, actions)
            failed.extend((dependent, task_id) for dependent in self._dependencies.failed(task_id))

    def _book(self, worker: Worker, batch: Batch, count: int, ended: int, ran: int, seconds: float) -> None:
        """`count` tasks of a batch have left the worker; `ran` of them ran to their end, in so many seconds together."""
        spec = batch.spec
        client = spec.client
        if count:
            worker.remove(batch, count)
            client.holding -= batch.charge * count
            client.served -= batch.charge * (count - ran)
            if spec.is_repeatable:
                self._count_repeatable(spec, -count)
        client.pending -= ended
        worker.done += ended
        if ran:
            client.served += max(0.0, seconds - batch.waited) * (batch.width or 1) - batch.charge * ran
            spec.function.observe(worker.id, worker.prior(spec.group.need), seconds / spec.scale, ran)

    def _ends(
        self,
        worker: Worker,
        batch: Batch,
        task_id: int,
        status: int,
        returned: List[Returned],
        now: float,
        actions: List[Action],
    ) -> bool:
        """Whether an attempt that did not run to its end is delivered as it is; if not, all that follows has been done."""
        spec = batch.spec
        worker.crashed += status == _CRASHED
        if status == _OUT_OF_MEMORY:
            larger = self._on_larger_cards(worker, batch)
            if larger is not None:
                spec = larger
                status = _RETRYABLE
        if status not in (_RETRYABLE, _CRASHED, _NOT_RUN, _HANDED_BACK):
            self._supervision.forget(task_id)
            return True
        if status == _HANDED_BACK and spec.spec.retries == 0:
            return True  # It had started.
        worker.recalled.pop(task_id, None)
        if task_id in self._copies and self._drop_copy(worker, task_id):
            if status in (_RETRYABLE, _CRASHED):
                self._note_strike(task_id, worker, status, actions)
            return False
        if self._cancelled and task_id in self._cancelled:
            self._fail(spec, task_id, _CANCELLED, "cancelled", actions, worker=worker.id)
            return False
        if status in (_NOT_RUN, _HANDED_BACK):
            self._supervision.give_back(task_id)
            returned.append((spec, task_id))
        elif self._supervision.strike(task_id, worker.id, status, retries=spec.spec.retries):
            self._try_again(spec, task_id, worker, status, returned, now, actions)
        else:
            self._supervision.forget(task_id)
            return True
        return False

    def _try_again(
        self,
        spec: Spec,
        task_id: int,
        worker: Worker,
        status: int,
        returned: List[Returned],
        now: float,
        actions: List[Action],
    ) -> None:
        """An attempt has failed here and is not the last one: the next is for now or for later, and perhaps not for everybody."""
        actions.append(Retrying(task_id, self._supervision.attempt_of(task_id), worker.id, status))
        if task_id in self._adopted:
            returned.append((spec, task_id))
            return
        strikes = self._supervision.strikes_of(task_id)
        wait = backoff_seconds(spec, strikes)
        spec = self._confine(spec.plain, self._supervision.failed_on(task_id))
        if spec.group.confinement.avoid:
            self._patience.add(task_id, spec, now + wait + patience_seconds(spec, worker, strikes))
        if wait:
            self._tasks[task_id] = self._delays.add(task_id, spec, now + wait)
        else:
            returned.append((spec, task_id))

    def _confine(self, spec: Spec, failed_on: Sequence[WorkerId]) -> Spec:
        """The same spec for a task that has failed on these workers."""
        if not failed_on:
            return spec
        confined = confinement(failed_on, [worker for worker in spec.group.workers if not worker.is_installing(spec.group)])
        if confined == ANYWHERE:
            return spec
        known = spec.client.confined
        found = known.get((spec, confined))
        if found is None:
            if len(known) % CONFINED_SPECS == CONFINED_SPECS - 1:
                self._forget_confined(spec.client)
            group = self._group(spec.spec, confined)
            found = known[spec, confined] = Spec(spec.client, spec.spec, spec.function, group, spec)
        return found

    def _forget_confined(self, client: Client) -> None:
        """Those of a client's confined specs that no task is of any more."""
        used: Dict[Spec, None] = {delayed.spec: None for _, delayed in self._delays}
        for worker in self._workers.values():
            used.update((batch.spec, None) for batch in (*worker.assigned.values(), *worker.orphans.values()))
        for key, spec in list(client.confined.items()):
            if spec not in used and not spec.group.count:
                del client.confined[key]
                self._forget_spec(spec)

    def _lose_patience(self, now: float, actions: List[Action]) -> None:
        """Those who should be tried elsewhere have waited for that long enough."""
        returned: List[Returned] = []
        for spec, task_id in self._patience.due(now):
            if self._tasks.get(task_id) is spec:
                spec.group.remove(spec, task_id)
                self._note(spec.group)
                returned.append((spec.plain, task_id))
        self._return(returned, now, actions)

    def _set_free(self, now: float, actions: List[Action]) -> None:
        """None of those who may run them is left: anybody may."""
        returned: List[Returned] = []
        for group in self._deserted:
            returned.extend((spec.plain, task_id) for spec, task_id in group.empty())
            self._note(group)
        self._deserted.clear()
        self._return(returned, now, actions)

    def _note_strike(self, task_id: int, worker: Worker, status: int, actions: List[Action]) -> None:
        """An attempt has failed here while another goes on."""
        self._supervision.note(task_id, worker.id, status)
        other = self._tasks[task_id]
        assert isinstance(other, Worker), task_id
        actions.append(Retrying(task_id, other.assigned[task_id].attempt, worker.id, status))

    def _on_larger_cards(self, worker: Worker, batch: Batch) -> Optional[Spec]:
        """What a task is to be tried again as whose card's memory did not suffice; None if nobody has a larger one."""
        spec = batch.spec
        if batch.lease is None:
            return None
        largest = max((card.memory for card in worker.facts.devices if card.key in batch.lease.cards), default=0)
        need = spec.spec.requirement._replace(gpu_memory=max(spec.spec.requirement.gpu_memory, largest + 1))
        wanted = spec.spec._replace(requirement=need)
        for known in spec.client.replaced:
            if known.spec == wanted:
                return known if known.group.workers else None
        if not any(each.state is WorkerState.HEALTHY and each.width_of(need) is not None for each in self._workers.values()):
            return None
        larger = self._new_spec(spec.client, wanted)
        spec.client.replaced.append(larger)
        return larger

    def _on_late(
        self,
        worker: Worker,
        task_id: int,
        attempt: int,
        status: int,
        payload: Any,
        seconds: float,
        now: float,
        actions: List[Action],
    ) -> None:
        """A result nobody waits for: of a client that left, overtaken, or of an attempt that was given up too early."""
        batch = worker.orphans.pop((task_id, attempt), None)
        if batch is not None:
            worker.remove(batch, 1)
            self._count_repeatable(batch.spec, -1)
            self._forget_orphan(task_id, attempt)
        else:
            self._on_unexpected(worker, task_id, attempt, status, payload, seconds, now, actions)

    def _return(self, returned: List[Returned], now: float, actions: List[Action]) -> None:
        """Tasks go back to the front of their queues, in the order in which they left them, and out again if there is room."""
        groups: Dict[Group, None] = {}
        if self._adopted:
            returned = self._without_adopted(returned, actions)
        returned = [(spec if spec.group.workers else spec.plain, task_id) for spec, task_id in returned]
        if self._has_dead and returned:
            self._bury_all(returned)
        for spec, task_id in reversed(returned):
            group = spec.group
            self._tasks[task_id] = spec
            group.push_front(spec, task_id, now)
            if group not in groups:
                groups[group] = None
                self._note(group)
            if not group.workers:
                self._stick(group, spec, now)
        for group in sorted(groups, key=lambda group: -group.priority):
            if group.workers:
                self._distribute(group, now, actions)

    def _without_adopted(self, returned: Sequence[Returned], actions: List[Action]) -> List[Returned]:
        """Those whose arguments are here. The clients of the others submit them again when they are back."""
        gone = [(spec, task_id) for spec, task_id in returned if task_id in self._adopted]
        for spec, task_id in gone:
            del self._tasks[task_id]
            del self._adopted[task_id]
            spec.client.pending -= 1
            self._supervision.forget(task_id)
            self._locality.forget(task_id)
        if gone:
            actions.append(Forget([task_id for _, task_id in gone]))
        ids = {task_id for _, task_id in gone}  # Only asked for membership.
        return [each for each in returned if each[1] not in ids]

    def _bury_all(self, returned: Sequence[Returned]) -> None:
        """Tasks come back to queues in which they may be dead: one that left its queue for a worker that was back."""
        by_client: Dict[Client, Dict[int, Place]] = {}
        for spec, task_id in returned:
            by_client.setdefault(spec.client, {})[task_id] = spec
        for client, fresh in by_client.items():
            self._bury(client, fresh)

    def _fail(
        self,
        spec: Spec,
        task_id: int,
        status: int,
        reason: str,
        actions: List[Action],
        *,
        worker: str = "",
        cause: str = "",
    ) -> None:
        """A task ends by our decision; it is in no queue and on no worker any more. A `cause` is for programs."""
        details: Dict[str, Any] = {"reason": reason, "attempts": self._supervision.attempts(task_id)}
        if worker:
            details["worker"] = worker
        if cause:
            details["cause"] = cause
        del self._tasks[task_id]
        self._supervision.forget(task_id)
        self._locality.forget(task_id)
        self._cancelled.pop(task_id, None)
        self._adopted.pop(task_id, None)
        spec.client.pending -= 1
        actions.append(Fail(spec.client.number, task_id, status, details))
        if spec.spec.plan is not None:
            self._never_created(task_id, actions)
        if task_id in self._dependencies:
            self._fail_dependents(task_id, actions)

    # --- cancelling

    def _on_cancel_requested(self, event: ev.CancelRequested, now: float, actions: List[Action]) -> None:
        recalls: Dict[Worker, List[Tuple[int, int]]] = {}
        for task_id in event.task_ids:
            if task_id >> SEQUENCE_BITS != event.client:
                continue
            where = self._tasks.get(task_id)
            if where is None:
                self._give_up_place(task_id)
                continue  # Its end is on the way.
            if isinstance(where, Waiting):
                self._dependencies.drop(task_id, where)
                self._fail(where.spec, task_id, _CANCELLED, "cancelled before it started", actions)
            elif isinstance(where, Delayed):
                self._delays.drop(task_id)
                self._fail(where.spec, task_id, _CANCELLED, "cancelled before it was tried again", actions)
            elif isinstance(where, Spec):
                self._unqueue(where, task_id)
                self._fail(where, task_id, _CANCELLED, "cancelled before it started", actions)
            elif isinstance(where, Recovering):
                self._leave_recovery(where, task_id)
                self._fail(where.spec, task_id, _CANCELLED, "cancelled", actions)
            elif isinstance(where, Actor):
                self._cancel_at_actor(where, task_id, force=event.force, now=now, actions=actions)
            elif event.force or task_id not in self._cancelled:
                self._cancelled[task_id] = None
                for worker in self._copies.get(task_id, (where,)):
                    recalls.setdefault(worker, []).append((task_id, worker.assigned[task_id].attempt))
        for worker, tasks in recalls.items():
            actions.append(Recall(worker.id, tasks, kill=True, force=event.force))

    def _unqueue(self, spec: Spec, task_id: int) -> None:
        """A ready task leaves its queue other than by being placed."""
        spec.group.kill(spec.client, task_id)
        self._has_dead = True
        self._after_removal(spec.group)

    def _leave_recovery(self, recovering: Recovering, task_id: int) -> None:
        """A task is not held back any more."""
        del recovering.ids[task_id]
        if not recovering.ids:
            del self._recovering[recovering.spec]

    def _after_removal(self, group: Group) -> None:
        """Tasks were taken out of a group other than by placing them."""
        if not group.count:
            self._note(group)
            self._stuck.pop(group, None)

    # --- what nobody can run

    def _stick(self, group: Group, spec: Spec, now: float) -> None:
        """A task of this spec was added to a group that nobody can run."""
        if group not in self._stuck:
            self._stuck[group] = None
            group.due = math.inf
        group.hasten(spec, now)

    def _give_up(self, group: Group, now: float, actions: List[Action]) -> None:
        """Tell the clients, and fail what has waited long enough."""
        for lane in list(group.lanes.values()):
            if group.lane_due(lane) > now:
                continue
            client = lane.client
            workers = list(self._workers.values())
            text = explain(lane.head.spec.name, group.need, workers, client=client.name)
            cause = "version" if is_version_mismatch(group.need, workers) else ""
            self._expire(group, lane, text, cause, now, actions)
            if lane.count and group.need not in client.noticed:
                client.noticed[group.need] = None
                actions.append(Notice(client.number, next(lane.living()), text))
        self._after_removal(group)
        group.set_due()

    def _expire(self, group: Group, lane: Lane, text: str, cause: str, now: float, actions: List[Action]) -> None:
        for run in list(lane.runs):
            if not lane.count:
                return  # What is left of it was cancelled, and the lane is gone.
            timeout = run.spec.spec.placement_timeout
            if timeout < 0 or run.since + timeout > now:
                continue
            ids = group.expire(lane, run)
            for task_id in ids:
                self._fail(run.spec, task_id, _INFEASIBLE, text, actions, cause=cause)

    # --- balance

    def _balance(self, now: float, actions: List[Action]) -> None:
        """Ask tasks back that wait at one worker while another has nothing to do."""
        self._balance_at = None
        if not self._idle or not self._stacked:
            return
        idle = Rescue(self._idle, self._locality.fetch_seconds if self._locality.matters else None)
        look_again = math.inf
        for worker in self._stacked:
            found = surplus(worker, idle, now)
            look_again = min(look_again, found.look_again)
            if found.tasks:
                worker.recalled.update(dict.fromkeys(task_id for task_id, _ in found.tasks))
                actions.append(Recall(worker.id, found.tasks, kill=False))
        if look_again != math.inf:
            self._balance_at = look_again
