"""F12: driver and worker have different versions of a library: the error says which, where, and what to do; nothing else suffers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Iterator

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import SerializationError
from tests.integration.programs import Programs, started_programs
from tests.support.processes import until
from tests.support.wheels import installed

# Stand-ins for a library that moved a class between two versions. The first is one that workers tell the version of.
TOLD, UNTOLD = "xarray", "stubpkg"
OLD = {"__init__.py": "", "frames.py": "class Frame:\n    pass\n\ndef make():\n    return Frame()\n"}
NEW = {"__init__.py": "", "frames.py": "", "core.py": "class Frame:\n    pass\n"}


def library(folder: Path, version: str, files: Any) -> Path:
    packages = folder / version / "site-packages"
    for name in (TOLD, UNTOLD):
        installed(packages, name, version, {f"{name}/{file}": text for file, text in files.items()})
    return packages


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


@pytest.fixture
def mesh(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPUMesh]:
    """This process has version 1.0 of the libraries, one worker has that too, the other has 2.0."""
    old, new = library(tmp_path, "1.0", OLD), library(tmp_path, "2.0", NEW)
    monkeypatch.syspath_prepend(str(old))
    _, url = programs.serve("--no-self-worker", "--token", "secret")
    for version, packages in (("1.0", old), ("2.0", new)):
        programs.gpumesh("join", url, "--token", "secret", "--slots", "1", "--tag", f"has={version}", PYTHONPATH=str(packages))
    with GPUMesh(url, token="secret", fallback=False) as made:
        until(lambda: len(made.workers()) == 2, 20, what="two workers")
        yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in (TOLD, UNTOLD)]:
        del sys.modules[name]


def on(mesh: GPUMesh, version: str, function: Any) -> Any:
    return accelerate(mesh, tags={"has": version})(function).remote


def worker_with(mesh: GPUMesh, version: str) -> Any:
    (found,) = [worker for worker in mesh.workers() if worker["tags"]["has"] == version]
    return found


def said_by(future: Any) -> str:
    with pytest.raises(SerializationError) as caught:
        future.result(20)
    return str(caught.value)


def test_the_list_of_workers_shows_versions(mesh: GPUMesh) -> None:
    assert [worker_with(mesh, version)["versions"][TOLD] for version in ("1.0", "2.0")] == ["1.0", "2.0"]
    assert all(UNTOLD not in worker["versions"] for worker in mesh.workers())


@pytest.mark.parametrize("name", [TOLD, UNTOLD])
def test_a_function_or_argument_of_another_version_of_a_library(mesh: GPUMesh, name: str) -> None:
    frames = __import__(f"{name}.frames").frames
    assert type(on(mesh, "1.0", frames.make)().result(20)) is frames.Frame
    worker = worker_with(mesh, "2.0")

    errors = [said_by(on(mesh, "2.0", frames.make)()), said_by(on(mesh, "2.0", repr)(frames.Frame()))]

    for error, missing in zip(errors, ("make", "Frame")):
        assert missing in error
        assert f"{name} is 2.0 on worker {worker['hostname']} ({worker['id']}), and 1.0 on this machine" in error
        assert "the same version" in error
    assert on(mesh, "2.0", len)("abc").result(20) == 3
    assert worker_with(mesh, "2.0")["pid"] == worker["pid"]


def test_a_result_of_another_version_of_a_library(mesh: GPUMesh) -> None:
    worker = worker_with(mesh, "2.0")
    make = on(mesh, "2.0", lambda name: [__import__(f"{name}.core").core.Frame()])

    error = said_by(make(TOLD))

    assert f"{TOLD}.core" in error
    assert f"{TOLD} is 1.0 on this machine" in error
    assert f"and 2.0 on worker {worker['hostname']} ({worker['id']})" in error
    assert f"{UNTOLD} is 1.0 on this machine" in said_by(make(UNTOLD))
    stream = accelerate(mesh, tags={"has": "2.0"})(lambda name: [__import__(f"{name}.core").core.Frame()]).map([TOLD])
    with pytest.raises(SerializationError, match=f"and 2.0 on worker {worker['hostname']}"):
        stream.result(20)
    assert on(mesh, "2.0", len)("abc").result(20) == 3


def test_a_library_that_a_worker_does_not_have_at_all(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(library(tmp_path, "1.0", OLD)))
    _, url = programs.serve("--token", "secret", "--slots", "1")
    frames = __import__(f"{UNTOLD}.frames").frames
    with GPUMesh(url, token="secret", fallback=False) as mesh:
        error = said_by(accelerate(mesh)(frames.make).remote())

    assert "module 'stubpkg' is not installed" in error
    assert "stubpkg is not installed on worker" in error
    assert "and 1.0 on this machine" in error
