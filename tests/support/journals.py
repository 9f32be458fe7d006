"""What a journal needs of its surroundings, and short words for what is written to it."""

from __future__ import annotations

import queue
import time
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

from gpumesh.errors import JournalError
from gpumesh.journal.base import Journal, JournalReader, NewJob, TaskEnd

T = TypeVar("T")


class Turns:
    """The loop's thread: calls that were handed over, made when somebody waits for them."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()

    def call_soon(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def until(self, look: Callable[[], T], timeout: float = 20.0) -> T:
        """Make calls until `look` says something true."""
        deadline = time.monotonic() + timeout
        while True:
            found = look()
            if found:
                return found
            try:
                call = self._calls.get(timeout=max(0.0, min(0.05, deadline - time.monotonic())))
            except queue.Empty:
                assert time.monotonic() < deadline, f"did not come about within {timeout:g} s"
                continue
            call()


class Answers:
    """Waits for what a journal answers."""

    def __init__(self, journal: Journal, turns: Turns) -> None:
        self.journal = journal
        self.turns = turns

    def synced(self, *requests: Callable[..., Any]) -> List[Optional[JournalError]]:
        """The answer to each of these requests, which take `on_synced`."""
        came: List[Tuple[int, Optional[JournalError]]] = []
        for place, request in enumerate(requests):
            request(on_synced=lambda error, place=place: came.append((place, error)))
        self.turns.until(lambda: len(came) == len(requests))
        return [error for _, error in sorted(came, key=lambda answer: answer[0])]

    def read(self, call: Callable[[JournalReader], T]) -> T:
        came: List[Tuple[Optional[T], Optional[JournalError]]] = []
        self.journal.read(call, lambda found, error: came.append((found, error)))
        ((found, error),) = self.turns.until(lambda: came)
        if error is not None:
            raise error
        return found  # type: ignore[return-value]

    def submit(
        self,
        job_id: str,
        payloads: Sequence[bytes],
        *,
        code: bytes = b"",
        archive: Optional[bytes] = None,
        submitted: float = 1000.0,
    ) -> int:
        """A whole job, on disk when this returns; its first row."""
        rows: List[int] = []
        journal = self.journal
        answers = self.synced(
            lambda on_synced: rows.append(
                journal.begin_job(
                    new_job(job_id, code=code, submitted=submitted), len(payloads), code=archive, on_synced=on_synced
                )
            ),
            lambda on_synced: journal.add_payloads(job_id, 0, [(0, payload) for payload in payloads], on_synced),
            lambda on_synced: journal.accept_job(job_id, on_synced),
        )
        for error in answers:
            if error is not None:
                raise error
        return rows[0]

    def end(self, *ends: TaskEnd) -> None:
        (error,) = self.synced(lambda on_synced: self.journal.end_tasks(ends, on_synced))
        if error is not None:
            raise error

    def finish(self, job_id: str, *, at: float = 2000.0, status: str = "done") -> None:
        (error,) = self.synced(lambda on_synced: self.journal.finish_job(job_id, status, at, on_synced))
        if error is not None:
            raise error


def new_job(job_id: str, *, code: bytes = b"", submitted: float = 1000.0) -> NewJob:
    return NewJob(job_id, f"name of {job_id}", "work/train.py", code, b"options", submitted, "queued")


def done(row: int, result: bytes = b"1", *, status: str = "done", attempts: int = 1) -> TaskEnd:
    return TaskEnd(row, status, attempts, "worker", 0.5, 1500.0, "", "[]", result)
