"""Script jobs as people run them: commands in processes of their own, a coordinator that is killed and started again, Ctrl-C."""

from __future__ import annotations

import csv
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from gpumesh.cli.main import main
from tests.integration.programs import Program, Programs, started_programs
from tests.support.processes import free_port, until

Ask = Callable[..., str]

SCRIPTS = {
    "double.py": """
import json, sys
payload = json.load(sys.stdin)
print("working on", payload)
print("a word of warning", file=sys.stderr)
print(json.dumps({"y": payload["x"] * 2}))
""",
    "sometimes.py": """
import json, pathlib, sys
payload = json.load(sys.stdin)
if payload["x"] == 1 and not pathlib.Path(payload["mark"]).exists():
    sys.exit("this one does not work")
print(payload["x"])
""",
    "die.py": """
import json, os, pathlib, signal, sys
payload = json.load(sys.stdin)
mark = pathlib.Path(payload["mark"])
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print(7)
""",
    "linger.py": """
import json, os, pathlib, sys, time
payload = json.load(sys.stdin)
with open(payload["marks"], "a") as marks:
    marks.write(f"{payload['x']}\\n")
until = pathlib.Path(payload["gate"])
print("waiting", flush=True)
while not until.exists():
    time.sleep(0.02)
print(payload["x"] + 100)
""",
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """A coordinator with one worker of two slots, for the tests that leave it alone."""
    home = tmp_path_factory.mktemp("home")
    with started_programs(home) as programs:
        programs.serve("--slots", "2", "--db", str(home / "jobs.db"))
        until(lambda: json.loads(said(programs.gpumesh("workers", "--json"))), 20.0)
        yield programs


@pytest.fixture
def ask(mesh: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Ask]:
    """Commands that only ask this coordinator something, in this process: ten times as fast."""
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN", "GPUMESH_LOCAL", "GPUMESH_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.setenv(name, mesh.environment[name])
    logger = logging.getLogger("gpumesh")
    handlers, level = logger.handlers[:], logger.level

    def command(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed
        return printed.out + printed.err

    yield command
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scripts, and nothing else: a script's folder travels with it."""
    path = tmp_path / "scripts"
    path.mkdir()
    for name, text in SCRIPTS.items():
        (path / name).write_text(text)
    return path


def said(program: Program, code: int = 0, timeout: float = 30.0) -> str:
    """What a command has printed, errors included."""
    assert program.wait(timeout) == code, program.output
    assert "Traceback" not in [line[:9] for _, line in program.lines]  # Among what tasks have said there may be one.
    return program.output


def payload_file(folder: Path, payloads: List[Dict[str, Any]]) -> str:
    path = folder.parent / "payloads.json"
    path.write_text(json.dumps(payloads))
    return str(path)


def lingering(tmp_path: Path, folder: Path, count: int) -> str:
    common = {"gate": str(tmp_path / "gate"), "marks": str(tmp_path / "marks")}
    return payload_file(folder, [{"x": x, **common} for x in range(count)])


def marks(tmp_path: Path) -> List[int]:
    """Which tasks have begun, in order."""
    path = tmp_path / "marks"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_whoever_waits_sees_how_it_is_also_when_that_came_soon_and_stays(mesh: Programs, folder: Path, tmp_path: Path) -> None:
    script, payloads = str(folder / "linger.py"), lingering(tmp_path, folder, 2)
    said(mesh.gpumesh("submit", script, "--payloads", payloads))
    until(lambda: len(marks(tmp_path)) == 2, 20.0)
    other_gate = tmp_path / "other gate"
    other = payload_file(folder, [{"x": 7, "gate": str(other_gate), "marks": str(tmp_path / "marks")}])
    waiting = mesh.gpumesh("submit", script, "--payloads", other, "--wait")
    waiting.wait_for("0/1 1 waiting")

    (tmp_path / "gate").touch()

    waiting.wait_for("0/1 1 running", 10.0)  # Half of what a question waits for news.
    other_gate.touch()
    assert "1/1 1 done" in said(waiting)


def test_a_job_from_its_payloads_to_its_results(mesh: Programs, ask: Ask, folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "payloads.csv"
    table.write_text("x,name\n1,one\n0.5,\n3,three\n")

    submitted = mesh.gpumesh("submit", str(folder / "double.py"), "--payloads", str(table), "--name", "sweep", "--wait")

    lines = said(submitted).splitlines()
    job = lines[0]
    assert lines[-1].startswith(f"gpumesh: job {job} has ended: 3 done; ")
    assert any(line.startswith("3/3") for line in lines)

    status = json.loads(ask("status", job, "--json"))
    assert (status["finished"], status["name"]) == (True, "sweep")
    assert status["counts"]["done"] == 3
    assert [task["result"] for task in status["tasks"]] == [{"y": 2}, {"y": 1.0}, {"y": 6}]
    assert [task["payload"] for task in status["tasks"]] == [{"x": 1, "name": "one"}, {"x": 0.5}, {"x": 3, "name": "three"}]
    assert f"{job} sweep: done, 3 done" in ask("status", job)

    output = tmp_path / "results.csv"
    ask("results", job, "--output", str(output))
    with open(output, newline="") as file:
        assert [row["result.y"] for row in csv.DictReader(file)] == ["2", "1.0", "6"]
    assert [one["result"]["y"] for one in json.loads(ask("results", job, "--format", "json"))] == [2, 1.0, 6]

    assert "working on {'x': 3, 'name': 'three'}" in ask("logs", job, "2")
    everything = ask("logs", job)
    assert "[0] a word of warning" in everything
    assert "[1] working on {'x': 0.5}" in everything
    assert job in ask("jobs")


def test_a_script_that_fails_ends_waiting_with_1_and_can_be_tried_again(
    mesh: Programs, ask: Ask, folder: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    payloads = payload_file(folder, [{"x": x, "mark": str(mark)} for x in range(3)])

    output = said(mesh.gpumesh("submit", str(folder / "sometimes.py"), "--payloads", payloads, "--wait"), code=1)
    job = output.splitlines()[0]
    assert "task 1 failed: " in output
    assert "2 done, 1 failed" in output
    shown = ask("status", job)
    assert "this one does not work" in shown

    mark.touch()
    assert "1 task " in ask("retry", job)
    assert "3 done" in ask("status", job, "--wait")
    assert "no task" in ask("retry", job)


def test_a_task_that_was_killed_runs_again_and_says_so(ask: Ask, folder: Path, tmp_path: Path) -> None:
    payloads = payload_file(folder, [{"mark": str(folder)}, {"mark": str(tmp_path / "mark")}])

    told = ask("submit", str(folder / "die.py"), "--payloads", payloads, "--wait")

    job = told.splitlines()[0]
    tasks = json.loads(ask("status", job, "--json"))["tasks"]
    assert [task["result"] for task in tasks] == [7, 7]
    assert [[attempt["status"] for attempt in task["attempts"]] for task in tasks] == [["ok"], ["crashed", "ok"]]
    events = [json.loads(line) for line in ask("events", "--json").splitlines()]
    (retry,) = [event for event in events if event["kind"] == "retry"]
    assert (retry["job"], retry["task"]) == (job, 1)
    assert f"task 1 of job {job} runs again (attempt 2)" in retry["text"]


def test_ctrl_c_ends_the_waiting_and_not_the_job(mesh: Programs, ask: Ask, folder: Path, tmp_path: Path) -> None:
    waiting = mesh.gpumesh("submit", str(folder / "linger.py"), "--payloads", lingering(tmp_path, folder, 2), "--wait")
    job = waiting.wait_for(r"^(j-\S+)").group(1)
    until(lambda: len(marks(tmp_path)) == 2, 20.0)

    waiting.interrupt()

    told = said(waiting, code=130)
    assert f"gpumesh status {job} --wait" in told
    assert f"gpumesh cancel {job}" in told
    following = mesh.gpumesh("logs", job, "--follow")
    following.wait_for("waiting")
    (tmp_path / "gate").touch()
    assert "2 done" in ask("status", job, "--wait")
    assert sorted(said(following).splitlines()) == ["[0] 100", "[0] waiting", "[1] 101", "[1] waiting"]


@pytest.mark.parametrize("command", [("cancel",), ("kill", "--force")])
def test_a_job_that_is_ended_ends_what_runs_and_never_starts_the_rest(
    command: List[str], ask: Ask, folder: Path, tmp_path: Path
) -> None:
    payloads = lingering(tmp_path, folder, 6)
    job = ask("submit", str(folder / "linger.py"), "--payloads", payloads).splitlines()[0]
    until(lambda: len(marks(tmp_path)) == 2, 20.0)

    assert job in ask(*command[:1], job, *command[1:])

    assert "cancelled" in ask("status", job, "--wait", code=1)
    status = json.loads(ask("status", job, "--json"))
    assert (status["finished"], status["counts"]["cancelled"]) == (True, 6)
    assert len(marks(tmp_path)) == 2
    assert "had ended" in ask(*command[:1], job, *command[1:])


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "retry", "kill", "results"])
def test_a_job_that_does_not_exist_is_one_line(command: str, ask: Ask) -> None:
    output = ask(command, "j-22222222", code=1)

    assert output.startswith("gpumesh: ")
    assert "j-22222222" in output
    assert output.count("\n") == 1


def test_the_status_of_the_mesh_names_its_workers_and_unfinished_jobs(ask: Ask) -> None:
    assert "1 worker with 2 slots; 0 running tasks, 0 waiting" in ask("status")
    found = json.loads(ask("status", "--json"))
    assert len(found["workers"]) == 1
    assert found["jobs"] == []


def test_a_coordinator_that_is_not_there_is_one_line_and_not_a_wait(programs: Programs) -> None:
    asked = programs.gpumesh("status", "--url", f"127.0.0.1:{free_port()}", "--token", "t")

    assert asked.wait(10.0) == 1
    assert asked.output.startswith("gpumesh: ")
    assert asked.output.count("\n") == 0


def test_a_job_goes_on_after_the_coordinator_was_killed_and_started_again(
    programs: Programs, folder: Path, tmp_path: Path
) -> None:
    place = ("--host", "127.0.0.1", "--port", str(free_port()), "--db", str(tmp_path / "jobs.db"), "--no-self-worker")
    coordinator = programs.gpumesh("serve", *place)
    coordinator.wait_for("serving at")
    worker = programs.gpumesh("join", "--slots", "2")
    worker.wait_for("works for")
    waiting = programs.gpumesh("submit", str(folder / "linger.py"), "--payloads", lingering(tmp_path, folder, 4), "--wait")
    job = waiting.wait_for(r"^(j-\S+)").group(1)
    until(lambda: len(marks(tmp_path)) == 2, 20.0)

    os.kill(coordinator.process.pid, signal.SIGKILL)
    coordinator.wait()
    on_disk = json.loads(said(programs.gpumesh("jobs", "--db", str(tmp_path / "jobs.db"), "--json")))
    assert [(one["id"], one["finished"], one["total"]) for one in on_disk] == [(job, False, 4)]
    tasks = json.loads(said(programs.gpumesh("results", job[:5], "--db", str(tmp_path / "jobs.db"))).partition("gpumesh: ")[0])
    assert [(task["status"], task["payload"]["x"]) for task in tasks] == [("pending", x) for x in range(4)]
    programs.gpumesh("serve", *place).wait_for("serving at")
    (tmp_path / "gate").touch()

    assert "4 done" in said(waiting)
    assert sorted(marks(tmp_path)) == [0, 1, 2, 3]  # Each was started once.
    results = json.loads(said(programs.gpumesh("results", job)))
    assert [one["result"] for one in results] == [100, 101, 102, 103]
    events = [json.loads(line) for line in said(programs.gpumesh("events", "--json")).splitlines()]
    kinds = [event["kind"] for event in events]
    assert kinds.count("started") == 2
    assert kinds.index("accepted") < len(kinds) - 1 - kinds[::-1].index("started") < kinds.index("finished")
    numbers = [event["number"] for event in events]
    assert numbers == sorted(set(numbers))


def test_waiting_for_a_coordinator_that_stays_away_ends_with_1_in_time(
    programs: Programs, folder: Path, tmp_path: Path
) -> None:
    coordinator, _ = programs.serve("--no-self-worker", "--db", str(tmp_path / "jobs.db"))
    waiting = programs.gpumesh("submit", str(folder / "double.py"), "--wait", "--reconnect-timeout", "1")
    job = waiting.wait_for(r"^(j-\S+)").group(1)
    waiting.wait_for("0/1")

    os.kill(coordinator.process.pid, signal.SIGKILL)

    told = said(waiting, code=1, timeout=10.0)
    assert f"gpumesh status {job} --wait" in told.splitlines()[-1]
