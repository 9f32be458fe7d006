"""F73: actors outlive their last handle once it was passed on, and their clean-up is not run when they end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, List

import pytest

import gpumesh
from gpumesh import GPUMesh, accelerate
from tests.support.hosts import REPOSITORY
from tests.support.processes import until
from tests.support.recorded_actor import Record, Recorded
from tests.support.site_of_hosts import TOKEN, Site, site_of_hosts

SOON = 20.0
WITHOUT_CLIENT = 30.0  # CLIENT_GRACE_SECONDS, and what the machine is slow by.

DRIVER = """
import sys, time
from gpumesh import GPUMesh
from tests.support.recorded_actor import Recorded
mesh = GPUMesh(sys.argv[1], token=sys.argv[2])
handle = mesh.actor(Recorded, name="of the driver").remote(sys.argv[3])
detached = mesh.actor(Recorded, name="for good", lifetime="detached").remote(sys.argv[4])
handle.ready(20), detached.ready(20)
print("ready", flush=True)
if sys.argv[5] == "stay":
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=1, slots=2) as made:
        yield made


def ends_soon(record: Record, timeout: float = SOON) -> None:
    """It has been asked to end, once, and its process is gone."""
    (life,) = until(record.lives, SOON, what="a life")
    until(lambda: record.closed() == [life], timeout, what="its last words")
    until(lambda: not os.path.exists(f"/proc/{life}"), SOON, what="the end of its process")


def test_one_that_goes_out_of_scope_ends(mesh: GPUMesh, tmp_path: Path) -> None:
    handle = mesh.actor(Recorded).remote(str(tmp_path / "record"))
    assert handle.add.remote(0).result(SOON)[1] == 1

    del handle
    gc.collect()

    ends_soon(Record(tmp_path / "record"))
    until(lambda: not mesh.actors(), SOON, what="no actors")


def test_those_that_a_loop_makes_end_while_it_goes_on(mesh: GPUMesh, tmp_path: Path) -> None:
    actor = mesh.actor(Recorded)
    for place in range(6):
        assert actor.remote(str(tmp_path / f"record-{place}")).add.remote(0).result(SOON)[1] == 1

    for place in range(6):
        ends_soon(Record(tmp_path / f"record-{place}"))


def make_and_pass_on(record: str) -> List[int]:
    """A task that creates an actor and gives it to a task of its own; both end."""
    handle = gpumesh.current_mesh().actor(Recorded).remote(record)
    first = handle.add.remote(0).result()[1]
    return [first, accelerate()(use_up).remote(handle).result()]


def use_up(handle: Any) -> int:
    """A task that has a handle only for its own time."""
    count: int = handle.add.remote(1).result()[1]
    return count


def test_one_that_a_task_has_made_and_passed_on_ends_with_both(mesh: GPUMesh, tmp_path: Path) -> None:
    assert accelerate(mesh)(make_and_pass_on).remote(str(tmp_path / "record")).result(SOON) == [1, 2]

    ends_soon(Record(tmp_path / "record"))
    until(lambda: not mesh.actors(), SOON, what="no actors")


def test_one_lives_as_long_as_any_handle_anywhere(mesh: GPUMesh, tmp_path: Path) -> None:
    handle = mesh.actor(Recorded).remote(str(tmp_path / "record"))
    ref = mesh.put([handle])
    assert handle.add.remote(0).result(SOON)[1] == 1
    del handle
    gc.collect()

    (again,) = mesh.get(ref)
    assert again.add.remote(1).result(SOON)[1] == 2, "it is the same one"
    del again
    ref.delete()
    gc.collect()

    ends_soon(Record(tmp_path / "record"))


class Minded:
    """Has neither `close` nor `__exit__`, but a finalizer."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __del__(self) -> None:
        Path(self.path).write_text("finalized")


class Managed:
    """A context manager."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __exit__(self, *error: object) -> None:
        Path(self.path).write_text(f"left with {error}")


@pytest.mark.parametrize(("made", "words"), [(Minded, "finalized"), (Managed, "left with (None, None, None)")])
def test_whatever_clean_up_there_is_is_run(mesh: GPUMesh, tmp_path: Path, made: type, words: str) -> None:
    path = tmp_path / "said"
    handle = mesh.actor(made).remote(str(path))
    handle.ready(SOON)

    del handle
    gc.collect()

    until(lambda: path.exists() and path.read_text() == words, SOON, what=words)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_of_hosts(tmp_path, times={}) as made:
        made.join("one")
        yield made


@pytest.mark.parametrize("end", ["exits", "is killed"])
def test_one_goes_with_its_driver_unless_it_was_made_to_stay(site: Site, tmp_path: Path, end: str) -> None:
    own, detached = tmp_path / "own", tmp_path / "detached"
    words = [site.url, TOKEN, str(own), str(detached), "stay" if end == "is killed" else "go"]
    environment = {**site.environment("driver"), "PYTHONPATH": str(REPOSITORY)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *words], env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        if end == "is killed":
            driver.send_signal(signal.SIGKILL)
        driver.wait(SOON)
        driver.stdout.close()

        ends_soon(Record(own), WITHOUT_CLIENT)

        shown = site.command(None, ["actors"], site.environment("asking"))
        assert shown.wait(SOON) == 0
        assert "for good" in shown.output
        assert "of the driver" not in shown.output
        ended = site.command(None, ["kill-actor", "for good"], site.environment("asking"))
        assert ended.wait(SOON) == 0
        ends_soon(Record(detached))
    finally:
        driver.kill()
        driver.wait()
