"""What a crash tells: the process's peak of memory, whether the system killed it for that, its last words, and all its attempts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh.errors import TaskCancelledError, WorkerCrashedError
from gpumesh.runtime.embedded import EmbeddedMesh
from gpumesh.runtime.system import OOM_SCORE_OF_RUNNERS
from tests.support import tasks
from tests.support.client import Client
from tests.support.memory_group import memory_group
from tests.support.processes import named, session_of, until

MB = 1 << 20
LIMIT = 400 * MB


@pytest.fixture(scope="module")
def mesh() -> Iterator[EmbeddedMesh]:
    with EmbeddedMesh(workers=1, slots=2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def client(mesh: EmbeddedMesh) -> Iterator[Client]:
    with Client(mesh.url, mesh.token) as client:
        yield client


def crash(client: Client, function: object, *args: object, retries: int = 0) -> WorkerCrashedError:
    with pytest.raises(WorkerCrashedError) as caught:
        client.remote(function, *args, retries=retries).result(30)  # type: ignore[arg-type]
    return caught.value


def fill(megabytes: int, mark: str = "") -> None:
    """Take memory, then wait to be killed, or die."""
    kept = [b"x" * MB for _ in range(megabytes)]
    if mark:
        Path(mark).write_text(str(os.getpid()))
        time.sleep(60)
    os._exit(3 if kept else 4)


def gorge(mark: str = "") -> str:
    """Take memory until somebody has enough of it."""
    if mark:
        with open(mark, "a") as file:
            file.write("started\n")
    sys.stderr.write("about to read everything\n")
    kept: List[bytes] = []
    while len(kept) < 4 * LIMIT // MB:
        kept.append(b"x" * MB)
    return "there was room for it"


def test_a_process_that_exits_tells_the_most_memory_it_had(client: Client) -> None:
    small, large = crash(client, fill, 1), crash(client, fill, 200)

    grown = large.attempts[0]["memory_bytes"] - small.attempts[0]["memory_bytes"]
    assert 150 * MB < grown < 250 * MB
    assert "exited with code 3; it had reached 2" in str(large)
    assert "out_of_memory" not in large.attempts[0], "nobody killed it"


def test_who_is_killed_by_somebody_else_is_not_called_out_of_memory(client: Client, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    future = client.remote(fill, 50, str(mark), retries=0)
    until(lambda: mark.exists() and mark.read_text(), 20)
    os.kill(int(mark.read_text()), signal.SIGKILL)

    with pytest.raises(WorkerCrashedError, match="SIGKILL") as caught:
        future.result(20)

    (attempt,) = caught.value.attempts
    assert attempt["exit"] == -signal.SIGKILL
    assert attempt["memory_bytes"] > 50 * MB
    assert attempt["memory_limit_bytes"] > attempt["memory_bytes"]
    assert attempt.get("out_of_memory") is not True
    if "out_of_memory" in attempt:
        assert "and not by the system for lack of memory" in str(caught.value)


def test_a_task_over_the_limit_of_its_machine_is_said_to_be_out_of_memory_and_hits_nobody_else(tmp_path: Path) -> None:
    with memory_group(LIMIT, f"gpumesh-test-{os.getpid()}") as group:
        with EmbeddedMesh(workers=1, slots=2) as mesh, Client(mesh.url, mesh.token) as client:
            client.remote(tasks.noop).result(20)
            agent = mesh.processes["worker-1"]
            group.add(process.pid for process in session_of(mesh.processes["spawner"]))
            beside = client.remote(tasks.sleep, 1.0, retries=0)

            error = crash(client, gorge, str(tmp_path / "starts"), retries=1)

            assert beside.result(20) == "slept"
            assert len(error.attempts) == 2
            for attempt in error.attempts:
                assert attempt["exit"] == -signal.SIGKILL
                assert attempt["out_of_memory"] is True
                assert attempt["memory_limit_bytes"] == LIMIT
                assert (
                    LIMIT / 2 < attempt["memory_bytes"] < 1.2 * LIMIT
                )  # Pages of files count here, and there for whoever read them first.
                assert attempt["stderr"] == "about to read everything"
            assert "SIGKILL, by the system for lack of memory; it had reached" in str(error)
            assert "of 419 MB" in str(error)
            assert "options(memory=...)" in str(error)
            assert "about to read everything" in str(error)
            assert (tmp_path / "starts").read_text() == "started\n" * 2

            assert mesh.processes["worker-1"] == agent, "the agent has lived through it"
            (worker,) = client.workers()
            assert (worker["problem"], worker["pid"]) == ("", agent)
            slots = [client.remote(tasks.sleep, 0.1) for _ in range(4)]
            assert [future.result(20) for future in slots] == ["slept"] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="how the system chooses is known of Linux only")
def test_the_system_takes_a_runner_before_its_agent(mesh: EmbeddedMesh, client: Client) -> None:
    client.remote(tasks.noop).result(20)
    runners = named(session_of(mesh.processes["spawner"]), "gpumesh-runner")
    scores = [int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) for process in runners]
    agent = int(Path(f"/proc/{mesh.processes['worker-1']}/oom_score_adj").read_text())

    assert len(scores) == 2
    assert all(score == min(1000, agent + OOM_SCORE_OF_RUNNERS) for score in scores)


def test_a_task_that_never_survives_tells_of_every_attempt(client: Client) -> None:
    error = crash(client, tasks.die, retries=2)

    text = str(error)
    assert len(error.attempts) == 3
    assert "3 attempts failed:" in text
    (worker,) = client.workers()
    lines = text[text.index("3 attempts failed:") :].splitlines()[1:]
    assert len(lines) == 3
    assert all(str(worker["hostname"]) in line for line in lines)


def delayed(client: Client) -> List[Any]:
    return [view for view in client.session.query("waiting") if view["state"] == "delayed"]


def test_attempts_are_made_with_growing_pauses_in_which_the_task_holds_nothing(client: Client) -> None:
    started = time.monotonic()
    future = client.remote(tasks.die, retries=2, backoff=0.3)

    (view,) = until(lambda: delayed(client), 10, what="a task that waits for its second attempt")
    assert list(view["functions"]) == ["die"]
    assert "tried again in 0." in view["reason"]
    assert [client.remote(tasks.noop, n).result(10) for n in range(3)] == [0, 1, 2]
    with pytest.raises(WorkerCrashedError, match="3 attempts failed"):
        future.result(20)
    assert time.monotonic() - started >= 0.3 + 0.6


def test_a_pause_can_be_cut_short(client: Client) -> None:
    future = client.remote(tasks.die, retries=2, backoff=60.0)
    until(lambda: delayed(client), 10, what="a task that waits for its second attempt")

    assert future.cancel()

    with pytest.raises(TaskCancelledError):
        future.result(10)
    until(lambda: not delayed(client), 10, what="that it does not wait any more")
