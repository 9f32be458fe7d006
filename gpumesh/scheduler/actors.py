"""The life of actors: where each lives, when it is started again, when it is over. Their calls are in calls.py. Pure.

    expected ──> waiting ──> starting ──> alive ──> ending ──> dead
       (called      ^           │           │                   ^
        before      │           └───────────┴── restarting ─────┤
        created)    └ its worker has never seen it     │        │
                                                       └────────┘
The same as a table: actor_states.ACTOR_MOVES.

An actor's creation is a task of its client, and its life is the attempts at that task: an attempt ends when that life does. So whatever holds for
tasks when somebody is away or comes back holds for actors.

Promises:

1. An actor is on one worker at most, and what it needs there is booked from before its process is started until its end is reported.
2. It is started again at most `retries` times within `restart_seconds`, and never after its constructor has failed, or it was ended on purpose.
3. When it is gone, all its calls have ended, and later ones end at once, with the reason as long as it is known.
4. It goes with its client, unless that is the coordinator's own.
5. A name belongs to one actor at a time.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

from gpumesh.config import (
    CRASH_RESTART_DELAYS_SECONDS,
    DEAD_ACTORS_KNOWN,
    EARLY_DEATH_SECONDS,
    INFEASIBLE_NOTICE_SECONDS,
)
from gpumesh.model.actors import show_actor
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber
from gpumesh.model.outcomes import Status
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import Action, Assign, Deliver, Fail, Notice, Recall, Retrying
from gpumesh.scheduler.actor_states import Actor, ActorState
from gpumesh.scheduler.calls import Calls
from gpumesh.scheduler.explanation import explain
from gpumesh.scheduler.homes import can_ever_live, choose_home, slots_of
from gpumesh.scheduler.states import Batch, Client, Spec, Worker

_OK = int(Status.OK)
_RAISED = int(Status.RAISED)
_CRASHED = int(Status.CRASHED)
_CANCELLED = int(Status.CANCELLED)
_NOT_RUN = int(Status.NOT_RUN)
_LOST = int(Status.LOST)
_INFEASIBLE = int(Status.INFEASIBLE)
_REFUSED = int(Status.REFUSED)
_HANDED_BACK = int(Status.HANDED_BACK)
_ACTOR_DIED = int(Status.ACTOR_DIED)

DEATHS = frozenset((_CRASHED, _LOST))  # Ends of a life that count against `max_restarts`.
MOVES = frozenset((_NOT_RUN, _HANDED_BACK))  # Ends that nobody's fault is: it goes elsewhere.


class Actors(Calls):
    """The tables of actors; see the module's promises."""

    def __init__(self) -> None:
        super().__init__()
        self._names: Dict[str, Actor] = {}
        self._tokens: Dict[int, int] = {}  # What handles refer to -> actor.

    # --- they begin

    def _on_actor_tasks(self, client: Client, spec: Spec, event: ev.TasksSubmitted, now: float, actions: List[Action]) -> None:
        """Creations, or calls, are submitted."""
        ids = list(event.task_ids)
        doubtful = False
        if event.again:
            doubtful = not client.is_known
            ids = [task_id for task_id in ids if not self._is_here_again(client, spec, task_id, now, actions)]
        elif client.confirmed is not None:
            client.confirmed.update(dict.fromkeys(ids))
        ids = self._screen(client, ids, actions)
        if not ids:
            return
        if self._orphans:
            for task_id in ids:
                if task_id in self._orphans:
                    self._supervision.start_from(task_id, max(self._orphans[task_id]) + 1)
        if client.pending <= client.actors:
            self._greet(client)
        client.pending += len(ids)
        if spec.spec.plan is None:
            self._enter_calls(spec, ids, now, actions, doubtful=doubtful)
            return
        for task_id in ids:
            announced = self._announced.pop(task_id, None) if doubtful else None
            worker = self._workers.get(announced[0]) if announced is not None else None
            if doubtful and worker is None:
                self._supervision.start_from(task_id, self._first_attempt_now())
            self._create(
                spec,
                task_id,
                now,
                actions,
                doubtful=doubtful,
                ended=(worker, announced[1]) if worker is not None and announced is not None else None,
            )

    def _create(
        self,
        spec: Spec,
        ident: int,
        now: float,
        actions: List[Action],
        *,
        doubtful: bool = False,
        ended: Optional[Tuple[Worker, int]] = None,
    ) -> None:
        """A new actor; its client counts it among its pending tasks already.

        Args:
            doubtful: It is submitted again, and an earlier life of it may be lost.
            ended: The worker that is about to tell that a life of it has ended, and which.
        """
        actor = self._actors.get(ident)
        if actor is None:
            actor = self._actors[ident] = Actor(ident, now)
        actor.spec = spec
        actor.state = ActorState.WAITING
        actor.since = now
        actor.attempt = self._supervision.attempt_of(ident)
        actor.is_doubtful = doubtful
        actor.had_doubt = ident in self._failed_before
        actor.not_before = self._not_before(now) if doubtful else 0.0
        self._dead.pop(ident, None)  # Nobody had created it in time.
        self._tasks[ident] = actor
        spec.client.actors += 1
        self._awaited[actor] = None
        if actor.plan.token:
            self._tokens[actor.plan.token] = ident
        name = actor.plan.name
        if name:
            holder = self._names.setdefault(name, actor)
            if holder is not actor:
                reason = f"the name {name!r} belongs to {self._called(holder)} already; find that one with get_actor({name!r})"
                self._end_actor(actor, _REFUSED, {"reason": reason}, actions)
                return
        if ended is not None:
            self._expect_end(ended[0], actor, ident, ended[1], now)
            return
        self._look_at_actor(actor, now, actions)

    def _never_created(self, ident: int, actions: List[Action]) -> None:
        """The inputs of an actor's constructor have failed, or its client has cancelled it before they came."""
        actor = self._actors.get(ident)
        if actor is not None:
            self._lay_to_rest(
                actor, {"reason": f"{self._called(actor)} was never created: what its constructor needs has failed"}, actions
            )
        else:
            self._note_death(
                ident,
                {
                    "actor": ident,
                    "is_gone": True,
                    "reason": f"actor {show_actor(ident)} was never created: what its constructor needs has failed",
                },
            )

    def _line_up(self, spec: Spec, task_id: int, now: float, actions: List[Action]) -> None:
        """A creation or a call waits for its inputs."""
        if spec.spec.plan is None:
            super()._line_up(spec, task_id, now, actions)
        elif self._actor_called(task_id, now) is not None:
            self._actors[task_id].due = None

    def _not_before(self, now: float) -> float:
        raise AssertionError("overridden by Cluster")

    def _first_attempt_now(self) -> int:
        raise AssertionError("overridden by Cluster")

    @property
    def _is_nothing_lost(self) -> bool:
        raise AssertionError("overridden by Cluster")

    def _look_at_actors(self, now: float, actions: List[Action]) -> None:
        """Something may have made room, or it is time."""
        for actor in sorted(self._awaited, key=lambda actor: -actor.spec.spec.priority if actor.spec is not None else 0):
            if actor in self._awaited:
                self._look_at_actor(actor, now, actions)

    def _look_at_actor(self, actor: Actor, now: float, actions: List[Action]) -> None:
        """One that has no worker: give it one, or say why it has none."""
        spec = actor.spec
        if spec is None:
            if actor.due is not None and actor.due <= now:
                if actor.id in self._tasks:  # Its creation waits for inputs.
                    actor.due = None
                    return
                reason = f"there is no actor {show_actor(actor.id)}; it has ended, or was never created"
                self._lay_to_rest(actor, {"reason": reason, "was_expected": True}, actions)
            return
        actor.due = None
        if actor.not_before > now:
            actor.due = actor.not_before
            return
        if actor.is_doubtful and not self._settle_doubt(actor, spec, now, actions):
            return
        members: List[Actor] = []
        if actor.plan.group:
            members = [
                other
                for other in self._actors.values()
                if other is not actor
                and other.spec is not None
                and other.spec.client is spec.client
                and other.plan.group == actor.plan.group
            ]
        worker = choose_home(actor, self._workers.values(), members)
        if worker is not None:
            self._move_in(actor, spec, worker, now, actions)
            return
        need = spec.group.need
        if any(can_ever_live(worker, need) for worker in self._workers.values()):
            actor.since = now  # It waits for room, as long as that takes.
            return
        notice_at = actor.since + INFEASIBLE_NOTICE_SECONDS
        timeout = spec.spec.placement_timeout
        fail_at = actor.since + timeout if timeout >= 0 else math.inf
        if fail_at <= now:
            text = explain(spec.spec.name, need, list(self._workers.values()), client=spec.client.name)
            self._end_actor(actor, _INFEASIBLE, {"reason": text}, actions)
            return
        if notice_at <= now and not actor.is_noticed:
            actor.is_noticed = True
            text = explain(spec.spec.name, need, list(self._workers.values()), client=spec.client.name)
            actions.append(Notice(spec.client.number, actor.id, text))
        actor.due = fail_at if actor.is_noticed else min(notice_at, fail_at)
        if actor.due == math.inf:
            actor.due = None

    def _settle_doubt(self, actor: Actor, spec: Spec, now: float, actions: List[Action]) -> bool:
        """Nobody has brought it back: if it had a life, this is its next; whether there may be one."""
        actor.is_doubtful = False
        if self._is_nothing_lost and not actor.had_doubt:
            return True
        if not self._may_restart(actor, spec, now):
            reason = (
                f"{self._called(actor)} may have been lost while the coordinator was down; {_no_more(spec.spec.retries)[2:]}"
            )
            self._end_actor(actor, _LOST, {"reason": reason}, actions)
            return False
        actor.restarts += 1
        actor.restarted_at.append(now)
        actor.had_doubt = True
        return True

    def _move_in(self, actor: Actor, spec: Spec, worker: Worker, now: float, actions: List[Action]) -> None:
        need = spec.group.need
        lease = worker.cards.open(need, spec.group.depth) if need.needs_gpu and worker.cards is not None else None
        batch = Batch(spec, actor.attempt, slots_of(worker, need), now, -1, 0.0, lease)
        self._house(actor, worker, batch)
        cards, ordinal = (lease.cards, lease.ordinal) if lease is not None else ((), 0)
        actions.append(Assign(worker.id, spec.spec, [(actor.id, actor.attempt)], cards, ordinal))
        if actor.doubtful:
            self._end_doubtful(actor, actions)
        self._forward(actor, actions)
        self._settle(worker, now)

    def _house(self, actor: Actor, worker: Worker, batch: Batch) -> None:
        """The one way onto a worker."""
        self._awaited.pop(actor, None)
        actor.worker = worker
        actor.batch = batch
        actor.state = ActorState.STARTING
        actor.due = None
        worker.actors[actor.id] = batch
        worker.add(batch, 1)

    def _leave(self, actor: Actor) -> Worker:
        """The one way off a worker, which reports nothing of it any more."""
        worker, batch = actor.worker, actor.batch
        assert worker is not None, actor.id
        assert batch is not None, actor.id
        del worker.actors[actor.id]
        worker.remove(batch, 1)
        actor.worker = None
        actor.batch = None
        actor.is_over = False
        return worker

    def _end_doubtful(self, actor: Actor, actions: List[Action]) -> None:
        """If this life is another, what an earlier one may have begun, and may run once only, ends."""
        doubtful, actor.doubtful = actor.doubtful, {}
        if actor.had_doubt:
            for task_id in doubtful:
                spec = actor.parked.get(task_id)
                if spec is not None and spec.spec.retries == 0:
                    del actor.parked[task_id]
                    self._end_call(spec, task_id, _ACTOR_DIED, self._lost_meanwhile(actor), actions)

    def _on_actor_started(self, event: ev.ActorStarted, now: float, actions: List[Action]) -> None:
        actor = self._actors.get(event.actor)
        if actor is None or actor.worker is None or actor.worker.id != event.worker or actor.attempt != event.attempt:
            return
        if actor.state is ActorState.STARTING:
            actor.state = ActorState.ALIVE

    # --- they end

    def _on_actor_killed(self, event: ev.ActorKilled, now: float, actions: List[Action]) -> None:
        actor = self._actors.get(event.actor)
        if actor is None or (actor.state is ActorState.ENDING and (actor.is_forced or not event.force)):
            return
        worker, batch = actor.worker, actor.batch
        if worker is None or batch is None:
            if actor.spec is not None:
                self._end_actor(actor, _CANCELLED, {"reason": f"{self._called(actor)} was {event.why}"}, actions)
            return
        actor.state = ActorState.ENDING
        actor.is_forced = event.force
        actor.why = event.why
        if worker.away_until is None:
            actions.append(Recall(worker.id, [(actor.id, batch.attempt)], kill=True, force=event.force))

    def _on_life_ended(
        self, worker: Worker, ident: int, status: int, payload: Any, seconds: float, now: float, actions: List[Action]
    ) -> None:
        """A worker has reported the end of an actor's process, or is lost."""
        actor = self._actors[ident]
        spec, batch = actor.spec, actor.batch
        assert spec is not None, ident
        assert batch is not None, ident
        was_short = now - batch.assigned_at < EARLY_DEATH_SECONDS
        self._leave(actor)
        host = worker.facts.hostname or worker.id
        goes_on = status in MOVES or status in DEATHS
        is_moving = status in MOVES
        if actor.state is ActorState.ENDING or ident in self._cancelled or ident in self._adopted:
            goes_on = False
        elif status in DEATHS:
            goes_on = self._may_restart(actor, spec, now)
        elif status == _HANDED_BACK:
            goes_on = spec.spec.retries != 0
        told = payload if isinstance(payload, dict) else {}
        why = str(told.get("reason") or "")
        crash = {key: told[key] for key in ("exit", "stderr", "pid") if key in told}
        text = _ends(self._called(actor), host, status, why, actor.why)
        if not goes_on:
            if status in DEATHS and actor.state is not ActorState.ENDING:
                text += _no_more(spec.spec.retries)
            cause = payload if status == _RAISED else None
            details = {
                **crash,
                "reason": text,
                "worker": f"{host} ({worker.id})",
            }
            if type(cause) is bytes:
                details["cause"] = cause
            was_told = actor.state is ActorState.ENDING
            end_status = _CANCELLED if was_told else status
            self._end_actor(
                actor,
                end_status,
                details,
                actions,
                payload={"reason": text}
                if was_told
                else {**payload, "actor_reason": text}
                if isinstance(payload, dict)
                else payload,
                worker=worker,
                seconds=seconds,
            )
            return
        actor.deaths = actor.deaths + 1 if status in DEATHS and was_short else 0
        if is_moving:
            self._supervision.give_back(ident)
        else:
            actor.restarts += 1
            actor.restarted_at.append(now)
            self._supervision.strike(ident, worker.id, status, retries=1 << 30)
            actions.append(Retrying(ident, self._supervision.attempt_of(ident), worker.id, status))
        actor.attempt = self._supervision.attempt_of(ident)
        if status == _NOT_RUN:  # So were its calls.
            self._park_again(actor, worker, actions)
        else:
            details = {
                **crash,
                "reason": f"{text}; its state was lost, and it is started again",
                "worker": f"{host} ({worker.id})",
                "is_gone": False,
            }
            self._part(actor, worker, self._details(actor, details), actions)
        actor.state = ActorState.WAITING if status == _NOT_RUN else ActorState.RESTARTING
        delays = CRASH_RESTART_DELAYS_SECONDS
        actor.not_before = now + delays[min(actor.deaths, len(delays) - 1)]
        actor.since = now
        self._awaited[actor] = None
        self._look_at_actor(actor, now, actions)

    def _may_restart(self, actor: Actor, spec: Spec, now: float) -> bool:
        limit = spec.spec.retries
        period = actor.plan.restart_seconds
        while period and actor.restarted_at and actor.restarted_at[0] <= now - period:
            actor.restarted_at.popleft()
        return limit < 0 or len(actor.restarted_at) < limit

    def _end_actor(
        self,
        actor: Actor,
        status: int,
        details: Dict[str, Any],
        actions: List[Action],
        *,
        payload: Any = None,
        worker: Optional[Worker] = None,
        seconds: float = 0.0,
    ) -> None:
        """An actor that is on no worker is gone: its client hears of it, then who called it."""
        spec = actor.spec
        assert spec is not None, actor.id
        client = spec.client
        del self._tasks[actor.id]
        self._adopted.pop(actor.id, None)
        self._cancelled.pop(actor.id, None)
        self._supervision.forget(actor.id)
        self._locality.forget(actor.id)
        client.pending -= 1
        client.actors -= 1
        if payload is not None and worker is not None:
            actions.append(Deliver(client.number, worker.id, [(actor.id, status, payload, seconds)]))
        else:
            actions.append(Fail(client.number, actor.id, status, {**details, "attempts": []}))
        if actor.id in self._dependencies:
            self._fail_dependents(actor.id, actions)
        if worker is not None:
            for task_id in actor.calls:
                self._end_call(worker.calls.pop(task_id).spec, task_id, _ACTOR_DIED, self._details(actor, details), actions)
            actor.calls = {}
        self._lay_to_rest(actor, details, actions)

    def _lay_to_rest(self, actor: Actor, details: Dict[str, Any], actions: List[Action]) -> None:
        """Out of all tables but that of reasons."""
        details = self._details(actor, details)
        self._end_all_calls(actor, details, actions)
        self._actors.pop(actor.id, None)
        self._awaited.pop(actor, None)
        if self._names.get(actor.plan.name) is actor:
            del self._names[actor.plan.name]
        self._tokens.pop(actor.plan.token, None)
        actor.state = ActorState.DEAD
        self._note_death(actor.id, details)

    def _lost_meanwhile(self, actor: Actor) -> Dict[str, Any]:
        called = self._called(actor)
        reason = f"{called} was lost while the coordinator was down, and its state with it; it was started again"
        return self._details(actor, {"reason": reason, "is_gone": False})

    def _note_death(self, ident: int, details: Dict[str, Any]) -> None:
        self._dead[ident] = details
        if len(self._dead) > DEAD_ACTORS_KNOWN:
            self._dead.popitem(last=False)

    def _details(self, actor: Actor, details: Dict[str, Any]) -> Dict[str, Any]:
        return {"actor": actor.id, "name": actor.plan.name, "is_gone": True, **details}

    @staticmethod
    def _called(actor: Actor) -> str:
        """What people call it."""
        name = f" {actor.plan.name!r}" if actor.plan.name else ""
        kind = f" ({actor.spec.spec.name})" if actor.spec is not None else ""
        return f"actor{name} {show_actor(actor.id)}{kind}"

    # --- one by one

    def _spec_at(self, actor: Actor, task_id: int) -> Spec:
        """Of a call of an actor, or of its life."""
        if task_id == actor.id:
            assert actor.spec is not None, task_id
            return actor.spec
        if task_id in actor.calls:
            assert actor.worker is not None, task_id
            return actor.worker.calls[task_id].spec
        spec = actor.parked.get(task_id)
        for line in actor.lines.values():
            spec = line.get(task_id) or spec
        assert spec is not None, f"call {task_id} is nowhere at {show_actor(actor.id)}"
        return spec

    def _cancel_at_actor(self, actor: Actor, task_id: int, *, force: bool, now: float, actions: List[Action]) -> None:
        """The client of a call, or of the actor itself, does not want it any more."""
        if task_id == actor.id:
            self._on_actor_killed(ev.ActorKilled(task_id, "cancelled by its client", force), now, actions)
        else:
            self._cancel_call(actor, task_id, force=force, actions=actions)

    def _expect_end(self, worker: Worker, actor: Actor, task_id: int, attempt: int, now: float) -> None:
        raise AssertionError("overridden by Returns")

    def _is_here_again(self, client: Client, spec: Spec, task_id: int, now: float, actions: List[Action]) -> bool:
        raise AssertionError("overridden by Returns")

    # --- looking

    def actors_due(self) -> Optional[float]:
        """When an actor without a worker is to be looked at."""
        due = [actor.due for actor in self._awaited if actor.due is not None]
        return min(due) if due else None

    def find_actor(self, *, name: str = "", ident: int = 0) -> Optional[Actor]:
        """The living actor with this name, or id."""
        return self._names.get(name) if name else self._actors.get(ident)

    def actor_of_token(self, oid: int) -> int:
        """The living actor whose handles refer to this object; 0 if it is no such object."""
        return self._tokens.get(oid, 0)

    def actor_views(self) -> List[Dict[str, Any]]:
        """One dict for each actor, in order of creation; the shape of `mesh.actors()`."""
        return [actor_view(actor) for actor in self._actors.values() if actor.spec is not None]

    def actors_of(self, number: ClientNumber) -> List[int]:
        """Actors of one client."""
        return [ident for ident, actor in self._actors.items() if actor.spec is not None and ident >> SEQUENCE_BITS == number]


def actor_view(actor: Actor) -> Dict[str, Any]:
    """One actor for people: `id` as they type it, `number` for programs, and how it is."""
    assert actor.spec is not None, actor.id
    worker = actor.worker
    lease = actor.batch.lease if actor.batch is not None else None
    return {
        "id": show_actor(actor.id),
        "number": actor.id,
        "name": actor.plan.name,
        "class_name": actor.spec.spec.name,
        "state": actor.state.value,
        "worker": worker.id if worker is not None else "",
        "hostname": worker.facts.hostname if worker is not None else "",
        "cards": list(lease.cards) if lease is not None else [],
        "restarts": actor.restarts,
        "max_restarts": actor.spec.spec.retries,
        "calls": actor.pending,
        "detached": actor.plan.is_detached and not actor.plan.token,
        "group": actor.plan.group,
        "owner": actor.spec.client.name,
    }


def _ends(called: str, host: str, status: int, why: str, told: str) -> str:
    """What has become of it, for people."""
    if told:
        return f"{called} was {told}"
    if status == _RAISED:
        return f"{called} has no instance: its constructor failed on {host}"
    if status == _OK:
        return f"{called} has ended itself on {host}"
    if status == _LOST:
        return f"{called} was lost with its worker {host}{': ' + why if why else ''}"
    if status in MOVES:
        return f"{called} had to leave its worker {host}{': ' + why if why else ''}"
    return f"the process of {called} on {host} died{': ' + why if why else ''}"


def _no_more(limit: int) -> str:
    if limit == 0:
        return "; its state is lost, and it is not started again (max_restarts=0)"
    return f"; its state is lost, and it has been started again {limit} {'time' if limit == 1 else 'times'} already (max_restarts={limit})"
