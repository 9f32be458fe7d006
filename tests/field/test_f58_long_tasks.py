"""F58: a task that is longer than every timeout in the system runs exactly once; it runs again only after a death, and that is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Iterator, Tuple

import pytest

import gpumesh.config
from gpumesh import accelerate
from gpumesh.errors import WorkerCrashedError
from tests.integration.programs import Programs, started_programs
from tests.support.client import Client
from tests.support.machines import Machines, machines, starts, work
from tests.support.processes import free_port, until

LIMIT = 2.0  # Seconds, of everything that gives up after a while.
LENGTH = 2.6
PATIENCE = (
    "HANDSHAKE", "SILENCE", "CONNECT", "RECONNECT", "STORE_WAIT", "FREE_SEGMENTS", "PLACEMENT_TIMEOUT", "CLIENT_GRACE", "RESULT_GRACE", "ABSENT_CLIENT",
    "RECOVERY", "WORKER_TTL", "AGEING", "DRAIN", "RUNNER_START", "ORPHAN", "ENVIRONMENT_IDLE", "JOB_WAIT", "ACTOR_CLOSE", "NESTED_ASK",
)  # fmt: skip
TIMES = {**{f"{name}_SECONDS": LIMIT for name in PATIENCE}, "HEARTBEAT_SECONDS": 0.5}


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with started_programs(tmp_path) as started:
        yield started


@pytest.fixture
def site() -> Iterator[Machines]:
    with machines() as site:
        yield site


def command(programs: Programs, *words: str) -> Any:
    """A gpumesh command for which every time in config.py that anybody waits for is short."""
    times = [f"{name}={seconds}" for name, seconds in TIMES.items()]
    return programs.python("-m", "tests.support.other_times", *times, "--", *words)


def record(log: str, name: str, seconds: float) -> str:
    """Say that it runs, then take its time."""
    with open(log, "a") as file:
        file.write(name + "\n")
    time.sleep(seconds)
    return name


class SlowToArrive:
    """An argument that takes its time to be rebuilt, like a task that imports a lot."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> Tuple[Any, ...]:
        return _rebuild, (self.seconds,)


def _rebuild(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


def test_the_times_that_are_made_short_are_all_that_anybody_waits_for() -> None:
    """Who adds one to config.py decides here whether it may end something that lives."""
    harmless = {
        "HEARTBEAT",
        "DISTRIBUTE_TIMEOUT",
        "ENVIRONMENT_BUILD",
        "ENVIRONMENT_RETRY",
        "BACKOFF_CAP",
        "CALL_TIMEOUT",
        "ELSEWHERE_UNKNOWN",
        "SPARE_RUNNER",
        "TOKEN_GRACE",
        "DOCTOR_STEP",
        "CLOCK_NOTE",
        "TUNNEL_START",
        "TUNNEL_CHECK",
        "TUNNEL_END",
        "FIND",
        "FIND_AGAIN",
        "QUICK_BENCHMARK",
        "FAILED_PROOFS",  # These are for strangers.
        "FAILED_PROOFS_MAX",
        "REFUSALS_LOGGED",
        "HTTP",
        "HTTP_IDLE",
        "OUTAGE_LINE",
        "OUTAGE_LINE_MAX",
    }
    long = {
        name[: -len("_SECONDS")]
        for name, value in vars(gpumesh.config).items()
        if name.endswith("_SECONDS") and isinstance(value, float) and value > LIMIT
    }
    journal = {name for name in long if name.startswith(("JOURNAL_", "RECONNECT_MAX", "SCRIPT_"))}

    assert long - set(PATIENCE) - harmless - journal == set()


def test_what_takes_longer_than_every_timeout_runs_once(programs: Programs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    port = free_port()
    server = command(programs, "serve", "--host", "127.0.0.1", "--port", str(port), "--no-self-worker", "--token", "secret")
    server.wait_for("serving at")
    with Client(f"127.0.0.1:{port}", "secret", connect_timeout=LIMIT, reconnect_timeout=LIMIT) as client:
        worker = command(programs, "join", f"127.0.0.1:{port}", "--token", "secret", "--slots", "1", "--score", "1")
        worker.wait_for("works for")
        names = ["long", "waits for as long", "slow to arrive"]
        futures = [client.remote(record, str(log), name, LENGTH) for name in names[:2]]
        futures.append(client.remote(record, str(log), names[2], SlowToArrive(LENGTH)))

        assert [future.result(30) for future in futures] == names

        assert log.read_text().splitlines() == names
        (view,) = client.workers()
        assert (view["alive"], view["done"]) == (True, 3)


def test_after_a_death_it_runs_again_which_is_told_unless_it_may_run_only_once(site: Machines, tmp_path: Path) -> None:
    folder, gate = tmp_path / "starts", tmp_path / "gate"
    folder.mkdir()
    victim = site.join(slots=2)
    again = accelerate(site.mesh)(work).remote(str(folder), "again", 0.3, str(gate))
    once = accelerate(site.mesh, retries=0)(work).remote(str(folder), "once", 0.3, str(gate))
    until(lambda: sorted(starts(folder)) == ["again", "once"], 20, what="the start of both")

    site.kill(victim)
    site.join(slots=2)

    with pytest.raises(WorkerCrashedError, match="lost its worker") as caught:
        once.result(20)
    assert len(caught.value.attempts) == 1
    until(lambda: starts(folder).count("again") == 2, 20, what="the second start")
    (told,) = [event for event in site.mesh.events() if event["kind"] == "retry"]
    assert told["task"] == again.task_id
    gate.touch()
    assert again.result(20).name == "again"
    assert sorted(starts(folder)) == ["again", "again", "once"]
