"""The journal while it runs: groups, limits, full disks and locks, what is old."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Callable, Iterator, List, Optional

import pytest

from gpumesh.errors import JournalError
from gpumesh.journal import opening, schema, writer, writing
from gpumesh.journal.base import EventRecord
from gpumesh.journal.memory import MemoryJournal
from gpumesh.journal.sqlite import SqliteJournal, open_reader
from tests.support.journals import Answers, Turns, done, new_job
from tests.support.processes import until
from tests.support.small_disk import SmallDisk

Opened = Callable[..., Answers]
DIGEST = b"d" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a lock to go, and what failed is tried again soon."""
    monkeypatch.setattr(opening, "JOURNAL_BUSY_SECONDS", 0.02)
    monkeypatch.setattr(writer, "JOURNAL_RETRY_SECONDS", 0.05)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program writes to the database, and does not end."""
    with contextlib.closing(sqlite3.connect(str(path), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def is_whole(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(str(path))) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def counted(path: Path, table: str) -> int:
    with contextlib.closing(sqlite3.connect(str(path))) as connection:
        (number,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(number)


def test_whoever_is_told_finds_it_on_disk(opened: Opened, path: Path) -> None:
    answers = opened()
    journal = answers.journal
    seen: List[int] = []

    def told(error: Optional[JournalError]) -> None:
        with contextlib.closing(sqlite3.connect(str(path))) as connection:
            seen.append(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])

    for number in range(3):
        journal.begin_job(new_job(f"j-{number:04}"), 1, code=None, on_synced=told)
        answers.turns.until(lambda number=number: len(seen) > number)

    assert seen == [1, 2, 3]


def test_what_is_queued_is_committed_at_once(opened: Opened, path: Path) -> None:
    answers = opened()
    commits = 0

    def trace(statement: str) -> None:
        nonlocal commits
        commits += statement == "COMMIT"

    answers.journal._writer._connection.set_trace_callback(trace)  # type: ignore[attr-defined]
    came: List[Optional[JournalError]] = []
    for number in range(1000):
        answers.journal.begin_job(new_job(f"j-{number:04}"), 1, code=None, on_synced=came.append)
    answers.turns.until(lambda: len(came) == 1000)

    assert came == [None] * 1000
    assert 1 <= commits <= 100


def test_what_nobody_waits_for_is_written_soon_all_the_same(opened: Opened, path: Path) -> None:
    answers = opened()
    answers.journal.note_event(EventRecord(1, "time", "kind", "text"))

    with contextlib.closing(open_reader(str(path))) as reader:
        assert until(reader.events) == [EventRecord(1, "time", "kind", "text")]


@pytest.mark.usefixtures("impatient")
def test_while_the_database_is_locked_facts_wait_and_requests_are_refused(opened: Opened, path: Path) -> None:
    answers = opened()
    journal = answers.journal
    first = answers.submit("j-1111", [b"1", b"2"])
    troubles: List[Optional[JournalError]] = []
    journal.on_trouble = troubles.append
    ended: List[Optional[JournalError]] = []
    message = f"the database of jobs {path} is locked by another program; end it, or name another one with --db"

    with locked(path):
        journal.end_tasks([done(first, b"1")], ended.append)
        journal.append_log(first, 1, 1, b"output")
        answers.turns.until(lambda: troubles)
        assert [str(troubles[0]), str(journal.trouble)] == [message, message]

        for name in ("j-2222", "j-3333"):
            with pytest.raises(JournalError) as refused:
                answers.submit(name, [b"1"])
            assert str(refused.value) == message
        journal.end_tasks([done(first + 1, b"2")], ended.append)
        assert answers.read(lambda reader: [task.status for task in reader.tasks("j-1111")]) == ["pending", "pending"]
        assert ended == []

    answers.turns.until(lambda: len(ended) == 2)
    answers.turns.until(lambda: len(troubles) == 2)
    assert ended == [None, None]
    assert troubles[1] is None
    assert journal.trouble is None
    assert answers.read(lambda reader: [task.result for task in reader.tasks("j-1111")]) == [b"1", b"2"]
    assert answers.read(lambda reader: [part.data for part in reader.log(first)]) == [b"output"]
    answers.submit("j-2222", [b"1"])
    assert answers.read(lambda reader: [job.id for job in reader.jobs()]) == ["j-1111", "j-2222"]


@pytest.mark.usefixtures("impatient")
def test_what_could_not_be_written_until_the_end_is_told(opened: Opened, path: Path) -> None:
    answers = opened()
    first = answers.submit("j-1111", [b"1"])
    ended: List[Optional[JournalError]] = []

    with locked(path):
        answers.journal.end_tasks([done(first)], ended.append)
        answers.journal.close()
        answers.turns.until(lambda: ended)

    assert "is locked by another program" in str(ended[0])
    answers.journal.end_tasks([done(first)], ended.append)
    answers.journal.read(lambda reader: reader.jobs(), lambda found, error: ended.append(error))
    answers.turns.until(lambda: len(ended) == 3)
    assert [str(error) for error in ended[1:]] == [f"the database of jobs {path} is closed"] * 2


def test_closing_writes_what_is_queued(opened: Opened, path: Path) -> None:
    answers = opened()
    first = answers.submit("j-1111", [b"1"])
    answers.journal.end_tasks([done(first)])
    answers.journal.append_log(first, 1, 1, b"output")
    answers.journal.close()

    with contextlib.closing(open_reader(str(path))) as reader:
        assert [task.status for task in reader.tasks("j-1111")] == ["done"]
        assert [part.data for part in reader.log(first)] == [b"output"]


def test_a_disk_that_fills_up_refuses_jobs_and_loses_nothing(
    small_disk: SmallDisk, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "JOURNAL_RETRY_SECONDS", 0.05)
    path = small_disk.folder / "jobs.db"
    journal = SqliteJournal(str(path), call_soon=turns.call_soon)
    answers = Answers(journal, turns)
    first = answers.submit("j-1111", [b"1"] * 500)
    small_disk.fill()
    troubles: List[Optional[JournalError]] = []
    journal.on_trouble = troubles.append

    with pytest.raises(JournalError, match=r"no room for the database of jobs .*: the disk is full; free some space"):
        answers.submit("j-2222", [b"x" * 1_000_000])
    ended: List[Optional[JournalError]] = []
    for place in range(500):  # Some fit into what the log has already.
        journal.end_tasks([done(first + place, b"r" * 5000)], ended.append)
    turns.until(lambda: troubles)
    with pytest.raises(JournalError, match="the disk is full"):
        answers.submit("j-3333", [b"1"])
    assert answers.read(lambda reader: [job.id for job in reader.jobs()]) == ["j-1111"]
    acknowledged = len(ended)
    assert acknowledged < 500

    small_disk.free()
    small_disk.mount("size=8m")
    turns.until(lambda: len(ended) == 500)
    turns.until(lambda: journal.trouble is None)

    assert ended == [None] * 500
    assert answers.read(lambda reader: reader.jobs()[0].counts) == {"done": 500}
    answers.submit("j-2222", [b"x" * 1_000_000])
    journal.close()
    assert is_whole(path)


def test_a_request_too_large_for_the_disk_leaves_the_others_alone(small_disk: SmallDisk, turns: Turns) -> None:
    journal = SqliteJournal(str(small_disk.folder / "jobs.db"), call_soon=turns.call_soon)
    answers = Answers(journal, turns)
    first = answers.submit("j-1111", [b"1"])

    errors = answers.synced(
        lambda on_synced: journal.begin_job(new_job("j-2222"), 1, code=None, on_synced=on_synced),
        lambda on_synced: journal.end_tasks([done(first)], on_synced),
        lambda on_synced: journal.add_payloads("j-2222", 0, [(0, b"x" * 4_000_000)], on_synced),
        lambda on_synced: journal.begin_job(new_job("j-3333"), 0, code=None, on_synced=on_synced),
        lambda on_synced: journal.accept_job("j-3333", on_synced),
    )

    assert [error is None for error in errors] == [True, True, False, True, True]
    assert [str(error) for error in answers.synced(lambda on_synced: journal.accept_job("j-2222", on_synced))] == [
        "job j-2222 is not complete: payloads of 0 of its 1 tasks came"
    ]
    assert journal.trouble is None
    assert answers.read(lambda reader: [(job.id, job.counts) for job in reader.jobs()]) == [
        ("j-1111", {"done": 1}),
        ("j-3333", {}),
    ]
    journal.close()


def test_what_can_never_be_written_is_refused_alone(opened: Opened) -> None:
    answers = opened()
    first = answers.submit("j-1111", [b"1", b"2", b"3"])
    journal = answers.journal

    errors = answers.synced(
        lambda on_synced: journal.end_tasks([done(first)], on_synced),
        lambda on_synced: journal.end_tasks([done(first + 1, attempts=1 << 70)], on_synced),
        lambda on_synced: journal.end_tasks([done(first + 2)], on_synced),
    )

    assert [error is None for error in errors] == [True, False, True]
    assert "this cannot be written" in str(errors[1])
    assert answers.read(lambda reader: [task.status for task in reader.tasks("j-1111")]) == ["done", "pending", "done"]
    assert journal.trouble is None


@pytest.mark.usefixtures("impatient")
def test_what_waits_is_bounded(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "JOURNAL_QUEUE_BYTES", 100_000)
    answers = opened()
    journal = answers.journal
    first = answers.submit("j-1111", [b"1"] * 100)
    ended: List[Optional[JournalError]] = []

    with locked(path):
        for place in range(60):
            journal.end_tasks([done(first + place, b"r" * 2000)], ended.append)
        assert journal.is_pressed
        journal.note_event(EventRecord(1, "time", "kind", "dropped in need"))
        (error,) = answers.synced(lambda on_synced: journal.begin_job(new_job("j-2222"), 1, code=None, on_synced=on_synced))
        assert "wait to be written" in str(error)

    answers.turns.until(lambda: len(ended) == 60)
    assert not journal.is_pressed
    assert answers.read(lambda reader: (reader.jobs()[0].counts, reader.events())) == ({"done": 60, "pending": 40}, [])


def test_one_request_above_the_limit_is_taken_when_nothing_else_waits(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "JOURNAL_QUEUE_BYTES", 100_000)
    answers = opened()
    journal = answers.journal

    answers.synced(lambda on_synced: journal.begin_job(new_job("j-1111"), 1, code=None, on_synced=on_synced))
    assert answers.synced(lambda on_synced: journal.add_payloads("j-1111", 0, [(0, b"x" * 200_000)], on_synced)) == [None]


def test_the_output_of_all_together_is_bounded(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "JOURNAL_LOG_BYTES", 10_000)
    answers = opened()
    first = answers.submit("j-1111", [b"1"] * 3)
    for number in range(100):
        answers.journal.append_log(first + number % 3, 1, 1, b"%03d" % number * 100)

    logs = answers.read(lambda reader: [reader.log(first + place) for place in range(3)])
    kept = sorted(part.data[:3] for parts in logs for part in parts)
    assert kept == [b"%03d" % number for number in range(100 - len(kept), 100)]
    assert 9_000 - 300 <= 300 * len(kept) <= 10_000
    assert [parts[-1].start for parts in logs] == [33 * 300, 32 * 300, 32 * 300]


# --- what is old


def old_and_new(answers: Answers) -> None:
    """Two old jobs, one of them unfinished, and a new one; the first has a folder of its own."""
    first = answers.submit("j-old1", [b"1"] * 10, code=DIGEST, archive=b"archive")
    answers.end(*[done(first + place) for place in range(10)])
    answers.journal.append_log(first, 1, 1, b"output")
    answers.finish("j-old1", at=1000.0)
    answers.submit("j-old2", [b"1"])
    answers.submit("j-new1", [b"1"], submitted=9000.0)
    answers.finish("j-new1", at=9000.0)


def test_old_finished_jobs_are_deleted_with_all_that_was_theirs(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "JOURNAL_SWEEP_ROWS", 3)
    monkeypatch.setattr(writing, "JOURNAL_CODE_SECONDS", 0.0)
    answers = opened(keep_days=1.0, wall=lambda: 10_000.0)
    old_and_new(answers)
    answers.journal.close()

    answers = opened(keep_days=1.0, wall=lambda: 1000.0 + 86400.0 + 1.0)
    pruned: List[str] = []
    answers.journal.on_pruned = pruned.extend
    assert answers.journal.has_code(DIGEST)
    answers.turns.until(lambda: pruned)
    answers.turns.until(lambda: not answers.journal.has_code(DIGEST))

    assert pruned == ["j-old1"]
    assert answers.read(lambda reader: [job.id for job in reader.jobs()]) == ["j-old2", "j-new1"]
    assert [counted(path, table) for table in ("jobs", "payloads", "states", "logs", "code")] == [2, 2, 0, 0, 0]
    assert answers.submit("j-old1", [b"again"]) == 13


def test_nothing_is_deleted_when_everything_is_kept(opened: Opened, path: Path) -> None:
    answers = opened(keep_days=None, wall=lambda: 10_000.0)
    old_and_new(answers)
    answers.journal.close()

    answers = opened(keep_days=None, wall=lambda: 1e12)

    assert answers.read(lambda reader: [job.id for job in reader.jobs()]) == ["j-old1", "j-old2", "j-new1"]


def test_a_job_that_came_only_in_part_is_gone_after_a_start(opened: Opened, path: Path) -> None:
    answers = opened()
    answers.synced(
        lambda on_synced: answers.journal.begin_job(new_job("j-1111"), 2, code=None, on_synced=on_synced),
        lambda on_synced: answers.journal.add_payloads("j-1111", 0, [(0, b"1")], on_synced),
    )
    answers.journal.close()

    answers = opened()
    (error,) = answers.synced(lambda on_synced: answers.journal.accept_job("j-1111", on_synced))
    assert str(error) == "no job j-1111 is being submitted"
    assert answers.submit("j-1111", [b"1", b"2"]) == 3
    answers.journal.close()
    assert [counted(path, table) for table in ("jobs", "payloads")] == [1, 1]


def test_a_job_that_was_being_deleted_is_never_seen_again(opened: Opened, path: Path) -> None:
    answers = opened()
    first = answers.submit("j-1111", [b"1"])
    answers.end(done(first))
    answers.finish("j-1111")
    answers.journal.close()
    with contextlib.closing(sqlite3.connect(str(path), isolation_level=None)) as connection:
        connection.execute(
            "UPDATE jobs SET stage = ?", (schema.DROPPED,)
        )  # As a coordinator that was killed meanwhile leaves it.

    with contextlib.closing(open_reader(str(path))) as reader:
        assert (reader.jobs(), reader.job("j-1111"), reader.tasks("j-1111"), reader.task(first)) == ([], None, [], None)
    answers = opened()
    answers.submit("j-1111", [b"2"])
    assert answers.read(lambda reader: [task.payload for task in reader.tasks("j-1111", payloads=True)]) == [b"2"]


# --- without a file


def test_a_journal_in_memory_is_bounded() -> None:
    turns = Turns()
    answers = Answers(MemoryJournal(call_soon=turns.call_soon, limit_bytes=100_000), turns)
    pruned: List[str] = []
    answers.journal.on_pruned = pruned.extend
    for number in range(3):
        first = answers.submit(f"j-{number:04}", [b"x" * 20_000], code=bytes([number]) * 16, archive=b"y" * 5000)
        answers.end(done(first, b"z" * 5000))
    with pytest.raises(JournalError, match=r"no room for the job: a mesh without a database keeps 0 MB of jobs"):
        answers.submit("j-0003", [b"x" * 20_000])
    answers.finish("j-0001")

    answers.submit("j-0004", [b"x" * 20_000])

    assert answers.read(lambda reader: [job.id for job in reader.jobs()]) == ["j-0000", "j-0002", "j-0004"]
    assert pruned == ["j-0001"]
    assert [answers.journal.has_code(bytes([number]) * 16) for number in range(3)] == [True, False, True]


def test_results_above_the_limit_of_memory_are_kept_and_make_room_of_what_has_finished() -> None:
    turns = Turns()
    answers = Answers(MemoryJournal(call_soon=turns.call_soon, limit_bytes=10_000), turns)
    old = answers.submit("j-0001", [b"1"])
    answers.end(done(old, b"x" * 4000))
    answers.finish("j-0001")
    first = answers.submit("j-0002", [b"1"] * 5)

    answers.end(*[done(first + place, b"x" * 4000) for place in range(5)])

    assert not answers.journal.is_pressed
    assert answers.read(lambda reader: [(job.id, job.counts) for job in reader.jobs()]) == [("j-0002", {"done": 5})]


def test_the_oldest_output_in_memory_goes_first() -> None:
    turns = Turns()
    answers = Answers(MemoryJournal(call_soon=turns.call_soon, limit_bytes=10_000), turns)
    first = answers.submit("j-0001", [b"1"] * 5)
    for place in range(5):
        answers.journal.append_log(first + place, 1, 1, b"%d" % place * 3000)

    assert answers.read(lambda reader: [len(reader.log(first + place)) for place in range(5)]) == [0, 0, 1, 1, 1]
