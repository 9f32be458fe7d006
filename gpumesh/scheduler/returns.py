"""Actors and calls whose worker or client has gone, or is back with what the tables do not know. What cluster.py does for tasks. Pure.

A worker that is back says which lives and which calls it has; a client that is back submits again what has not ended for it. What an earlier coordinator
may have begun, and nobody brings back, is not begun again without leave.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from gpumesh.config import RESULT_GRACE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import Action, Fail, Forget, Recall
from gpumesh.scheduler.actor_states import Actor, ActorState, Call
from gpumesh.scheduler.actors import Actors
from gpumesh.scheduler.delays import Delayed
from gpumesh.scheduler.homes import slots_of
from gpumesh.scheduler.states import Batch, Client, Spec, Worker

_CANCELLED = int(Status.CANCELLED)
_LOST = int(Status.LOST)
_ACTOR_DIED = int(Status.ACTOR_DIED)


class Returns(Actors):
    """See the module."""

    def _lose_actors(self, worker: Worker, reason: str, now: float, actions: List[Action]) -> None:
        """A worker is gone, with all that lived there."""
        for ident in list(worker.actors):
            self._on_life_ended(worker, ident, _LOST, {"reason": reason}, 0.0, now, actions)

    def _take_back_unseen_actors(self, worker: Worker, has: Dict[int, int], actions: List[Action]) -> None:
        """A worker is back: what was sent to it, and it has nothing of, it has never seen. `has`: attempt by task."""
        recalls: List[Tuple[int, int]] = []
        for ident, batch in list(worker.actors.items()):
            actor = self._actors[ident]
            if has.get(ident) == batch.attempt:
                if actor.state is ActorState.ENDING:
                    actions.append(Recall(worker.id, [(ident, batch.attempt)], kill=True, force=actor.is_forced))
                continue
            self._leave(actor)
            self._park_again(actor, worker, actions)
            if actor.state is ActorState.ENDING:
                self._end_actor(actor, _CANCELLED, {"reason": f"{self._called(actor)} was {actor.why}"}, actions)
                continue
            self._supervision.give_back(ident)
            actor.attempt = self._supervision.attempt_of(ident)
            actor.state = ActorState.WAITING
            self._awaited[actor] = None
        for task_id, call in list(worker.calls.items()):
            if has.get(task_id) == call.attempt:
                if task_id in self._cancelled:
                    recalls.append((task_id, call.attempt))
                continue
            del worker.calls[task_id]
            del call.actor.calls[task_id]
            if task_id in self._cancelled:
                self._end_call(call.spec, task_id, _CANCELLED, {"reason": "cancelled before it started"}, actions)
                continue
            if task_id in self._adopted:
                self._drop_adopted(call.spec, task_id, actions)
                continue
            self._supervision.give_back(task_id)
            call.actor.parked = dict(sorted({**call.actor.parked, task_id: call.spec}.items()))
        if recalls:
            actions.append(Recall(worker.id, recalls, kill=True))

    def _forward_all(self, worker: Worker, actions: List[Action]) -> None:
        """A worker is back: what was parked while it was away goes there."""
        for ident in list(worker.actors):
            self._forward(self._actors[ident], actions)

    def _adopt(self, worker: Worker, spec: Spec, ident: int, attempt: int, held: ev.Held, now: float) -> bool:
        """A worker that is back has an actor that we did not know to be there; whether that is possible."""
        known = self._actors.get(ident)
        if known is not None and known.is_housed:
            return False
        if ident in self._dead:
            if not self._dead[ident].get("was_expected"):
                return False  # It has ended meanwhile.
            del self._dead[ident]
        need = spec.group.need
        lease = None
        if need.needs_gpu:
            lease = worker.cards.reopen(need, tuple(held.cards), held.ordinal) if worker.cards is not None else None
            if lease is None:
                return False
        actor = known if known is not None else Actor(ident, now)
        self._actors[ident] = actor
        if actor.spec is None:
            actor.spec = spec
            if not spec.client.pending:
                self._greet(spec.client)
            spec.client.pending += 1
            spec.client.actors += 1
            self._tasks[ident] = actor
            self._adopted[ident] = None
            if actor.plan.token:
                self._tokens[actor.plan.token] = ident
            if actor.plan.name:
                self._names.setdefault(actor.plan.name, actor)
        self._supervision.resume(ident, attempt)
        actor.attempt = attempt
        actor.doubtful = {}
        actor.had_doubt = attempt > 1  # A call that it has not may have been begun by a life before.
        self._house(actor, worker, Batch(spec, attempt, slots_of(worker, need), now, -1, 0.0, lease))
        return True

    def _adopt_call(self, worker: Worker, spec: Spec, task_id: int, attempt: int) -> bool:
        """The same of a call; its actor was adopted before."""
        actor = self._actors.get(spec.spec.actor)
        if actor is None or actor.worker is not worker:
            return False
        where = self._tasks.get(task_id)
        if where is None:
            spec.client.pending += 1
            self._adopted[task_id] = None
        elif isinstance(where, Delayed):
            self._delays.drop(task_id)
        elif where is actor and task_id not in actor.calls:
            self._withdraw_call(actor, task_id)
        else:
            return False
        self._tasks[task_id] = actor
        self._supervision.resume(task_id, attempt)
        actor.newest[spec.client.number] = max(task_id, actor.newest.get(spec.client.number, 0))
        actor.calls[task_id] = None
        worker.calls[task_id] = Call(actor, spec, attempt)
        return True

    def _expect_end(self, worker: Worker, actor: Actor, task_id: int, attempt: int, now: float) -> None:
        """A worker that is back is about to report the end of something that was submitted again."""
        if task_id == actor.id:
            if actor.spec is not None and not actor.is_housed:
                self._supervision.resume(task_id, attempt)
                actor.attempt = attempt
                self._house(actor, worker, Batch(actor.spec, attempt, 0, now, -1, 0.0, None))
                actor.is_over = True
        elif actor.worker is worker and task_id not in actor.calls:
            self._adopt_call(worker, self._spec_at(actor, task_id), task_id, attempt)

    def _is_here_again(self, client: Client, spec: Spec, task_id: int, now: float, actions: List[Action]) -> bool:
        """Whether what a client submits again is here, and goes on."""
        if client.confirmed is not None:
            client.confirmed[task_id] = None
        if task_id in self._tasks:
            self._adopted.pop(task_id, None)
            return True
        if client.number in self._expired_clients():
            self._refuse_expired(client, spec, task_id, actions)
            return True
        announced = self._announced.get(task_id) if spec.spec.actor else None
        worker = self._workers.get(announced[0]) if announced is not None else None
        if worker is None:
            return False
        if client.pending <= client.actors:
            self._greet(client)
        client.pending += 1
        reason = f"worker {worker.facts.hostname or worker.id} was lost with its result"
        self._tasks[task_id] = self._delays.add(task_id, spec, now + RESULT_GRACE_SECONDS, lost=(worker.id, reason))
        return True

    def _expired_clients(self) -> Any:
        raise AssertionError("overridden by Cluster")

    def _refuse_expired(self, client: Client, spec: Spec, task_id: int, actions: List[Action]) -> None:
        reason = "its client was away for too long, so its actors were ended and its calls given up"
        status = _ACTOR_DIED if spec.spec.actor else _LOST
        actions.append(
            Fail(client.number, task_id, status, {"reason": reason, "actor": spec.spec.actor or task_id, "attempts": []})
        )

    def _lose_actors_of(self, client: Client, actions: List[Action]) -> None:
        """A client has left: its calls, its actors, and the calls of others at those."""
        gone = self._drop_calls_of(client, actions)
        for actor in [actor for actor in self._actors.values() if actor.spec is not None and actor.spec.client is client]:
            gone.append(actor.id)
            self._disown(actor, actions)
        for task_id in gone:
            self._tasks.pop(task_id, None)
            self._forget_call(task_id)
            client.pending -= 1
        if gone:
            actions.append(Forget(gone))

    def _disown(self, actor: Actor, actions: List[Action]) -> None:
        """Its client does not want it any more; it holds what it has until its worker reports its end."""
        worker, batch = actor.worker, actor.batch
        reason = f"{self._called(actor)} has ended with its owner"
        if actor.spec is not None:
            actor.spec.client.actors -= 1
        if worker is not None and batch is not None:
            calls, actor.calls = actor.calls, {}
            del worker.actors[actor.id]
            worker.orphans[actor.id, batch.attempt] = batch
            self._orphans.setdefault(actor.id, []).append(batch.attempt)
            actor.worker = None
            actor.batch = None
            if worker.away_until is None:
                actions.append(Recall(worker.id, [(actor.id, batch.attempt)], kill=True))
            for task_id in calls:
                spec = worker.calls.pop(task_id).spec
                self._end_call(spec, task_id, _ACTOR_DIED, self._details(actor, {"reason": reason}), actions)
        self._lay_to_rest(actor, {"reason": reason}, actions)

    def _drop_of_actor(self, client: Client, actor: Actor, task_id: int, actions: List[Action]) -> None:
        """Its client does not wait for this any more: a call, or the life of an actor. The caller forgets the task."""
        if task_id == actor.id:
            self._disown(actor, actions)
        else:
            self._drop_call(actor, task_id, actions)
