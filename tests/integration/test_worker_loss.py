"""Agents and coordinators that go away in the middle of work: tasks run elsewhere, or again, or say why not; never twice at once."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Iterator, List

import psutil
import pytest

from gpumesh.errors import WorkerCrashedError
from gpumesh.runtime.embedded import EmbeddedMesh
from tests.integration.programs import Program, Programs, started_programs
from tests.support import tasks
from tests.support.client import Client
from tests.support.processes import free_port, named, until


def starts(folder: Path) -> Counter[str]:
    """How often each task of this folder was started."""
    return Counter(path.name.split(".")[0] for path in folder.iterdir())


def healthy(client: Client, count: int) -> None:
    until(
        lambda: sum(worker["alive"] and not worker["problem"] for worker in client.workers()) == count,
        20,
        what=f"{count} workers",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "starts"
    path.mkdir()
    return path


@pytest.fixture
def two_workers() -> Iterator[EmbeddedMesh]:
    with EmbeddedMesh(workers=2, slots=2) as mesh:
        yield mesh


def test_tasks_of_a_killed_agent_run_elsewhere(two_workers: EmbeddedMesh, folder: Path) -> None:
    mesh = two_workers
    with Client(mesh.url, mesh.token) as client:
        healthy(client, 2)
        futures = [client.remote(tasks.count_then_sleep, str(folder), f"t{n}", 0.5, retries=1) for n in range(8)]
        client.session.flush()
        until(lambda: len(starts(folder)) >= 4, 20, what="four running tasks")

        os.kill(mesh.processes["worker-1"], signal.SIGKILL)

        assert [future.result(30) for future in futures] == [f"t{n}" for n in range(8)]
        counted = starts(folder)
        assert sum(counted.values()) <= 8 + 2, "only what ran there was started again"
        assert max(counted.values()) <= 2
        healthy(client, 1)


def test_a_task_that_may_run_once_tells_that_its_worker_was_lost(two_workers: EmbeddedMesh, folder: Path) -> None:
    mesh = two_workers
    with Client(mesh.url, mesh.token) as client:
        healthy(client, 2)
        futures = [client.remote(tasks.count_then_sleep, str(folder), f"t{n}", 0.8, retries=0) for n in range(4)]
        client.session.flush()
        until(lambda: len(starts(folder)) == 4, 20)

        os.kill(mesh.processes["worker-2"], signal.SIGKILL)

        ended: List[Any] = []
        for future in futures:
            try:
                ended.append(future.result(30))
            except WorkerCrashedError as error:
                ended.append(error)
        lost = [error for error in ended if isinstance(error, WorkerCrashedError)]
        assert len(lost) == 2
        assert "lost its worker" in str(lost[0])
        assert "vm" in str(lost[0]) or os.uname().nodename in str(lost[0])
        assert set(starts(folder).values()) == {1}


def test_waiting_tasks_outlive_every_worker_until_one_joins(folder: Path) -> None:
    from gpumesh.runtime.embedded import add_worker, start_coordinator

    with start_coordinator(port=0, token="secret") as coordinator, Client(coordinator.url, "secret") as client:
        with add_worker(coordinator.url, "secret", slots=1, score=1.0) as first:
            running = client.remote(tasks.count_then_sleep, str(folder), "running", 0.4)
            waiting = [client.remote(tasks.noop, n) for n in range(10)]
            until(lambda: starts(folder)["running"] == 1, 20)
            first.kill()
        with add_worker(coordinator.url, "secret", slots=1, score=1.0):
            assert running.result(20) == "running"
            assert [future.result(20) for future in waiting] == list(range(10))
    assert starts(folder)["running"] == 2


def test_a_worker_that_leaves_on_purpose_finishes_what_it_runs_and_gives_back_the_rest(folder: Path) -> None:
    from gpumesh.runtime.embedded import add_worker, start_coordinator

    with start_coordinator(port=0, token="secret") as coordinator, Client(coordinator.url, "secret") as client:
        first = add_worker(coordinator.url, "secret", slots=1, score=1.0)
        futures = [client.remote(tasks.count_then_sleep, str(folder), f"t{n}", 0.3, retries=0) for n in range(6)]
        client.session.flush()
        until(lambda: starts(folder)["t0"] == 1, 20)
        second = add_worker(coordinator.url, "secret", slots=1, score=1.0)

        first.stop()

        assert [future.result(20) for future in futures] == [f"t{n}" for n in range(6)]
        assert set(starts(folder).values()) == {1}
        second.stop()


def test_a_frozen_agent_that_wakes_up_is_a_worker_again(two_workers: EmbeddedMesh) -> None:
    mesh = two_workers
    with Client(mesh.url, mesh.token) as client:
        healthy(client, 2)
        agent = psutil.Process(mesh.processes["worker-1"])
        agent.suspend()
        futures = [client.remote(tasks.noop, n) for n in range(200)]
        client.session.flush()
        time.sleep(0.5)
        agent.resume()

        assert [future.result(30) for future in futures] == list(range(200))
        healthy(client, 2)


# --- the coordinator


class Site:
    """A coordinator on a port of its own, joined workers, all of them programs."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.coordinator = self.serve()
        self.workers = [self.join() for _ in range(2)]

    def serve(self) -> Program:
        program = self.programs.gpumesh(
            "serve", "--host", "127.0.0.1", "--no-self-worker", "--port", str(self.port), "--token", "secret"
        )
        program.wait_for("serving at")
        return program

    def join(self) -> Program:
        program = self.programs.gpumesh("join", self.url, "--token", "secret", "--slots", "2", "--score", "1")
        program.wait_for("works for")
        return program

    def restart(self, pause: float) -> None:
        self.coordinator.process.kill()
        self.coordinator.process.wait()
        time.sleep(pause)
        self.coordinator = self.serve()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with started_programs(tmp_path) as programs:
        yield Site(programs)


def test_agents_and_clients_find_a_coordinator_that_was_killed_and_started_again(
    site: Site, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(site.url, "secret", reconnect_timeout=30) as client:
        healthy(client, 2)
        futures = [client.remote(tasks.count_then_sleep, str(folder), f"t{n}", 1.0, retries=3) for n in range(12)]
        client.session.flush()
        until(lambda: len(starts(folder)) >= 4, 20)

        site.restart(pause=0.5)

        assert [future.result(40) for future in futures] == [f"t{n}" for n in range(12)]
        assert max(starts(folder).values()) <= 2
        healthy(client, 2)
        for worker in site.workers:
            assert "lost the coordinator" in worker.output
            assert len(named(worker.remember_children(), "gpumesh-runner")) >= 2
        said = [record.getMessage() for record in caplog.records]
        assert any("lost the coordinator" in text for text in said)
        assert any("is back" in text for text in said)
        assert client.remote(tasks.noop, "still").result(20) == "still"


def test_what_may_run_once_is_not_run_again_by_the_next_coordinator(site: Site, folder: Path) -> None:
    with Client(site.url, "secret", reconnect_timeout=30) as client:
        healthy(client, 2)
        once = client.remote(tasks.count_then_sleep, str(folder), "once", 3.0, retries=0)
        often = client.remote(tasks.count_then_sleep, str(folder), "often", 1.0)
        client.session.flush()
        until(lambda: len(starts(folder)) == 2, 20)

        site.restart(pause=0.0)

        assert [once.result(30), often.result(30)] == ["once", "often"]
        assert starts(folder) == {"once": 1, "often": 1}


def test_a_deaf_task_goes_on_under_the_next_coordinator_in_the_process_it_runs_in(site: Site, folder: Path) -> None:
    with Client(site.url, "secret", reconnect_timeout=30) as client:
        healthy(client, 2)
        futures = [client.remote(tasks.hold_the_gil, 2, str(folder / f"t{n}")) for n in range(4)]
        client.session.flush()
        until(lambda: len(starts(folder)) == 4, 20)
        before = {process.pid for worker in site.workers for process in named(worker.remember_children(), "gpumesh-runner")}

        site.restart(pause=0.0)

        assert [future.result(40) for future in futures] == ["slept"] * 4
        assert all(psutil.pid_exists(pid) for pid in before)
        assert set(starts(folder).values()) == {1}
