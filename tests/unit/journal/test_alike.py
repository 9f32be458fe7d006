"""A journal in a file and one in memory tell the same after the same history, also across starts of the one in the file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict, List, Set, Tuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumesh.journal.base import EventRecord, Journal, JournalReader, WorkerRecord
from gpumesh.journal.memory import MemoryJournal
from gpumesh.journal.packing import PACK_BYTES
from gpumesh.journal.sqlite import SqliteJournal
from tests.support.journals import Answers, Turns, done, new_job

JOBS = ["j-0001", "j-0002", "j-0003"]
SIZES = {"j-0001": 0, "j-0002": 3, "j-0003": 8}
ROWS = st.integers(0, 25)
IDS = st.sampled_from(JOBS)
STATUSES = st.sampled_from(["done", "failed", "cancelled"])
PAYLOADS = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.binary(max_size=4), st.just(b"x" * (PACK_BYTES // 2)))), min_size=1, max_size=8
)
STEP = st.one_of(
    st.tuples(st.just("submit"), IDS),
    st.tuples(st.just("begin"), IDS),
    st.tuples(st.just("add"), IDS, st.integers(0, 7), PAYLOADS),
    st.tuples(st.just("accept"), IDS),
    st.tuples(st.just("discard"), IDS),
    st.tuples(st.just("end"), st.lists(st.tuples(ROWS, STATUSES), max_size=6)),
    st.tuples(st.just("start"), st.lists(ROWS, max_size=4)),
    st.tuples(st.just("cancel"), IDS, st.lists(ROWS, max_size=4)),
    st.tuples(st.just("retry"), IDS, st.lists(STATUSES, max_size=3, unique=True)),
    st.tuples(st.just("finish"), IDS),
    st.tuples(st.just("set"), IDS),
    st.tuples(st.just("log"), ROWS, st.binary(max_size=4)),
    st.tuples(st.just("event"), st.integers(1, 5)),
    st.tuples(st.just("joined"), st.sampled_from("abc")),
    st.tuples(st.just("left"), st.sampled_from("abc")),
)


def apply(answers: Answers, step: Tuple[Any, ...]) -> List[str]:
    """Do one step; what was answered."""
    journal, (word, *rest) = answers.journal, step
    if word == "begin":
        job = rest[0]
        asked = [lambda on_synced: journal.begin_job(new_job(job), SIZES[job], code=None, on_synced=on_synced)]
    elif word == "submit":
        job, payloads = rest[0], [(1, b"whole")] * SIZES[rest[0]]
        asked = [
            lambda on_synced: journal.begin_job(new_job(job), SIZES[job], code=None, on_synced=on_synced),
            lambda on_synced: journal.add_payloads(job, 0, payloads, on_synced),
            lambda on_synced: journal.accept_job(job, on_synced),
        ]
    elif word == "add":
        asked = [lambda on_synced: journal.add_payloads(rest[0], rest[1], rest[2], on_synced)]
    elif word == "accept":
        asked = [lambda on_synced: journal.accept_job(rest[0], on_synced)]
    elif word == "end":
        ends = [done(row, b"result", status=status) for row, status in rest[0] if owned(answers, row)]
        asked = [lambda on_synced: journal.end_tasks(ends, on_synced)]
    elif word == "start":
        rows = [row for row in rest[0] if owned(answers, row)]
        asked = [lambda on_synced: journal.mark_started(rows, on_synced)]
    elif word == "cancel" and rest[0] in goes_on(answers):
        asked = [
            lambda on_synced: journal.cancel_pending(
                rest[0], "cancelled", status="cancelled", except_rows=rest[1], on_synced=on_synced
            )
        ]
    elif word == "retry":
        asked = [lambda on_synced: journal.retry_job(rest[0], rest[1], status="queued", on_synced=on_synced)]
    elif word == "finish" and goes_on(answers).get(rest[0]) is False:
        asked = [lambda on_synced: journal.finish_job(rest[0], "done", 2000.0, on_synced)]
    elif word == "set":
        asked = [lambda on_synced: journal.set_job(rest[0], "running", on_synced)]
    else:
        asked = []
        if word == "discard":
            journal.discard_job(rest[0])
        elif word == "log" and owned(answers, rest[0]):
            journal.append_log(rest[0], 1, 1, rest[1])
        elif word == "event":
            journal.note_event(EventRecord(rest[0], "time", "kind", "text"))
        elif word == "joined":
            journal.worker_joined(WorkerRecord(rest[0], "name", float(ord(rest[0]))))
        elif word == "left":
            journal.worker_left(rest[0])
    return [str(error) for error in answers.synced(*asked)]


def owned(answers: Answers, row: int) -> bool:
    """The runtime tells only of tasks of jobs that are not finished."""
    task = answers.read(lambda reader: reader.task(row))
    return task is not None and task.job_id in goes_on(answers)


def goes_on(answers: Answers) -> Dict[str, bool]:
    """Unfinished jobs, and whether something of them is pending."""
    return {job.id: "pending" in job.counts for job in answers.read(lambda reader: reader.unfinished())}


def everything(reader: JournalReader) -> List[Any]:
    """All that can be read."""
    found: List[Any] = [reader.unfinished(), reader.jobs(), reader.jobs(2), reader.started(), reader.events(), reader.workers()]
    for job in JOBS:
        found.append(reader.job(job))
        found.append([(part.row, part.data) for part in reader.job_log(job, max_bytes=1000)])
        for payloads in (False, True):
            found.append(reader.tasks(job, payloads=payloads, results=payloads))
        found.append(reader.tasks(job, first=2, limit=3, max_bytes=PACK_BYTES, payloads=True))
        found.append(reader.pending(job, after=0, limit=1000, max_bytes=1 << 30))
        found.append(reader.pending(job, after=4, limit=3, max_bytes=PACK_BYTES))
    found.extend([reader.task(row) for row in range(26)])
    found.extend([[part.data for part in reader.log(row)] for row in range(26)])
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, max_size=25), st.integers(0, 25))
def test_they_are_alike(steps: List[Tuple[Any, ...]], restart_after: int) -> None:
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "jobs.db")
        memory = Answers(MemoryJournal(call_soon=turns.call_soon, wall=lambda: 5.0), turns)
        file = Answers(SqliteJournal(path, call_soon=turns.call_soon, wall=lambda: 5.0, keep_days=None), turns)
        try:
            begun: Set[str] = set()  # A second one is refused; its rows are given again, but only after a restart.
            for number, step in enumerate(steps):
                if step[0] in ("submit", "begin") and step[1] in begun:
                    continue
                if step[0] in ("submit", "begin"):
                    begun.add(step[1])
                assert [apply(memory, step)] == [apply(file, step)], step
                if number == restart_after:
                    file.journal.close()
                    file.journal = SqliteJournal(path, call_soon=turns.call_soon, wall=lambda: 5.0, keep_days=None)
                    forget_what_only_came_in_part(memory.journal)
            assert memory.read(everything) == file.read(everything)
        finally:
            file.journal.close()


def forget_what_only_came_in_part(journal: Journal) -> None:
    for job in JOBS:
        journal.discard_job(job)
