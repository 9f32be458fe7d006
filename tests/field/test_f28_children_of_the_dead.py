"""F28: when the driver, an agent, the coordinator or a command is killed, all that it had started is gone within 5 seconds."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Iterator, List

import psutil
import pytest

from tests.integration.programs import Program, Programs, started_programs
from tests.support import processes
from tests.support.processes import marked, named, until, until_gone

GONE_SECONDS = 5.0

DRIVER = """
import json, sys, time
from gpumesh.runtime.embedded import EmbeddedMesh
from tests.support import tasks
from tests.support.client import Client

mesh = EmbeddedMesh(workers=2, slots=1)
client = Client(mesh.url, mesh.token)
futures = [client.remote(getattr(tasks, name), 1000, f"{sys.argv[1]}/{name}", retries=0) for name in sys.argv[2:]]
print("running", json.dumps(mesh.processes), flush=True)
for future in futures:
    try:
        print("ended", future.result(), flush=True)
    except Exception as error:
        print("failed", type(error).__name__, error, flush=True)
time.sleep(1000)
"""


class Scene:
    """Programs with a mark, a folder for their temporary files, and a look at what they leave."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.programs = programs
        self.shared_before = processes.shared_memory_files()
        programs.environment.update({processes.MARK: self.mark, "TMPDIR": str(self.temporary)})

    def alive(self) -> List[psutil.Process]:
        return marked(self.mark)

    def drive(self, *tasks: str) -> Program:
        """A driver with an embedded mesh whose two runners are in the midst of these tasks."""
        program = self.programs.python("-c", DRIVER, str(self.folder), *tasks)
        program.wait_for("running")
        for task in tasks:
            until((self.folder / task).exists, 20, what=f"the start of {task}")
        return program

    def nothing_is_left(self) -> None:
        until_gone(self.alive, GONE_SECONDS)
        assert list(self.temporary.iterdir()) == []
        assert processes.shared_memory_files() <= self.shared_before


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with started_programs(tmp_path) as programs:
        scene = Scene(programs, tmp_path)
        try:
            yield scene
        finally:
            for process in scene.alive():
                process.kill()


BUSY = {
    "C sleep and a held GIL": ("sleep_in_c", "hold_the_gil"),
    "subprocesses and a deaf loop": ("with_children", "ignore_interrupts"),
}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("tasks", BUSY.values(), ids=BUSY.keys())
def test_nothing_outlives_a_killed_driver(scene: Scene, tasks: List[str], number: int) -> None:
    driver = scene.drive(*tasks)
    assert len(named(scene.alive(), "gpumesh-runner")) == 2

    driver.process.send_signal(number)

    scene.nothing_is_left()


def test_no_runner_outlives_its_killed_agent(scene: Scene) -> None:
    driver = scene.drive("with_children", "hold_the_gil")
    agents = named(scene.alive(), "gpumesh-worker")
    assert len(agents) == 2

    for agent in agents:
        agent.kill()

    driver.wait_for("failed WorkerCrashedError")
    until_gone(lambda: named(scene.alive(), "gpumesh-runner"), GONE_SECONDS)
    until_gone(lambda: named(scene.alive(), "sleep"), GONE_SECONDS)
    assert driver.process.poll() is None
    driver.process.kill()
    scene.nothing_is_left()


@pytest.mark.parametrize("name", ["gpumesh-coord", "gpumesh-spawner"])
def test_an_embedded_mesh_ends_with_its_coordinator_or_spawner(scene: Scene, name: str) -> None:
    driver = scene.drive("sleep_in_c", "hold_the_gil")
    (victim,) = named(scene.alive(), name)

    victim.kill()

    until_gone(lambda: [one for one in scene.alive() if one.pid != driver.process.pid], GONE_SECONDS)
    assert driver.process.poll() is None
    driver.process.kill()
    scene.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("which", ["serve", "join"])
def test_nothing_outlives_a_killed_command(scene: Scene, which: str, number: int) -> None:
    server, _ = scene.programs.serve(*(["--slots", "2"] if which == "serve" else ["--no-self-worker"]))
    victim = server
    if which == "join":
        victim = scene.programs.gpumesh("join", "--slots", "2")
        victim.wait_for("works for")
    source = f"""
from gpumesh.runtime.settings import resolve_connection
from tests.support import tasks
from tests.support.client import Client
client = Client(*resolve_connection(), is_own_mesh=False)
futures = [client.remote(task, 1000, {str(scene.folder)!r} + "/" + task.__name__) for task in (tasks.with_children, tasks.hold_the_gil)]
futures[0].result()
"""
    client = scene.programs.python("-c", source)
    until((scene.folder / "with_children").exists, 20)
    until((scene.folder / "hold_the_gil").exists, 20)
    victim.remember_children()
    assert len(named(scene.alive(), "gpumesh-runner")) == 2

    os.kill(victim.process.pid, number)

    kept = {client.process.pid} | ({server.process.pid} if which == "join" else set())
    until_gone(lambda: [one for one in scene.alive() if one.pid not in kept], GONE_SECONDS)
    client.process.kill()
    if which == "join":
        assert server.process.poll() is None
        server.process.kill()
    scene.nothing_is_left()
