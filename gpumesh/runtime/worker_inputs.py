"""Tasks of one worker that wait until their inputs are on this host, and what they hold while they are in the pool.

RunTasks ──> waiting ──admitted──> resolving ──all inputs here──> pool ──ended──> let go
                └── recalled, drained ──> NOT_RUN  └── an input is lost ──> RAISED
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from gpumesh.config import MIB
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, Stored
from gpumesh.protocol.object_errors import FULL, from_text
from gpumesh.runtime.worker_store import Copy, OnFound

if TYPE_CHECKING:
    from gpumesh.runtime.worker_objects import WorkerObjects

INPUTS_AHEAD_FRACTION = 0.25  # Of a store of our own: inputs brought here before a slot is free for their task.
INPUTS_AHEAD_BYTES = 64 * MIB  # At least. In a store that others use too no more: what is located is pinned.
_NOT_RUN, _CANCELLED, _RAISED = int(Status.NOT_RUN), int(Status.CANCELLED), int(Status.RAISED)

Result = Tuple[int, int, int, Any, float]
# Cards and ordinal; without cards the task takes a slot. An ordinal below 0: a call of the actor with that number, or its creation.
LeaseKey = Tuple[Tuple[str, ...], int]


class _Waiting:
    """A task whose inputs are not all here."""

    __slots__ = ("spec", "task_id", "attempt", "payload", "oids", "lease", "missing", "held", "found", "is_over")

    def __init__(self, spec: int, task_id: int, attempt: int, payload: Any, inputs: Dict[int, int], lease: LeaseKey) -> None:
        self.spec = spec
        self.lease = lease
        self.task_id = task_id
        self.attempt = attempt
        self.payload = payload
        self.oids = inputs  # Object -> its size.
        self.missing = len(inputs)
        self.held: List[int] = []  # Those of them that are here.
        self.found: Dict[int, Any] = {}  # Small ones, to be put in their places.
        self.is_over = False


class TaskInputs:
    """An attempt that arrived is either in the pool or reported from here, once.

    Args:
        objects: Brings objects here.
        report: Results of tasks that never reached the pool.
    """

    def __init__(self, objects: WorkerObjects, report: Callable[[List[Result]], None]) -> None:
        self.is_draining = False
        self._is_withheld = False  # All of it, by the machine's owner; ...
        self._withheld_cards: FrozenSet[str] = frozenset()  # ... or these cards.
        self._objects = objects
        self._pool = objects.pool
        self._report = report
        self._waiting: Dict[LeaseKey, OrderedDict[Tuple[int, int], _Waiting]] = {}  # Not admitted yet; no queue is empty.
        self._resolving: Dict[Tuple[int, int], _Waiting] = {}  # (task, attempt)
        self._running: Dict[int, List[int]] = {}  # Task in the pool -> the objects that it uses.
        self._leases: Dict[int, LeaseKey] = {}  # Task in the pool -> where it runs.
        self._taken: Dict[LeaseKey, int] = {}  # Tasks of each that are resolving or in the pool; none has a count of 0.

    @property
    def is_idle(self) -> bool:
        """Whether no task waits here."""
        return not (self._waiting or self._resolving)

    def run(self, spec: int, tasks: Any, cards: Tuple[str, ...] = (), ordinal: int = 0) -> None:
        """Attempts arrived, and some of them are more than plain bytes; for the rest see `RunnerPool.run`."""
        lease = (tuple(cards), ordinal)
        actors = self._pool.actors
        is_of_actors = actors is not None and actors.knows(spec)
        if actors is not None and is_of_actors:
            tasks = self._pool.expect(spec, tasks, cards=lease[0], ordinal=ordinal)
            if not tasks:
                return
            lease = ((), -(actors.callee(spec) or tasks[0][0]))
        plain: List[Tuple[int, int, Any]] = []
        for task_id, attempt, payload in tasks:
            oids = {} if type(payload) is bytes else sizes_of(payload)
            if not oids:
                plain.append((task_id, attempt, payload))
            elif not is_of_actors and (self.is_draining or self._keeps_from(lease)):
                self._report([(task_id, attempt, _NOT_RUN, {}, 0.0)])
            else:
                self._queue_of(lease)[(task_id, attempt)] = _Waiting(spec, task_id, attempt, payload, oids, lease)
        if plain:
            self._pool.run(spec, plain, cards=lease[0], ordinal=lease[1])
        self._admit()

    def _queue_of(self, lease: LeaseKey) -> OrderedDict[Tuple[int, int], _Waiting]:
        queue = self._waiting.get(lease)
        if queue is None:
            queue = self._waiting[lease] = OrderedDict()
        return queue

    def _admit(self) -> None:
        """Bring in the inputs of the next tasks: those that a slot or a lease is free for, and some more as far as memory allows."""
        for lease in list(self._waiting):
            width = 1 if lease[0] else self._pool.slots
            while lease in self._waiting:
                if lease[1] < 0 and any(other.lease == lease for other in self._resolving.values()):
                    break  # In order, or the inputs of a later call could keep the memory that those of an earlier one need.
                queue = self._waiting[lease]
                key, waiting = next(iter(queue.items()))
                taken = self._taken.get(lease, 0)
                if taken >= width and not self._fits_ahead(waiting):
                    break
                self._unqueue(waiting)
                self._taken[lease] = taken + 1
                self._resolving[key] = waiting
                for oid, nbytes in waiting.oids.items():
                    self._objects.acquire(oid, nbytes, self._on_input(waiting, oid))

    def _unqueue(self, waiting: _Waiting) -> bool:
        """Take it out of those that wait, if it is among them."""
        queue = self._waiting.get(waiting.lease)
        if queue is None or queue.pop((waiting.task_id, waiting.attempt), None) is None:
            return False
        if not queue:
            del self._waiting[waiting.lease]
        return True

    def _leave(self, lease: LeaseKey) -> None:
        """A task that was counted is none of ours any more."""
        left = self._taken[lease] - 1
        if left:
            self._taken[lease] = left
        else:
            del self._taken[lease]

    def _fits_ahead(self, waiting: _Waiting) -> bool:
        objects = self._objects
        more = sum(nbytes for oid, nbytes in waiting.oids.items() if objects.copy_of(oid) is None)
        allowed = INPUTS_AHEAD_BYTES
        if objects.has_own_store:
            allowed = max(allowed, int(objects.limit * INPUTS_AHEAD_FRACTION))
        return objects.copy_bytes + more <= allowed

    def _on_input(self, waiting: _Waiting, oid: int) -> OnFound:
        def then(copy: Optional[Copy], error: str) -> None:
            if waiting.is_over:
                if copy is not None:
                    self._objects.release(oid)
            elif copy is None and error.startswith(FULL) and (len(self._resolving) > 1 or self._running):
                self._put_back(waiting)  # What others here hold comes free.
            elif copy is None:
                self._fail(waiting, error)
            else:
                waiting.missing -= 1
                waiting.held.append(oid)
                if not copy.path:
                    waiting.found[oid] = copy.data
                if not waiting.missing:
                    self._start(waiting)

        return then

    def _start(self, waiting: _Waiting) -> None:
        """All inputs are here."""
        waiting.is_over = True
        del self._resolving[(waiting.task_id, waiting.attempt)]
        payload = _filled(waiting.payload, waiting.found) if waiting.found else waiting.payload
        self._let_go(waiting.task_id)  # Of an attempt that was given up and has not ended.
        self._running[waiting.task_id] = waiting.held
        self._leases[waiting.task_id] = waiting.lease
        tasks = [(waiting.task_id, waiting.attempt, payload)]
        self._pool.run(waiting.spec, tasks, is_holding=True, cards=waiting.lease[0], ordinal=waiting.lease[1])
        if waiting.lease[1] < 0 and waiting.lease in self._waiting:
            self._objects.loop.call_soon(self._admit)

    def _put_back(self, waiting: _Waiting) -> None:
        """There is no room for its inputs while others have theirs: it is the next to try when one of them has ended."""
        self._drop(waiting)
        fresh = _Waiting(waiting.spec, waiting.task_id, waiting.attempt, waiting.payload, waiting.oids, waiting.lease)
        key = (waiting.task_id, waiting.attempt)
        queue = self._queue_of(waiting.lease)
        queue[key] = fresh
        queue.move_to_end(key, last=False)

    def _fail(self, waiting: _Waiting, error: str) -> None:
        from gpumesh.serialization.exceptions import dump_exception

        self._drop(waiting)
        payload = dump_exception(from_text(error))
        self._report([(waiting.task_id, waiting.attempt, _RAISED, payload, 0.0)])
        self._tell_lost([waiting])
        self._objects.loop.call_soon(self._admit)

    def _drop(self, waiting: _Waiting) -> None:
        key = (waiting.task_id, waiting.attempt)
        waiting.is_over = True
        if not self._unqueue(waiting):
            del self._resolving[key]
            self._leave(waiting.lease)
        for oid in waiting.held:
            self._objects.release(oid)

    def recall(self, tasks: Any, *, kill: bool) -> Any:
        """The coordinator wants these back; those that the pool has are left."""
        if not self._waiting and not self._resolving:
            return tasks
        status = _CANCELLED if kill else _NOT_RUN
        left: List[Tuple[int, int]] = []
        given_back: List[Result] = []
        lost: List[_Waiting] = []
        for task_id, attempt in tasks:
            key = (task_id, attempt)
            waiting = self._resolving.get(key) or next((queue[key] for queue in self._waiting.values() if key in queue), None)
            if waiting is None:
                left.append(key)
            else:
                self._drop(waiting)
                lost.append(waiting)
                given_back.append((task_id, attempt, status, {}, 0.0))
        if given_back:
            self._report(given_back)
            self._tell_lost(lost)
            self._admit()
        return left

    def _tell_lost(self, gone: List[_Waiting]) -> None:
        """An actor that expects these is told that they do not come."""
        for waiting in gone:
            if waiting.lease[1] < 0 and self._pool.actors is not None:
                self._pool.actors.inputs_lost(waiting.spec, waiting.task_id, waiting.attempt)

    def forget(self, tasks: List[Tuple[int, int]]) -> None:
        """Nobody wants these any more, which their actor has expected, and their end is not to be told."""
        for key in tasks:
            waiting = self._resolving.get(key) or next((queue[key] for queue in self._waiting.values() if key in queue), None)
            if waiting is not None:
                self._drop(waiting)
        if self._waiting:
            self._objects.loop.call_soon(self._admit)  # Not now: the pool is in the middle of acting.

    def drain(self) -> None:
        """Give back what has not reached the pool, now and from now on. What actors expect they give up by themselves."""
        self.is_draining = True
        self._give_back([waiting for waiting in [*self._resolving.values(), *self._all_waiting()] if waiting.lease[1] >= 0])

    def withhold(self, *, everything: bool, cards: FrozenSet[str]) -> None:
        """The machine's owner keeps all of it, or these cards, until this is called again: what has not reached the pool goes back."""
        self._is_withheld = everything
        self._withheld_cards = cards
        if everything or cards:
            waiting = [*self._resolving.values(), *self._all_waiting()]
            self._give_back([each for each in waiting if self._keeps_from(each.lease) and each.lease[1] >= 0])

    def _keeps_from(self, lease: LeaseKey) -> bool:
        return self._is_withheld or not self._withheld_cards.isdisjoint(lease[0])

    def _give_back(self, waiting: List[_Waiting]) -> None:
        for each in waiting:
            self._drop(each)
        if waiting:
            self._report([(each.task_id, each.attempt, _NOT_RUN, {}, 0.0) for each in waiting])

    def abandon(self) -> None:
        """The coordinator is lost: forget them."""
        if self._pool.actors is not None:
            self._pool.actors.abandon(has_store=True)
        for waiting in self._all_waiting():
            waiting.is_over = True
        for waiting in self._resolving.values():
            waiting.is_over = True
            self._leave(waiting.lease)
            for oid in waiting.held:
                self._objects.release(oid)
        self._waiting.clear()
        self._resolving.clear()

    def lose(self) -> None:
        """What tasks in the pool use is not counted any more: the store behind it is another one from now on."""
        for task_id in self._running:
            self._running[task_id] = []

    def _all_waiting(self) -> List[_Waiting]:
        return [waiting for queue in self._waiting.values() for waiting in queue.values()]

    def ended(self, task_id: int) -> None:
        """A task has left the pool."""
        self._let_go(task_id)
        if self._waiting:
            self._objects.loop.call_soon(self._admit)  # Not now: the pool is in the middle of acting.

    def _let_go(self, task_id: int) -> None:
        lease = self._leases.pop(task_id, None)
        if lease is not None:
            self._leave(lease)
        for oid in self._running.pop(task_id, ()):
            self._objects.release(oid)


def sizes_of(payload: Any) -> Dict[int, int]:
    """The stored objects whose bytes a payload stands for, and their sizes."""
    if type(payload) is Stored:
        return {payload.oid: payload.nbytes}
    if not isinstance(payload, tuple):
        return {}
    found = sizes_of(payload[0])
    for _, part in payload[1]:
        found.update(sizes_of(part))
    return found


def _filled(payload: Any, found: Dict[int, Any]) -> Any:
    """The payload with small objects in place of their names."""
    if type(payload) is Stored:
        return found.get(payload.oid, payload)
    if not isinstance(payload, tuple):
        return payload
    inputs = tuple((place, _filled(part, found)) for place, part in payload[1])
    return Bundle(_filled(payload[0], found), inputs, payload[2])
