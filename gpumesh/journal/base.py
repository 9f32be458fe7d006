"""What the runtime may ask of a journal, and the records that go in and out. No storage.

1. `on_synced(None)` means durable: it survives the death of the process and of the machine (a journal without a file: it is kept).
2. Writing never blocks and never raises: a record that cannot be kept is refused through `on_synced(error)`.
3. Records are written in the order in which they were given; one read sees everything that was given before it.
4. A *request* (`begin_job`, `add_payloads`, `accept_job`, `retry_job`) is refused as a whole when it cannot be written.
   A *fact* (`end_tasks`, `finish_job`, `worker_joined`, ...) is not refused for want of room: it is kept in memory and tried again until it is written.
   A *note* (`append_log`, `note_event`, `worker_left`) comes with the next commit, and may be dropped in need.
5. All callbacks come on the thread of the loop that the journal was opened for, never from within the call that they belong to.

    loop ──begin_job, end_tasks, ...──> queue  ──> writer thread ──one transaction per group──> file
      ^                                                  │ durable
      └────────────── on_synced(None | error) <──────────┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

from gpumesh.errors import JournalError
from gpumesh.model.records import NamedTuple

T = TypeVar("T")
OnSynced = Callable[[Optional[JournalError]], None]
"""Called once, on the loop's thread: None, it is durable; an error, nothing of it was kept."""

PENDING = "pending"
"""The status of a task that has not ended; every other word is an end. What runs at this moment is not journaled: workers tell that."""

MAX_ROW = (1 << 32) - 1
"""A task's row is the sequence part of its id."""


class NewJob(NamedTuple):
    """A job as it is submitted."""

    id: str  # One that is known is refused.
    name: str  # For people.
    script: str  # Path of the script inside its folder, with forward slashes.
    code: bytes  # Digest of the folder, b"": none.
    options: bytes = b""  # Whatever else the runtime wants back; opaque here.
    submitted: float = 0.0  # Seconds since the epoch, by this machine's clock.
    status: str = PENDING  # The runtime's word.


class JobRecord(NamedTuple):
    """A job as it is kept. Its tasks have the rows `first_row ... first_row + tasks - 1`, by their place in it."""

    id: str
    name: str
    script: str
    code: bytes
    options: bytes
    submitted: float
    status: str
    finished: float  # Seconds since the epoch; 0.0: not finished.
    first_row: int
    tasks: int
    counts: Dict[str, int]  # Tasks by status; they add up to `tasks`.


class TaskRecord(NamedTuple):
    """A task as it is kept."""

    row: int  # 1, 2, ...: given once, never again.
    job_id: str
    variant: int  # As it was given with the payload.
    status: str
    attempts: int
    worker: str  # Where it ended, for people.
    seconds: float  # Run time of the attempt that ended it.
    ended: float  # Seconds since the epoch; 0.0: not ended.
    error: str
    history: str  # What the runtime wants back about its attempts, such as JSON; opaque here.
    payload: Optional[bytes]  # None where a read leaves it out.
    result: Optional[bytes]  # None: it has none.


class TaskEnd(NamedTuple):
    """One task has ended, for whatever reason; a later one about the same row replaces it."""

    row: int
    status: str  # Not PENDING.
    attempts: int
    worker: str = ""
    seconds: float = 0.0
    ended: float = 0.0  # Seconds since the epoch.
    error: str = ""
    history: str = ""
    result: Optional[bytes] = None


class LogPart(NamedTuple):
    """Some bytes that a task wrote."""

    start: int  # Bytes that the task had written before these, in all attempts and streams together.
    attempt: int  # 1, 2, ...
    stream: int  # 1: standard output, 2: standard error.
    data: bytes


class JobLogPart(NamedTuple):
    """Some bytes that a task of a job wrote, among those of its other tasks."""

    number: int  # Grows with every part of any task, for as long as the journal lives.
    row: int
    attempt: int
    stream: int
    data: bytes


class EventRecord(NamedTuple):
    """Something that has happened in the mesh, for people."""

    number: int  # 1, 2, ...: whoever notes events counts them, going on after the last that is kept here.
    time: str  # ISO 8601.
    kind: str  # One word: "joined", "left", "retry", ...
    text: str  # A sentence.
    details: str = ""  # Whatever else, such as JSON; opaque here.


class WorkerRecord(NamedTuple):
    """A worker that was connected when the journal was written last."""

    id: str
    name: str  # Its host; "" for one that ends with the coordinator, for which nobody has to wait.
    joined: float  # Seconds since the epoch.


class JournalReader(ABC):
    """What can be read. Every method blocks for as long as the disk takes, and may raise `JournalError`: damaged, locked, gone.

    The methods may be called on any one thread at a time.
    """

    @abstractmethod
    def unfinished(self) -> List[JobRecord]:
        """All jobs that are accepted and not finished, oldest first."""

    @abstractmethod
    def pending(self, job_id: str, *, after: int, limit: int, max_bytes: int) -> List[TaskRecord]:
        """Tasks of a job that have not ended, with their payloads, by row.

        Args:
            after: Only rows above this one.
            limit: At most so many.
            max_bytes: At most so many bytes of payloads, but always one task if there is one.
        """

    @abstractmethod
    def started(self) -> List[TaskRecord]:
        """Tasks of all accepted jobs that were marked as started and have not ended, with their payloads, by row."""

    @abstractmethod
    def jobs(self, limit: int = 1000) -> List[JobRecord]:
        """The newest jobs, oldest of them first."""

    @abstractmethod
    def job(self, job_id: str) -> Optional[JobRecord]:
        """One job, None: unknown. A unique beginning of its id, of 4 characters or more, will do."""

    @abstractmethod
    def tasks(
        self,
        job_id: str,
        *,
        first: int = 0,
        limit: Optional[int] = None,
        max_bytes: Optional[int] = None,
        payloads: bool = False,
        results: bool = True,
    ) -> List[TaskRecord]:
        """Tasks of one job by row; [] for an unknown job.

        Args:
            first: How many to leave out at the beginning.
            limit: At most so many; None: all.
            max_bytes: At most so many bytes of payloads, results, errors and histories, but always one task if there is one.
            payloads: Whether to read them; None stands in the record otherwise.
            results: The same.
        """

    @abstractmethod
    def task(self, row: int) -> Optional[TaskRecord]:
        """One task with payload and result; None: unknown."""

    @abstractmethod
    def log(self, row: int, since: int = 0) -> List[LogPart]:
        """What is kept of a task's output from byte `since` on, in order; the first part may begin later: that is lost."""

    @abstractmethod
    def job_log(self, job_id: str, *, row: Optional[int] = None, after: int = 0, max_bytes: int) -> List[JobLogPart]:
        """What is kept of the output of all tasks of a job, as it came.

        Args:
            row: Of this task only.
            after: Only parts with a number above this one.
            max_bytes: At most so many bytes, but always one part if there is one.
        """

    @abstractmethod
    def events(self, after: int = 0, limit: int = 1000) -> List[EventRecord]:
        """The newest events with a number above `after`, oldest of them first."""

    @abstractmethod
    def workers(self) -> List[WorkerRecord]:
        """Those that were connected when it was written last (on a fresh start: before the previous coordinator ended)."""

    @abstractmethod
    def code(self, digest: bytes) -> Optional[bytes]:
        """A kept folder's archive; None: not kept."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file. Idempotent."""


class Journal(ABC):
    """Where a coordinator writes. All methods but `close` return at once; call them on the loop's thread only.

    Attributes:
        path: The file; "" for a journal without one.
        mesh_id: 16 hexadecimal digits, the same in every start on this journal.
        generation: Number of starts on this journal, this one included: 1, 2, ...
        on_trouble: Set it to be told when writing begins to fail (with the error) and when it works again (None).
        on_pruned: Set it to be told the ids of jobs that were dropped because of their age.
    """

    path: str
    mesh_id: str
    generation: int
    on_trouble: Callable[[Optional[JournalError]], None]
    on_pruned: Callable[[List[str]], None]

    @property
    @abstractmethod
    def trouble(self) -> Optional[JournalError]:
        """Why writing does not work at present; None: it does."""

    @property
    @abstractmethod
    def is_pressed(self) -> bool:
        """More is waiting to be written than should: start no more script tasks, requests are refused for now."""

    @abstractmethod
    def begin_job(self, job: NewJob, tasks: int, *, code: Optional[bytes], on_synced: OnSynced) -> int:
        """A request: a new job comes in parts. No read sees it before it is accepted, and the next start drops it if it never was.

        Args:
            job: Its id must not be known yet.
            tasks: How many it will have, 0 or more.
            code: The folder's archive; None when `has_code(job.code)`, or the job has none.
            on_synced: See above.

        Returns:
            The row of its first task; the others follow it. Meaningless if the request is refused.
        """

    @abstractmethod
    def add_payloads(self, job_id: str, first: int, payloads: Sequence[Tuple[int, bytes]], on_synced: OnSynced) -> None:
        """A request: (variant, payload) of the tasks `first`, `first + 1`, ... of a job that is not accepted yet.

        A variant is a number from 0 to 65535. The same part once more changes nothing.
        """

    @abstractmethod
    def accept_job(self, job_id: str, on_synced: OnSynced) -> None:
        """A request: the job is complete; refused if it is not."""

    @abstractmethod
    def discard_job(self, job_id: str) -> None:
        """A fact: nothing of a job that is not accepted yet is wanted any more."""

    @abstractmethod
    def retry_job(self, job_id: str, statuses: Sequence[str], *, status: str, on_synced: OnSynced) -> None:
        """A request: tasks that ended so are pending again and as new; the job is unfinished, and `status` its status."""

    @abstractmethod
    def cancel_pending(
        self,
        job_id: str,
        task_status: str,
        *,
        status: str,
        except_rows: Sequence[int] = (),
        on_synced: Optional[OnSynced] = None,
    ) -> None:
        """A fact: all tasks of the job that have not ended have now, with this status, except these rows; `status` is the job's.

        Costs the same for any number of tasks.
        """

    @abstractmethod
    def mark_started(self, rows: Sequence[int], on_synced: Optional[OnSynced] = None) -> None:
        """A fact: these pending tasks may be running from now on, until they end or are retried."""

    @abstractmethod
    def end_tasks(self, ends: Sequence[TaskEnd], on_synced: Optional[OnSynced] = None) -> None:
        """A fact: these tasks have ended. A later one about the same row replaces it, also after `cancel_pending`."""

    @abstractmethod
    def set_job(self, job_id: str, status: str, on_synced: Optional[OnSynced] = None) -> None:
        """A fact: an unfinished job's status."""

    @abstractmethod
    def finish_job(self, job_id: str, status: str, finished: float, on_synced: Optional[OnSynced] = None) -> None:
        """A fact: all tasks of the job have ended, at this time (seconds since the epoch)."""

    @abstractmethod
    def append_log(self, row: int, attempt: int, stream: int, data: bytes) -> None:
        """A note: a task wrote this. The last JOURNAL_TASK_LOG_BYTES of a task are kept, and JOURNAL_LOG_BYTES of all together."""

    @abstractmethod
    def note_event(self, event: EventRecord) -> None:
        """A note: keep an event. The last EVENTS_KEPT are kept."""

    @abstractmethod
    def worker_joined(self, worker: WorkerRecord) -> None:
        """A fact: a worker is connected. What it brings back after a restart is believed only if this is known."""

    @abstractmethod
    def worker_left(self, worker_id: str) -> None:
        """A note: a worker said goodbye, or was given up."""

    @abstractmethod
    def has_code(self, digest: bytes) -> bool:
        """Whether this folder is kept, so that a job can be submitted without sending it again."""

    @abstractmethod
    def read(self, call: Callable[[JournalReader], T], then: Callable[[Optional[T], Optional[JournalError]], None]) -> None:
        """Let `call` read on a thread of the journal's, after all that was given before.

        `then(result, None)` or `then(None, error)` follows on the loop; what else `call` raises is raised there, behind such an answer.
        """

    @abstractmethod
    def reader(self) -> JournalReader:
        """Reads at once, on the caller's thread: for a start, before anything is given; close it then."""

    @abstractmethod
    def close(self) -> None:
        """Write what is waiting, let go of the file. Blocks for as long as that takes. Idempotent."""


def answer_read(read: Callable[[], T], then: Callable[[Optional[T], Optional[JournalError]], None]) -> None:
    """Tell what was read, or that it could not be: whoever waits for it waits for no longer, whatever `read` raises."""
    found: Optional[T] = None
    failed: Optional[JournalError] = JournalError("reading the database of jobs failed; the log says why")
    try:
        found = read()
        failed = None
    except JournalError as error:
        failed = error
    finally:
        then(found, failed)


def nothing(*told: Any) -> None:
    """A callback for who does not want to know."""
