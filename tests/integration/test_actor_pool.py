"""Actors in a worker's pool on real processes, without a mesh: the test is the coordinator."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import psutil
import pytest

from gpumesh.config import CANCEL_GRACE_SECONDS
from gpumesh.model.actors import ActorPlan
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import ANYTHING, DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.runtime.loop import LoopThread
from gpumesh.runtime.pool import PoolOwner, RunnerPool
from gpumesh.serialization import functions, values
from tests.support.processes import until

GB = 10**9
CARD = DeviceFacts("cuda", 0, "RTX", 24 * GB, 100.0, uuid="GPU-a")
CPU = DeviceFacts("cpu", 0, "AMD Ryzen", 64 * GB, 0.5)
NO_BODY = functions._digest(b"")
PATIENCE_SECONDS = 20.0


class Diary:
    """Writes down what it does, and where."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        self.entries: List[Any] = []

    def add(self, entry: Any) -> List[Any]:
        self.entries.append(entry)
        return self.entries

    def place(self) -> Tuple[int, str]:
        return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def hold(self, name: str) -> str:
        """Leave a mark at the start, wait for the test's word."""
        Path(self.folder, f"{name}.started").touch()
        until(Path(self.folder, f"{name}.go").exists, PATIENCE_SECONDS)
        return name

    def close(self) -> None:
        if self.folder:
            Path(self.folder, "closed").touch()


def here() -> int:
    return os.getpid()


def nap(seconds: float) -> Tuple[float, float]:
    began = time.monotonic()
    time.sleep(seconds)
    return began, time.monotonic()


class Site(PoolOwner):
    """The pool's owner."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder = folder
        self.alive: List[Tuple[int, int]] = []
        self.reports: Dict[int, List[Tuple[int, Any]]] = {}
        self.order: List[int] = []
        self.unwanted: List[Tuple[int, int]] = []
        self.spawners: List[int] = []
        self._news = threading.Condition()
        self._exporter = functions.Exporter()
        self._thread = LoopThread("test-pool")
        self._next = 1

        def launch(stderr: int) -> Tuple[int, socket.socket]:
            pid, channel = launch_spawner(environment=child_environment(), stderr=stderr)
            self.spawners.append(pid)
            return pid, channel

        async def start() -> RunnerPool:
            pool = RunnerPool(self._thread.loop, launch, self, slots=slots, cores=slots, devices=[CPU, CARD])
            pool.start()
            return pool

        self.pool = self._thread.call(start, timeout=10)

    def close(self) -> None:
        self.on_loop(self.pool.close)
        self._thread.stop()

    def on_loop(self, act: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return act()

        return self._thread.call(call, timeout=10)

    # --- what a coordinator sends

    def number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def send(self, spec: TaskSpec, body: Any, tasks: List[Tuple[int, int, Any]], cards: Tuple[str, ...] = ()) -> None:
        def run() -> None:
            self.pool.define_function(spec.function, body)
            number = self.pool.define_spec(tuple(spec), cores=spec.requirement.cores, timeout=spec.timeout)
            self.pool.run(number, tasks, cards=cards)

        self.on_loop(run)

    def create(self, *args: Any, need: Requirement = ANYTHING, cards: Tuple[str, ...] = ()) -> int:
        exported = self._exporter.export(Diary)
        actor = self.number()
        spec = TaskSpec(exported.digest, "Diary", need, retries=0, plan=ActorPlan())
        self.send(spec, exported.body, [(actor, 1, values.dumps_call(args, {}))], cards)
        return actor

    def call_spec(self, actor: int, method: str, timeout: float = 0.0) -> TaskSpec:
        return TaskSpec(NO_BODY, method, retries=0, timeout=timeout, actor=actor, method=method)

    def call(self, actor: int, method: str, *args: Any, timeout: float = 0.0) -> int:
        task = self.number()
        self.send(self.call_spec(actor, method, timeout), b"", [(task, 1, values.dumps_call(args, {}))])
        return task

    def expect(self, actor: int, method: str) -> Callable[..., int]:
        """A call whose inputs are on their way; returns what brings them."""
        task = self.number()
        spec = self.call_spec(actor, method)

        def announce() -> int:
            self.pool.define_function(spec.function, b"")
            number = self.pool.define_spec(tuple(spec), cores=0, timeout=0.0)
            self.pool.expect(number, [(task, 1, b"")], cards=(), ordinal=0)
            return number

        number = self.on_loop(announce)

        def come(*args: Any) -> int:
            payload = values.dumps_call(args, {})
            self.on_loop(lambda: self.pool.run(number, [(task, 1, payload)], is_holding=True))
            return task

        return come

    def run(self, function: Any, *args: Any, cards: Tuple[str, ...] = (), need: Requirement = ANYTHING) -> int:
        exported = self._exporter.export(function)
        task = self.number()
        spec = TaskSpec(exported.digest, exported.name, need)
        self.send(spec, exported.body, [(task, 1, values.dumps_call(args, {}))], cards)
        return task

    def recall(self, task: int, *, force: bool = False) -> None:
        self.on_loop(lambda: self.pool.recall([(task, 1)], kill=True, force=force))

    # --- what comes of it

    def ended(self, task: int) -> Tuple[int, Any]:
        with self._news:
            assert self._news.wait_for(lambda: task in self.reports, PATIENCE_SECONDS), f"{task} has not ended"
        ((status, payload),) = self.reports[task]
        return status, values.loads(payload) if status == Status.OK else payload

    def value(self, task: int) -> Any:
        status, value = self.ended(task)
        assert status == Status.OK, value
        return value

    def started(self, name: str) -> None:
        until((self.folder / f"{name}.started").exists, PATIENCE_SECONDS, what=f"the start of {name}")

    def go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    @property
    def has_closed(self) -> bool:
        return (self.folder / "closed").exists()

    # --- the pool's owner

    def on_results(self, results: Any) -> None:
        with self._news:
            for task, _, status, payload, _ in results:
                self.reports.setdefault(task, []).append((status, payload))
                self.order.append(task)
            self._news.notify_all()

    def on_actor_alive(self, actor: int, attempt: int) -> None:
        self.alive.append((actor, attempt))

    def on_inputs_unwanted(self, tasks: List[Tuple[int, int]]) -> None:
        self.unwanted.extend(tasks)

    @property
    def takes_output(self) -> bool:
        return True

    def on_output(self, task_id: int, stream: int, data: bytes) -> None:
        pass

    def on_health(self, problem: str) -> None:
        assert not problem, problem

    def on_feeding(self, runner: int, task_id: int, payload: Any) -> None:
        pass

    def on_inputs_free(self, task_id: int) -> None:
        pass

    def on_results_heard(self, results: Any) -> None:
        pass

    def on_runner_gone(self, runner: int) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, 2)
    yield made
    made.close()


def test_calls_are_in_order_whenever_their_inputs_come(site: Site) -> None:
    actor = site.create()
    site.value(site.call(actor, "add", 0))
    first = site.expect(actor, "add")
    second = site.expect(actor, "add")
    third = site.call(actor, "add", 3)
    task = second(2)
    assert not site.reports.get(third)
    first(1)
    assert site.value(task) == [0, 1, 2]
    assert site.value(third) == [0, 1, 2, 3]
    assert site.alive == [(actor, 1)]


def test_an_actor_is_beside_the_slots(site: Site) -> None:
    actor = site.create(str(site.folder))
    held = site.call(actor, "hold", "it")
    site.started("it")
    assert len({site.value(site.run(here)) for _ in range(4)} | {site.value(site.call(site.create(), "place"))[0]}) >= 2
    site.go("it")
    assert site.value(held) == "it"


def overlap(site: Site) -> bool:
    """Whether two tasks run at the same time."""
    naps = [site.value(task) for task in [site.run(nap, 0.2), site.run(nap, 0.2)]]
    (_, end), (begin, _) = sorted(naps)
    return bool(begin < end)


def test_its_cores_are_taken_from_the_slots(site: Site) -> None:
    until(lambda: overlap(site), PATIENCE_SECONDS, what="two processes")
    actor = site.create(need=Requirement(cores=1))
    site.value(site.call(actor, "add", 1))
    assert not overlap(site), "one slot is left"
    site.recall(actor)
    site.ended(actor)
    assert overlap(site)


def test_an_idle_process_makes_way_for_an_actor_on_its_card(site: Site) -> None:
    idle = site.value(site.run(here, cards=("GPU-a",), need=Requirement("gpu", gpus=1.0)))
    actor = site.create(need=Requirement("gpu", gpus=1.0), cards=("GPU-a",))
    pid, visible = site.value(site.call(actor, "place"))
    assert not psutil.pid_exists(idle)
    assert visible == "GPU-a"
    holders = site.on_loop(site.pool.card_holders)
    assert pid in holders.pids
    assert "GPU-a" in holders.keys


def test_killed_it_closes_and_its_calls_end_with_it(site: Site) -> None:
    actor = site.create(str(site.folder))
    running = site.call(actor, "hold", "it")
    site.started("it")
    waiting = site.call(actor, "add", 1)
    site.recall(actor)
    status, _ = site.ended(actor)
    assert status == Status.CANCELLED
    assert site.has_closed
    assert not {running, waiting} & site.reports.keys(), "their end is the actor's"
    assert site.on_loop(lambda: site.pool.is_idle)


def test_with_force_it_is_gone_at_once(site: Site) -> None:
    actor = site.create(str(site.folder))
    pid, _ = site.value(site.call(actor, "place"))
    site.recall(actor, force=True)
    assert site.ended(actor)[0] == Status.CANCELLED
    assert not psutil.pid_exists(pid)
    assert not site.has_closed


def test_a_worker_that_leaves_lets_the_running_call_end_and_gives_the_actor_back(site: Site) -> None:
    actor = site.create(str(site.folder))
    running = site.call(actor, "hold", "it")
    site.started("it")
    unsent = site.expect(actor, "add")
    site.on_loop(site.pool.drain)
    assert [task for task, _ in site.unwanted] == [unsent(1)]
    assert not site.reports
    site.go("it")
    assert site.value(running) == "it"
    assert site.ended(actor)[0] == Status.HANDED_BACK
    assert site.order == [running, actor]
    assert site.has_closed
    until(lambda: site.on_loop(lambda: site.pool.is_idle), 5)


def test_an_owner_in_a_hurry_gets_the_machine_back(site: Site) -> None:
    actor = site.create(str(site.folder))
    running = site.call(actor, "hold", "it")
    site.started("it")
    began = time.monotonic()
    site.on_loop(lambda: site.pool.hand_back(running=True))
    assert site.ended(actor)[0] == Status.HANDED_BACK
    assert time.monotonic() - began < CANCEL_GRACE_SECONDS + 2
    assert running not in site.reports
    again = site.create()
    assert site.ended(again)[0] == Status.NOT_RUN
    site.on_loop(site.pool.accept)
    assert site.value(site.call(site.create(), "add", 1)) == [1]


def test_what_it_has_is_told_to_the_next_coordinator(site: Site) -> None:
    actor = site.create(str(site.folder))
    running = site.call(actor, "hold", "it")
    site.started("it")
    behind = site.call(actor, "add", 1)
    site.expect(actor, "add")
    last = site.call(actor, "add", 2)
    site.on_loop(site.pool.give_back_holding)
    held = site.on_loop(site.pool.held)
    assert [keys for _, _, _, keys in held] == [[(actor, 1)], [(running, 1)], [(behind, 1)]], (
        "and nothing of what is behind a gap"
    )
    assert held[0][0][:2] == (site._exporter.export(Diary).digest, "Diary")
    site.go("it")
    assert site.value(behind) == [1]
    assert last not in site.reports


def test_the_death_of_what_started_it_is_its_death(site: Site) -> None:
    actor = site.create()
    site.value(site.call(actor, "add", 1))
    os.kill(site.spawners[0], signal.SIGKILL)
    status, details = site.ended(actor)
    assert status == Status.CRASHED
    assert details["reason"]
    other = site.create()
    assert site.value(site.call(other, "add", 2)) == [2]
