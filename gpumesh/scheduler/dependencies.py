"""Tasks that wait for the results of others. Knows who waits for whom; what follows is the cluster's business."""

from __future__ import annotations

from typing import Dict, List, Sequence

from gpumesh.scheduler.states import Client, Spec


class Waiting:
    """A task whose inputs do not all exist."""

    __slots__ = ("spec", "missing")

    def __init__(self, spec: Spec, missing: Dict[int, None]) -> None:
        self.spec = spec
        self.missing = missing  # Tasks that it waits for; never empty while it is in the table.


class Dependencies:
    """Both directions of the relation, each the exact inverse of the other."""

    __slots__ = ("_dependents",)

    def __init__(self) -> None:
        self._dependents: Dict[int, Dict[int, Waiting]] = {}  # Task -> those that wait for it, in order of submission.

    def __bool__(self) -> bool:
        return bool(self._dependents)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._dependents

    def add(self, task_id: int, spec: Spec, producers: Sequence[int]) -> Waiting:
        """`task_id` waits for all of `producers`, of which there is at least one."""
        waiting = Waiting(spec, dict.fromkeys(producers))
        for producer in waiting.missing:
            self._dependents.setdefault(producer, {})[task_id] = waiting
        return waiting

    def dependents(self, producer: int) -> List[int]:
        """Those that wait for this task's result."""
        return list(self._dependents.get(producer, ()))

    def arrived(self, producer: int) -> List[int]:
        """The result of `producer` is there: those that wait for nothing else now, in order."""
        ready: List[int] = []
        for task_id, waiting in self._dependents.pop(producer, {}).items():
            del waiting.missing[producer]
            if not waiting.missing:
                ready.append(task_id)
        return ready

    def failed(self, producer: int) -> List[int]:
        """There will be no result of `producer`: all that wait for it. They wait for nothing any more."""
        lost = self._dependents.pop(producer, {})
        for task_id, waiting in lost.items():
            del waiting.missing[producer]
            self._forget(task_id, waiting)
        return list(lost)

    def drop(self, task_id: int, waiting: Waiting) -> None:
        """A waiting task has ended."""
        self._forget(task_id, waiting)

    def drop_client(self, client: Client) -> List[int]:
        """The client is gone, with all its tasks: those that waited."""
        gone: Dict[int, None] = {}
        for producer in list(self._dependents):
            waiting = self._dependents[producer]
            if next(iter(waiting.values())).spec.client is client:  # A task waits for tasks of its own client only.
                gone.update(dict.fromkeys(waiting))
                del self._dependents[producer]
        return list(gone)

    def pairs(self) -> List[List[int]]:
        """(waiting task, the task that it waits for), for checking."""
        return [[task_id, producer] for producer, waiting in self._dependents.items() for task_id in waiting]

    def _forget(self, task_id: int, waiting: Waiting) -> None:
        for producer in waiting.missing:
            others = self._dependents[producer]
            del others[task_id]
            if not others:
                del self._dependents[producer]
        waiting.missing.clear()
