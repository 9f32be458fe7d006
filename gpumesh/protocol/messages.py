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
    """Worker -> coordinator."""

    worker: str  # WorkerId
    facts: Tuple[Any, ...]  # model.resources.WorkerFacts


@message(0x11)
class RegisterClient(NamedTuple):
    """Client -> coordinator."""

    client: int  # ClientNumber
    name: str  # For people: user@host, process.


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
    """Coordinator -> client: how many workers are alive and healthy now."""

    workers: int


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
    """Client -> coordinator: tasks of one spec. `task_ids[i]` goes with `payloads[i]` (its pickled arguments)."""

    spec: int
    task_ids: List[int]
    payloads: List[Any]


@message(0x23)
class CancelTasks(NamedTuple):
    """Client -> coordinator: end these, running or not."""

    task_ids: List[int]


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
    """coordinator -> worker -> runner: run these of one spec, in order. Each is (task id, attempt, payload)."""

    spec: int
    tasks: List[Tuple[int, int, Any]]


@message(0x31)
class RecallTasks(NamedTuple):
    """Coordinator -> worker: these (task id, attempt) come back as NOT_RUN if they have not started.

    With `kill` those that run are ended as well, as CANCELLED. Without it a running one goes on and its result counts.
    """

    tasks: List[Tuple[int, int]]
    kill: bool


@message(0x32)
class TasksFinished(NamedTuple):
    """runner -> worker -> coordinator: attempts have ended.

    Each is (task id, attempt, Status, payload or dict, run seconds inside the runner).
    Sent once for each attempt, also when the task has since been given to another worker: the receiver compares attempt
    numbers and ignores one it has moved past.
    """

    results: List[Tuple[int, int, int, Any, float]]


@message(0x40)
class RunnerReady(NamedTuple):
    """Runner -> worker: up, imports done, waiting for work."""

    pid: int


# --- questions


@message(0x50)
class Query(NamedTuple):
    """Client -> coordinator: tell me about `what` ("workers", ...)."""

    number: int
    what: str
    arguments: Dict[str, Any]


@message(0x51)
class Answer(NamedTuple):
    """Coordinator -> client: the answer to the query of that number; `error` is not empty when there is none."""

    number: int
    value: Any
    error: str
