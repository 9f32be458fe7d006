"""The one exception tree: everything gpumesh raises on purpose, and nothing else.

MeshError
├── MeshUnavailableError (ConnectionError)     nobody answers, or the connection is gone for good
├── AuthenticationError (PermissionError)      the token was refused
├── ProtocolError (ConnectionError)            the peer does not speak the mesh protocol, or broke it
├── VersionMismatchError                       the two sides cannot work together
├── MeshClosedError                            the mesh object was closed
├── SerializationError (TypeError)             a value cannot travel
├── NoSuitableWorkerError                      no machine can ever run the task
├── EnvironmentBuildError                      the packages that the task needs cannot be installed
├── RemoteTaskError                            the task raised something that cannot be rebuilt here
├── WorkerCrashedError                         the process that ran the task died
├── TaskTimeoutError (TimeoutError)            the task ran longer than its limit
├── TaskCancelledError (CancelledError)        the task was cancelled
├── ActorDiedError                             the actor is gone
├── ActorBusyError (TimeoutError)              the actor has as many calls waiting as it may have
├── NestingTooDeepError (RecursionError)       a task inside a task inside a task ..., too often
├── ObjectLostError                            every copy of the object is gone
├── ObjectStoreFullError                       no room for the object
├── UnknownActorError (LookupError)            there is no such actor
├── UnknownJobError (LookupError)              there is no such job
└── JournalError                               the database of jobs cannot be used, or something is not on disk

Every class survives pickling: its constructor takes the message alone, details are attributes.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any, Dict, List, Optional


class MeshError(Exception):
    """Base of every error that gpumesh itself raises."""


class MeshUnavailableError(MeshError, ConnectionError):
    """The coordinator cannot be reached, was lost for good, or has no workers.

    Attributes:
        refusal: Where a coordinator has answered, but not let us in: "tls" (it speaks only TLS with this machine), "later" (too many
            failed attempts came from here), "busy" (too many connections wait there); else "".
    """

    refusal: str = ""


class AuthenticationError(MeshError, PermissionError):
    """The coordinator refused the token, or could not prove that it knows it."""


class ProtocolError(MeshError, ConnectionError):
    """The other side does not speak the mesh protocol, or broke one of its rules.

    Attributes:
        stranger: Who is there in place of a coordinator, such as "an HTTP server"; "" where it is not known, or is one.
    """

    stranger: str = ""


class VersionMismatchError(MeshError):
    """Two sides with versions that cannot work together."""


class MeshClosedError(MeshError):
    """The mesh object was closed while, or before, it was needed."""


class SerializationError(MeshError, TypeError):
    """A value cannot travel; the message names the path to the part that cannot.

    Attributes:
        package: What a value that cannot be rebuilt is a part of, "" when that is not known.
        version: Of that package where it was to be rebuilt: "2.0", or "not installed".
        machine: The name of the machine where it was to be rebuilt.
    """

    package: str = ""
    version: str = ""
    machine: str = ""


class NoSuitableWorkerError(MeshError):
    """No worker can ever satisfy what the task requires."""


class EnvironmentBuildError(MeshError):
    """The environment that the task is to run in cannot be built, or its processes do not start."""


class RemoteTaskError(MeshError):
    """A task raised an exception that cannot be rebuilt on this side.

    Attributes:
        type_name: Qualified name of the exception's type on the worker.
        remote_message: `str()` of the exception on the worker.
        remote_traceback: Formatted traceback, as text.
    """

    type_name: str = ""
    remote_message: str = ""
    remote_traceback: str = ""


class WorkerCrashedError(MeshError):
    """The process or machine that ran the task died.

    Attributes:
        attempts: One dict for each failed attempt, oldest first, with what is known of it: `worker` (its machine's name and its id),
            `hostname`, `status` (a `Status`), `reason`; of a process that died `pid`, `exit` (negative: killed by that signal),
            `stderr` (its last lines) and `memory_bytes` (the most it had resident); of one killed by SIGKILL also `memory_limit_bytes`
            (what there is for all on that machine) and `out_of_memory` (True: the system killed it for lack of memory; False: somebody
            else did; missing where the system does not tell). Of very many attempts those in the middle are left out; `left_out` of the
            first says how many.
    """

    attempts: List[Dict[str, Any]] = []


class TaskTimeoutError(MeshError, TimeoutError):
    """The task ran longer than its `timeout` and its process was ended."""


class TaskCancelledError(MeshError, CancelledError):
    """The task was cancelled."""


class ActorDiedError(MeshError):
    """The actor's process or machine is gone, and with it the actor's state.

    Where its constructor has failed, that exception is the `__cause__`.

    Attributes:
        actor_id: As `handle.actor_id`.
        reason: What has become of it.
        worker: Where it was: its machine's name and its worker's id; "" where that is not known.
        is_gone: False: it was started again, and only this call is lost.
        member: Its place in its group, for a call of the group; None otherwise.
    """

    actor_id: str = ""
    reason: str = ""
    worker: str = ""
    is_gone: bool = True
    member: Optional[int] = None


class ActorBusyError(MeshError, TimeoutError):
    """As many calls of the actor wait as may, and there was no room within the `call_timeout`; the call was not made."""


class NestingTooDeepError(MeshError, RecursionError):
    """The task was submitted inside a task that was submitted inside a task ..., more often than is allowed."""


class ObjectLostError(MeshError):
    """Every copy of the object is gone."""


class ObjectStoreFullError(MeshError):
    """There is no room for the object."""


class UnknownActorError(MeshError, LookupError):
    """There is no actor with this name or id."""


class UnknownJobError(MeshError, LookupError):
    """There is no job with this id, or more than one whose id begins so."""


class JournalError(MeshError):
    """The database of jobs cannot be opened, read or written; what was to be kept in it is not."""
