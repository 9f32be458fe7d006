"""The chaos run's parts: what it draws, how it accounts, what its wires do, what it finds left over."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from benchmarks import chaos_findings, chaos_plan, chaos_tasks
from benchmarks.chaos_accounts import Accounts
from benchmarks.chaos_faults import Done
from benchmarks.chaos_mesh import Program
from benchmarks.running import ROOT
from gpumesh.errors import WorkerCrashedError

ALL = list(chaos_plan.SHARES)


class TestPlan:
    def test_ten_minutes_have_far_more_than_two_hundred_faults_of_every_kind(self) -> None:
        for seed in range(20):
            faults = chaos_plan.draw(seed, 600.0, ALL)
            assert len(faults) >= 230
            assert {fault.kind for fault in faults} == set(ALL)
            assert {fault.what for fault in faults if fault.kind == "freeze"} == {name for name, _ in chaos_plan.FROZEN}
            assert {fault.what for fault in faults if fault.kind == "cut"} == {name for name, _ in chaos_plan.CUTS}

    def test_a_seed_says_it_all(self) -> None:
        assert chaos_plan.draw(7, 100.0, ALL) == chaos_plan.draw(7, 100.0, ALL)
        assert chaos_plan.draw(7, 100.0, ALL) != chaos_plan.draw(8, 100.0, ALL)

    def test_faults_are_in_order_and_over_in_time_and_two_long_silences_are_far_apart(self) -> None:
        for seed in range(20):
            faults = chaos_plan.draw(seed, 600.0, ALL)
            assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
            assert all(fault.at + fault.seconds < 600.0 for fault in faults)
            long = [fault for fault in faults if fault.seconds > chaos_plan.LONG[1]]
            for before, after in zip(long, long[1:]):
                assert after.at - (before.at + before.seconds) >= chaos_plan.BEYOND_EVERY_SECONDS

    def test_only_what_is_asked_for_is_drawn(self) -> None:
        assert {fault.kind for fault in chaos_plan.draw(1, 200.0, ["runner", "cut"])} == {"runner", "cut"}
        assert chaos_plan.draw(1, 200.0, []) == []


class TestAccounts:
    def test_what_ends_as_it_should_is_no_violation(self) -> None:
        said: List[Dict[str, Any]] = []
        accounts = Accounts(said.append)
        task = accounts.open("noop")
        accounts.close(task, task.number, None)
        once = accounts.open("once")
        accounts.close(once, None, WorkerCrashedError("its process was killed"))

        assert said == []
        counts = accounts.counts()
        assert (counts["submitted"], counts["done"], counts["given_up"], counts["pending"]) == (2, 2, 1, 0)

    @pytest.mark.parametrize(
        ("what", "value", "error"),
        [("wrong", 17, None), ("wrong", None, ValueError("no")), ("lost", None, WorkerCrashedError("killed"))],
    )
    def test_what_does_not_is_one_with_its_story(self, what: str, value: Any, error: Any) -> None:
        said: List[Dict[str, Any]] = []
        accounts = Accounts(said.append)
        accounts.close(accounts.open("noop"), value, error)

        (story,) = said
        assert (story["violation"], story["number"], story["kind"]) == (what, 0, "noop")
        assert accounts.pending() == []

    def test_nothing_may_come_twice(self) -> None:
        said: List[Dict[str, Any]] = []
        accounts = Accounts(said.append)
        task = accounts.open("noop")
        accounts.close(task, task.number, None)
        accounts.close(task, task.number, None)

        assert [story["violation"] for story in said] == ["delivered twice"]
        assert accounts.counts()["done"] == 1


class TestTasks:
    def test_marks_are_whole_lines_in_the_order_of_events(self, tmp_path: Path) -> None:
        path = tmp_path / "marks"
        assert chaos_tasks.mark(3, 0.0, str(path)) == 3
        assert chaos_tasks.mark(3, 0.0, str(path)) == 3

        ((number, lines),) = chaos_findings.marks(path).items()
        assert number == 3
        assert [line.split()[0] for line in lines] == ["start", "end", "start", "end"]
        assert chaos_findings.runs(lines) == (2, 1)

    def test_a_run_that_began_while_another_went_on_is_no_run_after_the_end(self) -> None:
        assert chaos_findings.runs(["start 1 7 0.1", "start 1 8 0.2", "end 1 8 0.3", "end 1 7 0.4"]) == (2, 0)
        assert chaos_findings.runs(["start 1 7 0.1"]) == (1, 0)

    def test_the_script_of_the_jobs_leaves_the_same_marks(self, tmp_path: Path) -> None:
        path = tmp_path / "marks"
        payload = json.dumps({"number": 4, "seconds": 0.0, "path": str(path)})
        script = ROOT / "benchmarks" / "chaos_script.py"
        run = subprocess.run(
            [sys.executable, str(script)], input=payload, capture_output=True, text=True, check=True, timeout=30
        )
        assert json.loads(run.stdout.splitlines()[-1]) == {"number": 4}
        assert chaos_findings.runs(chaos_findings.marks(path)[4]) == (1, 0)

    def test_values_are_known_by_their_number(self) -> None:
        assert len(chaos_tasks.blob(5, 1003)) == 1000
        assert chaos_tasks.blob(5, 16) != chaos_tasks.blob(6, 16)
        assert chaos_tasks.measure(5, chaos_tasks.pattern(5, 1003)) == (5, 1000)
        assert chaos_tasks.measure(5, b"") == (5, 0)


class TestFindings:
    BEFORE = {"coordinator": {"memory": 30e6, "descriptors": 20, "processes": 1, "memory of all": 30e6}}

    def test_a_little_more_of_what_breathes_is_fine(self) -> None:
        after = {"coordinator": {"memory": 50e6, "descriptors": 22, "processes": 1, "memory of all": 50e6}}
        assert chaos_findings.grown(self.BEFORE, after) == []

    @pytest.mark.parametrize(("what", "value"), [("memory", 70e6), ("descriptors", 40), ("processes", 2), ("processes", 0)])
    def test_more_is_told(self, what: str, value: float) -> None:
        after = {"coordinator": {**self.BEFORE["coordinator"], what: value}}
        (text,) = chaos_findings.grown(self.BEFORE, after)
        assert text.startswith(f"{what} of coordinator: {value:.0f} now")

    def test_who_is_missing_is_told(self) -> None:
        assert chaos_findings.grown(self.BEFORE, {}) == ["coordinator is not there"]

    def test_the_faults_that_a_violation_may_have_met_are_told(self) -> None:
        fault = chaos_plan.Fault(10.0, "freeze", "agent", 0.5, 0.5, 3.0)
        done = Done(fault, "worker 1", 10.0, 13.0)
        assert chaos_findings.touches(done, {"submitted_at": 12.0, "ended_at": 12.5})
        assert not chaos_findings.touches(done, {"submitted_at": 15.0, "ended_at": 16.0})
        assert not chaos_findings.touches(done, {"submitted_at": 1.0, "ended_at": 9.0})
        assert chaos_findings.told(done) == "10.00 s: freeze agent for 3.00 s: worker 1"

    def test_a_program_that_died_by_itself_is_told_from_one_that_was_killed(self, tmp_path: Path) -> None:
        program = Program("one", [sys.executable, "-c", "print('hello'); raise SystemExit(3)"], {}, tmp_path / "log")
        program.start()
        deadline = time.monotonic() + 10
        while program.why_over() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert program.why_over() == 3
        assert "hello" in program.said()

        sleeper = Program("two", [sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log")
        sleeper.start()
        sleeper.kill()
        assert sleeper.why_over() is None
        assert sleeper.pid == 0


class Wired:
    """A wire of the relay, with both its ends here."""

    def __init__(self, relay: Any, server: socket.socket, near: socket.socket, far: socket.socket) -> None:
        self._relay = relay
        self.server = server
        self.near = near
        self.far = far

    def order(self, **order: Any) -> None:
        self._relay.stdin.write(json.dumps({"wire": 0, **order}).encode() + b"\n")
        self._relay.stdin.flush()


def says(sock: socket.socket, seconds: float = 5.0) -> str:
    """What comes next: text, "end", "reset", or "nothing" in time."""
    sock.settimeout(seconds)
    try:
        return sock.recv(65536).decode() or "end"
    except socket.timeout:
        return "nothing"
    except ConnectionResetError:
        return "reset"


@pytest.fixture
def wired() -> Iterator[Wired]:
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        command = [sys.executable, "-m", "benchmarks.chaos_relay", str(server.getsockname()[1]), "1"]
        relay = ends.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert relay.stdin is not None
        ends.callback(relay.stdin.close)
        assert relay.stdout is not None
        (port,) = json.loads(relay.stdout.readline())
        near = ends.enter_context(socket.create_connection(("127.0.0.1", port)))
        near.sendall(b"hello")
        far = ends.enter_context(server.accept()[0])
        assert says(far) == "hello"
        yield Wired(relay, server, near, far)


class TestWires:
    def test_a_stall_of_one_direction_leaves_the_other(self, wired: Wired) -> None:
        wired.order(do="stall", way="up")
        wired.far.sendall(b"down")
        assert says(wired.near) == "down"
        wired.near.sendall(b"up")
        assert says(wired.far, 0.2) == "nothing"

        wired.order(do="flow")

        assert says(wired.far) == "up"

    def test_a_reset_reaches_both(self, wired: Wired) -> None:
        wired.order(do="reset", side="both")
        assert (says(wired.near), says(wired.far)) == ("reset", "reset")

    @pytest.mark.parametrize("side", ["peer", "coordinator"])
    def test_a_reset_of_one_side_is_a_silence_of_the_other_until_all_flows_again(self, wired: Wired, side: str) -> None:
        wired.order(do="reset", side=side)
        hit, other = (wired.near, wired.far) if side == "peer" else (wired.far, wired.near)
        assert says(hit) == "reset"
        other.sendall(b"is anybody there")
        assert says(other, 0.2) == "nothing"

        wired.order(do="flow")

        assert says(other) == "reset"

    def test_an_end_is_passed_on(self, wired: Wired) -> None:
        wired.near.sendall(b"bye")
        wired.near.close()
        assert says(wired.far) == "bye"
        assert says(wired.far) == "end"

    def test_much_passes_whole(self, wired: Wired) -> None:
        data = bytes(range(256)) * 40_000
        received = bytearray()
        wired.far.settimeout(5.0)
        sent = 0
        wired.near.setblocking(False)
        while len(received) < len(data):
            with contextlib.suppress(BlockingIOError):
                sent += wired.near.send(data[sent : sent + 100_000])
            wired.far.settimeout(0.01 if sent < len(data) else 5.0)
            with contextlib.suppress(socket.timeout):
                received += wired.far.recv(1 << 20)
        assert received == data
