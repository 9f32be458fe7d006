"""Every message on the wire, one frozen class each, with its tag for ever.

A message is a tuple; its body on the wire is a msgpack array of its fields in order. A newer peer may append fields: what an
older one does not know it ignores, what an older one does not send has a default. Payloads are opaque.

 client ── SubmitTasks ──> coordinator ── RunTasks ──────> worker ── RunTasks ──────> runner
 client <─ TaskResults ─── coordinator <─ TasksFinished ── worker <─ TasksFinished ── runner
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple, Type, TypeVar

from gpumesh.model.records import NamedTuple

M = TypeVar("M", bound=Type[Any])

MESSAGE_TYPES: Dict[int, Type[Any]] = {}
TAGS: Dict[Type[Any], int] = {}
PREAUTH_TAGS = frozenset((0x01, 0x02, 0x03, 0x04, 0x05))


def message(tag: int) -> Callable[[M], M]:
    """Claim a tag for a message class."""

    def claim(cls: M) -> M:
        assert tag not in MESSAGE_TYPES, f"tag {tag:#x} belongs to {MESSAGE_TYPES[tag].__name__}"
        assert 0 < tag < 0x7F, tag
        MESSAGE_TYPES[tag] = cls
        TAGS[cls] = tag
        return cls

    return claim


# --- handshake: the only messages understood before authentication


@message(0x01)
class Hello(NamedTuple):
    """Dialer -> listener, the first frame: who wants what, and a fresh nonce. Nothing secret."""

    role: str  # "client" or "worker".
    nonce: bytes  # 32 random bytes.
    gpumesh: str  # Package version.
    python: str  # "3.11".
    platform: str  # "linux".


@message(0x02)
class Challenge(NamedTuple):
    """Listener -> dialer: prove that you know the token."""

    nonce: bytes  # 32 random bytes.
    mesh: str  # The coordinator's id, drawn anew by each start.
    gpumesh: str
    python: str


@message(0x03)
class Proof(NamedTuple):
    """Dialer -> listener: HMAC over both nonces under the dialer's label."""

    proof: bytes


@message(0x04)
class Welcome(NamedTuple):
    """Listener -> dialer: authenticated; the listener's own proof, which the dialer checks before it sends anything."""

    proof: bytes
    workers: int  # Alive and healthy at this moment.


@message(0x05)
class Refused(NamedTuple):
    """Either way: the connection ends here. `reason` is one of "authentication", "version", "protocol", "busy", "identity"."""

    reason: str
    text: str  # For people.


# --- any time after authentication, either way


@message(0x06)
class Ping(NamedTuple):
    """Are you there? Answered by Pong with the same number."""

    number: int


@message(0x07)
class Pong(NamedTuple):
    """The answer to a Ping."""

    number: int


@message(0x08)
class Goodbye(NamedTuple):
    """The sender closes the connection on purpose."""

    reason: str


@message(0x09)
class UnknownMessage(NamedTuple):
    """The sender of this does not know a tag it received; it ignored that frame."""

    tag: int


# --- registration: the first message of a side after Welcome


@message(0x10)
class RegisterWorker(NamedTuple):
    """Worker -> coordinator. A worker that is back tells what it has; results that it has kept follow in TasksFinished.

    `held`: not finished, each (model.tasks.TaskSpec, cards, ordinal, ((task id, attempt), ...)). `finished`: (task id, attempt) of
    the results that follow.
    """

    worker: str  # WorkerId
    facts: Tuple[Any, ...]  # model.resources.WorkerFacts
    held: Tuple[Any, ...] = ()
    finished: Tuple[Any, ...] = ()


@message(0x11)
class RegisterClient(NamedTuple):
    """Client -> coordinator."""

    client: int  # ClientNumber
    name: str  # For people: user@host, process.
    resumes: bool = False  # It had a connection before, and submits all that it still waits for again, until ResubmissionEnds.


@message(0x12)
class WorkerChanged(NamedTuple):
    """Worker -> coordinator: new facts (health, slots, score)."""

    facts: Tuple[Any, ...]


@message(0x13)
class WorkerDraining(NamedTuple):
    """Worker -> coordinator: give me nothing new; I leave when what I run is done."""

    reason: str


@message(0x14)
class MeshChanged(NamedTuple):
    """Coordinator -> client: how many workers are alive and healthy now. Coordinator -> worker: the same, now and then, about."""

    workers: int


@message(0x15)
class WorkerReadings(NamedTuple):
    """Worker -> coordinator, every few seconds: what the cards' instruments say."""

    readings: Tuple[Any, ...]  # model.resources.CardReading


@message(0x16)
class SessionResumed(NamedTuple):
    """Coordinator -> client, the answer to RegisterClient.resumes: whether the objects that it refers to are still here.

    Otherwise they went with the coordinator of before, or with the client's session, and what it needs of them is to be put again.
    """

    is_kept: bool


# --- definitions: sent once to whoever needs them, before anything that refers to them


@message(0x20)
class DefineFunction(NamedTuple):
    """client -> coordinator -> worker -> runner: the body of a function, by content."""

    digest: bytes
    body: Any  # Payload


@message(0x21)
class DefineSpec(NamedTuple):
    """client -> coordinator -> worker -> runner: what number a spec has on this connection."""

    number: int
    spec: Tuple[Any, ...]  # model.tasks.TaskSpec


# --- tasks


@message(0x22)
class SubmitTasks(NamedTuple):
    """Client -> coordinator: tasks of one spec. `task_ids[i]` goes with `payloads[i]` (its pickled arguments).

    `again`: they have been sent before, over a connection that broke; whoever has them goes on with them.
    """

    spec: int
    task_ids: List[int]
    payloads: List[Any]
    again: bool = False


@message(0x23)
class CancelTasks(NamedTuple):
    """Client -> coordinator: end these, running or not."""

    task_ids: List[int]


@message(0x24)
class ResultsReceived(NamedTuple):
    """Client -> coordinator: so many results have come over this connection, all together. They need not be kept any longer."""

    count: int  # type: ignore[assignment]  # Hides tuple.count, which nobody needs here.


@message(0x25)
class ResubmissionEnds(NamedTuple):
    """Client -> coordinator: that was all that I still wait for."""


@message(0x28)
class TaskResults(NamedTuple):
    """Coordinator -> client: tasks have ended, all on `worker` ("" if on none).

    Each result is (task id, Status, payload or dict, run seconds). The order of the results means nothing.
    """

    worker: str
    results: List[Tuple[int, int, Any, float]]


@message(0x29)
class TaskNotice(NamedTuple):
    """Coordinator -> client: something a person should see now about a task that goes on."""

    task_id: int
    text: str


@message(0x2A)
class TaskOutput(NamedTuple):
    """worker -> coordinator -> client: what a task wrote. `stream` is 1 (stdout) or 2 (stderr); `worker` is for people."""

    task_id: int
    stream: int
    data: bytes
    worker: str


@message(0x30)
class RunTasks(NamedTuple):
    """coordinator -> worker -> runner: run these of one spec, in order. Each is (task id, attempt, payload).

    With `cards` (DeviceFacts.key each) they run on those, one after another, in a process that sees no other cards. Several such
    processes may share cards; `ordinal` tells them apart: 0, 1, ... on the same cards.
    """

    spec: int
    tasks: List[Tuple[int, int, Any]]
    cards: Tuple[str, ...] = ()
    ordinal: int = 0


@message(0x31)
class RecallTasks(NamedTuple):
    """Coordinator -> worker: these (task id, attempt) come back as NOT_RUN if they have not started.

    With `kill` those that run are ended as well, as CANCELLED: interrupted first, or with `force` killed at once. Without it a running one
    goes on and its result counts.
    """

    tasks: List[Tuple[int, int]]
    kill: bool
    force: bool = False


@message(0x32)
class TasksFinished(NamedTuple):
    """runner -> worker -> coordinator: attempts have ended.

    Each is (task id, attempt, Status, payload or dict, run seconds inside the runner).
    Sent once for each attempt, also when the task has since been given to another worker: the receiver compares attempt
    numbers and ignores one it has moved past.
    """

    results: List[Tuple[int, int, int, Any, float]]


@message(0x33)
class ForgetResults(NamedTuple):
    """Coordinator -> worker: the results of these tasks have arrived where they are wanted, or nobody wants them."""

    task_ids: List[int]


@message(0x40)
class RunnerReady(NamedTuple):
    """Runner -> worker: up, imports done, waiting for work."""

    pid: int


# --- streams: values of generators, one by one. (task id, attempt) says which; a stream ends with the result of its task.


@message(0x34)
class StreamItems(NamedTuple):
    """runner -> worker -> coordinator -> client: values of a generator, from place `first` on, in order.

    Each is a payload. The first 256 may be sent unasked, further ones as `StreamCredit` allows. An empty one says that there are no more;
    the result of the task follows. A client takes each place once, ignores attempts before the newest that has sent something, and tells
    its credit again when an attempt does not go on where it was. Attempt -1: the worker was asked for what was not taken, and has nothing
    of this stream.
    """

    task_id: int
    attempt: int
    first: int
    items: List[Any]


@message(0x35)
class StreamCredit(NamedTuple):
    """client -> coordinator -> worker -> runner: so many values of this stream may have been sent, counted from its first.

    It is 256 more than were taken. A worker keeps those that were not, and sends them again to a coordinator that it has reached anew.
    0: send all that was not taken again, and the empty one after them if the task has ended; a coordinator asks for that when the
    client is back.
    """

    task_id: int
    limit: int


# --- work inside work


@message(0x36)
class TaskWaits(NamedTuple):
    """Runner -> worker: the task that runs here waits for others, and its slot may be used; or it wants to go on.

    The worker answers the latter with SlotGranted as soon as a slot is free.
    """

    task_id: int
    waits: bool


@message(0x37)
class SlotGranted(NamedTuple):
    """Worker -> runner: the task that waited may go on."""

    task_id: int


@message(0x38)
class TasksWait(NamedTuple):
    """Worker -> coordinator: these (task id, attempt) do not take their slots; or, with `waits` false, they do again."""

    tasks: List[Tuple[int, int]]
    waits: bool


# --- actors: their creation and their calls are tasks (model.tasks.TaskSpec.plan, .actor)


@message(0x39)
class ActorReady(NamedTuple):
    """runner -> worker -> coordinator: its constructor has returned. `attempt` says which of its lives."""

    actor: int
    attempt: int


@message(0x3A)
class EndActor(NamedTuple):
    """Worker -> runner of an actor: begin no more calls, run its `close` or `__exit__`, and end."""


@message(0x3B)
class CancelCalls(NamedTuple):
    """Worker -> runner of an actor that runs several calls at a time: end these, as `status` (Status.CANCELLED or TIMED_OUT)."""

    task_ids: List[int]
    status: int


@message(0x3C)
class CreateDetached(NamedTuple):
    """Client -> coordinator: an actor that outlives this client. An order, answered by Answer with a map: `actor`, its id.

    What its spec refers to has been defined before. A known key means the same actor.
    """

    number: int
    key: bytes  # 16 random bytes.
    spec: Tuple[Any, ...]  # model.tasks.TaskSpec, with a plan that is detached.
    payload: Any  # Payload: the arguments of its constructor.


@message(0x3D)
class KillActor(NamedTuple):
    """Client -> coordinator: end this actor, whoever's it is; with `force` at once. An order, answered by Answer: `found`."""

    number: int
    actor: int
    force: bool


# --- the token


@message(0x3E)
class RotateToken(NamedTuple):
    """Client -> coordinator: draw a new token, and let the one of now in for `grace` seconds more. An order, answered by TokenRotated.

    Only over TLS or from the coordinator's own machine. A second order of the same key changes nothing, and has the same answer.
    """

    number: int
    key: bytes  # 16 random bytes.
    grace: float


@message(0x3F)
class TokenRotated(NamedTuple):
    """Coordinator -> client: the token from now on; or, with an `error`, why it is still the one of before."""

    number: int
    token: str
    is_kept: bool  # The coordinator's next start uses it by itself; False: its owner has chosen the one of before, and chooses again.
    error: str

    def __repr__(self) -> str:
        return f"TokenRotated(number={self.number}, token=..., is_kept={self.is_kept}, error={self.error!r})"


# --- objects: what was put, and every value over 64 KiB
#
# Whoever keeps a host's store (the coordinator, or the agent of a machine that the coordinator shares no memory with) is its
# owner. A peer that can read the owner's probe shares the host and moves values through files of that folder; any other peer
# moves them as chunks: the receiver makes room first, then fetches. Names of segments go to the owner, paths come from it.


@message(0x60)
class OpenStore(NamedTuple):
    """Peer -> owner: where is your store? Answered by StoreOffer."""


@message(0x61)
class StoreOffer(NamedTuple):
    """Owner -> peer: a peer that reads `secret` in the file `probe` shares the host."""

    probe: str  # Path; its folder is the store's.
    secret: bytes


@message(0x62)
class CreateSegment(NamedTuple):
    """Peer that shares the host -> owner: I want to write an object of `nbytes`. Answered by SegmentCreated."""

    number: int
    oid: int
    nbytes: int


@message(0x63)
class SegmentCreated(NamedTuple):
    """Owner -> peer: write into this file; or there is no room, and `error` says why."""

    number: int
    path: str
    error: str


@message(0x64)
class PutObject(NamedTuple):
    """Peer -> owner, worker -> coordinator: an object exists. The sender holds one reference from now on, one more each time.

    Its bytes are `data` (a small payload), or in `segment` (a name that SegmentCreated gave out), or at the sender, from where
    the owner fetches them; ObjectStored is the answer to the last.
    """

    oid: int
    nbytes: int
    segment: str
    data: Any  # Payload or None.
    refs: List[int]  # Objects that the value refers to.


@message(0x65)
class ObjectStored(NamedTuple):
    """Coordinator -> sender of PutObject: it is here; or it cannot be kept, and `error` says why."""

    oid: int
    error: str


@message(0x66)
class LocateObject(NamedTuple):
    """Peer that shares the host -> owner: where is it? Waits until it exists. Answered by ObjectAt.

    A runner asks its agent, which may have to make room for it first.
    """

    number: int
    oid: int
    nbytes: int = 0  # As far as the asker knows.


@message(0x67)
class ObjectAt(NamedTuple):
    """Owner -> peer: the object is in this file, which stays as it is until UnpinObjects; or it is `data`; or there is none.

    Also the answer to a FetchObject that needs no transfer or cannot have one. `error` starts with "lost: " or "full: ".
    """

    number: int
    oid: int
    path: str
    nbytes: int
    data: Any  # Payload or None.
    error: str


@message(0x68)
class FetchObject(NamedTuple):
    """Receiver -> whoever has the object: send it as transfer `number`, `window` bytes before the first TransferCredit.

    `number` is the receiver's, with the highest of 32 bits set. Waits until the object exists.
    """

    number: int
    oid: int
    window: int


@message(0x69)
class ObjectSent(NamedTuple):
    """The answer to a FetchObject, right behind the last chunk; to one that was cancelled too.

    The receiver confirms it with a last TransferCredit.
    """

    number: int


@message(0x6A)
class TransferCredit(NamedTuple):
    """Receiver -> sender: so many more bytes of this transfer may leave.

    Together less than the object's size until ObjectSent has come, then exactly that.
    """

    number: int
    nbytes: int


@message(0x6B)
class CancelFetch(NamedTuple):
    """Receiver -> sender: no more of this transfer. What is on its way is dropped."""

    number: int


@message(0x6C)
class UnpinObjects(NamedTuple):
    """Peer -> owner: so many of the ObjectAt answers for each (object, count) are not mapped any more."""

    objects: List[Tuple[int, int]]


@message(0x6D)
class HoldRefs(NamedTuple):
    """Peer -> coordinator: references to these live here too (they came inside a value). One grant each.

    `is_all`: of a worker that is back, which has said now what it refers to; what it was granted before counts no more.
    """

    oids: List[int]
    is_all: bool = False


@message(0x6E)
class ReleaseRefs(NamedTuple):
    """Peer -> coordinator: the last reference to each (object, grants) is gone here. Counts what the sender was granted."""

    objects: List[Tuple[int, int]]


@message(0x6F)
class DeleteObjects(NamedTuple):
    """Client -> coordinator: nobody needs these any more, whoever still refers to them."""

    oids: List[int]


@message(0x70)
class FreeObjects(NamedTuple):
    """Coordinator -> worker: drop your copies. Worker -> coordinator: these copies were dropped, to make room."""

    oids: List[int]


@message(0x71)
class SegmentsGone(NamedTuple):
    """Owner -> peer: let go of your own mappings of these files (names)."""

    names: List[str]


# --- code


@message(0x72)
class DefineCode(NamedTuple):
    """client -> coordinator -> worker -> runner: modules that travel with functions, by content.

    Either some files, packed, which need nothing; or a list of what was packed so, which needs those.
    """

    digest: bytes
    archive: Any  # Payload
    needs: Tuple[bytes, ...] = ()  # Digests of other DefineCode that have come before, and need nothing themselves.


# --- jobs: orders that are answered by Answer when they are on disk, and may be given again after a reconnect


@message(0x73)
class SubmitJob(NamedTuple):
    """Client -> coordinator: a job, after the DefineCode of its folder and before its payloads. A known key means the same job.

    The value of the answer is a map: `accepted` when the job is there already, and wants no payloads.
    """

    number: int
    job: Tuple[Any, ...]  # model.jobs.JobSpec


@message(0x74)
class JobPayloads(NamedTuple):
    """Client -> coordinator: payloads of a job from place `first` on, in order and without gaps. The last of them makes it a job.

    Each is (variant, JSON): which of the job's specs it goes with.
    """

    number: int
    job: str
    first: int
    payloads: List[Tuple[int, Any]]


@message(0x75)
class ChangeJob(NamedTuple):
    """Client -> coordinator: "cancel" ends what has not ended, "kill" without giving it time, "retry" runs again what has no result.

    The value of the answer is a map: `count`, of the tasks that this concerned.
    """

    number: int
    job: str
    what: str


# --- questions


@message(0x50)
class Query(NamedTuple):
    """Client -> coordinator: tell me about `what` ("workers", ...)."""

    number: int
    what: str
    arguments: Dict[str, Any]


@message(0x51)
class Answer(NamedTuple):
    """Coordinator -> client: the answer to the query or order of that number; `error` is not empty when there is none.

    `kind` tells a program what kind of error it is: "unknown", "value", "taken", "again", "journal", or "" for any other.
    """

    number: int
    value: Any
    error: str
    kind: str = ""
