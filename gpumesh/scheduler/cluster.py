"""The brain of the coordinator: who is here, who is away, who is gone, and what follows for the tasks (flow.py moves them). Pure.

    event ──handle──> tables change ──> actions          time ──on_time──> actions

    worker:  (unknown) ── connected ──> here ── connection breaks ──> away ── too late ──> (gone)
                                         ^                             │
                                         └──── connected again ────────┘   states what it has; see below
    client:  the same; one that is back submits everything again that it still waits for

A worker that is back, or that was at work for a coordinator before this one, tells what it has. Of each attempt:

    assigned here, same number        it goes on
    ready, or held back in recovery   it goes on, and is assigned from now on
    of a client that is not here yet  it goes on; who does not come for it in time loses it
    anything else                     recalled, as nobody wants it
    assigned, and it has nothing of it: it never saw it, so back to the front of the queue without a strike

Promises, beside those of flow.py:

7. A connection that breaks and is there again in time costs no attempt, no result and no client's task.
8. After a restart nothing is started that a worker of before may still have, until all of those are back or `RECOVERY_SECONDS` have
   passed; what may run at most once is not started again unless all of them are back.
9. Of results of one task the first that is valid is delivered, whoever it comes from; the others change nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from gpumesh.config import (
    ABSENT_CLIENT_SECONDS,
    CLIENT_GRACE_SECONDS,
    DEATH_GRACE_ROUND_TRIPS,
    DEATH_GRACE_SECONDS,
    EXPIRED_CLIENTS_KNOWN,
    LOST_WORKERS_SHOWN,
    RECOVERY_SECONDS,
    RESULT_GRACE_SECONDS,
    WORKER_TTL_SECONDS,
)
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import (
    Action,
    ClientGone,
    Deliver,
    Fail,
    Forget,
    Keep,
    Recall,
    Retrying,
    WorkerGone,
)
from gpumesh.scheduler.actor_states import Actor
from gpumesh.scheduler.cards import Lease
from gpumesh.scheduler.delays import Delayed
from gpumesh.scheduler.dependencies import Waiting
from gpumesh.scheduler.flow import RAN, Returned
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.snapshot import gone_view, unable_views, waiting_views, worker_views
from gpumesh.scheduler.states import Batch, Client, Recovering, Spec, Worker, WorkerState
from gpumesh.scheduler.waiting_tasks import WaitingTasks

_CANCELLED = int(Status.CANCELLED)
_LOST = int(Status.LOST)
_OK = int(Status.OK)

_LOST_AT_RESTART = (
    "it may have been running when the coordinator was lost, and retries=0 means at most once, so it is not started again"
)


class Cluster(WaitingTasks):
    """All tables of the mesh; see the module's promises.

    Args:
        worker_ttl: Seconds for which a lost worker is still shown.
    """

    def __init__(self, *, worker_ttl: float = WORKER_TTL_SECONDS) -> None:
        super().__init__()
        self._worker_ttl = worker_ttl
        self._gone: OrderedDict[WorkerId, Tuple[float, Dict[str, Any]]] = OrderedDict()  # Until when each is shown, and how.
        self._away: Dict[Worker, None] = {}
        self._away_clients: Dict[Client, None] = {}
        self._expired: OrderedDict[ClientNumber, None] = OrderedDict()  # Clients that are gone.
        self._expected: Optional[
            Dict[WorkerId, None]
        ] = {}  # Of before the restart and not back; None: not known who was there.
        self._recover_at: Optional[float] = None  # Until then what is submitted again may be held back.
        self._first_attempt = 1
        self._has_lost = False  # Workers of before the restart have ended with it, or since, with results that nobody had.
        self._handlers: Dict[type, Callable[[Any, float, List[Action]], None]] = {
            ev.Started: self._on_started,
            ev.WorkerConnected: self._on_worker_connected,
            ev.WorkerChanged: self._on_worker_changed,
            ev.CardsMeasured: self._on_cards_measured,
            ev.WorkerDraining: self._on_worker_draining,
            ev.WorkerAway: self._on_worker_away,
            ev.WorkerLost: self._on_worker_lost,
            ev.ClientConnected: self._on_client_connected,
            ev.ClientAway: self._on_client_away,
            ev.TasksConfirmed: self._on_tasks_confirmed,
            ev.ResubmissionEnded: self._on_resubmission_ended,
            ev.ClientLost: self._on_client_lost,
            ev.SpecDefined: self._on_spec_defined,
            ev.TasksSubmitted: self._on_tasks_submitted,
            ev.DependentSubmitted: self._on_dependent_submitted,
            ev.ResultStored: self._on_result_stored,
            ev.AttemptsFinished: self._on_attempts_finished,
            ev.StoreShared: self._on_news_of_objects,
            ev.CopyMade: self._on_news_of_objects,
            ev.CopiesGone: self._on_news_of_objects,
            ev.BytesMoved: self._on_news_of_objects,
            ev.TasksWait: self._on_tasks_wait,
            ev.CancelRequested: self._on_cancel_requested,
            ev.ActorStarted: self._on_actor_started,
            ev.ActorKilled: self._on_actor_killed,
        }

    # --- the interface

    def handle(self, event: ev.Event, now: float) -> List[Action]:
        """Take in what happened; what to do about it, in order."""
        actions: List[Action] = []
        self._handlers[type(event)](event, now, actions)
        if self._deserted:
            self._set_free(now, actions)
        if self._lined:
            self._advance(actions)
        return actions

    def next_deadline(self) -> Optional[float]:
        """When `on_time` is due, None for not before the next event."""
        due = math.inf if self._balance_at is None else self._balance_at
        if self._look_at is not None:
            due = min(due, self._look_at)
        for delays in (self._delays, self._patience):
            delay = delays.next_due()
            if delay is not None:
                due = min(due, delay)
        for group in self._stuck:
            due = min(due, group.due)
        if self._away or self._away_clients:
            for worker in self._away:
                assert worker.away_until is not None, worker.id
                due = min(due, worker.away_until)
            for client in self._away_clients:
                assert client.away_until is not None, client.number
                due = min(due, client.away_until)
        if self._recovering and self._recover_at is not None:
            due = min(due, self._recover_at)
        if self._awaited:
            actors_due = self.actors_due()
            if actors_due is not None:
                due = min(due, actors_due)
        return None if due == math.inf else due

    def on_time(self, now: float) -> List[Action]:
        """Time has passed; early calls do no harm."""
        actions: List[Action] = []
        if self._away or self._away_clients:
            self._give_up_the_away(now, actions)
        if self._recovering:
            self._settle_recovery(now, actions)
        if self._awaited:
            self._look_at_actors(now, actions)
        if self._delays:
            self._return(self._due(now, actions), now, actions)
        if self._patience:
            self._lose_patience(now, actions)
        if self._balance_at is not None and self._balance_at <= now:
            self._balance(now, actions)
        if self._look_at is not None and self._look_at <= now:
            self._look(now, actions)
        if self._stuck:
            for group in list(self._stuck):
                if group.due <= now:
                    self._give_up(group, now, actions)
        if self._lined:
            self._advance(actions)
        return actions

    def snapshot(self, now: float) -> List[Dict[str, Any]]:
        """One dict for each worker, in order of joining, then those lost lately; the shape of `mesh.workers()`."""
        while self._gone and next(iter(self._gone.values()))[0] <= now:
            self._gone.popitem(last=False)
        return [*worker_views(self._workers.values()), *(dict(view) for _, view in self._gone.values())]

    def waiting(self, now: float) -> List[Dict[str, Any]]:
        """One dict for each client's ready tasks of one requirement; the shape of `mesh.waiting()`."""
        return waiting_views(self._queues.ready(now), list(self._workers.values()), self._delays, now)

    def unable(self, client: ClientNumber, now: float) -> List[Tuple[List[int], str]]:
        """A client's tasks that nobody here can run, as soon as there is something to say of it: (ids, why) of each kind."""
        return unable_views(self._stuck, list(self._workers.values()), client, now) if self._stuck else []

    def is_confirmed(self, task_id: int) -> bool:
        """Whether the task is here and its client has said, in this session, that it waits for it."""
        return task_id in self._tasks and task_id not in self._adopted

    def has_attempts_at(self, worker: WorkerId) -> bool:
        """Whether a worker has anything that has not ended."""
        known = self._workers.get(worker)
        return known is not None and bool(known.assigned or known.orphans or known.actors)

    def retries_of(self, client: ClientNumber, spec_number: int) -> int:
        """How often tasks of a client's spec may be tried again; 0 for one that was never defined."""
        known = self._clients.get(client)
        spec = known.specs.get(spec_number) if known is not None else None
        return spec.spec.retries if spec is not None else 0

    def is_stream(self, client: ClientNumber, spec_number: int) -> bool:
        """Whether tasks of a client's spec send their values one by one."""
        known = self._clients.get(client)
        spec = known.specs.get(spec_number) if known is not None else None
        return spec is not None and spec.spec.is_stream

    # --- workers

    def _on_started(self, event: ev.Started, now: float, actions: List[Action]) -> None:
        self._expected = None if event.workers is None else dict.fromkeys(event.workers)
        self._first_attempt = event.first_attempt
        self._has_lost = event.has_lost
        if self._expected is None or self._expected:
            self._recover_at = now + RECOVERY_SECONDS

    def _on_worker_connected(self, event: ev.WorkerConnected, now: float, actions: List[Action]) -> None:
        worker = self._workers.get(event.worker)
        returned: List[Returned] = []
        if worker is None:
            self._gone.pop(event.worker, None)
            worker = self._workers[event.worker] = Worker(event.worker, event.facts)
            self._locality.join(worker, is_near=event.is_near)
        else:
            self._withdraw(worker, now)
            self._idle.discard(worker)
            self._away.pop(worker, None)
            worker.away_until = None
            worker.arriving = frozenset()
            worker.is_draining = False
            worker.change(event.facts)
            self._forget_waits(worker, now)
            self._forget_announced(worker)  # It announces anew what it still has.
            has = dict(event.finished)
            for held in event.held:
                has.update(held.tasks)
            returned = self._take_back_unseen(worker, has, actions)
            self._take_back_unseen_actors(worker, has, actions)
        self._take_in_held(worker, event, now, actions)
        self._admit(worker, now)
        if self._expected:
            self._expected.pop(event.worker, None)
        if returned:
            self._return(returned, now, actions)
        if self._awaited and self._are_all_back:
            for actor in self._awaited:
                if actor.not_before == self._recover_at:
                    actor.not_before = now
        if self._recovering:
            self._settle_recovery(now, actions)
        self._refill(worker, now, actions)
        if worker.actors:
            self._forward_all(worker, actions)
        self._tell_workers(worker, actions)

    def _on_worker_changed(self, event: ev.WorkerChanged, now: float, actions: List[Action]) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        self._withdraw(worker, now)
        self._idle.discard(worker)  # Its speed is its place there.
        worker.change(event.facts)
        self._admit(worker, now)
        self._refill(worker, now, actions)
        self._tell_workers(worker, actions)

    def _on_cards_measured(self, event: ev.CardsMeasured, now: float, actions: List[Action]) -> None:
        worker = self._workers.get(event.worker)
        if worker is None or worker.cards is None:
            return
        worker.readings.update((reading.key, reading) for reading in event.readings)
        if worker.cards.measure(event.readings) and worker.state is WorkerState.HEALTHY:
            self._refill(worker, now, actions)

    def _on_worker_draining(self, event: ev.WorkerDraining, now: float, actions: List[Action]) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        self._withdraw(worker, now)
        worker.is_draining = True
        self._settle(worker, now)
        self._tell_workers(worker, actions)

    def _on_worker_away(self, event: ev.WorkerAway, now: float, actions: List[Action]) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        self._withdraw(worker, now)
        worker.away_until = now + DEATH_GRACE_SECONDS + DEATH_GRACE_ROUND_TRIPS * worker.round_trip
        worker.away_reason = event.reason
        worker.arriving = frozenset(event.arriving)
        self._away[worker] = None
        self._settle(worker, now)
        self._tell_workers(worker, actions)

    def _on_worker_lost(self, event: ev.WorkerLost, now: float, actions: List[Action]) -> None:
        worker = self._workers.pop(event.worker, None)
        if worker is None:
            return
        self._withdraw(worker, now)
        self._away.pop(worker, None)
        self._idle.discard(worker)
        self._stacked.pop(worker, None)
        self._locality.leave(worker)
        if self._worker_ttl > 0:
            self._gone[worker.id] = (now + self._worker_ttl, gone_view(worker, event.reason))
            if len(self._gone) > LOST_WORKERS_SHOWN:
                self._gone.popitem(last=False)
        if self._forget_announced(worker):
            self._has_lost = True  # Results of tasks whose clients have not come back yet.
        for (task_id, attempt), batch in worker.orphans.items():
            self._forget_orphan(task_id, attempt)
            self._count_repeatable(batch.spec, -1)
        if worker.actors:
            self._lose_actors(worker, event.reason, now, actions)
        executing = frozenset(worker.executing())  # Only asked for membership.
        returned: List[Returned] = []
        where = worker.facts.hostname or worker.id
        for task_id, batch in worker.assigned.items():
            spec = batch.spec
            retries = spec.spec.retries
            self._count_repeatable(spec, -1)
            spec.client.holding -= batch.charge
            if task_id in self._copies and self._drop_copy(worker, task_id):
                if task_id in executing:
                    self._note_strike(task_id, worker, _LOST, actions)
                continue
            if self._cancelled and task_id in self._cancelled:
                self._fail(spec, task_id, _CANCELLED, "cancelled", actions, worker=worker.id)
                continue
            if task_id in worker.arriving:
                reason = f"worker {where} was lost with the result: {event.reason}"
                lost = (worker.id, reason)
                self._tasks[task_id] = self._delays.add(task_id, spec, now + RESULT_GRACE_SECONDS, lost=lost)
                continue
            if task_id in executing or retries == 0:
                if not self._supervision.strike(task_id, worker.id, _LOST, retries=retries):
                    reason = f"worker {where} was lost while it had the task: {event.reason}"
                    self._fail(spec, task_id, _LOST, reason, actions, worker=worker.id)
                    continue
                self._try_again(spec, task_id, worker, _LOST, returned, now, actions)
                continue
            self._supervision.give_back(task_id)
            returned.append((spec, task_id))
        self._throughput.forget(worker.id)
        self._return(returned, now, actions)
        self._tell_workers(worker, actions, is_gone=True)

    def _due(self, now: float, actions: List[Action]) -> List[Returned]:
        """Tasks that have waited long enough: for another try, or for a worker to come back with a result."""
        found: List[Returned] = []
        for spec, task_id in self._delays.due(now):
            where = self._tasks[task_id]
            assert isinstance(where, Delayed), task_id
            if where.lost is not None:
                ident, reason = where.lost
                if not self._supervision.strike(task_id, ident, _LOST, retries=spec.spec.retries):
                    self._fail(spec, task_id, _LOST, reason, actions, worker=ident)
                    continue
                actions.append(Retrying(task_id, self._supervision.attempt_of(task_id), ident, _LOST))
            if spec.is_of_actor:
                self._enter_calls(spec, [task_id], now, actions, doubtful=False)
                continue
            found.append((spec, task_id))
        return found

    def _give_up_the_away(self, now: float, actions: List[Action]) -> None:
        """Whoever is not back in time is lost."""
        for worker in list(self._away):
            if worker.away_until is not None and worker.away_until <= now:
                actions.append(WorkerGone(worker.id, worker.away_reason))
                self._on_worker_lost(ev.WorkerLost(worker.id, worker.away_reason), now, actions)
        for client in list(self._away_clients):
            if client.away_until is not None and client.away_until <= now:
                self._on_client_lost(ev.ClientLost(client.number), now, actions)
                actions.append(ClientGone(client.number))

    # --- what a worker that is back has

    def _take_back_unseen(self, worker: Worker, has: Dict[int, int], actions: List[Action]) -> List[Returned]:
        """What was sent to it and never arrived, or was recalled and the recall never did."""
        returned: List[Returned] = []
        recalls: List[Tuple[int, int]] = []
        worker.recalled.clear()
        for task_id, batch in list(worker.assigned.items()):
            if has.get(task_id) == batch.attempt:
                if self._cancelled and task_id in self._cancelled:
                    recalls.append((task_id, batch.attempt))
                continue
            spec = batch.spec
            del worker.assigned[task_id]
            worker.remove(batch, 1)
            spec.client.holding -= batch.charge
            spec.client.served -= batch.charge
            self._count_repeatable(spec, -1)
            if task_id in self._copies and self._drop_copy(worker, task_id):
                continue
            if self._cancelled and task_id in self._cancelled:
                self._fail(spec, task_id, _CANCELLED, "cancelled before it started", actions)
                continue
            self._supervision.give_back(task_id)
            returned.append((spec, task_id))
        for (task_id, attempt), batch in list(worker.orphans.items()):
            if has.get(task_id) == attempt:
                recalls.append((task_id, attempt))
                continue
            del worker.orphans[task_id, attempt]
            worker.remove(batch, 1)
            self._count_repeatable(batch.spec, -1)
            self._forget_orphan(task_id, attempt)
        if recalls:
            actions.append(Recall(worker.id, recalls, kill=True))
        return returned

    def _take_in_held(self, worker: Worker, event: ev.WorkerConnected, now: float, actions: List[Action]) -> None:
        """What it has and we did not know of."""
        unwanted: List[Tuple[int, int]] = []
        for held in event.held:
            for task_id, attempt in held.tasks:
                if self._is_at(worker, task_id, attempt):
                    continue
                spec = self._spec_of(held.spec, task_id, now)
                if spec is not None and spec.is_of_actor:
                    if not (
                        self._adopt_call(worker, spec, task_id, attempt)
                        if held.spec.plan is None
                        else self._adopt(worker, spec, task_id, attempt, held, now)
                    ):
                        unwanted.append((task_id, attempt))
                elif spec is None or not self._go_on(worker, spec, task_id, attempt, held, now):
                    unwanted.append((task_id, attempt))
        for task_id, attempt in event.finished:
            if self._is_at(worker, task_id, attempt):
                continue
            where = self._tasks.get(task_id)
            if isinstance(where, Delayed) and where.spec.is_of_actor:
                self._announced[task_id] = (worker.id, attempt)
            elif isinstance(where, (Spec, Recovering, Delayed)):
                spec = where if isinstance(where, Spec) else where.spec
                self._go_on(worker, spec, task_id, attempt, None, now)
            elif isinstance(where, Actor):
                self._expect_end(worker, where, task_id, attempt, now)
            elif where is not None or self._is_of_the_absent(task_id, now):
                self._announced[task_id] = (worker.id, attempt)
        if unwanted:
            actions.append(Recall(worker.id, unwanted, kill=True))

    def _forget_failures_of(self, number: ClientNumber) -> None:
        for task_id in [task_id for task_id in self._failed_before if task_id >> SEQUENCE_BITS == number]:
            del self._failed_before[task_id]

    def _forget_announced(self, worker: Worker) -> bool:
        """Whether there was something."""
        mine = [task_id for task_id, (ident, _) in self._announced.items() if ident == worker.id]
        for task_id in mine:
            del self._announced[task_id]
        return bool(mine)

    def _is_at(self, worker: Worker, task_id: int, attempt: int) -> bool:
        batch = worker.assigned.get(task_id)
        if batch is None and worker.actors:
            batch = worker.actors.get(task_id)
            call = worker.calls.get(task_id)
            if call is not None and call.attempt == attempt:
                return True
        return (batch is not None and batch.attempt == attempt) or (task_id, attempt) in worker.orphans

    def _is_of_the_absent(self, task_id: int, now: float) -> bool:
        """Whether the client of a task that is not here may still come for it; if nobody has seen it yet, it counts as away from now on."""
        number = ClientNumber(task_id >> SEQUENCE_BITS)
        client = self._clients.get(number)
        if client is None:
            if number in self._expired:
                return False
            client = self._clients[number] = Client(number, "")
            client.is_known = False
            client.away_until = now + ABSENT_CLIENT_SECONDS
            self._away_clients[client] = None
        if client.confirmed is not None:
            return task_id not in client.confirmed
        return client.away_until is not None

    def _spec_of(self, spec: TaskSpec, task_id: int, now: float) -> Optional[Spec]:
        """The spec under which an attempt at a task can go on; None if nobody wants it."""
        where = self._tasks.get(task_id)
        if isinstance(where, Spec):
            return where
        if isinstance(where, (Recovering, Delayed)):
            return where.spec
        if isinstance(where, Actor):
            return self._spec_at(where, task_id)
        if where is not None or not self._is_of_the_absent(task_id, now):
            return None
        client = self._clients[ClientNumber(task_id >> SEQUENCE_BITS)]
        for known in [*client.specs.values(), *client.replaced]:
            if known.spec == spec:
                return known
        found = self._new_spec(client, spec)
        client.replaced.append(found)
        return found

    def _go_on(self, worker: Worker, spec: Spec, task_id: int, attempt: int, held: Optional[ev.Held], now: float) -> bool:
        """An attempt that a worker has is assigned to it from now on; whether that is possible."""
        lease: Optional[Lease] = None
        width = 0
        need = spec.group.need
        if held is None or not need.needs_gpu:
            width = worker.width_of(need) or 1
        elif worker.cards is not None:
            lease = worker.cards.reopen(need, tuple(held.cards), held.ordinal)
        if not width and lease is None:
            return False
        where = self._tasks.get(task_id)
        if isinstance(where, Spec):
            self._unqueue(where, task_id)
        elif isinstance(where, Recovering):
            self._leave_recovery(where, task_id)
        elif isinstance(where, Delayed):
            self._delays.drop(task_id)
        else:
            if spec.client.pending <= spec.client.actors:
                self._greet(spec.client)
            spec.client.pending += 1
            self._adopted[task_id] = None
        self._supervision.resume(task_id, attempt)
        self._enter(worker, Batch(spec, attempt, width, now, -1, self._charge(worker, spec, width or 1), lease), task_id)
        return True

    # --- results of whom nobody has asked

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
        """A result of an attempt that is not assigned here: valid all the same if it was announced and its task has not ended."""
        if self._announced.get(task_id) != (worker.id, attempt):
            return
        del self._announced[task_id]
        where = self._tasks.get(task_id)
        if where is None:
            if self._is_of_the_absent(task_id, now):
                number = ClientNumber(task_id >> SEQUENCE_BITS)
                if status not in RAN:
                    self._failed_before[task_id] = None
                actions.append(Keep(number, worker.id, (task_id, status, payload, seconds)))
            return
        if status not in RAN or isinstance(where, (Waiting, Actor)) or task_id in self._cancelled:
            return
        if isinstance(where, Worker):
            spec = where.assigned[task_id].spec
            for other in self._copies.pop(task_id, (where,)):
                self._orphan(other, [task_id], actions)
                self._settle(other, now)
        elif isinstance(where, Recovering):
            spec = where.spec
            self._leave_recovery(where, task_id)
        elif isinstance(where, Delayed):
            spec = where.spec
            self._delays.drop(task_id)
        else:
            spec = where
            self._unqueue(where, task_id)
        del self._tasks[task_id]
        self._adopted.pop(task_id, None)
        self._supervision.forget(task_id)
        self._locality.forget(task_id)
        spec.client.pending -= 1
        worker.done += 1
        actions.append(Deliver(spec.client.number, worker.id, [(task_id, status, payload, seconds)]))
        if task_id in self._dependencies:
            for group in self._release([(task_id, status == _OK)], now, actions):
                if group.count and group.workers and not group.is_saturated:
                    self._distribute(group, now, actions)

    # --- clients

    def _on_client_connected(self, event: ev.ClientConnected, now: float, actions: List[Action]) -> None:
        client = self._clients.get(event.client)
        if client is not None and event.resumes:
            self._away_clients.pop(client, None)
            client.away_until = None
            client.name = event.name
            client.confirmed = {}
            return
        if client is not None:
            self._on_client_lost(ev.ClientLost(event.client), now, actions)
        client = self._clients[event.client] = Client(event.client, event.name)
        if event.resumes:
            client.is_known = False
            client.confirmed = {}
        else:
            self._expired.pop(event.client, None)

    def _on_client_away(self, event: ev.ClientAway, now: float, actions: List[Action]) -> None:
        client = self._clients.get(event.client)
        if client is not None:
            client.away_until = now + CLIENT_GRACE_SECONDS
            client.confirmed = None
            self._away_clients[client] = None

    def _on_tasks_confirmed(self, event: ev.TasksConfirmed, now: float, actions: List[Action]) -> None:
        client = self._clients.get(event.client)
        if client is not None and client.confirmed is not None:
            client.confirmed.update(dict.fromkeys(event.task_ids))
            for task_id in event.task_ids:
                self._adopted.pop(task_id, None)
        if client is not None:
            others = [task_id for task_id in event.answered if task_id in self._tasks]
            if others:  # Other attempts at them, that workers had.
                self._drop(client, others, now, actions)

    def _on_resubmission_ended(self, event: ev.ResubmissionEnded, now: float, actions: List[Action]) -> None:
        client = self._clients.get(event.client)
        if client is None or client.confirmed is None:
            return
        confirmed, client.confirmed = client.confirmed, None
        client.is_known = True  # From now on; what is held back in recovery is.
        number = event.client
        for task_id in [task_id for task_id in self._announced if task_id >> SEQUENCE_BITS == number]:
            del self._announced[task_id]
        self._forget_failures_of(number)
        unwanted = [task_id for task_id in self._tasks if task_id >> SEQUENCE_BITS == number and task_id not in confirmed]
        if unwanted:
            self._drop(client, unwanted, now, actions)

    def _drop(self, client: Client, task_ids: Sequence[int], now: float, actions: List[Action]) -> None:
        """Its client does not wait for these any more."""
        orphaned: Dict[Worker, List[int]] = {}
        for task_id in task_ids:
            where = self._tasks.get(task_id)
            if where is None:
                continue
            if isinstance(where, Worker):
                for worker in self._copies.pop(task_id, (where,)):
                    orphaned.setdefault(worker, []).append(task_id)
            elif isinstance(where, Waiting):
                self._dependencies.drop(task_id, where)
            elif isinstance(where, Recovering):
                self._leave_recovery(where, task_id)
            elif isinstance(where, Delayed):
                self._delays.drop(task_id)
            elif isinstance(where, Actor):
                self._drop_of_actor(client, where, task_id, actions)
            else:
                self._unqueue(where, task_id)
        for worker, ids in orphaned.items():
            self._orphan(worker, ids, actions)
            self._settle(worker, now)
        for task_id in task_ids:
            if self._tasks.pop(task_id, None) is None:
                continue
            client.pending -= 1
            self._adopted.pop(task_id, None)
            self._cancelled.pop(task_id, None)
            self._supervision.forget(task_id)
            self._locality.forget(task_id)
            if task_id in self._dependencies:
                self._fail_dependents(task_id, actions)
        actions.append(Forget(list(task_ids)))

    def _on_client_lost(self, event: ev.ClientLost, now: float, actions: List[Action]) -> None:
        client = self._clients.pop(event.client, None)
        if client is None:
            return
        self._away_clients.pop(client, None)
        self._expired[event.client] = None
        if len(self._expired) > EXPIRED_CLIENTS_KNOWN:
            self._expired.popitem(last=False)
        for task_id in [task_id for task_id in self._announced if task_id >> SEQUENCE_BITS == event.client]:
            del self._announced[task_id]
        self._forget_failures_of(event.client)
        self._lose_actors_of(client, actions)
        gone: List[int] = []
        for worker in self._workers.values():
            lost = [task_id for task_id, batch in worker.assigned.items() if batch.spec.client is client]
            if lost:
                self._orphan(worker, lost, actions)
                gone.extend(task_id for task_id in lost if self._tasks[task_id] is worker)
        for task_id in gone:
            self._copies.pop(task_id, None)
            self._cancelled.pop(task_id, None)
            self._adopted.pop(task_id, None)
        for spec in [spec for spec in self._recovering if spec.client is client]:
            gone.extend(self._recovering.pop(spec).ids)
        for group in list(self._queues.groups.values()):
            ids = group.drop(client)
            if ids:
                gone.extend(ids)
                self._note(group)
                if not group.count:
                    self._stuck.pop(group, None)
        if self._dependencies:
            gone.extend(self._dependencies.drop_client(client))
        if self._delays:
            gone.extend(self._delays.drop_client(client))
        for task_id in gone:
            del self._tasks[task_id]
            self._supervision.forget(task_id)
            self._locality.forget(task_id)
        self._patience.drop_client(client)
        for spec in [*client.specs.values(), *client.replaced, *client.confined.values()]:
            self._forget_spec(spec)
        if gone:
            actions.append(Forget(gone))

    # --- submitted again

    def _sift(self, client: Client, spec: Spec, ids: Sequence[int], now: float, actions: List[Action]) -> List[int]:
        """Of tasks that a client has submitted before: those that are to be queued now. The others go on, are held back, or have failed."""
        confirmed = client.confirmed
        fresh: List[int] = []
        held_back: List[int] = []
        is_recovering = (
            self._recover_at is not None and now < self._recover_at and not client.is_known and not self._are_all_back
        )
        for task_id in ids:
            if confirmed is not None:
                confirmed[task_id] = None
            if task_id in self._tasks:
                self._adopted.pop(task_id, None)
                continue
            announced = self._announced.pop(task_id, None)
            worker = self._workers.get(announced[0]) if announced is not None else None
            if announced is not None and worker is not None and self._go_on(worker, spec, task_id, announced[1], None, now):
                self._adopted.pop(task_id, None)
                self._settle(worker, now)
            elif client.is_known and client.number not in self._expired:
                fresh.append(task_id)  # It was on its way when the connection broke.
            elif is_recovering and client.number not in self._expired:
                held_back.append(task_id)
            elif spec.spec.retries == 0 and (client.number in self._expired or not self._is_nothing_lost):
                self._refuse_again(client, task_id, actions)
            else:
                if task_id not in self._orphans and not self._is_nothing_lost:
                    self._supervision.start_from(task_id, self._first_attempt)
                fresh.append(task_id)
        if held_back:
            if client.pending <= client.actors:
                self._greet(client)
            client.pending += len(held_back)
            recovering = self._recovering.get(spec)
            if recovering is None:
                recovering = self._recovering[spec] = Recovering(spec)
            recovering.ids.update(dict.fromkeys(held_back))
            self._tasks.update(dict.fromkeys(held_back, recovering))
        return fresh

    def _may_depend_again(self, client: Client, spec: Spec, task_id: int, now: float, actions: List[Action]) -> bool:
        """The same for one that waits for others: whether it is to be taken in."""
        if client.confirmed is not None:
            client.confirmed[task_id] = None
        if task_id in self._tasks:
            self._adopted.pop(task_id, None)
            return False
        if client.is_known and client.number not in self._expired:
            return True
        if spec.spec.retries == 0:
            self._refuse_again(client, task_id, actions)
            return False
        self._supervision.start_from(task_id, self._first_attempt)
        return True

    def _refuse_again(self, client: Client, task_id: int, actions: List[Action]) -> None:
        actions.append(Fail(client.number, task_id, _LOST, {"reason": _LOST_AT_RESTART, "attempts": []}))

    def _not_before(self, now: float) -> float:
        """When what is submitted again may be started, as far as can be told now; `_settle_recovery` may bring it forward."""
        if self._recover_at is None or now >= self._recover_at or self._are_all_back:
            return now
        return self._recover_at

    def _first_attempt_now(self) -> int:
        return 1 if self._is_nothing_lost else self._first_attempt

    def _expired_clients(self) -> Any:
        return self._expired

    @property
    def _are_all_back(self) -> bool:
        """Whether every worker of before the restart that lives is here: what none of them has, nobody has."""
        return self._expected is not None and not self._expected

    @property
    def _is_nothing_lost(self) -> bool:
        """Whether, beside that, what nobody has has never been started."""
        return self._are_all_back and not self._has_lost

    def _settle_recovery(self, now: float, actions: List[Action]) -> None:
        """Queue what was held back, once nobody who may have it is missing or has been missing for too long."""
        if not self._are_all_back and self._recover_at is not None and now < self._recover_at:
            return
        is_nothing_lost = self._is_nothing_lost
        recovering, self._recovering = self._recovering, {}
        groups: Dict[Group, None] = {}
        for spec, each in recovering.items():
            client = spec.client
            ids = list(each.ids)
            if spec.spec.retries == 0 and not is_nothing_lost:
                for task_id in ids:
                    del self._tasks[task_id]
                    client.pending -= 1
                    self._locality.forget(task_id)
                    self._refuse_again(client, task_id, actions)
                    if task_id in self._dependencies:
                        self._fail_dependents(task_id, actions)
                continue
            if not is_nothing_lost:
                for task_id in ids:
                    self._supervision.start_from(task_id, self._first_attempt)
            group = spec.group
            self._tasks.update(dict.fromkeys(ids, spec))
            if self._has_dead:
                self._bury(client, dict.fromkeys(ids, spec))
            group.push(spec, ids, now)
            self._note(group)
            groups[group] = None
            if not group.workers:
                self._stick(group, spec, now)
        for group in sorted(groups, key=lambda group: -group.priority):
            if group.count and group.workers:
                self._distribute(group, now, actions)
