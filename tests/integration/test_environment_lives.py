"""What happens to a worker's environments as time passes: second tries, idle processes, builds that never end. The pool runs in this process."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Awaitable, Callable, Dict, List, Tuple

import pytest

from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.runtime import environment_build, environments, pool
from gpumesh.runtime.environment_build import BuildError, build, is_complete, python_of
from gpumesh.runtime.environments import environment_name, wrong_with
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.serialization import functions, values
from gpumesh.serialization.exceptions import load_exception
from tests.support import packed, processes
from tests.support.processes import marked, named, until, until_gone
from tests.support.wheels import make_slow_project, make_wheel, offline


class Owner(pool.PoolOwner):
    """Keeps what the pool tells."""

    takes_output = True

    def __init__(self) -> None:
        self.results: Dict[int, Tuple[int, Any]] = {}
        self.installing: List[Any] = []
        self.output: List[str] = []

    def on_results(self, results: List[Tuple[int, int, int, Any, float]]) -> None:
        for task_id, _, status, payload, _ in results:
            self.results[task_id] = (status, payload)

    def on_output(self, task_id: int, stream: int, data: bytes) -> None:
        self.output.append(data.decode())

    def on_health(self, problem: str) -> None:
        raise AssertionError(problem)

    def on_installing(self, packages: Tuple[Tuple[str, ...], ...]) -> None:
        self.installing.append(packages)

    def on_results_heard(self, results: Any) -> None:
        """Nothing here is in a store."""

    def on_runner_gone(self, runner: int) -> None:
        """The same."""


class Site:
    """A pool of one slot, on the loop of the test."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.wheels = folder / "wheels"
        self.mark = mark
        self.owner = Owner()
        self.pool = pool.RunnerPool(asyncio.get_running_loop(), self._launch, self.owner, slots=1, cores=1, label="here")
        self._next_task = 1
        self.pool.start()

    @staticmethod
    def _launch(stderr: int) -> Tuple[int, socket.socket]:
        return launch_spawner(environment=child_environment(), stderr=stderr)

    async def run(self, function: Callable[..., Any], *packages: str) -> Tuple[int, Any]:
        """The status and the value or exception of one task; NOT_RUN when it has to come again."""
        exported = functions.Exporter().export(function)
        self.pool.define_function(exported.digest, exported.body)
        spec = self.pool.define_spec(TaskSpec(exported.digest, "f", packages=packages), cores=0, timeout=0.0)
        task, self._next_task = self._next_task, self._next_task + 1
        self.pool.run(spec, [(task, 1, values.dumps_call((), {}))])
        await self.until(lambda: task in self.owner.results)
        status, payload = self.owner.results[task]
        if status == Status.OK:
            return status, values.loads(payload)
        return status, load_exception(payload) if status == Status.RAISED else payload

    async def built(self) -> None:
        """Nothing is being installed any more."""
        await self.until(lambda: bool(self.owner.installing) and self.owner.installing[-1] == ())

    async def until(self, look: Callable[[], bool], timeout: float = 40.0) -> None:
        deadline = time.monotonic() + timeout
        while not look():
            assert time.monotonic() < deadline, "it did not come about"
            await asyncio.sleep(0.01)

    def spawners(self) -> int:
        return len(named(marked(self.mark), "gpumesh-spawner"))


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a coroutine function with a site; nothing of it may be left in the end."""
    mark = f"lives-{os.getpid()}-{tmp_path.name}"
    for name, value in {**offline(tmp_path / "wheels", tmp_path / "environments"), processes.MARK: mark}.items():
        monkeypatch.setenv(name, value)
    make_wheel(tmp_path / "wheels", "tinypkg", "1.0")

    def run(scene: Callable[[Site], Awaitable[None]]) -> None:
        async def perform() -> None:
            site = Site(tmp_path, mark)
            try:
                await scene(site)
            finally:
                site.pool.close()

        asyncio.run(perform())
        until_gone(lambda: [process for process in marked(mark) if process.pid != os.getpid()], 10)

    return run


def test_tasks_come_again_when_their_environment_is_built(play: Any) -> None:
    async def scene(site: Site) -> None:
        status, _ = await site.run(packed.version, "tinypkg==1.0")
        assert status == Status.NOT_RUN
        assert site.owner.installing == [(("tinypkg==1.0",),)]
        assert site.owner.output == ["[gpumesh: installing tinypkg==1.0 on here; tasks that need it wait, this once]\n"]
        assert await site.run(os.getpid) != (status, {})
        assert (await site.run(packed.version, "tinypkg==1.0"))[0] == Status.NOT_RUN
        await site.built()
        assert await site.run(packed.version, "tinypkg==1.0") == (Status.OK, "1.0")
        assert len(site.owner.output) == 1

    play(scene)


def test_a_set_that_failed_is_tried_again_later(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(site: Site) -> None:
        wish = (packed.version, "tinypkg==3.0")
        assert (await site.run(*wish))[0] == Status.NOT_RUN
        await site.built()
        make_wheel(site.wheels, "tinypkg", "3.0")
        status, error = await site.run(*wish)
        assert status == Status.RAISED
        assert "tinypkg==3.0" in str(error)

        monkeypatch.setattr(environments, "ENVIRONMENT_RETRY_SECONDS", 0.0)

        assert (await site.run(*wish))[0] == Status.NOT_RUN
        await site.built()
        assert await site.run(*wish) == (Status.OK, "3.0")

    play(scene)


def test_the_processes_of_an_idle_environment_end_and_come_back(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(site: Site) -> None:
        wish = (packed.version, "tinypkg==1.0")
        await site.run(*wish)
        monkeypatch.setattr(environments, "ENVIRONMENT_IDLE_SECONDS", 0.2)
        await site.built()
        assert await site.run(*wish) == (Status.OK, "1.0")

        await site.until(lambda: site.spawners() == 1)

        assert await site.run(*wish) == (Status.OK, "1.0")
        assert site.spawners() >= 1

    play(scene)


def test_a_build_that_does_not_end_is_ended(play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = str(make_slow_project(tmp_path / "slowpkg", "slowpkg", started=tmp_path / "started", gate=tmp_path / "gate"))
    monkeypatch.setattr(environments, "ENVIRONMENT_BUILD_SECONDS", 3.0)

    async def scene(site: Site) -> None:
        await site.run(packed.version, project)
        await site.built()
        status, error = await site.run(packed.version, project)
        assert status == Status.RAISED
        assert "did not end in time" in str(error)

    play(scene)
    assert not (tmp_path / "environments" / environment_name((project,))).exists()


def test_a_worker_takes_no_options_for_the_installer_from_others(play: Any, tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        status, error = await site.run(packed.version, "--index-url=http://elsewhere", "tinypkg")
        assert status == Status.RAISED
        assert "'--index-url=http://elsewhere' is not a requirement" in str(error)
        assert site.owner.installing == []

    play(scene)
    assert not (tmp_path / "environments").exists()


def test_what_an_installer_must_not_be_given() -> None:
    assert wrong_with(["numpy", "scikit-learn==1.5.*", "name @ file:///a.whl", "./a.whl"]) == ""
    for wrong in (["-r"], [" -r"], [""], [3], ["n" * 2000], ["n"] * 2000):
        assert wrong_with(wrong)


def test_a_package_in_a_file_is_another_one_when_the_file_changes(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "tinypkg", "1.0")
    before = environment_name((str(wheel),))
    assert environment_name((str(wheel),)) == before

    os.utime(wheel, ns=(1, 1))

    assert environment_name((str(wheel),)) != before
    assert environment_name(("tinypkg",)) != environment_name(("tinypkg", "other"))


@pytest.mark.parametrize("installer", ["uv", "pip", "an old pip"])
def test_each_installer_builds_the_same(installer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if installer == "uv":
        if shutil.which("uv") is None:
            pytest.skip("uv is not installed here")
    else:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    if installer == "an old pip":
        monkeypatch.setattr(environment_build, "_pip_version", lambda: (21, 2))
    for name, value in offline(tmp_path / "wheels", tmp_path / "environments").items():
        monkeypatch.setenv(name, value)
    make_wheel(tmp_path / "wheels", "tinypkg", "1.0")
    folder = str(tmp_path / "environments" / "x")

    build(folder, ["tinypkg"], [str(tmp_path / "wheels")], seconds=60.0, starter=os.getppid())

    assert is_complete(folder)
    program = "import sys, tinypkg; print(tinypkg.VERSION, sys.path[-1])"
    ended = subprocess.run([python_of(folder), "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["1.0", str(tmp_path / "wheels")]
    if installer != "an old pip":  # Which takes ten seconds for each environment.
        with pytest.raises(BuildError, match="install ended with exit code"):
            build(f"{folder}2", ["absent"], [], seconds=60.0, starter=os.getppid())
        assert not Path(f"{folder}2").exists()


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(OSError, match=str(file)):
        build(str(file / "environment"), ["tinypkg"], [], seconds=10.0, starter=os.getppid())


def test_a_builder_whose_worker_is_gone_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in offline(tmp_path / "wheels", tmp_path / "environments").items():
        monkeypatch.setenv(name, value)
    started = tmp_path / "started"
    project = str(make_slow_project(tmp_path / "slowpkg", "slowpkg", started=started, gate=tmp_path / "gate"))
    folder = str(tmp_path / "environments" / "x")
    request = f"folder={folder!r}, packages=[{project!r}], paths=[], seconds=60.0, starter=os.getpid()"
    program = (
        "import json, os, subprocess, sys, time\n"
        "builder = subprocess.Popen([sys.executable, '-c', 'from gpumesh.runtime.environment_build import main; main()'],"
        " stdin=subprocess.PIPE)\n"
        f"builder.stdin.write(json.dumps(dict({request})).encode())\n"
        "builder.stdin.close()\n"
        "time.sleep(60)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], env=child_environment())
    until(started.exists, 30, what="the build")

    worker.kill()
    worker.wait()

    until(lambda: not Path(folder).exists(), 10, what="the end of what was half built")
    installer = int(started.read_text())
    until(lambda: not Path(f"/proc/{installer}").exists(), 10, what="the end of the installer")
    assert not is_complete(folder)
    with pytest.raises(BuildError, match="is gone"):
        build(folder, [project], [], seconds=60.0, starter=1)
