"""A database that cannot be used is refused with one clear error, and stays as it is, byte for byte."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import pytest

from gpumesh.errors import JournalError
from gpumesh.journal import files, opening, schema
from gpumesh.journal.sqlite import SqliteJournal, default_db_path, open_reader
from tests.support.journals import Answers, Turns, done
from tests.support.small_disk import SmallDisk

Opened = Callable[..., Answers]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a lock to go."""
    monkeypatch.setattr(opening, "JOURNAL_BUSY_SECONDS", 0.05)
    monkeypatch.setattr(files, "JOURNAL_BUSY_SECONDS", 0.05)
    monkeypatch.setattr(files, "JOURNAL_LOCK_SECONDS", 0.05)


def filled(opened: Opened, *, jobs: int = 20) -> None:
    """A database with something in it, and nothing in its log."""
    answers = opened()
    for number in range(jobs):
        first = answers.submit(f"j-{number:04}", [b"payload" * 100] * 10)
        answers.end(done(first, b"result" * 100))
    answers.journal.close()


def left_behind(folder: Path) -> Dict[str, bytes]:
    """What is in a folder, but for the lock, which is nobody's data."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".lock" and file.is_file()}


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = left_behind(folder)
    yield
    assert left_behind(folder) == before


def is_whole(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(str(path))) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_database_is_made_for_its_owner_alone(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "jobs.db"

    opened(path).submit("j-1111", [b"1"])

    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == dict.fromkeys(
        ["jobs.db", "jobs.db-wal", "jobs.db-shm", "jobs.db.lock"], 0o600
    )
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_every_start_is_counted_and_the_mesh_stays_the_same(opened: Opened) -> None:
    seen = []
    for _ in range(3):
        answers = opened()
        seen.append((answers.journal.generation, answers.journal.mesh_id))
        answers.journal.close()

    assert [generation for generation, _ in seen] == [1, 2, 3]
    assert len({mesh for _, mesh in seen}) == 1


def test_rows_go_on_after_a_start(opened: Opened) -> None:
    answers = opened()
    answers.submit("j-1111", [b"1"] * 7)
    answers.journal.close()

    assert opened().submit("j-2222", [b"1"]) == 8


def test_a_commit_returns_when_the_disk_has_it(path: Path) -> None:
    lock = files.WriterLock(str(path))
    connection, *_ = opening.open_for_writing(str(path), lock)
    with contextlib.closing(connection):
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    lock.release()


def test_the_default_is_in_the_users_folder_for_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the variable is one of Linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_db_path() == str(tmp_path / "gpumesh" / "jobs.db")
    assert default_db_path(8001) == str(tmp_path / "gpumesh" / "jobs-8001.db")

    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_db_path() == str(tmp_path / "home" / ".local" / "share" / "gpumesh" / "jobs.db")


@pytest.mark.usefixtures("impatient")
def test_a_second_coordinator_is_refused_whatever_it_calls_the_file(opened: Opened, path: Path, tmp_path: Path) -> None:
    first = opened()
    (tmp_path / "link.db").symlink_to(path)

    for name in (path, tmp_path / "link.db"):
        with pytest.raises(JournalError) as refused:
            opened(name)
        assert str(refused.value) == (
            f"the database of jobs {path} is in use by another coordinator (process {os.getpid()});"
            " stop that one, or give this one another with --db"
        )

    first.submit("j-1111", [b"1"])
    first.journal.close()
    assert opened().read(lambda reader: [job.id for job in reader.jobs()]) == ["j-1111"]


def test_a_coordinator_that_is_just_ending_is_waited_for(opened: Opened) -> None:
    first = opened()
    threading.Timer(0.2, first.journal.close).start()

    assert opened().journal.generation == 2


FORKED = """
import os, sys
from gpumesh.journal.sqlite import SqliteJournal

journal = SqliteJournal(sys.argv[1], call_soon=print)
child = os.fork()
if not child:
    os.read(0, 1)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_does_not_keep_the_database(opened: Opened, path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        child = int(program.stdout.readline())
        program.wait(20)

        assert opened().journal.generation == 2
        os.kill(child, 0)  # It lives, and waits for its input to end.
        program.stdin.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "is not a database of jobs, or is damaged; nothing was changed in it; name another one with --db"),
        (random.Random(1).randbytes(10_000), "is not a database of jobs, or is damaged"),
        (b"SQLite format 3\0", "is not a database of jobs, or is damaged"),
        (b"SQLite format 3\0" + bytes(4080), r"is damaged \(.*\); nothing was changed in it; name another one with --db"),
    ],
    ids=["text", "noise", "short", "zeros"],
)
def test_what_is_no_database_is_refused(opened: Opened, path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)

    for use in (opened, lambda: open_reader(str(path))):
        with unchanged(path.parent), pytest.raises(JournalError, match=message):
            use()


def test_an_empty_file_is_a_new_database(opened: Opened, path: Path) -> None:
    path.touch()

    assert opened().journal.generation == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_database_is_refused(opened: Opened, path: Path, seed: int) -> None:
    filled(opened)
    content = bytearray(path.read_bytes())
    page = random.Random(seed).randrange(1, len(content) // 4096) * 4096
    content[page : page + 4096] = random.Random(seed).randbytes(4096)
    path.write_bytes(content)

    with unchanged(path.parent), pytest.raises(JournalError, match=r"is damaged \(.*\); nothing was changed in it"):
        opened()


def test_a_database_that_was_cut_short_is_refused(opened: Opened, path: Path) -> None:
    filled(opened)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])

    with unchanged(path.parent), pytest.raises(JournalError, match="is damaged"):
        opened()


def test_damage_that_is_met_while_reading_is_told(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(opened)
    monkeypatch.setattr(files, "JOURNAL_CHECK_BYTES", 0)  # As if it were large.
    content = bytearray(path.read_bytes())
    for page in range(20, len(content) // 4096):
        content[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
    path.write_bytes(content)

    answers = opened()
    with pytest.raises(JournalError, match="is damaged"):
        answers.read(lambda reader: [reader.tasks(f"j-{number:04}", payloads=True) for number in range(20)])


def test_the_database_of_another_program_is_refused(opened: Opened, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(str(path))) as connection:
        connection.execute("CREATE TABLE precious (things)")
        connection.commit()

    for use in (opened, lambda: open_reader(str(path))):
        with unchanged(path.parent), pytest.raises(JournalError, match="is a database of another program; nothing was changed"):
            use()


@pytest.mark.parametrize("in_log", [False, True])
def test_a_newer_database_is_refused(opened: Opened, path: Path, tmp_path: Path, in_log: bool) -> None:
    filled(opened)
    connection = sqlite3.connect(str(path), isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("PRAGMA user_version = 99")
        if in_log:  # As a killed coordinator leaves it.
            folder = tmp_path / "killed"
            folder.mkdir()
            for name in ("jobs.db", "jobs.db-wal"):
                (folder / name).write_bytes((tmp_path / name).read_bytes())
            path = folder / "jobs.db"

    for use in (opened, lambda path: open_reader(str(path))):
        before = left_behind(path.parent)
        with pytest.raises(JournalError) as refused:
            use(path)
        assert str(refused.value) == (
            f"the database of jobs {path} was written by a newer gpumesh (its tables have version 99, this one knows"
            f" {schema.VERSION}); nothing was changed in it; update gpumesh, or name another one with --db"
        )
        assert {name: content for name, content in left_behind(path.parent).items() if name in before} == before


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("mode", ["NORMAL", "EXCLUSIVE"])
def test_a_locked_database_is_refused(opened: Opened, path: Path, mode: str) -> None:
    filled(opened)
    with contextlib.closing(sqlite3.connect(str(path), isolation_level=None)) as other:
        other.execute(f"PRAGMA locking_mode = {mode}")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError) as refused:
            opened()
        other.execute("ROLLBACK")

    assert str(refused.value) == (
        f"the database of jobs {path} is locked by another program; end it, or name another one with --db"
    )
    assert opened().journal.generation == 2


def test_a_path_that_is_no_file_is_refused(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(JournalError, match=r"file/jobs\.db cannot be made: .*; name another one with --db"):
        opened(tmp_path / "file" / "jobs.db")
    with pytest.raises(JournalError, match="is not a file"):
        opened(tmp_path)


def test_a_database_on_a_read_only_disk_is_refused_but_read(small_disk: SmallDisk, turns: Turns) -> None:
    path = small_disk.folder / "jobs.db"
    journal = SqliteJournal(str(path), call_soon=turns.call_soon)
    Answers(journal, turns).submit("j-1111", [b"1"])
    journal.close()
    small_disk.mount("ro")

    with unchanged(small_disk.folder), pytest.raises(JournalError, match="is read-only for this user; change that, or name"):
        SqliteJournal(str(path), call_soon=turns.call_soon)
    with contextlib.closing(open_reader(str(path))) as reader:
        assert [job.id for job in reader.jobs()] == ["j-1111"]


def test_a_database_that_this_user_may_only_read_is_refused(opened: Opened, path: Path) -> None:
    filled(opened)
    path.chmod(0o444)
    if os.access(path, os.W_OK):
        pytest.skip("this user may write everything; the read-only disk stands for it")

    with unchanged(path.parent), pytest.raises(JournalError, match="is read-only for this user"):
        opened()


def test_a_full_disk_is_told_at_the_start_and_the_database_is_as_before(small_disk: SmallDisk, turns: Turns) -> None:
    path = small_disk.folder / "jobs.db"
    journal = SqliteJournal(str(path), call_soon=turns.call_soon)
    Answers(journal, turns).submit("j-1111", [b"1"])
    journal.close()
    small_disk.fill()

    for name in (path, small_disk.folder / "new.db"):
        with pytest.raises(JournalError, match=r"no room for the database of jobs .*: the disk is full; free some space"):
            SqliteJournal(str(name), call_soon=turns.call_soon)

    small_disk.free()
    assert is_whole(path)
    for name, generation in ((path, 2), (small_disk.folder / "new.db", 1)):
        journal = SqliteJournal(str(name), call_soon=turns.call_soon)
        assert journal.generation == generation
        journal.close()


# --- versions


def first_version(path: Path) -> None:
    """A database as the first version of the tables had it, with a job."""
    with contextlib.closing(sqlite3.connect(str(path), isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        schema.STEPS[0](connection)
        connection.execute(f"PRAGMA user_version = {1}")
        connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        connection.execute("UPDATE meta SET value = 5 WHERE key IN ('generation', 'next_row')")
        connection.execute(
            "INSERT INTO jobs (first_row, tasks, id, name, script, code, options, stage, status, submitted)"
            " VALUES (3, 2, 'j-1111', 'old', 'old.py', x'', x'', 1, 'queued', 7.0)"
        )
        connection.execute("INSERT INTO payloads VALUES (3, 2, x'00000100', x'01000000010000004142')")
        connection.execute("INSERT INTO states (row, status, result) VALUES (3, 'done', x'31')")


def test_an_older_database_is_brought_up_to_date(opened: Opened, path: Path) -> None:
    first_version(path)

    answers = opened()

    assert answers.journal.generation == 6
    tasks = answers.read(lambda reader: reader.tasks("j-1111", payloads=True))
    assert [(task.row, task.variant, task.status, task.payload, task.result) for task in tasks] == [
        (3, 0, "done", b"A", b"1"),
        (4, 1, "pending", b"B", None),
    ]
    answers.journal.append_log(4, 1, 1, b"new in version 2")
    assert answers.read(lambda reader: [part.data for part in reader.log(4)]) == [b"new in version 2"]
    assert answers.submit("j-2222", [b"1"]) == 5
    with contextlib.closing(sqlite3.connect(str(path))) as connection:
        assert schema.version_of(connection) == schema.VERSION


def test_an_older_database_is_read_without_changing_it(path: Path) -> None:
    first_version(path)

    with unchanged(path.parent), contextlib.closing(open_reader(str(path))) as reader:
        assert [(job.id, job.counts) for job in reader.jobs()] == [("j-1111", {"done": 1, "pending": 1})]
        assert reader.events() == []


def test_a_step_that_fails_leaves_the_old_version(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_version(path)

    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE jobs")
        connection.execute("SELECT * FROM missing")

    with monkeypatch.context() as patched:
        patched.setattr(schema, "STEPS", [schema.STEPS[0], broken])
        with pytest.raises(JournalError, match="cannot be used: no such table: missing"):
            opened()

    assert opened().read(lambda reader: [job.id for job in reader.jobs()]) == ["j-1111"]


# --- readers


def test_a_reader_changes_nothing(opened: Opened, path: Path) -> None:
    filled(opened, jobs=3)
    times = path.stat().st_mtime_ns, path.parent.stat().st_mtime_ns

    with unchanged(path.parent):
        with contextlib.closing(open_reader(str(path))) as reader:
            assert [job.id for job in reader.jobs()] == ["j-0000", "j-0001", "j-0002"]
            assert len(reader.tasks("j-0001", payloads=True)) == 10
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                reader._connection.execute("DELETE FROM jobs")
    assert (path.stat().st_mtime_ns, path.parent.stat().st_mtime_ns) == times


def test_a_reader_sees_what_a_running_coordinator_has_written(opened: Opened, path: Path) -> None:
    answers = opened()
    answers.submit("j-1111", [b"1"])
    with contextlib.closing(open_reader(str(path))) as reader:
        assert [job.id for job in reader.jobs()] == ["j-1111"]
        answers.submit("j-2222", [b"1"])
        assert [job.id for job in reader.jobs()] == ["j-1111", "j-2222"]
        answers.journal.close()
        assert [job.id for job in reader.jobs()] == ["j-1111", "j-2222"]

    assert is_whole(path)


KILLED = """
import os, sys
from gpumesh.journal.sqlite import SqliteJournal
from tests.support.journals import Answers, Turns

turns = Turns()
answers = Answers(SqliteJournal(sys.argv[1], call_soon=turns.call_soon), turns)
answers.submit("j-1111", [b"1", b"2"])
os.kill(os.getpid(), 9)
"""


def test_a_reader_reads_what_a_killed_coordinator_has_left(opened: Opened, path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=50)
    assert files.size_of(files.wal_of(str(path)))

    for remove in ([], ["jobs.db-shm"]):
        for name in remove:
            (path.parent / name).unlink()
        with unchanged(path.parent):
            with contextlib.closing(open_reader(str(path))) as reader:
                assert [(job.id, job.counts) for job in reader.jobs()] == [("j-1111", {"pending": 2})]

    assert opened().read(lambda reader: [job.id for job in reader.jobs()]) == ["j-1111"]


def test_a_reader_of_nothing_is_told_so_and_makes_nothing(path: Path) -> None:
    with unchanged(path.parent), pytest.raises(JournalError, match=r"there is no database of jobs at .*jobs\.db"):
        open_reader(str(path))
    path.touch()
    with unchanged(path.parent), contextlib.closing(open_reader(str(path))) as reader:
        assert reader.jobs() == []


@pytest.mark.usefixtures("impatient")
def test_no_coordinator_starts_while_its_database_is_read_in_place(opened: Opened, path: Path) -> None:
    filled(opened, jobs=1)
    with contextlib.closing(open_reader(str(path))):
        with pytest.raises(JournalError, match="is in use by another"):
            opened()

    assert opened().journal.generation == 2


def test_neither_clients_nor_workers_load_the_database() -> None:
    code = (
        "import sys; from gpumesh import GPUMesh; import gpumesh.runtime.worker, gpumesh.runtime.runner, gpumesh.journal.memory;"
        " print('sqlite3' in sys.modules)"
    )
    shown: Any = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=50)

    assert shown.stdout.strip() == "False"
