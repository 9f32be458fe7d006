"""F03: driver and worker run different minor versions of Python: bytecode goes only where it can run, names go anywhere."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Iterator, List

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import VersionMismatchError
from tests.support.interpreters import OTHERS, OWN, borrowed_dependencies, interpreter, why_not
from tests.support.processes import until

WORKER = """
import sys
from gpumesh.runtime.embedded import add_worker

with add_worker(sys.argv[1], sys.argv[2], slots=1, score=1.0, tags={"which": sys.argv[3]}) as worker:
    sys.stdin.read()
"""


class Site:
    """A mesh whose workers may run under any interpreter."""

    def __init__(self, folder: Path) -> None:
        self.coordinator = GPUMesh.start_coordinator(port=0)
        self.mesh = GPUMesh(self.coordinator.url, token=self.coordinator.token, fallback=False)
        self._folder = folder
        self._programs: List[subprocess.Popen[bytes]] = []

    def join(self, minor: str, which: str) -> None:
        """Start a worker of this version of Python, or skip the test."""
        python = interpreter(minor)
        if python is None:
            pytest.skip(f"there is no Python {minor} on this machine")
        variables = borrowed_dependencies(self._folder / "packages")
        problem = why_not(python, variables)
        if problem:
            pytest.skip(f"gpumesh does not run under the Python {minor} of this machine: {problem}")
        words = [python, "-c", WORKER, self.coordinator.url, self.coordinator.token, which]
        self._programs.append(subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, **variables}))
        until(lambda: which in [worker["tags"].get("which") for worker in self.mesh.workers()], 20, what=f"worker {which}")

    def end(self) -> None:
        self.mesh.close()
        for program in self._programs:
            assert program.stdin is not None
            program.stdin.close()
            program.wait(20)
        self.coordinator.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("minor", OTHERS)
def test_bytecode_finds_nobody_and_names_find_the_other_version(
    site: Site, minor: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.join(minor, "other")
    (worker,) = site.mesh.workers()
    assert worker["python"] == minor
    started = time.monotonic()
    stuck = accelerate(site.mesh, placement_timeout=3.0)(lambda number: number + 1).remote(1)

    assert accelerate(site.mesh)(platform.python_version).remote().result(20).rpartition(".")[0] == minor
    assert accelerate(site.mesh)(sorted).map([[3, 1], [2, 1]]).result(20) == [[1, 3], [1, 2]]
    with pytest.raises(VersionMismatchError) as caught:
        stuck.result(20)

    waited = time.monotonic() - started
    assert 2.5 < waited < 10
    for words in (f"Python {OWN}", f"runs Python {minor}", worker["hostname"], f":{os.getpid()}", "import"):
        assert words in str(caught.value)
    told = [record for record in caplog.records if f"runs Python {minor}" in record.getMessage()]
    assert told, "the driver was told long before"
    assert [view["problem"] for view in site.mesh.workers()] == [""]
    assert site.mesh.workers()[0]["pid"] == worker["pid"], "no process died of it"


@pytest.mark.parametrize("minor", OTHERS[:1])
def test_bytecode_goes_to_the_workers_of_its_own_version_alone(site: Site, minor: str) -> None:
    site.join(minor, "other")
    site.join(OWN, "own")

    found = accelerate(site.mesh)(lambda number: platform.python_version()).map(range(20)).result(30)

    assert {version.rpartition(".")[0] for version in found} == {OWN}


@pytest.mark.parametrize("minor", OTHERS[-1:])
def test_bytecode_among_the_arguments_of_an_importable_function_is_refused_and_kills_nobody(site: Site, minor: str) -> None:
    site.join(minor, "other")
    fold = accelerate(site.mesh)(functools.reduce)

    with pytest.raises(VersionMismatchError, match=f"code of Python {OWN} cannot run here, on Python {minor}"):
        fold.remote(lambda one, other: one + other, [1, 2]).result(20)

    assert accelerate(site.mesh)(len).remote([1, 2]).result(20) == 2
