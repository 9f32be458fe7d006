"""A coordinator's journal whose process is killed at any moment: whatever was acknowledged is there afterwards."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Dict, List, Set, Tuple

import pytest

from gpumesh.journal.sqlite import SqliteJournal, open_reader
from tests.support.journals import Turns

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
