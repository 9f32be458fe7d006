"""What is said of jobs, and the exit code of waiting for one."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import pytest

from gpumesh.cli import job_views, waiting
from gpumesh.cli.following import Patience
from gpumesh.cli.jobs import _LinePrinter
from gpumesh.cli.submit import submit_options
from gpumesh.errors import MeshUnavailableError
from tests.support.processes import until

JOB = "j-4k7mw2qx"


def task(number: int, status: str, **fields: Any) -> Dict[str, Any]:
    usual = {"payload": {"x": number}, "result": None, "error": None, "worker": "w1", "hostname": "attic", "attempts": [{}]}
    return {"id": number, "status": status, "seconds": 1.25, **usual, **fields}


def job(*tasks: Dict[str, Any]) -> Dict[str, Any]:
    counts = {"pending": 0, "running": 0, "done": 0, "failed": 0, "cancelled": 0}
    for each in tasks:
        counts[each["status"]] += 1
    is_finished = not counts["pending"] and not counts["running"]
    state = "done" if counts["done"] == len(tasks) else "failed" if is_finished else "running"
    return {
        "id": JOB,
        "name": "sweep",
        "script": "sweep.py",
        "state": state,
        "finished": is_finished,
        "counts": counts,
        "total": len(tasks),
        "submitted": "2026-01-31T12:34:56.789Z",
        "ended": "",
        "tasks": list(tasks),
    }


class Waited:
    """Stands in for a mesh: tells these states of a job one after the other, and may then raise."""

    url = "http://host:1"

    def __init__(self, *states: Dict[str, Any], error: Optional[BaseException] = None) -> None:
        self._states = states
        self._error = error

    def wait(self, job: str, *, on_progress: Callable[[Dict[str, Any]], None], tasks: bool) -> Dict[str, Any]:
        assert (job, tasks) == (JOB, False)
        for state in self._states:
            on_progress({key: value for key, value in state.items() if key != "tasks"})
        if self._error is not None:
            raise self._error
        return {key: value for key, value in self._states[-1].items() if key != "tasks"}

    def status(self, job: str) -> Dict[str, Any]:
        return self._states[-1]


def test_waiting_for_a_job_that_goes_well_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    mesh: Any = Waited(job(task(0, "pending"), task(1, "running")), job(task(0, "done"), task(1, "done")))

    assert waiting.wait_for_job(mesh, JOB) == 0

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "0/2 1 running, 1 waiting",
        "2/2 2 done",
        f"gpumesh: job {JOB} has ended: 2 done; `gpumesh results {JOB}` shows what they returned",
    ]


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
def test_waiting_for_a_job_that_does_not_go_well_ends_with_1_and_says_why(
    ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [task(number, ending, error=f"reason {number}\nmore") for number in range(8)]
    mesh: Any = Waited(job(*tasks, task(8, "done")))

    assert waiting.wait_for_job(mesh, JOB) == 1

    told = capsys.readouterr().err
    assert f"`gpumesh retry {JOB}`" in told
    if ending == "failed":
        assert "task 0 failed: reason 0\n" in told
        assert "and 3 more" in told
        assert "more\n" not in told.replace("and 3 more\n", "")


def test_ctrl_c_says_how_to_follow_and_how_to_cancel(capsys: pytest.CaptureFixture[str]) -> None:
    mesh: Any = Waited(job(task(0, "running")), error=KeyboardInterrupt())

    assert waiting.wait_for_job(mesh, JOB) == 130

    told = capsys.readouterr().err
    assert f"gpumesh status {JOB} --wait" in told
    assert f"gpumesh cancel {JOB}" in told


def test_a_coordinator_that_does_not_come_back_is_an_error_that_says_where_the_job_is() -> None:
    mesh: Any = Waited(job(task(0, "running")), error=MeshUnavailableError("nobody answers"))

    with pytest.raises(MeshUnavailableError, match=f"http://host:1, .*gpumesh status {JOB} --wait"):
        waiting.wait_for_job(mesh, JOB)


def draw(paint: waiting._LinePaint, *steps: List[str]) -> None:
    for step in steps:
        paint.draw(job(*(task(number, status) for number, status in enumerate(step))))


def test_without_a_terminal_progress_is_not_a_flood_and_the_last_line_always_comes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paint = waiting._LinePaint(pause=60.0)

    draw(paint, ["pending"] * 3, ["running"] * 3, ["done", "running", "running"], ["done"] * 3)

    assert capsys.readouterr().err.splitlines() == ["0/3 3 waiting", "3/3 3 done"]


def test_what_came_too_soon_after_a_line_is_said_later_though_nothing_follows(capsys: pytest.CaptureFixture[str]) -> None:
    paint = waiting._LinePaint(pause=0.1)
    said: List[str] = []

    def last() -> List[str]:
        said.extend(capsys.readouterr().err.splitlines())
        return said[-1:]

    draw(paint, ["pending"] * 3, ["running"] * 3, ["done", "running", "running"])

    until(lambda: last() == ["1/3 1 done, 2 running"])
    assert said[0] == "0/3 3 waiting"
    paint.close()
    assert last() == ["1/3 1 done, 2 running"]
    assert len(said) == len(set(said))


def test_what_came_too_soon_is_said_at_the_latest_when_nobody_waits_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    mesh: Any = Waited(job(task(0, "pending")), job(task(0, "running")), error=KeyboardInterrupt())

    assert waiting.wait_for_job(mesh, JOB) == 130

    assert capsys.readouterr().err.splitlines()[:2] == ["0/1 1 waiting", "0/1 1 running"]


def test_a_question_is_asked_until_the_coordinator_is_back(capsys: pytest.CaptureFixture[str]) -> None:
    answers: List[Any] = [6, MeshUnavailableError("it is gone"), MeshUnavailableError("it is gone"), 7]

    def question() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    patience = Patience(60.0)
    assert [patience.ask(question), patience.ask(question)] == [6, 7]
    assert capsys.readouterr().err.splitlines() == [
        "gpumesh: lost the coordinator; looking for it for 60 s",
        "gpumesh: the coordinator is back",
    ]


def test_a_question_to_a_coordinator_that_stays_away_ends_with_its_error() -> None:
    def question() -> None:
        raise MeshUnavailableError("it is gone")

    patience = Patience(0.0)
    patience.ask(lambda: None)
    with pytest.raises(MeshUnavailableError, match="it is gone"):
        patience.ask(question)


def test_a_coordinator_that_was_never_there_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    def question() -> None:
        raise MeshUnavailableError("nothing listens there")

    mesh: Any = Waited(error=MeshUnavailableError("nothing listens there"))
    with pytest.raises(MeshUnavailableError, match="^nothing listens there$"):
        Patience(600.0).ask(question)
    with pytest.raises(MeshUnavailableError, match="^nothing listens there$"):
        waiting.wait_for_job(mesh, JOB)
    assert capsys.readouterr().err == ""


def test_a_job_is_shown_with_what_runs_and_what_has_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = job(
        task(0, "done", result={"y": 1}), task(1, "running"), task(2, "failed", error="[it] broke", attempts=[{}, {}, {}])
    )

    job_views.print_job(found, everything=False)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{JOB} sweep: running, 1 done, 1 running, 1 failed, submitted 2026-01-3")
    assert [line.split()[:3] for line in lines[2:]] == [["1", "running", "1"], ["2", "failed", "3"]]
    assert "[it] broke" in lines[3]

    job_views.print_job(found, everything=True)

    assert '{"y": 1}' in capsys.readouterr().out


def test_of_many_failures_some_are_shown_and_the_rest_counted(capsys: pytest.CaptureFixture[str]) -> None:
    job_views.print_job(job(*(task(number, "failed") for number in range(25))), everything=False)

    assert capsys.readouterr().out.splitlines()[-1] == "and 5 more; --all shows every task"


def test_the_list_of_jobs_has_a_line_for_each_and_says_how_to_begin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    job_views.print_jobs([job(task(0, "done"), task(1, "pending"))])
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:3] == [JOB, "sweep", "running"]
    assert "1 done, 1 waiting" in line

    job_views.print_jobs([])
    assert "gpumesh submit" in capsys.readouterr().out


def test_lines_of_several_tasks_are_not_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    printer = _LinePrinter(is_numbered=True)
    printer.take(0, "out", "a")
    printer.take(1, "out", "x\ny")
    printer.take(0, "out", "b\nc\n")
    printer.take(1, "err", "oh\n")
    printer.end()

    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["[1] x", "[0] ab", "[0] c", "[1] y"]
    assert printed.err == "[1] oh\n"


@pytest.mark.parametrize(("said", "meant"), [("2", 2), ("0.5", 0.5), ("cuda", "cuda"), ("A100", "A100")])
def test_a_number_of_gpus_is_a_number(said: str, meant: Any) -> None:
    options = submit_options(
        gpu=said, memory=None, cores=None, tag=["room=lab", "floor=2"], retries=0, timeout=None, priority=1, name=None
    )

    assert options == {"gpu": meant, "tags": {"room": "lab", "floor": "2"}, "retries": 0, "priority": 1}
    assert type(options["gpu"]) is type(meant)
