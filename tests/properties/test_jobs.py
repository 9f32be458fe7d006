"""Random lives of script jobs: the book of what runs, against a plain list of what the journal holds."""

from __future__ import annotations

from typing import Dict, List, Tuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpumesh.model.jobs import CANCELLED, DONE, FAILED, PENDING
from gpumesh.scheduler.jobs import Job, JobBook, Wanted

WINDOW = 20
PAYLOAD_BYTES = 10


class Jobs(RuleBasedStateMachine):
    """The journal is a dict; pages are read late, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.book = JobBook(window=WINDOW, window_bytes=15 * PAYLOAD_BYTES)
        self.journal: Dict[int, str] = {}  # Row -> state, as on disk.
        self.owner: Dict[int, Job] = {}
        self.runs: Dict[int, bool] = {}  # Rows with the cluster -> being cancelled.
        self.done: Dict[int, int] = {}  # Row -> times that it was done.
        self.reading: List[Tuple[Wanted, List[int]]] = []  # What the journal said when it was asked.
        self.next_row = 1

    def jobs(self) -> List[Job]:
        return self.book.jobs()

    @rule(count=st.integers(1, 40), priority=st.integers(0, 2))
    def submit(self, count: int, priority: int) -> None:
        job = Job(f"j-{self.next_row}", self.next_row, count, priority=priority)
        for row in range(self.next_row, self.next_row + count):
            self.journal[row] = PENDING
            self.owner[row] = job
        self.next_row += count
        self.book.add(job)
        self.ask()

    def ask(self) -> None:
        for page in self.book.wanted():
            job = self.book.get(page.job)
            assert job is not None
            rows = range(page.after + 1, job.first + job.total)
            pending = [row for row in rows if self.journal[row] == PENDING]
            room = max(1, page.limit_bytes // PAYLOAD_BYTES)
            self.reading.append((page, pending[: min(page.limit, room)]))

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def read(self, data: st.DataObject, fails: int) -> None:
        page, found = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        if fails == 0:
            self.book.unread(page)
            return
        job = self.book.get(page.job)
        is_last = not found or (job is not None and found[-1] == job.first + job.total - 1)
        for row in self.book.read(page, [(row, PAYLOAD_BYTES) for row in found], is_last=is_last):
            assert row not in self.runs, "a task is with the cluster once at a time"
            assert self.journal[row] == PENDING, "what has ended does not run again"
            self.runs[row] = False
        self.ask()

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), state=st.sampled_from([DONE, DONE, FAILED]))
    def end(self, data: st.DataObject, state: str) -> None:
        row = data.draw(st.sampled_from(sorted(self.runs)))
        is_cancelled = self.runs.pop(row)
        if is_cancelled and data.draw(st.booleans()):
            state = CANCELLED
        job, now = self.book.ended(row, state)
        assert job is self.owner[row]
        if now != PENDING:
            self.journal[row] = now
            self.done[row] = self.done.get(row, 0) + (now == DONE)
        self.finish(job)
        self.ask()

    @precondition(lambda self: self.jobs())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs()))
        rows, _ = self.book.cancel(job)
        for row in rows:
            self.runs[row] = True
        for row, owner in self.owner.items():
            if owner is job and self.journal[row] == PENDING:
                self.journal[row] = CANCELLED
        self.finish(job)
        self.ask()

    @precondition(lambda self: self.jobs())
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs()))
        self.book.retry(job)
        for row, owner in self.owner.items():
            if owner is job and self.journal[row] in (FAILED, CANCELLED):
                self.journal[row] = PENDING
        self.finish(job)
        self.ask()

    def finish(self, job: Job) -> None:
        if job.is_finished:
            self.book.finish(job.id)

    @invariant()
    def the_window_holds(self) -> None:
        assert len(self.runs) <= WINDOW
        assert all(times <= 1 for times in self.done.values())

    @invariant()
    def counts_are_those_of_the_journal(self) -> None:
        for job in self.jobs():
            counts = job.counts(0)
            on_disk = [self.journal[row] for row in range(job.first, job.first + job.total)]
            running = [row for row in self.runs if self.owner[row] is job]
            assert sorted(running) == sorted(job.fed)
            for state in (DONE, FAILED):
                assert counts[state] == on_disk.count(state)
            assert counts[CANCELLED] + counts[PENDING] == on_disk.count(CANCELLED) + on_disk.count(PENDING)
            assert counts[PENDING] >= len(running)

    def teardown(self) -> None:
        """Whatever has happened, all of it comes to its end when the journal answers and tasks end."""
        for _ in range(10_000):
            self.ask()
            if self.reading:
                page, found = self.reading.pop(0)
                job = self.book.get(page.job)
                is_last = not found or (job is not None and found[-1] == job.first + job.total - 1)
                self.runs.update(
                    dict.fromkeys(self.book.read(page, [(row, PAYLOAD_BYTES) for row in found], is_last=is_last), False)
                )
            elif self.runs:
                row, is_cancelled = self.runs.popitem()
                ended, now = self.book.ended(row, CANCELLED if is_cancelled else DONE)
                assert ended is not None
                if now != PENDING:
                    self.journal[row] = now
                self.finish(ended)
            else:
                break
        assert not self.jobs(), "a job never ends"
        assert PENDING not in self.journal.values()


Jobs.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestJobs = Jobs.TestCase
