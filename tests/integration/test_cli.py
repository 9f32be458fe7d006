"""The commands as people run them: processes of their own, real sockets, real signals."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import stat
import threading
from pathlib import Path
from typing import Iterator

import psutil
import pytest

from tests.integration.programs import Programs, started_programs
from tests.support.processes import until

TASK = """
import pathlib, sys, time
from gpumesh import GPUMesh, accelerate

def linger(seconds, mark):
    pathlib.Path(mark).write_text("started")
    time.sleep(seconds)
    return "finished"

with GPUMesh() as mesh:
    print(accelerate(mesh, retries=0)(linger).remote(float(sys.argv[1]), sys.argv[2]).result())
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


def wait_until_exists(file: Path, patience: float = 20.0) -> None:
    """Block until a task has left its mark."""
    waiting = threading.Event()
    for _ in range(int(patience / 0.02)):
        if file.exists():
            return
        waiting.wait(0.02)
    raise AssertionError(f"{file} did not appear within {patience} s")


def test_a_sweep_runs_over_the_serving_and_the_joined_worker_with_results_streaming_in(programs: Programs) -> None:
    server, url = programs.serve("--slots", "1")
    worker = programs.gpumesh("join", "--slots", "1", "--tag", "room=lab")
    worker.wait_for(f"works for {re.escape(url)} with 1 slots")

    listing = programs.gpumesh("workers", "--json")
    assert listing.wait() == 0
    found = json.loads(listing.output)
    assert [(one["slots"], one["alive"]) for one in found] == [(1, True)] * 2
    assert sorted(one["tags"].get("room", "") for one in found) == ["", "lab"]
    assert all(one["score"] > 0 and one["id"] and one["hostname"] and one["device_name"] for one in found)

    table = programs.gpumesh("workers")
    assert table.wait() == 0
    assert all(one["id"] in table.output for one in found)
    assert "room=lab" in table.output

    sweep = programs.python("examples/sweep.py", "--points", "40", "--steps", "200000")
    assert sweep.wait(60) == 0
    arrivals = [when for when, line in sweep.lines if line.startswith("r = ")]
    assert len(arrivals) == 40
    assert arrivals[0] < 0.5 * arrivals[-1]  # Spread over the run, not printed at its end.
    assert arrivals[19] < 0.9 * arrivals[-1]
    shares = [int(count) for count in re.findall(r"^ *(\d+) on ", sweep.output, re.MULTILINE)]
    assert len(shares) == 2
    assert sum(shares) == 40
    assert min(shares) >= 5

    for program in (worker, server):
        program.remember_children()
        program.interrupt()
        assert program.wait() == 0
        assert program.survivors() == []
        assert "Traceback" not in program.output


def test_ctrl_c_lets_a_running_task_finish(programs: Programs, tmp_path: Path) -> None:
    server, _ = programs.serve("--slots", "1")
    client = programs.python("-c", TASK, "1.5", str(tmp_path / "mark"))
    wait_until_exists(tmp_path / "mark")

    server.interrupt()

    assert client.wait() == 0
    assert client.lines[-1][1] == "finished"
    assert server.wait() == 0
    assert "trying again" not in server.output, "its own worker ends with it, and complains of nothing"


def test_a_joined_worker_drains_on_ctrl_c(programs: Programs, tmp_path: Path) -> None:
    programs.serve("--no-self-worker")
    worker = programs.gpumesh("join", "--slots", "1")
    worker.wait_for("works for")
    client = programs.python("-c", TASK, "1.5", str(tmp_path / "mark"))
    wait_until_exists(tmp_path / "mark")

    worker.interrupt()

    assert client.wait() == 0
    assert client.output == "finished"
    assert worker.wait() == 0
    assert worker.survivors() == []


def test_ctrl_c_waits_for_nobody_who_does_not_answer(programs: Programs) -> None:
    with socket.socket() as deaf, contextlib.ExitStack() as callers:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(3):  # So many that the system takes no more, and answers nobody.
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        worker = programs.gpumesh("join", f"127.0.0.1:{deaf.getsockname()[1]}", "--token", "a token of some length")
        process = psutil.Process(worker.process.pid)
        until(lambda: any(each.status == psutil.CONN_SYN_SENT for each in process.net_connections("tcp")), 20)

        worker.interrupt()

        assert worker.wait(3.0) == 0


@pytest.mark.parametrize("which", ["serve", "join"])
def test_a_second_ctrl_c_stops_at_once(which: str, programs: Programs, tmp_path: Path) -> None:
    server, _ = programs.serve(*(["--slots", "1"] if which == "serve" else ["--no-self-worker"]))
    stopped = server
    if which == "join":
        stopped = programs.gpumesh("join", "--slots", "1")
        stopped.wait_for("works for")
    programs.python("-c", TASK, "50", str(tmp_path / "mark"))
    wait_until_exists(tmp_path / "mark")
    stopped.remember_children()

    stopped.interrupt()
    stopped.wait_for("(?i)again|finish|drain")
    assert stopped.process.poll() is None
    stopped.interrupt()

    stopped.wait(5.0)
    assert stopped.survivors() == []
    assert "Traceback" not in stopped.output


def test_a_given_secret_is_in_no_output_and_the_saved_one_only_its_owner_can_read(programs: Programs, tmp_path: Path) -> None:
    server, url = programs.serve("--slots", "1", GPUMESH_TOKEN="hush-hush", GPUMESH_VERBOSE="1")
    (tmp_path / "token").write_text("hush-hush\n")
    worker = programs.gpumesh("-vv", "join", url, "--token-file", str(tmp_path / "token"))
    worker.wait_for("works for")
    peek = programs.python(
        "-c",
        "import os\nfrom gpumesh import GPUMesh, accelerate\n"
        "with GPUMesh() as mesh:\n    print(accelerate(mesh)(lambda: os.environ.get('GPUMESH_TOKEN')).map([{}] * 8).result())",
    )
    assert peek.wait() == 0
    assert peek.output == str([None] * 8)

    for program in (worker, server):
        program.interrupt()
        assert program.wait() == 0
        assert "hush" not in program.output
    saved = [
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and file.name != "token" and "hush" in file.read_text(errors="ignore")
    ]
    assert saved
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in saved)


def test_a_generated_secret_is_shown_once_and_lets_another_user_join(programs: Programs, tmp_path: Path) -> None:
    server, url = programs.serve("--no-self-worker", "--show-token")
    line = server.wait_for(r"(gpumesh join \S+ --token (\S+))")
    worker = programs.gpumesh(*line.group(1).split()[1:], XDG_CONFIG_HOME=str(tmp_path / "other"), HOME=str(tmp_path / "other"))

    worker.wait_for(f"works for {re.escape(url)}")

    assert server.output.count(line.group(2)) == 1
    assert line.group(2) not in worker.output


@pytest.mark.parametrize("command", [("join",), ("workers", "--url")])
def test_a_wrong_secret_is_refused_in_one_line(command: tuple[str, ...], programs: Programs) -> None:
    _, url = programs.serve("--no-self-worker")

    refused = programs.gpumesh(*command, url, "--token", "wrong")

    assert refused.wait() == 1
    assert refused.output.splitlines()[-1].startswith("gpumesh: ")
    assert "the token was refused" in refused.output
    assert url.partition("//")[2] in refused.output.splitlines()[-1], "and where"
    assert "Traceback" not in refused.output


def test_a_port_that_is_taken_is_an_error_in_one_line(programs: Programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = programs.gpumesh("serve", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))

        assert server.wait() == 1

    assert server.output.splitlines()[-1].startswith("gpumesh: ")
    assert "Traceback" not in server.output


def test_asking_a_mesh_that_is_not_there_ends_soon_with_an_error(programs: Programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    asked = programs.gpumesh("workers", "--url", f"127.0.0.1:{port}", "--token", "t")

    assert asked.wait(10.0) == 1
    assert asked.output.startswith("gpumesh: ")
    assert asked.output.count("\n") == 0


def test_a_mesh_without_workers_says_how_to_get_one(programs: Programs) -> None:
    _, url = programs.serve("--no-self-worker")

    table, listing = programs.gpumesh("workers"), programs.gpumesh("workers", "--json")

    assert table.wait() == 0
    assert f"gpumesh join {url}" in table.output
    assert listing.wait() == 0
    assert json.loads(listing.output) == []


def test_the_quick_demo_streams_its_results_and_ends_with_the_best(programs: Programs) -> None:
    demo = programs.gpumesh("demo", "--quick")

    assert demo.wait(50) == 0
    results = [(when, line) for when, line in demo.lines if re.match(r" *\d+  C=\S+ +gamma=\S+ +accuracy 0\.\d{4} .* s$", line)]
    assert len(results) == 24 + 5
    best = [float(value) for value in re.findall(r"accuracy (0\.\d+)", demo.output.partition("best:")[2])]
    assert len(best) == 5
    assert best == sorted(best, reverse=True)
    assert best[0] > 0.9
    assert "estimate" in demo.output
    assert demo.survivors() == []


def test_ctrl_c_ends_the_demo_and_all_of_its_processes(programs: Programs) -> None:
    demo = programs.gpumesh("demo")
    demo.wait_for("accuracy")
    demo.remember_children()

    demo.interrupt()

    assert demo.wait(10.0) == 130
    assert "Traceback" not in demo.output
    assert demo.survivors() == []
