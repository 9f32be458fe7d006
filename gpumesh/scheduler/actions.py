"""What the coordinator's shell is told to do: orders in the imperative, to be carried out in the order of the list."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple, Union

from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.records import NamedTuple
from gpumesh.model.tasks import TaskSpec


class Assign(NamedTuple):
    """Send these to the worker, in order. Each is (task id, attempt). `cards` and `ordinal`: the lease they run under, if any."""

    worker: WorkerId
    spec: TaskSpec
    tasks: List[Tuple[int, int]]
    cards: Tuple[str, ...] = ()
    ordinal: int = 0


class Recall(NamedTuple):
    """Ask the worker to give these (task id, attempt) back unless they have started; with `kill` end the started ones too, with `force` at once."""

    worker: WorkerId
    tasks: List[Tuple[int, int]]
    kill: bool
    force: bool = False


class Deliver(NamedTuple):
    """Tasks have ended: tell the client, drop their arguments. Each is (task id, Status, payload or dict, run seconds)."""

    client: ClientNumber
    worker: WorkerId
    results: List[Tuple[int, int, Any, float]]


class Fail(NamedTuple):
    """A task ends by the scheduler's decision: tell the client, drop its arguments.

    `details` is for people: `reason`, `attempts` (one dict each: `worker`, `status`), and `worker` where one was involved.
    """

    client: ClientNumber
    task_id: int
    status: int
    details: Dict[str, Any]


class Notice(NamedTuple):
    """Show this to the person at the client: something about a task that goes on."""

    client: ClientNumber
    task_id: int
    text: str


class Retrying(NamedTuple):
    """An attempt failed with `status` on `worker` and the task runs again, now or later, or goes on elsewhere, as `attempt`."""

    task_id: int
    attempt: int
    worker: WorkerId
    status: int


class WorkersChanged(NamedTuple):
    """So many workers are connected, healthy and staying now."""

    count: int  # type: ignore[assignment]  # Hides tuple.count, which nobody needs here.


class WorkerGone(NamedTuple):
    """A worker was given up; what follows in the same list is about its tasks. `reason` is for people."""

    worker: WorkerId
    reason: str


class ClientGone(NamedTuple):
    """A client was given up: keep nothing for it any more."""

    client: ClientNumber


class Keep(NamedTuple):
    """A result of a task that nobody here knows, (task id, Status, payload or dict, run seconds): its client may come back for it."""

    client: ClientNumber
    worker: WorkerId
    result: Tuple[int, int, Any, float]


class Forget(NamedTuple):
    """Nobody waits for these any more: drop their arguments."""

    task_ids: List[int]


Action = Union[Assign, Recall, Deliver, Fail, Notice, Retrying, WorkersChanged, WorkerGone, ClientGone, Keep, Forget]
