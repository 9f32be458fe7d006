"""A pool of real runners: tasks with cards run beside the slots, in processes that see their cards and no others."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from gpumesh.devices import detect
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import ANYTHING, DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.runtime.loop import LoopThread
from gpumesh.runtime.pool import PoolOwner, RunnerPool
from gpumesh.scheduler import leases
from gpumesh.serialization import functions, values
from tests.support.processes import until

GB = 10**9
A, B = ("GPU-a",), ("GPU-b",)
BOTH = A + B
CPU = DeviceFacts("cpu", 0, "AMD Ryzen", 64 * GB, 0.5)
CARDS = [DeviceFacts("cuda", place, "RTX", 24 * GB, 100.0, uuid=key) for place, (key,) in enumerate((A, B))]
ONE, HALF, TWO = Requirement("gpu", gpus=1.0), Requirement("gpu", gpus=0.5), Requirement("gpu", gpus=2.0)
Place = Tuple[str, int]


def place() -> Place:
    """What this process sees, and which it is."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), os.getpid()


def device() -> str:
    return os.environ.get("GPUMESH_DEVICE", "")


def threads() -> str:
    return os.environ["OMP_NUM_THREADS"]


def hold(folder: str, name: str) -> Place:
    """Leave a mark at the start, wait for the test's word."""
    Path(folder, f"{name}.started").touch()
    end = time.monotonic() + 30
    while not Path(folder, f"{name}.go").exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    return place()


def nap(seconds: float) -> Place:
    time.sleep(seconds)
    return place()


def die() -> None:
    os.kill(os.getpid(), 9)


class Pool(PoolOwner):
    """A worker's pool without a mesh; the test is the coordinator."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder = folder
        self.reports: Dict[int, List[Tuple[int, Any]]] = {}
        self.problems: List[str] = []
        self._news = threading.Condition()
        self._exporter = functions.Exporter()
        self._thread = LoopThread("test-pool")
        self._next = 1

        def launch(stderr: int) -> Tuple[int, socket.socket]:
            return launch_spawner(environment=child_environment(), stderr=stderr)

        async def start() -> RunnerPool:
            pool = RunnerPool(self._thread.loop, launch, self, slots=slots, cores=4, devices=[CPU, *CARDS])
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

    def run(
        self,
        function: Any,
        *args: Any,
        cards: Tuple[str, ...] = (),
        ordinal: int = 0,
        attempt: int = 1,
        task: int = 0,
        **options: Any,
    ) -> int:
        """Send one attempt at a task, a new one if not said otherwise; its number."""
        exported = self._exporter.export(function)
        need = options.pop("need", ONE if cards else ANYTHING)
        spec = TaskSpec(exported.digest, exported.name, need, **options)
        payload = values.dumps_call(args, {}, what="arguments")
        if not task:
            task, self._next = self._next, self._next + 1

        def send() -> None:
            self.pool.define_function(exported.digest, exported.body)
            number = self.pool.define_spec(tuple(spec), cores=need.cores, timeout=spec.timeout)
            self.pool.run(number, [(task, attempt, payload)], cards=cards, ordinal=ordinal)

        self.on_loop(send)
        return task

    def ended(self, task: int, timeout: float = 30.0) -> Tuple[int, Any]:
        """How the attempt ended: status, and value or details."""
        with self._news:
            assert self._news.wait_for(lambda: task in self.reports, timeout), f"task {task} has not ended"
        ((status, payload),) = self.reports[task]
        return status, values.loads(payload) if status == Status.OK else payload

    def value(self, task: int) -> Any:
        status, value = self.ended(task)
        assert status == Status.OK, value
        return value

    def do(self, function: Any, *args: Any, **options: Any) -> Any:
        """Run one and wait for its value."""
        return self.value(self.run(function, *args, **options))

    def started(self, name: str) -> None:
        until((self.folder / f"{name}.started").exists, 20, what=f"the start of {name}")

    def go(self, *names: str) -> None:
        for name in names:
            (self.folder / f"{name}.go").touch()

    # --- the pool's owner

    def on_results(self, results: Any) -> None:
        with self._news:
            for task, _, status, payload, _ in results:
                self.reports.setdefault(task, []).append((status, payload))
            self._news.notify_all()

    @property
    def takes_output(self) -> bool:
        return True

    def on_output(self, task_id: int, stream: int, data: bytes) -> None:
        pass

    def on_health(self, problem: str) -> None:
        self.problems.append(problem)

    def on_results_heard(self, results: Any) -> None:
        pass

    def on_runner_gone(self, runner: int) -> None:
        pass


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path, 1)
    yield made
    made.close()


def test_each_task_sees_its_cards_and_a_plain_one_none(pool: Pool) -> None:
    assert pool.do(place, cards=A)[0] == "GPU-a"
    assert pool.do(place, cards=B)[0] == "GPU-b"
    assert pool.do(place, cards=BOTH, need=TWO)[0] == "GPU-a,GPU-b"
    assert pool.do(place)[0] == ""
    assert pool.do(device, cards=A) == "cuda:0"
    assert pool.do(device) == ""
    assert pool.do(threads, cards=A) == pool.do(threads) == "4"


def test_a_process_is_used_again_for_its_own_cards_only(pool: Pool) -> None:
    first = pool.do(place, cards=A)

    assert pool.do(place, cards=A) == first
    other = pool.do(place, cards=B)
    assert other[1] != first[1]
    assert pool.do(place, cards=A) == first
    assert pool.do(place)[1] not in (first[1], other[1])


def test_card_tasks_run_beside_the_slots_and_beside_each_other(pool: Pool) -> None:
    folder = str(pool.folder)
    tasks = [
        pool.run(hold, folder, "slot"),
        pool.run(hold, folder, "a", cards=A, need=HALF),
        pool.run(hold, folder, "a1", cards=A, ordinal=1, need=HALF),
        pool.run(hold, folder, "b", cards=B),
    ]

    for name in ("slot", "a", "a1", "b"):
        pool.started(name)
    pool.go("slot", "a", "a1", "b")

    seen = [pool.value(task) for task in tasks]
    assert [cards for cards, _ in seen] == ["", "GPU-a", "GPU-a", "GPU-b"]
    assert len({pid for _, pid in seen}) == 4


def test_one_lease_runs_one_task_at_a_time(pool: Pool) -> None:
    folder = str(pool.folder)
    first = pool.run(hold, folder, "first", cards=A)
    second = pool.run(hold, folder, "second", cards=A)
    pool.started("first")
    pool.go("second")

    assert not (pool.folder / "second.started").exists()
    pool.go("first")
    assert pool.value(first) == pool.value(second)


def test_an_idle_process_is_gone_before_another_lease_uses_its_card(pool: Pool) -> None:
    _, idle = pool.do(place, cards=A)

    # The task itself looks, so the other process was gone when it began.
    assert pool.do(is_alive, idle, cards=BOTH, need=TWO) is False


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_halves_keep_their_processes(pool: Pool) -> None:
    first = [pool.do(place, cards=A, ordinal=ordinal, need=HALF) for ordinal in (0, 1)]

    for _ in range(3):
        assert [pool.do(place, cards=A, ordinal=ordinal, need=HALF) for ordinal in (0, 1)] == first


def test_a_process_that_dies_takes_only_its_own_task_with_it(pool: Pool) -> None:
    folder = str(pool.folder)
    _, before = pool.do(place, cards=A)
    held = pool.run(hold, folder, "held", cards=B)
    crashed = pool.run(die, cards=A)
    behind = pool.run(place, cards=A)

    status, details = pool.ended(crashed)
    assert status == Status.CRASHED
    assert details["exit"] == -9
    cards, after = pool.value(behind)
    assert cards == "GPU-a"
    assert after != before
    pool.go("held")
    assert pool.value(held)[0] == "GPU-b"
    assert pool.problems == []


def test_cancelling_and_time_limits_reach_a_lease(pool: Pool) -> None:
    folder = str(pool.folder)
    held = pool.run(hold, folder, "held", cards=A)
    waiting = pool.run(place, cards=A)
    pool.started("held")

    pool.on_loop(lambda: pool.pool.recall([(waiting, 1)], kill=False))
    assert pool.ended(waiting)[0] == Status.NOT_RUN
    pool.on_loop(lambda: pool.pool.recall([(held, 1)], kill=True))
    assert pool.ended(held)[0] == Status.CANCELLED
    assert pool.ended(pool.run(nap, 30.0, cards=A, timeout=0.2))[0] == Status.TIMED_OUT
    assert pool.do(place, cards=A)[0] == "GPU-a"


@pytest.mark.parametrize("cards", [None, frozenset(A)])
def test_the_owner_gets_cards_back_and_lends_them_again(pool: Pool, cards: Any) -> None:
    folder = str(pool.folder)
    held = pool.run(hold, folder, "held", cards=A)
    pool.started("held")
    _, idle = pool.do(place, cards=B)

    pool.on_loop(lambda: pool.pool.hand_back(running=True, cards=cards, grace_seconds=0.5))

    assert pool.ended(held)[0] == Status.HANDED_BACK
    until(lambda: not pool.on_loop(lambda: pool.pool.card_holders().keys) & set(A), 10, what="no process on the card")
    assert pool.ended(pool.run(place, cards=A))[0] == Status.NOT_RUN
    if cards is None:
        until(lambda: not is_alive(idle), 10, what="no process on the other card")
    else:
        assert pool.do(place, cards=B)[1] == idle
    pool.on_loop(lambda: pool.pool.accept(cards))
    assert pool.do(place, cards=A)[0] == "GPU-a"


def test_a_draining_pool_ends_what_runs_on_cards(pool: Pool) -> None:
    folder = str(pool.folder)
    held = pool.run(hold, folder, "held", cards=A)
    pool.started("held")
    waiting = pool.run(place, cards=A)

    pool.on_loop(pool.pool.drain)

    assert pool.ended(waiting)[0] == Status.NOT_RUN
    assert pool.ended(pool.run(place, cards=B))[0] == Status.NOT_RUN
    assert not pool.on_loop(lambda: pool.pool.is_idle)
    pool.go("held")
    assert pool.value(held)[0] == "GPU-a"
    assert pool.on_loop(lambda: pool.pool.is_idle)


def test_a_further_attempt_beside_one_that_is_being_ended_is_told_as_well(pool: Pool) -> None:
    held = pool.run(hold, str(pool.folder), "held", cards=A)
    pool.started("held")
    assert pool.on_loop(pool.pool.held)[0][1:] == (A, 0, [(held, 1)])

    pool.on_loop(lambda: pool.pool.recall([(held, 1)], kill=True))
    pool.run(place, cards=B, task=held, attempt=2)

    until(lambda: len(pool.reports.get(held, ())) == 2, 20)
    assert sorted(status for status, _ in pool.reports[held]) == [Status.OK, Status.CANCELLED]
    assert pool.on_loop(pool.pool.held) == []


def test_those_who_hold_cards_are_told(pool: Pool) -> None:
    _, plain = pool.do(place)
    assert pool.on_loop(pool.pool.card_holders) == ([plain], set())

    pids = {pool.do(place, cards=A)[1], pool.do(place, cards=B)[1]}

    holders = pool.on_loop(pool.pool.card_holders)
    assert set(holders.pids) == {plain, *pids}
    assert holders.keys == {"GPU-a", "GPU-b"}


def test_an_idle_process_ends_after_a_while(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_IDLE_SECONDS", 0.2)

    _, pid = pool.do(place, cards=A)

    until(lambda: not is_alive(pid), 10, what="the end of the idle process")
    assert pool.do(place, cards=A)[1] != pid


def test_a_card_that_cannot_be_shown_is_told_as_trouble(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    pool.run(place, cards=("cuda:3",))

    until(lambda: pool.problems, 10, what="trouble")
    assert "there is no card cuda:3 with CUDA_VISIBLE_DEVICES=0" in pool.problems[0]
    assert pool.do(place)[0] == ""


def test_without_gpus_a_task_sees_the_variable_as_the_worker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(detect.PROBE_SWITCH, "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    pool = Pool(tmp_path, 1)
    try:
        pool.on_loop(lambda: pool.pool.change_devices([CPU]))
        pool.on_loop(lambda: pool.pool.end(1))  # It was started when the pool still had cards.
        until(lambda: 1 not in pool.pool._processes, 10, what="the end of the first runner")

        assert pool.do(place)[0] == "7"
    finally:
        pool.close()
