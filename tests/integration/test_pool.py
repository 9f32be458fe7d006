"""The pool of a worker on real runners: feeding and taking back, cancelling, time limits, deaths, restarts, width. The brain alone: properties."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import psutil
import pytest

from gpumesh.config import CANCEL_GRACE_SECONDS
from gpumesh.errors import TaskCancelledError, TaskTimeoutError, WorkerCrashedError
from gpumesh.runtime.embedded import EmbeddedMesh
from tests.integration.programs import started_programs
from tests.support import tasks
from tests.support.client import Client
from tests.support.processes import descriptors, named, session_of, until, until_gone


class Site:
    """One worker with some slots, a client, and a look at the processes."""

    def __init__(self, mesh: EmbeddedMesh, client: Client) -> None:
        self.mesh = mesh
        self.client = client
        self.remote = client.remote
        self.spawner = mesh.processes["spawner"]
        self.agent = mesh.processes["worker-1"]
        self.folder = Path()  # Of the test.

    def runners(self) -> List[psutil.Process]:
        return named(session_of(self.spawner), "gpumesh-runner")

    def full(self, slots: int) -> None:
        """All slots are there and work."""
        until(lambda: len(self.runners()) == slots, 10, what=f"{slots} runners")
        held = [self.remote(tasks.sleep, 0.2) for _ in range(slots)]
        started = time.monotonic()
        assert [future.result(20) for future in held] == ["slept"] * slots
        assert time.monotonic() - started < 5

    def mark(self, name: str) -> str:
        return str(self.folder / name)

    def started(self, name: str) -> int:
        """Wait until the task has left its mark; its process id."""
        path = self.folder / name
        until(path.exists, 20, what=f"the start of {name}")
        return int(path.read_text())


def make_site(slots: int) -> Iterator[Site]:
    with EmbeddedMesh(workers=1, slots=slots) as mesh, Client(mesh.url, mesh.token) as client:
        client.remote(tasks.noop).result(20)
        yield Site(mesh, client)


@pytest.fixture(scope="module")
def one_slot() -> Iterator[Site]:
    yield from make_site(1)


@pytest.fixture(scope="module")
def two_slots() -> Iterator[Site]:
    yield from make_site(2)


@pytest.fixture
def one(one_slot: Site, tmp_path: Path) -> Site:
    one_slot.folder = tmp_path
    return one_slot


@pytest.fixture
def two(two_slots: Site, tmp_path: Path) -> Site:
    two_slots.folder = tmp_path
    return two_slots


# --- feeding and taking back


def test_short_tasks_do_not_wait_behind_a_long_one(two: Site) -> None:
    for future in [two.remote(tasks.noop, n) for n in range(500)]:
        future.result(20)  # Known to be short from now on: fed in batches.
    futures = [two.remote(one_long, number, 700) for number in range(2000)]
    started = time.monotonic()

    ended = [(future.result(30), time.monotonic() - started) for future in futures if future is not futures[700]]

    assert [value for value, _ in ended] == [number for number in range(2000) if number != 700]
    assert ended[-1][1] < 10, "the long task takes 30 s"
    futures[700].cancel()
    assert outcome(futures[700]) is TaskCancelledError


def one_long(number: int, long: int) -> int:
    if number == long:
        time.sleep(30)
    return number


def test_a_single_slot_runs_the_others_after_the_long_one_exactly_once(one: Site) -> None:
    for future in [one.remote(tasks.noop, n) for n in range(300)]:
        future.result(20)
    log = one.mark("log")
    futures = [one.remote(append_and_wait, log, number, 0.3 if number % 100 == 50 else 0.0, retries=0) for number in range(300)]

    assert [future.result(30) for future in futures] == list(range(300))

    lines = Path(log).read_text().split()
    assert sorted(map(int, lines)) == list(range(300)), "each ran once, also those that were taken back"


def append_and_wait(log: str, number: int, seconds: float) -> int:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"%d\n" % number)
    os.close(file)
    time.sleep(seconds)
    return number


def test_taken_back_tasks_run_once_while_others_are_cancelled(two: Site) -> None:
    for future in [two.remote(tasks.noop, n) for n in range(300)]:
        future.result(20)
    log = two.mark("log")
    futures = [
        two.remote(append_and_wait, log, number, 0.1 if number % 50 == 25 else 0.0002, retries=0) for number in range(1000)
    ]
    unwanted = futures[::7]
    two.client.session.cancel([future.task_id for future in unwanted])

    outcomes = [outcome(future) for future in futures]

    ran = [int(line) for line in Path(log).read_text().split()]
    assert len(ran) == len(set(ran)), "nothing ran twice"
    for number, (future, what) in enumerate(zip(futures, outcomes)):
        if future in unwanted:
            assert what in (number, TaskCancelledError)
        else:
            assert what == number
            assert number in ran
    two.full(2)


def outcome(future: Any) -> Any:
    try:
        return future.result(30)
    except Exception as error:
        return type(error)


# --- cancelling


def test_a_queued_task_is_cancelled_without_running(one: Site) -> None:
    busy = one.remote(tasks.sleep, 1.0, one.mark("busy"))
    one.started("busy")
    queued = [one.remote(tasks.noop, one.mark(f"queued-{n}")) for n in range(5)]

    assert all(future.cancel() for future in queued)

    assert [outcome(future) for future in queued] == [TaskCancelledError] * 5
    assert busy.result(20) == "slept"


def test_a_fed_task_is_cancelled_without_running(one: Site) -> None:
    for future in [one.remote(one_long, n, -1) for n in range(300)]:
        future.result(20)
    log = one.mark("log")
    futures = [one.remote(append_and_wait, log, number, 0.0, retries=0) for number in range(200)]
    for future in futures:
        future.result(20)  # So short that the next ones are fed together.
    slow = one.remote(append_and_wait, log, 1000, 0.5)
    fed = [one.remote(append_and_wait, log, 2000 + number, 0.0) for number in range(20)]
    one.client.session.flush()
    until(lambda: "1000" in Path(log).read_text().split())
    one.client.session.cancel([future.task_id for future in fed])

    assert slow.result(20) == 1000
    assert [outcome(future) for future in fed] == [TaskCancelledError] * 20
    assert not any(int(line) >= 2000 for line in Path(log).read_text().split())


RUNNING: List[Callable[..., Any]] = [
    tasks.spin,
    tasks.sleep,
    tasks.sleep_in_c,
    tasks.ignore_interrupts,
    tasks.hold_the_gil,
    tasks.count_in_c,
]


@pytest.mark.parametrize("task", RUNNING, ids=lambda task: task.__name__)
def test_a_running_task_is_really_ended_by_cancel(one: Site, task: Callable[..., Any]) -> None:
    future = one.remote(task, 1000, one.mark("running"))
    process = psutil.Process(one.started("running"))
    started = time.monotonic()

    future.cancel()

    assert outcome(future) is TaskCancelledError
    assert time.monotonic() - started < CANCEL_GRACE_SECONDS + 1.5
    assert one.remote(tasks.noop, "next").result(10) == "next"
    if task in (tasks.sleep, tasks.spin):
        assert process.is_running(), "an interrupt was enough, and the runner is still warm"
    else:
        until_gone(lambda: [process] if process.is_running() and process.status() != "zombie" else [], 5)


# --- time limits


@pytest.mark.parametrize("task", RUNNING, ids=lambda task: task.__name__)
def test_a_task_over_its_time_is_really_ended(two: Site, task: Callable[..., Any]) -> None:
    future = two.remote(task, 1000, two.mark("late"), timeout=0.5)
    pid = two.started("late")
    started = time.monotonic()

    with pytest.raises(TaskTimeoutError, match=r"0\.5 s") as caught:
        future.result(20)

    assert time.monotonic() - started < 0.5 + CANCEL_GRACE_SECONDS + 1.5
    assert task.__name__ in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    if task not in (tasks.sleep, tasks.spin):
        until(lambda: pid not in [process.pid for process in two.runners()])
    two.full(2)


def test_time_spent_waiting_does_not_count(one: Site) -> None:
    blocker = one.remote(tasks.sleep, 1.2)
    waiting = [one.remote(tasks.sleep, 0.2, timeout=0.8) for _ in range(3)]

    assert [future.result(20) for future in waiting] == ["slept"] * 3
    assert blocker.result(20) == "slept"


# --- deaths


def test_an_idle_runner_that_is_killed_is_replaced(two: Site) -> None:
    two.full(2)
    before = {process.pid for process in two.runners()}
    for pid in before:
        os.kill(pid, signal.SIGKILL)

    until(lambda: len({process.pid for process in two.runners()} - before) == 2)
    two.full(2)


def test_only_the_running_task_is_hit_when_its_runner_is_killed(two: Site) -> None:
    victim = two.remote(tasks.sleep, 1000, two.mark("victim"), retries=0)
    other = two.remote(tasks.sleep, 0.8, two.mark("other"), retries=0)
    waiting = [two.remote(tasks.noop, n, retries=0) for n in range(20)]
    pid = two.started("victim")
    two.started("other")

    os.kill(pid, signal.SIGKILL)

    with pytest.raises(WorkerCrashedError, match="SIGKILL") as caught:
        victim.result(20)
    assert "memory" in str(caught.value)
    assert caught.value.attempts[0]["exit"] == -signal.SIGKILL
    assert other.result(20) == "slept"
    assert [future.result(20) for future in waiting] == list(range(20))
    two.full(2)


def test_a_killed_runner_loses_none_of_the_tasks_fed_to_it(one: Site) -> None:
    for future in [one.remote(tasks.noop, n) for n in range(500)]:
        future.result(20)
    for round_ in range(5):
        futures = [one.remote(tasks.noop, n) for n in range(3000)]
        one.client.session.flush()
        time.sleep(0.01 * round_)
        for process in one.runners():
            process.kill()
        assert [future.result(30) for future in futures] == list(range(3000))
    one.full(1)


def test_all_runners_killed_at_once_come_back(two: Site) -> None:
    futures = [two.remote(tasks.sleep, 0.3, two.mark(f"busy-{n}"), retries=3) for n in range(6)]
    two.started("busy-0")
    for process in two.runners():
        process.kill()

    assert [future.result(30) for future in futures] == ["slept"] * 6
    two.full(2)


def test_a_runner_killed_again_and_again_is_given_up_after_the_retries(one: Site) -> None:
    with pytest.raises(WorkerCrashedError) as caught:
        one.remote(tasks.die, retries=2).result(30)

    assert len(caught.value.attempts) == 3
    assert one.remote(tasks.noop, 1).result(20) == 1


def test_two_hundred_restarts_leave_nothing_behind(two: Site) -> None:
    two.full(2)
    before = descriptors(two.agent), descriptors(two.spawner), len(session_of(two.spawner))
    futures = [two.remote(os._exit, 3, retries=0) for _ in range(200)]

    for future in futures:
        with pytest.raises(WorkerCrashedError, match="code 3"):
            future.result(30)

    two.full(2)
    until(lambda: (descriptors(two.agent), descriptors(two.spawner), len(session_of(two.spawner))) <= before, 5)


# --- the spawner


def test_a_joined_worker_survives_the_death_of_its_spawner(tmp_path: Path) -> None:
    with started_programs(tmp_path) as programs:
        _, url = programs.serve("--no-self-worker", "--token", "secret")
        worker = programs.gpumesh("join", url, "--token", "secret", "--slots", "2", "--score", "1")
        worker.wait_for("works for")
        with Client(url, "secret") as client:
            patient = client.remote(tasks.sleep, 1.0, str(tmp_path / "patient"))
            doomed = client.remote(tasks.sleep, 1000, str(tmp_path / "doomed"), retries=0)
            until(lambda: (tmp_path / "patient").exists() and (tmp_path / "doomed").exists(), 20)
            for _ in range(2):
                (spawner,) = named(worker.remember_children(), "gpumesh-spawner")[-1:]
                spawner.kill()
                until_gone(lambda gone=spawner: [gone] if gone.is_running() else [])
                assert client.remote(tasks.noop, 1).result(20) == 1

            with pytest.raises(WorkerCrashedError):
                doomed.result(20)
            assert patient.result(20) == "slept"
            worker.interrupt()
            assert worker.wait() == 0
            assert worker.survivors() == []


# --- threads and width


def test_each_runner_is_told_its_share_of_the_cores(two: Site) -> None:
    cores = two.client.workers()[0]["cores"]

    told = two.remote(tasks.environment, ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]).result(20)

    assert set(told.values()) == {str(max(1, cores // 2))}


def test_a_task_of_all_cores_runs_alone_and_is_told_so(two: Site) -> None:
    cores = two.client.workers()[0]["cores"]
    before = [two.remote(tasks.sleep, 0.3) for _ in range(4)]
    wide = two.remote(tasks.environment, ["OMP_NUM_THREADS"], cores=cores)
    log = two.mark("log")
    alone = [two.remote(interval, log, 0.3, cores=cores) for _ in range(2)]
    after = [two.remote(interval, log, 0.1) for _ in range(4)]

    assert wide.result(30)["OMP_NUM_THREADS"] == str(cores)
    intervals = sorted(future.result(30) for future in alone + after)
    wides = [future.result() for future in alone]
    for begin, end in wides:
        overlapping = [
            other for other in intervals if other != (begin, end) and other[0] < end - 0.01 and other[1] > begin + 0.01
        ]
        assert overlapping == []
    assert [future.result(20) for future in before] == ["slept"] * 4
    two.full(2)


def interval(log: str, seconds: float) -> Any:
    begin = time.monotonic()
    time.sleep(seconds)
    return (begin, time.monotonic())
