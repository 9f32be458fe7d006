"""F75: while an actor restarts, calls are stuck or burn their retries; state is silently fresh; calls are replayed or skipped."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import pytest

from gpumesh import GPUMesh
from gpumesh.errors import ActorDiedError
from tests.support.hosts import kill
from tests.support.processes import until
from tests.support.recorded_actor import Record, Recorded
from tests.support.site_of_hosts import Site, site_of_hosts
from tests.support.wired_site import CLIENT, wired_site

SOON = 30.0
CALLS = 100
SECONDS = 0.01  # Of each call: some have ended, one runs, the rest waits when it dies.


class Patient(Recorded):
    """The same with a coroutine."""

    async def add_later(self, number: int, seconds: float) -> Tuple[int, int]:
        self._write(f"call {number}")
        self._count += 1
        await asyncio.sleep(seconds)
        return os.getpid(), self._count


class Once:
    """Its constructor works only the first time."""

    def __init__(self, folder: str) -> None:
        if Path(folder, "been here").exists():
            raise ValueError("the data set is gone")
        Path(folder, "been here").touch()

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def wait(self) -> None:
        """For ever."""
        signal.pause()


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=1, slots=1) as made:
        yield made


def in_flight(handle: Any, record: Record, *, retries: int = 0, method: str = "add", calls: int = CALLS) -> List[Any]:
    """So many calls, some of which have ended."""
    add = getattr(handle, method).options(retries=retries)
    futures = [add.remote(number, SECONDS) for number in range(calls)]
    futures[4].result(SOON)
    return futures


def ended(futures: List[Any]) -> Tuple[List[Any], List[Optional[BaseException]]]:
    """(results, what those without one raise)."""
    errors = [future.exception(SOON) for future in futures]
    return [future.result() for future, error in zip(futures, errors) if error is None], [error for error in errors if error]


def test_calls_in_flight_end_and_say_that_the_state_is_lost(mesh: GPUMesh, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    handle = mesh.actor(Recorded, max_restarts=2).remote(str(tmp_path / "record"))
    futures = in_flight(handle, record)

    os.kill(record.lives()[0], signal.SIGKILL)
    until(futures[-1].done, SOON, what="its death is known")
    after = handle.add.remote(CALLS)

    results, errors = ended(futures)
    assert 5 <= len(results) < CALLS
    assert [place for _, place in results] == list(range(1, len(results) + 1)), "those that have a result are the first"
    assert all(type(error) is ActorDiedError for error in errors), errors
    assert "state was lost" in str(errors[0])
    assert after.result(SOON)[1] == 1, "a call that is made meanwhile waits, and finds a fresh state"
    assert len(record.lives()) == 2
    begun = [number for numbers in record.begun().values() for number in numbers]
    assert len(begun) == len(set(begun)), "no call has begun twice"


def test_calls_that_may_be_repeated_are_in_order(mesh: GPUMesh, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    handle = mesh.actor(Recorded, max_restarts=2).remote(str(tmp_path / "record"))
    futures = in_flight(handle, record, retries=3)

    os.kill(record.lives()[0], signal.SIGKILL)
    after = handle.add.options(retries=3).remote(CALLS)

    results, errors = ended(futures)
    last, place = after.result(SOON)
    assert not errors
    assert len(results) == CALLS
    first, second = record.lives()
    begun = record.begun()
    assert begun[first] == sorted(begun[first])
    assert begun[second] == list(range(begun[second][0], CALLS + 1)), "all that had no result, and then what came later"
    assert begun[second][0] <= begun[first][-1] + 1
    assert (last, place) == (second, len(begun[second]))


def test_coroutines_are_neither_replayed_nor_skipped(mesh: GPUMesh, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    handle = mesh.actor(Patient, max_restarts=2).remote(str(tmp_path / "record"))
    once = [handle.add_later.remote(number, 0.02 if number % 2 else 30.0) for number in range(10)]
    again = [handle.add_later.options(retries=3).remote(number, 0.02) for number in range(10, 20)]
    for future in once[1::2]:
        future.result(SOON)
    for future in again:
        future.result(SOON)

    os.kill(record.lives()[0], signal.SIGKILL)

    assert [type(future.exception(SOON)) for future in once[::2]] == [ActorDiedError] * 5
    assert handle.add_later.remote(20, 0.0).result(SOON)[1] == 1, "what has ended out of order is not done again"
    assert record.begun()[record.lives()[1]] == [20]


def test_a_constructor_that_fails_on_a_restart_is_the_end_and_the_reason(mesh: GPUMesh, tmp_path: Path) -> None:
    handle = mesh.actor(Once, max_restarts=5).remote(str(tmp_path))
    pid = handle.pid.remote().result(SOON)
    pending = handle.wait.remote()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(pending.exception(SOON), ActorDiedError)

    error = handle.pid.remote().exception(SOON)

    assert isinstance(error, ActorDiedError)
    assert isinstance(error.__cause__, ValueError)
    assert "the data set is gone" in str(error.__cause__)
    with pytest.raises(ActorDiedError):
        handle.ready(SOON)


def test_it_is_started_again_only_so_often(mesh: GPUMesh, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    handle = mesh.actor(Recorded, max_restarts=2).remote(str(tmp_path / "record"))
    for life in range(3):
        pid, place = handle.add.remote(life).result(SOON)
        assert place == 1
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), SOON, what="its death")  # type: ignore[misc]
        until(lambda life=life: len(record.lives()) > life + 1 or life == 2, SOON, what="its next life")  # type: ignore[misc]

    error = handle.add.remote(3).exception(SOON)

    assert isinstance(error, ActorDiedError)
    assert "max_restarts=2" in str(error)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_of_hosts(tmp_path, times={}) as made:
        made.join("one")
        yield made


def test_its_machine_dies_and_it_goes_on_at_another(site: Site, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    with site.client() as mesh:
        handle = mesh.actor(Recorded, max_restarts=2).remote(str(tmp_path / "record"))
        handle.ready(SOON)
        site.join("two")
        futures = in_flight(handle, record)
        repeated = [handle.add.options(retries=3).remote(CALLS + number) for number in range(5)]

        kill(site.workers["one"])

        results, errors = ended(futures)
        assert results
        assert all(type(error) is ActorDiedError for error in errors)
        lives = [future.result(SOON)[0] for future in repeated]
        assert lives == [record.lives()[1]] * 5
        (view,) = mesh.actors()
        assert view["restarts"] == 1
        assert view["worker"] == site.ident(mesh, "two")


@pytest.mark.parametrize("lost", ["the coordinator", "the connections"])
def test_it_lives_through_a_loss_that_is_not_its_own(tmp_path: Path, lost: str) -> None:
    record = Record(tmp_path / "record")
    with wired_site(tmp_path) as site, site.client() as mesh:
        site.join("one")
        handle = mesh.actor(Recorded, name="c").remote(str(tmp_path / "record"))
        futures = in_flight(handle, record)

        if lost == "the coordinator":
            kill(site.coordinator)
            site.serve()
        else:
            site.reset(CLIENT)
            site.reset(CLIENT + 1)

        results, errors = ended(futures)
        assert not errors
        assert results == [(record.lives()[0], place) for place in range(1, CALLS + 1)]
        assert mesh.get_actor("c").add.remote(CALLS).result(SOON) == (record.lives()[0], CALLS + 1)
