"""Script jobs through the API, on real processes: results, failures, cancelling, and a coordinator that is killed at every bad moment."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh import GPUMesh
from gpumesh.errors import MeshUnavailableError, UnknownJobError
from tests.integration.programs import Program, Programs, started_programs
from tests.support.processes import free_port, until

SQUARE = """
import json, sys
payload = json.load(sys.stdin)
print("working on", payload["x"])
if payload["x"] == payload.get("bad") and not __import__("pathlib").Path(payload["cured"]).exists():
    sys.exit("this one does not work")
print(json.dumps({"y": payload["x"] ** 2}))
"""
LINGER = """
import json, pathlib, sys, time
payload = json.load(sys.stdin)
with open(payload["marks"], "a") as marks:
    marks.write(f"{payload['x']}\\n")
while not pathlib.Path(payload["gate"]).exists():
    time.sleep(0.02)
print(payload["x"] + 100)
"""
TOKEN = "secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scripts, and nothing else: a script's folder travels with it."""
    path = tmp_path / "scripts"
    path.mkdir()
    (path / "square.py").write_text(SQUARE)
    (path / "linger.py").write_text(LINGER)
    return path


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    """An embedded mesh keeps jobs too, in memory."""
    with GPUMesh.local(workers=1, slots=2) as local:
        yield local


def marks(folder: Path) -> Counter[str]:
    """How often each task was started."""
    path = folder.parent / "marks"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def lingering(folder: Path, count: int) -> List[Dict[str, Any]]:
    where = {"marks": str(folder.parent / "marks"), "gate": str(folder.parent / "gate")}
    return [{"x": x, **where} for x in range(count)]


def open_gate(folder: Path) -> None:
    (folder.parent / "gate").touch()


# --- one coordinator that stays


def test_a_job_runs_and_tells_of_each_task(mesh: GPUMesh, folder: Path) -> None:
    job = mesh.submit(name="squares", script=folder / "square.py", payloads=[{"x": x} for x in range(5)])

    status = mesh.wait(job, 30)

    assert status["finished"] is True
    assert status["state"] == "done"
    assert status["name"] == "squares"
    assert status["counts"] == {"pending": 0, "running": 0, "done": 5, "failed": 0, "cancelled": 0}
    assert [task["id"] for task in status["tasks"]] == [0, 1, 2, 3, 4]
    assert [task["payload"] for task in status["tasks"]] == [{"x": x} for x in range(5)]
    assert [task["result"] for task in status["tasks"]] == [{"y": x * x} for x in range(5)]
    (worker,) = mesh.workers()
    for task in status["tasks"]:
        assert (task["status"], task["error"], task["worker"], task["hostname"]) == (
            "done",
            None,
            worker["id"],
            worker["hostname"],
        )
        assert [attempt["status"] for attempt in task["attempts"]] == ["ok"]
        assert 0 < task["seconds"] < 30
    assert mesh.status(job) == status
    assert {**status, "tasks": []} == {**mesh.jobs()[0], "tasks": []}


def test_what_tasks_write_is_kept_for_each(mesh: GPUMesh, folder: Path) -> None:
    job = mesh.submit(script=folder / "square.py", payloads=[{"x": x} for x in range(3)])
    mesh.wait(job, 30)

    parts = mesh.logs(job, 1)

    assert "".join(part["text"] for part in parts) == 'working on 1\n{"y": 1}\n'
    assert {(part["task"], part["attempt"], part["stream"]) for part in parts} == {(1, 1, "out")}
    assert {part["task"] for part in mesh.logs(job)} == {0, 1, 2}
    assert mesh.logs(job, since=max(part["number"] for part in mesh.logs(job))) == []
    with pytest.raises(ValueError, match="has the tasks 0 to 2, not 3"):
        mesh.logs(job, 3)


def test_a_failed_task_says_why_and_a_retry_leaves_what_is_done(mesh: GPUMesh, folder: Path) -> None:
    cured = folder.parent / "cured"
    job = mesh.submit(script=folder / "square.py", payloads=[{"x": x, "bad": 1, "cured": str(cured)} for x in range(3)])
    status = mesh.wait(job, 30)
    assert status["state"] == "failed"
    assert status["counts"]["failed"] == 1
    failed = status["tasks"][1]
    assert (failed["status"], failed["result"]) == ("failed", None)
    assert "this one does not work" in failed["error"]
    assert failed["attempts"][0]["status"] == "raised"
    assert failed["attempts"][0]["exit"] == 1

    cured.touch()
    assert mesh.retry(job) == 1
    again = mesh.wait(job, 30)

    assert again["state"] == "done"
    assert again["tasks"][1]["result"] == {"y": 1}
    assert again["tasks"][0] == status["tasks"][0], "what was done has not run again"
    assert mesh.retry(job) == 0


def test_progress_is_told_as_it_comes(mesh: GPUMesh, folder: Path) -> None:
    seen: List[Dict[str, Any]] = []
    job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 2))
    until(lambda: sum(marks(folder).values()) == 2, 20)
    assert mesh.status(job, tasks=False)["counts"]["running"] == 2
    assert "tasks" not in mesh.status(job, tasks=False)
    assert [task["status"] for task in mesh.status(job)["tasks"]] == ["running", "running"]
    with pytest.raises(TimeoutError, match="has not finished within 0.2 s"):
        mesh.wait(job, 0.2)

    waiting = threading.Thread(target=lambda: mesh.wait(job, 30, on_progress=seen.append))
    waiting.start()
    until(lambda: seen, 10)
    open_gate(folder)
    waiting.join(30)

    assert seen[0]["counts"]["running"] == 2
    assert seen[-1]["finished"] is True
    assert seen[-1]["counts"]["done"] == 2


def test_a_task_whose_turn_comes_behind_another_job_is_told(mesh: GPUMesh, folder: Path) -> None:
    open_gate(folder)
    quick = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 8))
    mesh.wait(quick, 30)  # From now on tasks are sent ahead.
    (folder.parent / "gate").unlink()
    first = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 2))
    until(lambda: sum(marks(folder).values()) == 10, 20)
    second_gate = folder.parent / "second gate"
    second = mesh.submit(
        script=folder / "linger.py", payloads=[{**payload, "gate": str(second_gate)} for payload in lingering(folder, 2)]
    )
    seen: List[Dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: mesh.wait(second, 30, on_progress=seen.append))
    waiting.start()
    until(lambda: seen and seen[-1]["counts"]["pending"] == 2, 10)

    open_gate(folder)

    until(lambda: seen[-1]["counts"]["running"] == 2, 10, what=str(seen))
    second_gate.touch()
    waiting.join(30)
    assert seen[-1]["counts"]["done"] == 2
    assert mesh.wait(first, 30)["counts"]["done"] == 2


def test_cancelling_ends_what_runs_and_what_waits(mesh: GPUMesh, folder: Path) -> None:
    job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 5))
    until(lambda: sum(marks(folder).values()) == 2, 20)

    assert mesh.cancel(job) == 5
    status = mesh.wait(job, 20)

    assert status["state"] == "cancelled"
    assert status["counts"]["cancelled"] == 5
    assert {task["status"] for task in status["tasks"]} == {"cancelled"}
    assert sum(marks(folder).values()) == 2
    open_gate(folder)
    assert mesh.retry(job) == 5
    assert [task["result"] for task in mesh.wait(job, 30)["tasks"]] == [100, 101, 102, 103, 104]
    assert mesh.cancel(job) == 0, "it has finished"


@pytest.mark.parametrize("force", [False, True])
def test_what_is_cancelled_has_time_to_clean_up_unless_it_is_killed(mesh: GPUMesh, folder: Path, force: bool) -> None:
    cleaned = folder.parent / "cleaned"
    (folder / "clean.py").write_text(
        "import json, pathlib, sys, time\n"
        "payload = json.load(sys.stdin)\n"
        "pathlib.Path(payload['marks']).touch()\n"
        "try:\n"
        "    time.sleep(60)\n"
        "finally:\n"
        f"    pathlib.Path({str(cleaned)!r}).touch()\n"
    )
    job = mesh.submit(script=folder / "clean.py", payloads=lingering(folder, 1))
    until((folder.parent / "marks").exists, 20)

    mesh.cancel(job, force=force)

    assert mesh.wait(job, 20)["counts"]["cancelled"] == 1
    assert cleaned.exists() is not force


def test_a_job_without_tasks_is_done(mesh: GPUMesh, folder: Path) -> None:
    job = mesh.submit(script=folder / "square.py", payloads=[])

    status = mesh.wait(job, 10)

    assert (status["state"], status["total"], status["tasks"]) == ("done", 0, [])


def test_large_payloads_and_results_arrive_whole(mesh: GPUMesh, folder: Path) -> None:
    (folder / "echo.py").write_text("import sys\nprint(sys.stdin.read())\n")
    payloads = [{"x": 0}, {"text": "a" * 300_000}, {"text": "b" * 3_000_000}, {"x": 3}]

    job = mesh.submit(script=folder / "echo.py", payloads=payloads)

    assert [task["result"] for task in mesh.wait(job, 30)["tasks"]] == payloads


def test_many_tasks_are_told_of_in_pages(mesh: GPUMesh, folder: Path) -> None:
    job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 5000))
    mesh.cancel(job)

    status = mesh.wait(job, 30)

    assert [task["id"] for task in status["tasks"]] == list(range(5000))
    assert [task["payload"]["x"] for task in status["tasks"]] == list(range(5000))


def test_a_job_is_found_by_the_beginning_of_its_id_and_unknown_ones_are_said_to_be(mesh: GPUMesh, folder: Path) -> None:
    job = mesh.submit(script=folder / "square.py", payloads=[{"x": 1}])
    assert mesh.wait(job, 30)["id"] == job

    assert mesh.status(job[2:].upper())["id"] == job
    assert mesh.status(job[:7])["id"] == job
    for ask in (mesh.status, mesh.wait, mesh.cancel, mesh.retry, mesh.logs):
        with pytest.raises(UnknownJobError, match="no job 'j-zzzzzzz0'"):
            ask("j-zzzzzzz0")
    with pytest.raises(UnknownJobError, match="is not a job's id"):
        mesh.status("square.py")


def test_a_task_that_nobody_can_run_waits_and_the_job_says_why(mesh: GPUMesh, folder: Path) -> None:
    job = mesh.submit(script=folder / "square.py", payloads=[{"x": 1, "cpu_cores": 4096}, {"x": 2}])

    status = until(lambda: [s for s in [mesh.status(job)] if s["notices"]], 20)[0]

    assert "4096 cores" in status["notices"][0]
    until(lambda: mesh.status(job)["tasks"][1]["status"] == "done", 20)
    assert mesh.status(job)["counts"]["pending"] == 1
    other = mesh.submit(name="other", script=folder / "square.py", payloads=[{"x": 1, "cpu_cores": 4096}])
    seen: List[Any] = []
    waiting = threading.Thread(target=lambda: mesh.wait(other, 30, on_progress=lambda status: seen.append(status["notices"])))
    waiting.start()
    until(lambda: seen and seen[-1] and "4096 cores" in seen[-1][0], 10, what="another job that cannot run says so as well")
    mesh.cancel(other)
    waiting.join(30)
    mesh.cancel(job)
    assert mesh.wait(job, 10)["counts"] == {"pending": 0, "running": 0, "done": 1, "failed": 0, "cancelled": 1}


def test_frames_are_made_of_results(mesh: GPUMesh, folder: Path) -> None:
    pd = pytest.importorskip("pandas")
    job = mesh.submit(script=folder / "square.py", payloads=[{"x": x} for x in range(3)])

    frame = mesh.results_to_dataframe(mesh.wait(job, 30))

    assert isinstance(frame, pd.DataFrame)
    assert list(frame["x"]) == [0, 1, 2]
    assert list(frame["y"]) == [0, 1, 4]
    assert set(frame["status"]) == {"done"}


# --- a coordinator that is killed


class Served:
    """`gpumesh serve` on one port and one database, started as often as it is killed, and a worker that stays."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self.programs = programs
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        self.db = folder.parent / "jobs.db"
        self.coordinator = self.start()
        self.worker = programs.gpumesh("join", self.url, "--token", TOKEN, "--slots", "2")
        self.worker.wait_for("joined")

    def start(self) -> Program:
        words = ("--host", "127.0.0.1", "--port", str(self.port), "--token", TOKEN, "--no-self-worker", "--db", str(self.db))
        program = self.programs.gpumesh("serve", *words)
        program.wait_for("serving at")
        return program

    def kill(self) -> None:
        self.coordinator.process.kill()
        self.coordinator.process.wait()

    def restart(self) -> None:
        self.kill()
        self.coordinator = self.start()

    def client(self) -> GPUMesh:
        return GPUMesh(self.url, token=TOKEN, fallback=False, connect_timeout=20)


@pytest.fixture
def served(tmp_path: Path, folder: Path) -> Iterator[Served]:
    with started_programs(tmp_path) as programs:
        yield Served(programs, folder)


@pytest.mark.parametrize("retries", [0, 3])
def test_a_job_outlives_its_coordinator_and_each_script_runs_once(served: Served, folder: Path, retries: int) -> None:
    with served.client() as mesh:
        job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 6), retries=retries)
        until(lambda: sum(marks(folder).values()) == 2, 20)
        ended: List[Any] = []
        waiting = threading.Thread(target=lambda: ended.append(mesh.wait(job, 60)))
        waiting.start()

        served.restart()
        assert mesh.status(job, tasks=False)["finished"] is False
        open_gate(folder)
        waiting.join(60)

        (status,) = ended
        assert status["state"] == "done"
        assert [task["result"] for task in status["tasks"]] == [100 + x for x in range(6)]
        assert marks(folder) == {str(x): 1 for x in range(6)}
        assert [len(task["attempts"]) for task in status["tasks"]] == [1] * 6


def test_what_goes_on_after_a_restart_is_told_to_run_when_its_worker_is_back(served: Served, folder: Path) -> None:
    with served.client() as mesh:
        job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 2))
        until(lambda: sum(marks(folder).values()) == 2, 20)
        seen: List[int] = []
        waiting = threading.Thread(
            target=lambda: mesh.wait(job, 60, on_progress=lambda status: seen.append(status["counts"]["running"]))
        )
        waiting.start()
        until(lambda: seen, 20)
        assert seen == [2]

        served.worker.process.send_signal(signal.SIGSTOP)
        served.restart()
        until(lambda: seen[-1] == 0, 20, what="nobody who has them is back")
        served.worker.process.send_signal(signal.SIGCONT)

        until(lambda: seen[-1] == 2, 10, what="they go on")  # Half of what a question waits for news.
        open_gate(folder)
        waiting.join(60)
        assert marks(folder) == {"0": 1, "1": 1}


def test_what_has_finished_does_not_run_again(served: Served, folder: Path) -> None:
    open_gate(folder)
    with served.client() as mesh:
        job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 3))
        before = mesh.wait(job, 30)

        served.restart()

        assert mesh.status(job) == before
        assert mesh.wait(job, 5) == before
        assert marks(folder) == {"0": 1, "1": 1, "2": 1}
        assert mesh.retry(job) == 0


def test_a_job_is_there_when_submit_has_returned_whatever_happens_next(served: Served, folder: Path) -> None:
    with served.client() as mesh:
        job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 3))
        served.kill()
        open_gate(folder)
        served.coordinator = served.start()

        status = mesh.wait(job, 30)

    assert [task["result"] for task in status["tasks"]] == [100, 101, 102]
    assert marks(folder) == {"0": 1, "1": 1, "2": 1}


def test_a_job_that_was_being_submitted_is_there_once(served: Served, folder: Path) -> None:
    count = 40_000
    with served.client() as mesh:
        mesh.jobs()
        jobs: List[str] = []
        submitting = threading.Thread(
            target=lambda: jobs.append(mesh.submit(script=folder / "linger.py", payloads=lingering(folder, count)))
        )
        submitting.start()
        until(lambda: served.db.stat().st_size > 1_000_000 or served.db.with_name("jobs.db-wal").stat().st_size > 1_000_000, 20)

        served.restart()
        submitting.join(60)

        (job,) = jobs
        assert [(each["id"], each["total"]) for each in mesh.jobs()] == [(job, count)]
        mesh.cancel(job)
        assert mesh.wait(job, 30)["counts"]["cancelled"] == count


def test_a_job_that_was_being_cancelled_stays_cancelled(served: Served, folder: Path) -> None:
    with served.client() as mesh:
        job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 5))
        until(lambda: sum(marks(folder).values()) == 2, 20)
        mesh.cancel(job)

        served.restart()

        status = mesh.wait(job, 30)
        assert status["state"] == "cancelled"
        assert status["counts"]["cancelled"] == 5
        assert sum(marks(folder).values()) == 2


def test_a_coordinator_that_is_gone_for_good_is_told(served: Served, folder: Path) -> None:
    with GPUMesh(served.url, token=TOKEN, reconnect_timeout=1) as mesh:
        job = mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 1))
        served.kill()

        with pytest.raises(MeshUnavailableError):
            mesh.wait(job, 30)
        with pytest.raises(MeshUnavailableError):
            mesh.submit(script=folder / "linger.py", payloads=lingering(folder, 1))
