"""A coordinator's database: killed at any moment, damaged, used by two, on a disk that fills up."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import JournalError
from gpumesh.journal.sqlite import SqliteJournal, open_reader
from tests.integration.programs import Programs, started_programs
from tests.support.journals import Turns
from tests.support.processes import until
from tests.support.small_disk import mounted_disk

WRITER = """
import random, sys, time
from gpumesh.journal.base import NewJob, TaskEnd
from gpumesh.journal.sqlite import SqliteJournal
from tests.support.journals import Turns

turns = Turns()
journal = SqliteJournal(sys.argv[1], call_soon=turns.call_soon, keep_days=0.0 if sys.argv[3] == "prune" else None)
draw = random.Random(int(sys.argv[2]))
out = sys.stdout.buffer
waiting = 0


def told(line):
    global waiting
    waiting += 1

    def synced(error):
        global waiting
        waiting -= 1
        assert error is None, error
        out.write(line.encode() + b"\\n")
        out.flush()

    return synced


print("open", journal.generation, flush=True)
number = 0
while True:
    number += 1
    job = f"j-{journal.generation}-{number}"
    size = draw.choice([1, 1, 1, 10, 2000])
    first = journal.begin_job(NewJob(job, "name", "script.py", b"", b"", 1.0), size, code=None, on_synced=lambda error: None)
    for start in range(0, size, 500):
        part = [(0, b"%s %d" % (job.encode(), place)) for place in range(start, min(size, start + 500))]
        journal.add_payloads(job, start, part, lambda error: None)
    journal.accept_job(job, told(f"job {job} {first} {size}"))
    for place in range(0, size, 7):
        end = TaskEnd(first + place, "done", 1, "worker", 0.1, 1.0, result=b"r%d" % (first + place))
        journal.end_tasks([end], told(f"end {first + place}"))
    journal.append_log(first, 1, 1, b"x" * draw.randrange(3000))
    if size == 10:
        journal.cancel_pending(job, "cancelled", status="cancelled")
        journal.finish_job(job, "cancelled", time.time() - 10, told(f"finished {job}"))
    turns.until(lambda: waiting < draw.choice([1, 1, 20]))
"""


def run_until_killed(path: Path, seed: int, *, seconds: float, mode: str) -> List[List[str]]:
    """Write to the database until the process is killed; what it was told is on disk."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(seed), mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        lines = [process.stdout.readline()]  # It has opened the database; it is killed at some moment after that.
        killer = threading.Timer(seconds, process.kill)
        killer.start()
        lines.extend(process.stdout)
        killer.join()
    assert process.returncode == -signal.SIGKILL
    return [line.split() for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("mode", ["keep", "prune"])
def test_what_was_acknowledged_survives_kills_at_any_moment(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "jobs.db"
    draw = random.Random(mode)
    jobs: Dict[str, Tuple[int, int]] = {}
    ended: Set[int] = set()
    finished: Set[str] = set()
    for generation in range(1, 9):
        told = run_until_killed(path, generation, seconds=draw.uniform(0.0, 0.25), mode=mode)
        assert told[0] == ["open", str(generation)]
        for word, *rest in told[1:]:
            if word == "job":
                jobs[rest[0]] = (int(rest[1]), int(rest[2]))
            elif word == "end":
                ended.add(int(rest[0]))
            else:
                finished.add(rest[0])

        with contextlib.closing(open_reader(str(path))) as reader:
            there = {job.id: job for job in reader.jobs(1_000_000)}
            for name, (first, size) in jobs.items():
                if generation < 8 and not name.startswith(f"j-{generation}-"):
                    continue  # Looked at before, and at the end again.
                if mode == "prune" and size == 10 and (name not in there or there[name].finished):
                    continue  # Deleted because of its age, or on its way.
                assert name in there
                tasks = reader.tasks(name, payloads=True)
                assert [(task.row, task.payload) for task in tasks] == [
                    (first + place, f"{name} {place}".encode()) for place in range(size)
                ]
                assert all(task.result == b"r%d" % task.row for task in tasks if task.row in ended)
                assert {task.row for task in tasks if task.row in ended} == {
                    row for row in ended if first <= row < first + size
                }
                assert (there[name].finished > 0) >= (name in finished)
            assert all(sum(job.counts.values()) == job.tasks for job in there.values())

    assert len(jobs) > 40
    turns = Turns()
    journal = SqliteJournal(str(path), call_soon=turns.call_soon)
    journal.close()
    with contextlib.closing(sqlite3.connect(str(path))) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# --- as its users meet it

ECHO = """
import json, pathlib, sys, time
payload = json.load(sys.stdin)
while "gate" in payload and not pathlib.Path(payload["gate"]).exists():
    time.sleep(0.02)
print(json.dumps(payload["x"] * 2))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as running:
        yield running


def test_a_disk_that_fills_up_refuses_jobs_and_holds_up_nothing_else(programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "echo.py"
    script.parent.mkdir()
    script.write_text(ECHO)
    gate = tmp_path / "gate"
    with mounted_disk(tmp_path / "disk", megabytes=4) as disk:
        path = disk.folder / "jobs.db"
        coordinator, url = programs.serve("--db", str(path), "--token", "secret", "--slots", "2", "--no-self-worker")
        programs.gpumesh("join", url, "--token", "secret", "--slots", "2")
        with GPUMesh(url, token="secret", fallback=False) as mesh:
            until(mesh.workers, 20.0)
            double = accelerate(mesh)(_double)
            running = mesh.submit(script=script, payloads=[{"x": x, "gate": str(gate)} for x in range(4)])
            until(lambda: mesh.status(running)["counts"]["running"] == 2, 20.0)
            disk.fill()

            with pytest.raises(JournalError, match="no room for the database of jobs .*: the disk is full; free some space"):
                mesh.submit(script=script, payloads=[{"x": "y" * 200_000} for _ in range(20)])
            gate.touch()
            assert list(double.map(range(100))) == [2 * number for number in range(100)]
            assert [job["id"] for job in mesh.jobs()] == [running]
            assert coordinator.process.poll() is None

            disk.free()

            assert [task["result"] for task in mesh.wait(running, 30.0)["tasks"]] == [0, 2, 4, 6]
            after = mesh.submit(script=script, payloads=[{"x": 5}])
            assert [task["result"] for task in mesh.wait(after, 30.0)["tasks"]] == [10]
        coordinator.kill()
        with contextlib.closing(sqlite3.connect(str(path))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _double(number: int) -> int:
    return 2 * number


def test_a_database_that_cannot_be_used_is_one_line_and_stays_as_it_is(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_bytes(b"my notes, and no database\n" * 10)

    for words in (("serve", "--host", "127.0.0.1", "--port", "0", "--db", str(path)), ("jobs", "--db", str(path))):
        program = programs.gpumesh(*words)
        assert program.wait() == 1
        (line,) = [line for line in program.output.splitlines() if "jobs.db" in line]
        assert "is not a database of jobs, or is damaged; nothing was changed in it; name another one with --db" in line
        assert "Traceback" not in program.output
    assert path.read_bytes() == b"my notes, and no database\n" * 10


def test_two_coordinators_do_not_share_a_database(programs: Programs, tmp_path: Path) -> None:
    path = str(tmp_path / "jobs.db")
    first, _ = programs.serve("--db", path, "--no-self-worker")

    second = programs.gpumesh("serve", "--host", "127.0.0.1", "--port", "0", "--db", path, "--no-self-worker")

    assert second.wait() == 1
    assert f"is in use by another coordinator (process {first.process.pid}); stop that one" in second.output
    first.interrupt()
    assert first.wait() == 0
    programs.serve("--db", path, "--no-self-worker")
