"""Actors as a user meets them, on a mesh of real processes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from pathlib import Path
from typing import Any, AsyncIterator, Iterator, List, Optional

import pytest

import gpumesh
from gpumesh import ActorHandle, GPUMesh, accelerate, exit_actor
from gpumesh.errors import ActorDiedError, MeshError, UnknownActorError
from tests.integration.programs import Programs, started_programs
from tests.support.processes import until

np = pytest.importorskip("numpy")


class Counter:
    """Counts, and does what an actor may do."""

    def __init__(self, start: int = 0, closed: str = "") -> None:
        if start < 0:
            raise ValueError(f"cannot count from {start}")
        self.count = start
        self.closed = closed
        self.seen: List[Any] = []

    def increment(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def note(self, value: Any) -> None:
        self.seen.append(value)

    def noted(self) -> List[Any]:
        return self.seen

    def pid(self) -> int:
        return os.getpid()

    def total(self, array: Any) -> float:
        array += 1
        return float(array.sum())

    def up(self, count: int) -> Iterator[int]:
        for _ in range(count):
            self.count += 1
            yield self.count

    def die(self) -> None:
        os._exit(3)

    def leave(self) -> None:
        exit_actor()

    def ask(self, other: ActorHandle, by: int) -> Any:
        return other.increment.remote(by).result()

    def close(self) -> None:
        if self.closed:
            Path(self.closed).write_text(str(self.count), encoding="utf-8")


class Turnstile:
    """Its calls wait for one another."""

    def __init__(self) -> None:
        self.inside = 0
        self.are_all_in: Optional[asyncio.Event] = None

    async def enter(self, party: int) -> int:
        self.are_all_in = self.are_all_in or asyncio.Event()
        self.inside += 1
        if self.inside >= party:
            self.are_all_in.set()
        await self.are_all_in.wait()
        return self.inside

    async def letters(self, text: str) -> AsyncIterator[str]:
        for letter in text:
            yield letter


@pytest.fixture(scope="module")
def mesh() -> Iterator[GPUMesh]:
    with GPUMesh.local(workers=2) as made:
        yield made


def number_of(mesh: GPUMesh) -> int:
    return len(mesh.actors())


def test_an_actor_keeps_its_state_between_calls_in_order(mesh: GPUMesh) -> None:
    counter = mesh.actor(Counter).remote(10)
    counter.ready(30)
    assert counter.increment.remote(by=2).result(30) == 12
    assert [future.result(30) for future in [counter.increment.remote() for _ in range(100)]] == list(range(13, 113))
    for value in range(50):
        (counter.note if value % 2 else counter.method("note").options(name="other")).remote(value)
    assert counter.noted.remote().result(30) == list(range(50))
    assert counter.pid.remote().result(30) != os.getpid()
    (row,) = [each for each in mesh.actors() if each["id"] == counter.actor_id]
    assert (row["class_name"], row["state"], row["detached"], row["max_restarts"]) == ("Counter", "alive", False, 0)


def test_calls_stay_in_order_when_they_wait_for_tasks(mesh: GPUMesh) -> None:
    def slow(value: int) -> int:
        time.sleep(0.2)
        return value

    counter = mesh.actor(Counter).remote()
    late = accelerate(mesh)(slow).remote(1)
    counter.note.remote(late)
    counter.note.remote(2)
    counter.note.remote(np.zeros(100_000))
    counter.note.remote(counter.increment.remote())
    counter.note.remote(mesh.put("five"))
    seen = counter.noted.remote().result(30)
    assert (seen[0], seen[1], seen[3], seen[4]) == (1, 2, 1, "five")
    assert seen[2].shape == (100_000,)


def test_arrays_travel_and_may_be_changed(mesh: GPUMesh) -> None:
    counter = mesh.actor(Counter).remote()
    array = np.ones(300_000)
    assert counter.total.remote(array).result(30) == 600_000
    assert array.sum() == 300_000


def test_methods_that_are_coroutines_interleave(mesh: GPUMesh) -> None:
    turnstile = mesh.actor(Turnstile).remote()
    assert [future.result(30) for future in [turnstile.enter.remote(5) for _ in range(5)]] == [5] * 5

    async def read() -> List[str]:
        found = [letter async for letter in turnstile.letters.stream("abc")]
        return [*found, str(await turnstile.enter.remote(1))]

    assert asyncio.run(read()) == ["a", "b", "c", "6"]


def test_a_generator_method_streams(mesh: GPUMesh) -> None:
    counter = mesh.actor(Counter).remote()
    assert list(counter.up.stream(200)) == list(range(1, 201))
    stream = counter.up.remote(10**9)
    assert next(iter(stream)) == 201
    stream.close()
    assert counter.increment.remote(0).result(30) < 10**6, "it has stopped there"


def test_handles_go_to_tasks_and_other_actors_and_come_back(mesh: GPUMesh) -> None:
    counter = mesh.actor(Counter).remote()

    def add(handles: List[ActorHandle], by: int) -> ActorHandle:
        handles[0].increment.remote(by).result()
        return handles[0]

    assert accelerate(mesh)(add).remote([counter], 5).result(30) == counter
    other = mesh.actor(Counter).remote()
    assert other.ask.remote(counter, 10).result(30) == 15

    def make(start: int) -> Any:
        return gpumesh.current_mesh().actor(Counter).remote(start)

    made = accelerate(mesh)(make).remote(40).result(30)
    assert made.increment.remote(2).result(30) == 42, "it lives on where its handle is"


def test_a_constructor_that_fails_is_the_cause_of_the_first_use(mesh: GPUMesh) -> None:
    broken = mesh.actor(Counter, max_restarts=5).remote(-1)
    with pytest.raises(ActorDiedError, match="its constructor failed.*cannot count from -1") as caught:
        broken.ready(30)
    assert type(caught.value.__cause__) is ValueError
    assert "test_actor_handles.py" in str(caught.value.__cause__.__cause__)
    with pytest.raises(ActorDiedError, match="cannot count from -1"):
        broken.increment.remote().result(30)


def test_a_death_ends_what_was_pending_and_a_restart_begins_anew(mesh: GPUMesh) -> None:
    mortal = mesh.actor(Counter).remote(1)
    before, death, after = mortal.increment.remote(), mortal.die.remote(), mortal.increment.remote()
    for future in (death, after):
        with pytest.raises(ActorDiedError, match="exited with code 3") as caught:
            future.result(30)
        assert caught.value.is_gone
    assert before.exception(30) is None or isinstance(before.exception(), ActorDiedError)
    with pytest.raises(ActorDiedError):
        mortal.increment.remote().result(30)

    phoenix = mesh.actor(Counter, max_restarts=1).remote(5)
    assert phoenix.increment.remote().result(30) == 6
    lost, kept = phoenix.die.remote(), phoenix.increment.options(retries=1).remote()
    with pytest.raises(ActorDiedError, match="state was lost") as caught:
        lost.result(30)
    assert not caught.value.is_gone
    assert kept.result(30) == 6, "from the state that a new one has"
    with pytest.raises(ActorDiedError):
        phoenix.die.remote().result(30)
    with pytest.raises(ActorDiedError, match="max_restarts=1"):
        phoenix.increment.remote().result(30)


def test_an_actor_ends_with_its_last_handle_and_closes(mesh: GPUMesh, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    counter = mesh.actor(Counter).remote(3, str(closed))
    assert counter.increment.remote().result(30) == 4
    ident = counter.actor_id
    held = mesh.put([counter])
    del counter
    gc.collect()
    assert mesh.get(held)[0].increment.remote().result(30) == 5
    del held
    gc.collect()
    until(closed.exists, timeout=10)
    assert closed.read_text() in ("5", "")
    until(lambda: ident not in [each["id"] for each in mesh.actors()], timeout=10)


def test_kill_and_exit(mesh: GPUMesh, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    counter = mesh.actor(Counter).remote(7, str(closed))
    counter.ready(30)
    assert counter.kill()
    with pytest.raises(ActorDiedError, match="was killed by"):
        counter.increment.remote().result(30)
    until(closed.exists, timeout=10)
    assert not counter.kill(), "it is dead already"

    leaving = mesh.actor(Counter).remote()
    assert leaving.leave.remote().result(30) is None
    with pytest.raises(ActorDiedError, match="ended itself"):
        leaving.increment.remote().result(30)
    with pytest.raises(MeshError, match="exit_actor"):
        exit_actor()


def test_a_detached_actor_outlives_its_client_and_is_found_by_name(mesh: GPUMesh) -> None:
    assert mesh.url is not None
    embedded: Any = mesh._embedded
    with GPUMesh(mesh.url, token=embedded.token) as first:
        kept = first.actor(Counter, lifetime="detached", name="kept").remote(20)
        assert kept.increment.remote().result(30) == 21
        owned = first.actor(Counter, name="owned").remote()
        owned.ready(30)
        assert mesh.get_actor("owned") == owned
        with pytest.raises(ValueError, match="'kept' belongs to"):
            first.actor(Counter, lifetime="detached", name="kept").remote()
    until(lambda: "owned" not in [each["name"] for each in mesh.actors()], timeout=20)
    found = mesh.get_actor("kept")
    assert found.increment.remote().result(30) == 22
    found.kill()
    until(lambda: "kept" not in [each["name"] for each in mesh.actors()], timeout=10)
    with pytest.raises(UnknownActorError, match="'kept'"):
        mesh.get_actor("kept")


def test_a_group_works_as_one(mesh: GPUMesh) -> None:
    group = mesh.actors_group(Counter, 3, members=[1, 2, 3])
    group.ready(30)
    assert group.increment.remote(1).result(30) == [2, 3, 4]
    assert group.increment.scatter([10, 20, 30]).result(30) == [12, 23, 34]
    workers = {each["worker"] for each in mesh.actors() if each["group"]}
    assert len(workers) == 2, "spread over both"
    with pytest.raises(ActorDiedError, match=r"member 1 of 3 of the group \(a-.* on .*exited with code 3") as caught:
        group[1].die.remote()
        group.increment.remote().result(30)
    assert caught.value.member == 1
    assert group.kill() == 2


def test_a_class_of_a_module_that_is_decorated_there(mesh: GPUMesh) -> None:
    from tests.support import decorated_actor

    decorated_actor.Greeter._mesh = mesh
    greeter = decorated_actor.Greeter.remote("hello")
    assert greeter.greet.remote("you").result(30) == "hello you"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


def test_the_command_line_shows_and_ends_actors(programs: Programs, mesh: GPUMesh) -> None:
    embedded: Any = mesh._embedded
    where = ("--url", str(mesh.url), "--token", embedded.token)
    counter = mesh.actor(Counter, name="shown").remote()
    counter.ready(30)
    listed = programs.gpumesh("actors", "--json", *where)
    assert listed.wait(50) == 0, listed.output
    (row,) = [each for each in json.loads(listed.output) if each["name"] == "shown"]
    assert (row["id"], row["class_name"], row["state"]) == (counter.actor_id, "Counter", "alive")
    table = programs.gpumesh("actors", *where)
    assert table.wait(50) == 0
    assert counter.actor_id in table.output.replace("\n", "")
    killed = programs.gpumesh("kill-actor", "shown", "--force", *where)
    assert killed.wait(50) == 0, killed.output
    assert killed.output.strip() == "shown ends"
    with pytest.raises(ActorDiedError, match="was killed by"):
        counter.increment.remote().result(30)
    unknown = programs.gpumesh("kill-actor", "shown", *where)
    assert unknown.wait(50) == 1
    assert "there is no actor with the name 'shown'" in unknown.output
