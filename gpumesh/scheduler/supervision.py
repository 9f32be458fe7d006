"""What befell the tasks that did not end at the first attempt: strikes, attempt numbers, and who may try again. No queues."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from gpumesh.config import ATTEMPTS_KEPT
from gpumesh.model.ids import WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.scheduler.confinement import SUSPECTS

_DEATHS = (int(Status.CRASHED), int(Status.LOST))


class _History:
    __slots__ = ("attempt", "count", "strikes", "places")

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt  # The number of the next attempt, or of the one under way.
        self.count = 0  # Of strikes ever.
        self.strikes: List[Tuple[WorkerId, int]] = []  # Of very many the first and the newest.
        self.places: List[WorkerId] = []  # The first two on which it ended a process, or that were lost with it; each once.

    def strike(self, worker: WorkerId, status: int) -> None:
        self.count += 1
        self.strikes.append((worker, status))
        if len(self.strikes) > ATTEMPTS_KEPT:
            del self.strikes[1]
        if status in _DEATHS and len(self.places) < SUSPECTS and worker not in self.places:
            self.places.append(worker)


class Supervision:
    """Only tasks with a past are in here; any other is at its first attempt and has no strike."""

    __slots__ = ("_histories", "_failed")

    def __init__(self) -> None:
        self._histories: Dict[int, _History] = {}
        self._failed: Dict[int, None] = {}  # Those of them with strikes.

    def __bool__(self) -> bool:
        return bool(self._histories)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._histories

    def __len__(self) -> int:
        return len(self._histories)

    def attempt_of(self, task_id: int) -> int:
        """The number of the attempt that is under way or next."""
        history = self._histories.get(task_id)
        return 1 if history is None else history.attempt

    def start_from(self, task_id: int, attempt: int) -> None:
        """Numbers below `attempt` are taken: an earlier task of this id still runs somewhere."""
        self._histories[task_id] = _History(attempt)
        self._failed.pop(task_id, None)

    def resume(self, task_id: int, attempt: int) -> None:
        """An attempt that was given up, or that nobody knew of, goes on: the next one has a higher number."""
        if attempt != 1 or task_id in self._histories:
            history = self._history(task_id)
            history.attempt = max(history.attempt, attempt)

    def give_back(self, task_id: int) -> int:
        """A new attempt without a strike, and its number: the one before never started, was handed back, or goes on beside it."""
        history = self._history(task_id)
        history.attempt += 1
        return history.attempt

    def note(self, task_id: int, worker: WorkerId, status: int) -> None:
        """An attempt failed while another goes on: a strike that decides nothing now."""
        self._failed[task_id] = None
        self._history(task_id).strike(worker, status)

    def strike(self, task_id: int, worker: WorkerId, status: int, *, retries: int) -> bool:
        """The attempt failed; whether the task may try again, and then its number has moved on."""
        history = self._history(task_id)
        self._failed[task_id] = None
        history.strike(worker, status)
        if history.count > retries:
            return False
        history.attempt += 1
        return True

    def strikes_of(self, task_id: int) -> int:
        """How many of its attempts have failed."""
        history = self._histories.get(task_id)
        return 0 if history is None else history.count

    def failed_on(self, task_id: int) -> Sequence[WorkerId]:
        """The first two workers on which it ended a process, or that were lost with it; each once."""
        history = self._histories.get(task_id)
        return () if history is None else history.places

    def forget(self, task_id: int) -> None:
        """The task has ended."""
        if self._histories.pop(task_id, None) is not None:
            self._failed.pop(task_id, None)

    def attempts(self, task_id: int) -> List[Dict[str, Any]]:
        """Failed attempts for people, oldest first."""
        history = self._histories.get(task_id)
        if history is None:
            return []
        return [{"worker": worker, "status": Status(status).name} for worker, status in history.strikes]

    def failed(self) -> Mapping[int, None]:
        """Tasks of which an attempt has failed: what ended one process may end others, so they are not repeated at the same time."""
        return self._failed

    def ids(self) -> List[int]:
        """Tasks with a past."""
        return list(self._histories)

    def _history(self, task_id: int) -> _History:
        history = self._histories.get(task_id)
        if history is None:
            history = self._histories[task_id] = _History(1)
        return history
