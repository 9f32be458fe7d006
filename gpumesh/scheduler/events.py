"""What happened, as told to the cluster: facts in the past tense, with the ids and attempt numbers they belong to. Nothing acts."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple, Union

from gpumesh.model.ids import ClientNumber, WorkerId
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import CardReading, WorkerFacts
from gpumesh.model.tasks import TaskSpec


class Started(NamedTuple):
    """The coordinator serves from now on; told first.

    `workers`: those that were connected when it was last stopped; None: not known. `first_attempt`: attempts that start without
    knowing what became of earlier ones count from here, higher than any number used before. `has_lost`: beside those there were workers
    that ended with it, and what they had is lost.
    """

    workers: Optional[Sequence[WorkerId]]
    first_attempt: int
    has_lost: bool = False


class Held(NamedTuple):
    """What a worker says it has not finished: (task id, attempt) of one spec, under one lease if there are cards."""

    spec: TaskSpec
    tasks: Sequence[Tuple[int, int]]
    cards: Tuple[str, ...] = ()
    ordinal: int = 0


class WorkerConnected(NamedTuple):
    """A worker has joined, or is back: then its id is known, or it has something.

    `is_near`: it has at hand all that the coordinator stores, as far as can be told. `finished`: (task id, attempt) of results that it
    has kept; they follow in AttemptsFinished.
    """

    worker: WorkerId
    facts: WorkerFacts
    is_near: bool = False
    held: Sequence[Held] = ()
    finished: Sequence[Tuple[int, int]] = ()


class WorkerAway(NamedTuple):
    """A worker's connection broke without a goodbye; it may be back in a moment.

    `arriving`: tasks that have ended there, and the values of whose results have not all come.
    """

    worker: WorkerId
    reason: str
    arriving: Sequence[int] = ()


class WorkerChanged(NamedTuple):
    """A worker has new facts: health, slots, score, devices."""

    worker: WorkerId
    facts: WorkerFacts


class CardsMeasured(NamedTuple):
    """A worker's cards were looked at: how much of them other programs hold, and what their instruments say."""

    worker: WorkerId
    readings: Tuple[CardReading, ...]


class WorkerDraining(NamedTuple):
    """A worker takes nothing new and leaves when it has finished."""

    worker: WorkerId


class WorkerLost(NamedTuple):
    """A worker is gone for good; `reason` is for people."""

    worker: WorkerId
    reason: str


class ClientConnected(NamedTuple):
    """A client has joined. A known number means that the one before is gone, unless it `resumes`: then it submits all its tasks again."""

    client: ClientNumber
    name: str
    resumes: bool = False


class ClientAway(NamedTuple):
    """A client's connection broke without a goodbye; it may be back in a moment."""

    client: ClientNumber


class ResubmissionEnded(NamedTuple):
    """A client that resumes has told all that it still waits for; it has no use for anything else."""

    client: ClientNumber


class TasksConfirmed(NamedTuple):
    """A client that resumes still waits for these, which are here. `answered`: those whose results were kept for it; they have ended."""

    client: ClientNumber
    task_ids: Sequence[int]
    answered: Sequence[int] = ()


class ClientLost(NamedTuple):
    """A client is gone for good; nobody waits for its tasks any more."""

    client: ClientNumber


class SpecDefined(NamedTuple):
    """A client has given a spec a number; tasks submitted from now on under that number mean this spec."""

    client: ClientNumber
    number: int
    spec: TaskSpec


Input = Tuple[int, int, Sequence[WorkerId]]
"""A stored object that a task needs: its id, its size in bytes, and the workers that have copies of their own."""


class TasksSubmitted(NamedTuple):
    """A client wants these run, in this order if it matters at all. `inputs`: (task id, inputs) of those whose inputs are large.

    `again`: it has submitted them before, to this coordinator or to the one before, and workers may have them.
    """

    client: ClientNumber
    spec_number: int
    task_ids: Sequence[int]
    inputs: Sequence[Tuple[int, Sequence[Input]]] = ()
    again: bool = False


class DependentSubmitted(NamedTuple):
    """A client wants this run with the results of `producers`, tasks of its own, among the arguments."""

    client: ClientNumber
    spec_number: int
    task_id: int
    producers: Sequence[int]
    inputs: Sequence[Input] = ()  # Those that exist.
    again: bool = False  # As in TasksSubmitted.


class ResultStored(NamedTuple):
    """The result of a task that others wait for is a stored object; told before the task's end."""

    task_id: int
    inputs: Sequence[Input]


class AttemptsFinished(NamedTuple):
    """Attempts have ended on a worker: (task id, attempt, Status, payload or dict, run seconds), as they came over the wire."""

    worker: WorkerId
    results: Sequence[Tuple[int, int, int, Any, float]]


class StoreShared(NamedTuple):
    """Whether a worker has at hand all that the coordinator stores, as it has turned out."""

    worker: WorkerId
    is_shared: bool


class TasksWait(NamedTuple):
    """These attempts, (task id, attempt), wait for other tasks and take no slots; or, with `waits` false, want to go on and take them again."""

    worker: WorkerId
    tasks: Sequence[Tuple[int, int]]
    waits: bool


class CopyMade(NamedTuple):
    """A worker has a copy of an object, or is being sent one."""

    worker: WorkerId
    oid: int


class CopiesGone(NamedTuple):
    """A worker no longer has copies of these objects."""

    worker: WorkerId
    oids: Sequence[int]


class BytesMoved(NamedTuple):
    """So many bytes of objects went to a worker in so many seconds, in all of which some were on their way."""

    worker: WorkerId
    nbytes: int
    seconds: float


class CancelRequested(NamedTuple):
    """A client wants these ended, running or not. `force`: without giving what runs the time to end by itself."""

    client: ClientNumber
    task_ids: Sequence[int]
    force: bool = False


class ActorStarted(NamedTuple):
    """The constructor of an actor has returned."""

    worker: WorkerId
    actor: int
    attempt: int


class ActorKilled(NamedTuple):
    """An actor is to end, whoever's it is. `why` is for people, behind "was": "killed", "released"; `force`: without time for its last words."""

    actor: int
    why: str
    force: bool = False


ObjectNews = Union[StoreShared, CopyMade, CopiesGone, BytesMoved]

Event = Union[
    Started,
    WorkerConnected,
    WorkerAway,
    WorkerChanged,
    CardsMeasured,
    WorkerDraining,
    WorkerLost,
    ClientConnected,
    ClientAway,
    ResubmissionEnded,
    TasksConfirmed,
    ClientLost,
    SpecDefined,
    TasksSubmitted,
    DependentSubmitted,
    ResultStored,
    AttemptsFinished,
    StoreShared,
    CopyMade,
    CopiesGone,
    BytesMoved,
    TasksWait,
    CancelRequested,
    ActorStarted,
    ActorKilled,
]
