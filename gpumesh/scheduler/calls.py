"""How calls get to their actors, and back with a result or without one. What becomes of the actors themselves is in actors.py. Pure.

    submitted ──> parked at the actor ──> sent to its worker, which keeps the order ──> ended
                     ^     its actor has no worker, or the worker is away     │
                     └── given back, or tried again because it may be ────────┘

Promises:

1. Calls of one client reach the actor's worker in the order in which they were submitted, also if the inputs of some come later.
2. A call that was sent to one life of an actor is never sent to another unless its client allows retries, or its worker has never seen it.
3. A call waits only while its actor is coming; when the actor is gone, it ends with the reason.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from gpumesh.config import RECOVERY_SECONDS
from gpumesh.model.actors import show_actor
from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.actions import Action, Assign, Deliver, Fail, Forget, Recall, Retrying
from gpumesh.scheduler.actor_states import Actor, ActorState, Call
from gpumesh.scheduler.dependencies import Waiting
from gpumesh.scheduler.flow import Flow
from gpumesh.scheduler.states import Client, Spec, Worker

_OK = int(Status.OK)
_RETRYABLE = int(Status.RETRYABLE)
_OUT_OF_MEMORY = int(Status.OUT_OF_MEMORY)
_CRASHED = int(Status.CRASHED)
_NOT_RUN = int(Status.NOT_RUN)
_HANDED_BACK = int(Status.HANDED_BACK)
_CANCELLED = int(Status.CANCELLED)
_LOST = int(Status.LOST)
_ACTOR_DIED = int(Status.ACTOR_DIED)

TRIED_AGAIN = frozenset((_RETRYABLE, _OUT_OF_MEMORY, _CRASHED))
GIVEN_BACK = frozenset((_NOT_RUN, _HANDED_BACK))

Result = Tuple[int, int, int, Any, float]
"""(task id, attempt, Status, payload or dict, run seconds)."""


class Calls(Flow):
    """The tables of actors, and all that moves their calls."""

    def __init__(self) -> None:
        super().__init__()
        self._actors: Dict[int, Actor] = {}
        self._dead: OrderedDict[int, Dict[str, Any]] = (
            OrderedDict()
        )  # Actors that are gone, and why: details for who calls them.
        self._lined: Dict[Actor, None] = {}  # With calls that wait for inputs, or behind such.
        self._missing: Dict[
            int, Actor
        ] = {}  # Calls that are to be submitted again, with inputs that were not here; they keep their places.

    # --- in

    def _enter_calls(self, spec: Spec, ids: Sequence[int], now: float, actions: List[Action], *, doubtful: bool) -> None:
        """New calls. `doubtful`: submitted again after a restart, so an earlier life of the actor may have begun them."""
        target = spec.spec.actor
        actor = self._actor_called(target, now)
        if actor is None:
            for task_id in ids:
                self._end_call(spec, task_id, _ACTOR_DIED, self._dead[target], actions)
            return
        if doubtful and spec.spec.retries == 0 and actor.had_doubt and actor.is_housed:
            for task_id in ids:
                self._end_call(spec, task_id, _ACTOR_DIED, self._lost_meanwhile(actor), actions)
            return
        if doubtful and spec.spec.retries == 0 and actor.newest.get(spec.client.number, 0) > min(ids):
            ids = self._without_overtaken(actor, spec, ids, actions)
            if not ids:
                return
        self._tasks.update(dict.fromkeys(ids, actor))
        if self._missing:
            for task_id in ids:
                self._missing.pop(task_id, None)
        line = actor.lines.get(spec.client.number)
        if line is not None:
            line.update(dict.fromkeys(ids, spec))
            return
        if doubtful and not actor.is_housed:
            actor.doubtful.update(dict.fromkeys(ids))
        self._pass_on(actor, spec, ids, actions)

    def _without_overtaken(self, actor: Actor, spec: Spec, ids: Sequence[int], actions: List[Action]) -> List[int]:
        """A worker has later calls of the client and not these: an earlier coordinator has ended them, and the word was lost with it."""
        newest = actor.newest[spec.client.number]
        reason = f"it was ended with an earlier life of actor {show_actor(actor.id)}, whose state is lost, before the coordinator was lost"
        for task_id in ids:
            if task_id < newest:
                details = {"actor": actor.id, "name": actor.plan.name, "is_gone": False, "reason": reason}
                self._end_call(spec, task_id, _ACTOR_DIED, details, actions)
        return [task_id for task_id in ids if task_id > newest]

    def _actor_called(self, target: int, now: float) -> Optional[Actor]:
        """The actor that calls are for; one that nobody has heard of may still be created. None: it is gone."""
        actor = self._actors.get(target)
        if actor is None and target not in self._dead:
            actor = self._actors[target] = Actor(target, now)
            actor.due = now + RECOVERY_SECONDS
            self._awaited[actor] = None
        return actor

    def _pass_on(self, actor: Actor, spec: Spec, ids: Sequence[int], actions: List[Action]) -> None:
        """Calls whose turn it is."""
        if actor.parked or not _takes_calls(actor):
            actor.parked.update(dict.fromkeys(ids, spec))
        else:
            self._send_calls(actor, spec, ids, actions)

    def _send_calls(self, actor: Actor, spec: Spec, ids: Sequence[int], actions: List[Action]) -> None:
        worker = actor.worker
        assert worker is not None, actor.id
        call = Call(actor, spec, 1)
        actor.calls.update(dict.fromkeys(ids))
        worker.calls.update(dict.fromkeys(ids, call))
        tasks = [(task_id, 1) for task_id in ids]
        if self._supervision:
            for index, task_id in enumerate(ids):
                attempt = self._supervision.attempt_of(task_id)
                if attempt != 1:
                    tasks[index] = (task_id, attempt)
                    worker.calls[task_id] = Call(actor, spec, attempt)
        actions.append(Assign(worker.id, spec.spec, tasks))

    def _forward(self, actor: Actor, actions: List[Action]) -> None:
        """Send what is parked, if there is somebody to send it to."""
        if not actor.parked or not _takes_calls(actor):
            return
        parked, actor.parked = actor.parked, {}
        ids: List[int] = []
        last: Optional[Spec] = None
        for task_id, spec in parked.items():
            if spec is not last and last is not None:
                self._send_calls(actor, last, ids, actions)
                ids = []
            last = spec
            ids.append(task_id)
        if last is not None:
            self._send_calls(actor, last, ids, actions)

    # --- those that wait for inputs, and those behind them

    def _line_up(self, spec: Spec, task_id: int, now: float, actions: List[Action]) -> None:
        """A call waits for its inputs."""
        actor = self._actor_called(spec.spec.actor, now)
        if actor is None:
            waiting = self._tasks[task_id]
            assert isinstance(waiting, Waiting), task_id
            self._dependencies.drop(task_id, waiting)
            self._end_call(spec, task_id, _ACTOR_DIED, self._dead[spec.spec.actor], actions)
            return
        self._missing.pop(task_id, None)
        actor.lines.setdefault(spec.client.number, {})[task_id] = None
        self._lined[actor] = None

    def _keep_place(self, spec: Spec, task_id: int, now: float) -> None:
        """A call whose inputs are not here was sent back, and will be submitted again: none of the later ones overtakes it."""
        actor = self._actor_called(spec.spec.actor, now) if spec.spec.plan is None else None
        if actor is not None:
            self._missing[task_id] = actor
            actor.lines.setdefault(spec.client.number, {})[task_id] = None
            self._lined[actor] = None

    def _give_up_place(self, task_id: int) -> None:
        """It will not be submitted again; `_advance` follows."""
        self._missing.pop(task_id, None)

    def _inputs_came(self, spec: Spec, task_id: int) -> None:
        """A call that waited for its inputs is ready; `_advance` follows."""
        actor = self._actors[spec.spec.actor]
        self._tasks[task_id] = actor
        actor.lines[spec.client.number][task_id] = spec

    def _advance(self, actions: List[Action]) -> None:
        """Pass on the calls at the heads of their lines that are ready; those that have ended leave."""
        for actor in list(self._lined):
            for number, line in list(actor.lines.items()):
                while line:
                    task_id, spec = next(iter(line.items()))
                    if spec is None and (task_id in self._tasks or task_id in self._missing):
                        break
                    del line[task_id]
                    if spec is not None and task_id in self._tasks:
                        self._pass_on(actor, spec, [task_id], actions)
                if not line:
                    del actor.lines[number]
            if not actor.lines:
                del self._lined[actor]

    # --- out

    def _take_ends(self, worker: Worker, results: Sequence[Result], now: float, actions: List[Action]) -> List[Result]:
        """Ends of calls, and of actors; those of others are left."""
        calls = worker.calls
        rest: List[Result] = []
        delivered: Dict[ClientNumber, List[Tuple[int, int, Any, float]]] = {}
        awaited: List[Tuple[int, bool]] = []
        changed: Dict[Actor, None] = {}
        has_room = False
        for result in results:
            task_id, attempt, status, payload, seconds = result
            call = calls.get(task_id)
            if call is None or call.attempt != attempt:
                batch = worker.actors.get(task_id)
                if batch is not None and batch.attempt == attempt:
                    self._on_life_ended(worker, task_id, status, payload, seconds, now, actions)
                    has_room = True
                else:
                    rest.append(result)
                continue
            actor, spec, _ = call
            del calls[task_id]
            del actor.calls[task_id]
            if status in TRIED_AGAIN or status in GIVEN_BACK:
                if self._cancelled and task_id in self._cancelled:
                    self._end_call(spec, task_id, _CANCELLED, {"reason": "cancelled"}, actions)
                    continue
                if task_id in self._adopted and (status == _NOT_RUN or spec.spec.retries):
                    self._drop_adopted(spec, task_id, actions)
                    continue
                if self._is_to_come_back(spec, task_id, worker, status, actions):
                    actor.parked[task_id] = spec
                    changed[actor] = None
                    continue
            out = delivered.get(spec.client.number)
            if out is None:
                out = delivered[spec.client.number] = []
            out.append((task_id, status, payload, seconds))
            del self._tasks[task_id]
            spec.client.pending -= 1
            self._forget_call(task_id)
            if self._dependencies and task_id in self._dependencies:
                awaited.append((task_id, status == _OK))
        for number, outcomes in delivered.items():
            actions.append(Deliver(number, worker.id, outcomes))
        for actor in changed:
            actor.parked = dict(sorted(actor.parked.items()))  # Ids of one client grow in the order of its calls.
            self._forward(actor, actions)
        groups = self._release(awaited, now, actions) if awaited else ()
        if has_room:
            self._settle(worker, now)
            self._refill(worker, now, actions)
        for group in groups:
            if group.count and group.workers and not group.is_saturated:
                self._distribute(group, now, actions)
        return rest

    def _is_to_come_back(self, spec: Spec, task_id: int, worker: Worker, status: int, actions: List[Action]) -> bool:
        """Whether a call that has not ended well is tried again; its attempt has moved on then."""
        if status == _NOT_RUN:
            self._supervision.give_back(task_id)
            return True
        if spec.spec.retries == 0 or not self._supervision.strike(task_id, worker.id, status, retries=spec.spec.retries):
            return False
        actions.append(Retrying(task_id, self._supervision.attempt_of(task_id), worker.id, status))
        return True

    def _part(self, actor: Actor, worker: Worker, details: Dict[str, Any], actions: List[Action]) -> None:
        """A life of an actor is over: the calls that it had end, unless they may be tried again in the next."""
        again: Dict[int, Spec] = {}
        calls, actor.calls = actor.calls, {}
        for task_id in calls:
            spec = worker.calls.pop(task_id).spec
            if task_id in self._cancelled:
                self._end_call(spec, task_id, _CANCELLED, {"reason": "cancelled"}, actions)
            elif spec.spec.retries and task_id in self._adopted:
                self._drop_adopted(spec, task_id, actions)
            elif spec.spec.retries and self._supervision.strike(task_id, worker.id, _LOST, retries=spec.spec.retries):
                actions.append(Retrying(task_id, self._supervision.attempt_of(task_id), worker.id, _LOST))
                again[task_id] = spec
            else:
                self._end_call(spec, task_id, _ACTOR_DIED, details, actions)
        actor.parked = {**again, **actor.parked}

    def _park_again(self, actor: Actor, worker: Worker, actions: List[Action]) -> None:
        """The life that these calls were sent to has never begun: they wait for the next, but for those whose arguments are not here."""
        again: Dict[int, Spec] = {}
        calls, actor.calls = actor.calls, {}
        for task_id in calls:
            spec = worker.calls.pop(task_id).spec
            if task_id in self._adopted:
                self._drop_adopted(spec, task_id, actions)
            else:
                again[task_id] = spec
        actor.parked = {**again, **actor.parked}

    def _drop_adopted(self, spec: Spec, task_id: int, actions: List[Action]) -> None:
        """A call whose arguments are not here is to be made again: its client submits it when it is back."""
        self._tasks.pop(task_id, None)
        self._forget_call(task_id)
        spec.client.pending -= 1
        actions.append(Forget([task_id]))

    def _end_call(self, spec: Spec, task_id: int, status: int, details: Dict[str, Any], actions: List[Action]) -> None:
        """A call ends by our decision; it is in none of its actor's tables any more."""
        attempts = self._supervision.attempts(task_id)
        self._tasks.pop(task_id, None)
        self._forget_call(task_id)
        spec.client.pending -= 1
        actions.append(Fail(spec.client.number, task_id, status, {**details, "attempts": attempts}))
        if task_id in self._dependencies:
            self._fail_dependents(task_id, actions)

    def _forget_call(self, task_id: int) -> None:
        if self._cancelled:
            self._cancelled.pop(task_id, None)
        if self._adopted:
            self._adopted.pop(task_id, None)
        self._supervision.forget(task_id)
        self._locality.forget(task_id)

    def _end_all_calls(self, actor: Actor, details: Dict[str, Any], actions: List[Action]) -> None:
        """An actor is gone: whatever waited for it ends."""
        parked, actor.parked = actor.parked, {}
        for task_id, spec in parked.items():
            self._end_call(spec, task_id, _ACTOR_DIED, details, actions)
        lines, actor.lines = actor.lines, {}
        self._lined.pop(actor, None)
        for line in lines.values():
            for task_id, ready in line.items():
                self._missing.pop(task_id, None)
                where = self._tasks.get(task_id)
                if isinstance(where, Waiting):
                    self._dependencies.drop(task_id, where)
                    self._end_call(where.spec, task_id, _ACTOR_DIED, details, actions)
                elif ready is not None and where is actor:
                    self._end_call(ready, task_id, _ACTOR_DIED, details, actions)

    # --- somebody does not want them

    def _cancel_call(self, actor: Actor, task_id: int, *, force: bool, actions: List[Action]) -> None:
        """Its client does not want a call any more: what is not sent ends now, what is sent is asked back."""
        worker = actor.worker
        call = worker.calls.get(task_id) if worker is not None else None
        if worker is None or call is None:
            spec = self._withdraw_call(actor, task_id)
            self._end_call(spec, task_id, _CANCELLED, {"reason": "cancelled before it started"}, actions)
        elif force or task_id not in self._cancelled:
            self._cancelled[task_id] = None
            if worker.away_until is None:
                actions.append(Recall(worker.id, [(task_id, call.attempt)], kill=True, force=force))

    def _withdraw_call(self, actor: Actor, task_id: int) -> Spec:
        """Take a call that is not sent out of its actor's tables."""
        actor.doubtful.pop(task_id, None)
        spec = actor.parked.pop(task_id, None)
        for line in actor.lines.values():
            spec = line.pop(task_id, spec)
        assert spec is not None, f"call {task_id} is nowhere at {show_actor(actor.id)}"
        return spec

    def _drop_call(self, actor: Actor, task_id: int, actions: List[Action]) -> None:
        """The client of a call has left, or does not wait for it; the caller takes it out of the table of tasks."""
        worker = actor.worker
        call = worker.calls.pop(task_id, None) if worker is not None else None
        if worker is None or call is None:
            self._withdraw_call(actor, task_id)
            return
        del actor.calls[task_id]
        if worker.away_until is None and task_id not in self._cancelled:
            actions.append(Recall(worker.id, [(task_id, call.attempt)], kill=True))

    def _drop_calls_of(self, client: Client, actions: List[Action]) -> List[int]:
        """A client has left: its calls, which the caller takes out of the table of tasks."""
        gone: List[int] = []
        for task_id in [task_id for task_id in self._missing if task_id >> SEQUENCE_BITS == client.number]:
            del self._missing[task_id]
        if not client.pending:
            return gone
        for actor in list(self._actors.values()):
            mine = [task_id for task_id in _calls_at(actor) if self._is_call_of(task_id, client)]
            for task_id in mine:
                self._drop_call(actor, task_id, actions)
            gone.extend(mine)
            actor.lines.pop(client.number, None)
        return gone

    def _is_call_of(self, task_id: int, client: Client) -> bool:
        return type(self._tasks.get(task_id)) is Actor and task_id >> SEQUENCE_BITS == client.number

    def _lost_meanwhile(self, actor: Actor) -> Dict[str, Any]:
        raise AssertionError("overridden by Actors")

    def _on_life_ended(
        self, worker: Worker, ident: int, status: int, payload: Any, seconds: float, now: float, actions: List[Action]
    ) -> None:
        raise AssertionError("overridden by Actors")


def _takes_calls(actor: Actor) -> bool:
    """Whether calls can be sent to it now. A worker that leaves ends its actors, which go on elsewhere."""
    worker = actor.worker
    if worker is None or worker.away_until is not None or worker.is_draining:
        return False
    return actor.state is not ActorState.ENDING and not actor.is_over


def _calls_at(actor: Actor) -> Iterable[int]:
    """All calls of an actor that have not ended and do not wait for inputs."""
    lined = [task_id for line in actor.lines.values() for task_id, spec in line.items() if spec is not None]
    return [*actor.parked, *actor.calls, *lined]
