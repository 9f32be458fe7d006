"""`packages=`: environments built on the worker, with runners of their own, from wheels made here; no network."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import EnvironmentBuildError, TaskCancelledError, WorkerCrashedError
from gpumesh.runtime.environment_build import MARK
from gpumesh.runtime.environments import environment_name
from tests.integration.programs import ROOT, started_programs
from tests.support import processes
from tests.support.packed import die, in_a_child, look_around, parent, plain, version, where
from tests.support.processes import marked, named, until, until_gone
from tests.support.wheels import installed, make_slow_project, make_wheel, offline


class Site:
    """A mesh of one worker with two slots, and where its environments are."""

    mesh: GPUMesh

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        self.environments = folder / "environments"
        self.mark = f"environments-{os.getpid()}-{folder.name}"

    def remote(self, function: Any, *packages: str, **options: Any) -> Any:
        return accelerate(self.mesh, packages=list(packages), **options)(function).remote

    def path_of(self, *packages: str) -> Path:
        return self.environments / environment_name(tuple(sorted(packages)))

    def installing(self) -> List[List[str]]:
        (worker,) = self.mesh.workers()
        return [list(packages) for packages in worker["installing"]]


@contextlib.contextmanager
def made_site(folder: Path, workers: int = 1) -> Iterator[Site]:
    site = Site(folder)
    for number in ("1.0", "2.0"):
        make_wheel(site.wheels, "tinypkg", number)
    make_wheel(site.wheels, "msgpack", "0.0.1", {"msgpack/__init__.py": "raise ImportError('this msgpack is broken')\n"})
    base = installed(folder / "base", "tinypkg", "0.9", {"tinypkg/__init__.py": "VERSION = '0.9'\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(base))
        for name, value in {**offline(site.wheels, site.environments), processes.MARK: site.mark}.items():
            patch.setenv(name, value)
        with GPUMesh.local(workers=workers, slots=2) as mesh:
            site.mesh = mesh
            yield site
    until_gone(lambda: marked(site.mark), 10)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with made_site(tmp_path_factory.mktemp("site")) as made:
        yield made


def test_two_environments_side_by_side_differ_from_the_workers_own(site: Site) -> None:
    one, two = site.remote(look_around, "tinypkg==1.0", timeout=1.5), site.remote(look_around, "tinypkg==2.0")
    first, second = one(), two()

    found = [first.result(60), second.result(60), accelerate(site.mesh)(look_around).remote().result(20)]

    assert [each["tinypkg"] for each in found] == ["1.0", "2.0", "0.9"]
    assert found[0]["prefix"] == str(site.path_of("tinypkg==1.0"))
    assert Path(found[0]["python"]).parent.parent == site.path_of("tinypkg==1.0")
    assert found[0]["gpumesh"] == found[2]["gpumesh"]
    assert found[0]["cloudpickle"] == found[2]["cloudpickle"], "what the environment lacks comes from the worker"
    assert len({each["pid"] for each in found}) == 3
    again = [one(), two()]
    assert [future.result(20)["tinypkg"] for future in again] == ["1.0", "2.0"]
    assert site.installing() == []


def test_a_program_that_a_task_starts_finds_the_same(site: Site) -> None:
    import gpumesh

    assert site.remote(in_a_child, "tinypkg==1.0")().result(60) == ["1.0", gpumesh.__file__]


def test_a_stream_over_environments_mixed_with_plain_tasks(site: Site) -> None:
    one, two = (accelerate(site.mesh, packages=[f"tinypkg=={n}"])(version) for n in ("1.0", "2.0"))
    none = accelerate(site.mesh)(plain)
    one.remote().result(60)
    two.remote().result(60)
    futures = [(one.remote(), two.remote(), none.remote(number)) for number in range(60)]

    ended = [tuple(future.result(30) for future in group) for group in futures]

    assert ended == [("1.0", "2.0", number) for number in range(60)]


def test_a_requirement_that_cannot_be_met_fails_its_tasks_alone(site: Site) -> None:
    missing = site.remote(version, "nosuchpkg==7.3", "tinypkg==1.0")
    with pytest.raises(EnvironmentBuildError) as caught:
        missing().result(60)

    said = str(caught.value)
    assert "packages=['nosuchpkg==7.3', 'tinypkg==1.0']" in said
    assert "No matching distribution found for nosuchpkg==7.3" in said or "nosuchpkg" in said.partition("last lines:")[2]
    assert "exit code" in said
    assert not site.path_of("nosuchpkg==7.3", "tinypkg==1.0").exists()
    log = Path(f"{site.path_of('nosuchpkg==7.3', 'tinypkg==1.0')}.log")
    tried_at = log.stat().st_mtime_ns
    with pytest.raises(EnvironmentBuildError, match="nosuchpkg"):
        missing().result(20)
    assert log.stat().st_mtime_ns == tried_at, "a failed set is not tried again for each task"
    (worker,) = site.mesh.workers()
    assert worker["problem"] == ""
    assert accelerate(site.mesh)(plain).remote(1).result(20) == 1


def test_an_environment_whose_processes_do_not_start_fails_its_tasks_alone(site: Site) -> None:
    with pytest.raises(EnvironmentBuildError) as caught:
        site.remote(version, "msgpack==0.0.1")().result(60)

    assert "do not start" in str(caught.value)
    assert "this msgpack is broken" in str(caught.value)
    (worker,) = site.mesh.workers()
    assert worker["problem"] == ""
    assert [accelerate(site.mesh)(plain).remote(n).result(20) for n in range(3)] == [0, 1, 2]


def test_a_death_in_an_environment_is_told_and_the_next_task_runs(site: Site) -> None:
    with pytest.raises(WorkerCrashedError, match="SIGKILL"):
        site.remote(die, "tinypkg==1.0", retries=0)().result(60)

    assert site.remote(version, "tinypkg==1.0")().result(30) == "1.0"


def test_the_death_of_what_starts_its_processes_is_survived(site: Site) -> None:
    find_parent = site.remote(parent, "tinypkg==1.0")
    spawner = find_parent().result(60)

    os.kill(spawner, signal.SIGKILL)

    until(lambda: find_parent().result(30) != spawner, 20, what="another one")
    assert accelerate(site.mesh)(plain).remote(1).result(20) == 1


def test_a_task_can_be_cancelled_while_its_environment_is_built(site: Site) -> None:
    started, gate = site.folder / "started", site.folder / "gate"
    project = str(make_slow_project(site.folder / "slowpkg", "slowpkg", started=started, gate=gate))
    slow = site.remote(os.getpid, project)
    futures = [slow() for _ in range(4)]
    until(started.exists, 30, what="the build")

    assert site.installing() == [[project]]
    assert accelerate(site.mesh)(plain).remote(1).result(20) == 1
    assert futures[0].cancel()
    with pytest.raises(TaskCancelledError):
        futures[0].result(5)
    assert not any(future.done() for future in futures[1:])

    gate.touch()

    assert len({future.result(60) for future in futures[1:]}) <= 2
    assert site.installing() == []


def test_a_half_built_environment_is_built_anew(site: Site) -> None:
    packages = ("tinypkg<2", "tinypkg>=1")
    junk = site.path_of(*packages) / "lib" / "junk"
    junk.parent.mkdir(parents=True)
    junk.touch()

    assert site.remote(version, *packages)().result(60) == "1.0"

    assert not junk.exists()
    assert (site.path_of(*packages) / MARK).read_text().split() == list(packages)


def test_two_workers_of_a_machine_build_an_environment_once(tmp_path: Path) -> None:
    with made_site(tmp_path, workers=2) as site:
        folder = site.path_of("tinypkg==2.0")
        folder.parent.mkdir()
        with open(f"{folder}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            futures = [site.remote(where, "tinypkg==2.0")() for _ in range(8)]
            until(lambda: all(worker["installing"] for worker in site.mesh.workers()), 20, what="both workers to want it")
            assert not folder.exists()
        found = [future.result(60) for future in futures]

        assert len({inode for inode, _ in found}) == 1
        assert len({spawner for _, spawner in found}) == 2, "both workers ran tasks in it"


def test_nothing_is_left_of_a_build_when_the_mesh_ends(tmp_path: Path) -> None:
    started, gate = tmp_path / "started", tmp_path / "gate"
    project = str(make_slow_project(tmp_path / "slowpkg", "slowpkg", started=started, gate=gate))
    with made_site(tmp_path) as site:
        future = site.remote(version, project)()
        until(started.exists, 30, what="the build")
        assert not future.done()

    until(lambda: not site.path_of(project).exists(), 10, what="the end of what was half built")  # Its processes: made_site.


def test_nothing_is_left_when_the_worker_is_killed(tmp_path: Path) -> None:
    with made_site(tmp_path) as site:
        assert site.remote(version, "tinypkg==1.0")().result(60) == "1.0"
        agents = named(marked(site.mark), "gpumesh-worker")
        assert len(named(marked(site.mark), "gpumesh-spawner")) == 2

        for agent in agents:
            agent.kill()

        until_gone(lambda: named(marked(site.mark), "gpumesh-runner"), 10)
        until(lambda: len(named(marked(site.mark), "gpumesh-spawner")) == 1, 10, what="the end of the environment's spawner")


PROJECT = """
import sys
from gpumesh import GPUMesh, accelerate
from mylib.calc import compute

with GPUMesh(sys.argv[1], token="secret", fallback=False) as mesh:
    print(accelerate(mesh, packages=["tinypkg==1.0"])(compute).remote(3).result(60))
    print(accelerate(mesh, packages=["tinypkg==2.0"])(lambda number: compute(number)).remote(4).result(60))
"""


def test_a_projects_own_modules_travel_into_an_environment(tmp_path: Path) -> None:
    for number in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "tinypkg", number)
    calc = tmp_path / "project" / "mylib" / "calc.py"
    calc.parent.mkdir(parents=True)
    (calc.parent / "__init__.py").touch()
    calc.write_text("def compute(number):\n    import tinypkg\n    return tinypkg.VERSION, number\n")
    (tmp_path / "project" / "run.py").write_text(PROJECT)
    with started_programs(tmp_path) as programs:
        _, url = programs.serve("--token", "secret", "--slots", "1", **offline(tmp_path / "wheels", tmp_path / "environments"))
        driver = programs.python(str(tmp_path / "project" / "run.py"), url, PYTHONPATH=str(ROOT))

        assert driver.wait(50) == 0, driver.output
        assert "('1.0', 3)" in driver.output
        assert "('2.0', 4)" in driver.output
        assert "installing tinypkg==1.0 on" in driver.output
