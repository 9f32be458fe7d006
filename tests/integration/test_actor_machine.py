"""Lives of actors on a real mesh while its parts are killed, cut off and started again, against a model of what callers may see.

What an actor has really done stands in a file that it writes itself (tests/support/recorded_actor.py). The model:

- a call has one end in bounded time: its result, or ActorDiedError;
- a call that may not be repeated has begun once at most, and a result is that of the life in which it has begun;
- calls begin in the order in which they were made, in every life;
- an actor has no more lives than it may have, unless the coordinator was lost, which forgets those before;
- who drops the last handle ends the actor, and its last words are heard.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st

from gpumesh import GPUMesh
from gpumesh.errors import ActorDiedError
from tests.support.processes import until
from tests.support.recorded_actor import Record, Recorded
from tests.support.wired_site import CLIENT, WiredSite

TIMES = {"RECOVERY_SECONDS": 3.0, "RECONNECT_MAX_DELAY_SECONDS": 0.5}
SOON = 40.0
EXAMPLES = int(os.environ.get("ACTOR_MACHINE_EXAMPLES", "4"))  # More of them find more.
STEPS = 12
WORKERS = 2
SLOW_SECONDS = 0.05  # Of a call that something is likely to happen in.


class Call:
    """One call as its caller knows it."""

    def __init__(self, number: int, future: Any, *, may_repeat: bool) -> None:
        self.number = number
        self.future = future
        self.may_repeat = may_repeat


class Known:
    """An actor as its callers know it."""

    def __init__(self, handle: Any, record: Record, max_restarts: int) -> None:
        self.handle: Optional[Any] = handle
        self.record = record
        self.max_restarts = max_restarts
        self.calls: List[Call] = []
        self.deaths = 0  # That we know to have caused, at most.
        self.has_lost_coordinator = False


class ActorMachine(stateful.RuleBasedStateMachine):
    """Whoever is killed, cut off or started again."""

    site: WiredSite
    mesh: GPUMesh
    joined = WORKERS

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.site.folder))
        self.actors: List[Known] = []
        self.dropped: List[Known] = []

    # --- what callers do

    @stateful.precondition(lambda self: len(self.actors) < 3)
    @stateful.rule(max_restarts=st.sampled_from([0, 1, 5]))
    def create(self, max_restarts: int) -> None:
        record = self.folder / f"record-{len(self.actors) + len(self.dropped)}"
        handle = self.mesh.actor(Recorded, max_restarts=max_restarts).remote(str(record))
        self.actors.append(Known(handle, Record(record), max_restarts))

    @stateful.precondition(lambda self: self.actors)
    @stateful.rule(data=st.data(), count=st.integers(1, 6), slow=st.booleans(), retries=st.sampled_from([0, 0, 3]))
    def call(self, data: st.DataObject, count: int, slow: bool, retries: int) -> None:
        known = data.draw(st.sampled_from(self.actors))
        assert known.handle is not None
        method = known.handle.add.options(retries=retries)
        for _ in range(count):
            number = len(known.calls)
            future = method.remote(number, SLOW_SECONDS if slow else 0.0)
            known.calls.append(Call(number, future, may_repeat=retries > 0))

    @stateful.precondition(lambda self: self.actors)
    @stateful.rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        self.judge(data.draw(st.sampled_from(self.actors)))

    @stateful.precondition(lambda self: self.actors)
    @stateful.rule(data=st.data())
    def drop_the_last_handle(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.actors))
        self.judge(known)
        self.drop(known)

    # --- what happens to them

    @stateful.precondition(lambda self: self.actors)
    @stateful.rule(data=st.data())
    def kill_a_process(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.actors))
        lives = until(known.record.lives, SOON, what="a first life") if not known.record.lives() else known.record.lives()
        try:
            os.kill(lives[-1], signal.SIGKILL)
        except ProcessLookupError:
            return
        known.deaths += 1

    @stateful.rule(place=st.integers(0, WORKERS - 1))
    def kill_a_worker(self, place: int) -> None:
        names = [name for name, program in self.site.workers.items() if program.process.poll() is None]
        program = self.site.workers[names[place % len(names)]]
        program.process.kill()
        program.process.wait(10)
        for known in self.actors:
            known.deaths += 1
        self.join()

    @stateful.rule(wire=st.integers(CLIENT, WORKERS))
    def cut_a_connection(self, wire: int) -> None:
        self.site.reset(wire)

    @stateful.rule()
    def lose_the_coordinator(self) -> None:
        self.site.kill_coordinator()
        self.site.serve()
        for known in self.actors:
            known.has_lost_coordinator = True

    # --- what must hold

    def judge(self, known: Known) -> None:
        """All calls made so far have ended as they may."""
        for call in known.calls:
            error = call.future.exception(SOON)
            assert error is None or isinstance(error, ActorDiedError), f"call {call.number}: {error!r}"
        begun = known.record.begun()
        counts: Dict[int, int] = {}
        for life, numbers in begun.items():
            assert numbers == sorted(numbers), f"life {life} began its calls as {numbers}"
            for number in numbers:
                counts[number] = counts.get(number, 0) + 1
        for call in known.calls:
            count = counts.get(call.number, 0)
            assert count <= 1 or call.may_repeat, f"call {call.number} has begun {count} times"
            if call.future.exception() is None:
                life, place = call.future.result()
                assert begun[life][place - 1] == call.number, f"the result of call {call.number} is that of another"
        if not known.has_lost_coordinator:
            lives = len(known.record.lives())
            assert lives <= 1 + known.max_restarts, f"{lives} lives, and {known.max_restarts} restarts allowed"
            died = any(isinstance(call.future.exception(), ActorDiedError) for call in known.calls)
            assert known.deaths or not died, "an actor died, and nobody killed it"

    def drop(self, known: Known) -> None:
        self.actors.remove(known)
        self.dropped.append(known)
        known.handle = None
        known.calls.clear()
        gc.collect()
        lives = known.record.lives()
        until(lambda: not [life for life in lives if _is_alive(life)], SOON, what=f"{lives} end")
        if not known.deaths and lives:
            assert known.record.closed() == lives, "its last words were not heard"

    def teardown(self) -> None:
        try:
            for known in list(self.actors):
                self.judge(known)
                self.drop(known)
            until(lambda: not self.mesh.actors(), SOON, what="no actors are left")
        finally:
            for known in self.actors:
                known.handle = None
            self.actors.clear()
            shutil.rmtree(self.folder)
            gc.collect()

    def join(self) -> None:
        """Another worker takes the place of one that is gone."""
        alive = [name for name, program in self.site.workers.items() if program.process.poll() is None]
        dead = [name for name in self.site.workers if name not in alive]
        for name in dead:
            del self.site.workers[name]
        while len(self.site.workers) < WORKERS:
            type(self).joined += 1
            self.site.join(f"w{type(self).joined}")


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Any]:
    made = WiredSite(tmp_path, times=TIMES)
    try:
        made.serve()
        for place in range(WORKERS):
            made.join(f"w{place + 1}")
        with made.client() as mesh:
            ActorMachine.site, ActorMachine.mesh = made, mesh
            yield ActorMachine
    finally:
        made.close()
        print(made.story())


@pytest.mark.timeout(600)
def test_lives_of_actors_are_what_callers_may_see(machine: Any) -> None:
    stateful.run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
