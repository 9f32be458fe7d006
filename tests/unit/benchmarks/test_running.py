"""Runs in processes of their own: one real one, and some that go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from benchmarks import processes, running
from benchmarks.__main__ import compare
from benchmarks.running import ROOT, Run, run_all, run_once
from benchmarks.systems import PROFILES, is_installed
from benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")


def test_a_quick_run_prints_the_table_and_writes_the_json(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "noop_latency", "start", "--systems", "processpool"]

    ran = subprocess.run(
        [*command, "--quick", "--repeats", "2", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert "no-op round trip, p50, us" in ran.stdout
    written: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert written["environment"]["cores"] >= 1
    assert written["options"]["quick"] is True
    assert [(run["workload"], run["repeat"], run["error"]) for run in written["runs"]] == [
        ("noop_latency", 0, ""),
        ("noop_latency", 1, ""),
        ("start", 0, ""),
        ("start", 1, ""),
    ]
    assert all(run["metrics"]["p50_us"] > 1 for run in written["runs"][:2])
    assert not any(run["left_behind"] for run in written["runs"])


def test_systems_take_turns_and_slow_ones_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[Tuple[int, str]] = []

    def note(workload: str, system: str, repeat: int, *, quick: bool) -> Run:
        asked.append((repeat, system))
        return Run(workload, system, repeat, {}, "", 0.0, 0.0, [])

    monkeypatch.setattr(running, "run_once", note)
    run_all(["many_pending"], ["gpumesh", "processpool", "ray"], repeats=2, quick=True, on_run=lambda run: None)

    assert asked == [(0, "gpumesh"), (0, "processpool"), (0, "ray"), (1, "processpool"), (1, "gpumesh")]


@pytest.mark.parametrize("workload", ["put_small", "ref_argument"])
def test_values_go_through_a_real_mesh(workload: str) -> None:
    run = run_once(workload, "gpumesh", 0, quick=True)

    assert (run.error, run.left_behind) == ("", [])
    assert all(value > 0 for value in run.metrics.values())


@pytest.mark.parametrize("workload", ["actor_array", "actor_stream", "nested"])
def test_actors_and_nested_tasks_run_on_a_real_mesh(workload: str) -> None:
    run = run_once(workload, "gpumesh", 0, quick=True)

    assert (run.error, run.left_behind) == ("", [])
    assert all(value > 0 for value in run.metrics.values())


def test_a_workload_runs_only_on_the_systems_that_have_such_a_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[Tuple[str, str]] = []

    def note(workload: str, system: str, repeat: int, *, quick: bool) -> Run:
        asked.append((workload, system))
        return Run(workload, system, repeat, {}, "", 0.0, 0.0, [])

    monkeypatch.setattr(running, "run_once", note)
    run_all(["cross_host", "put_small"], ["processpool", "ray", "dask"], repeats=1, quick=True, on_run=lambda run: None)

    assert asked == [("put_small", "ray"), ("put_small", "dask")]


def test_a_system_without_tasks_runs_only_workloads_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[Tuple[str, str]] = []

    def note(workload: str, system: str, repeat: int, *, quick: bool) -> Run:
        asked.append((workload, system))
        return Run(workload, system, repeat, {}, "", 0.0, 0.0, [])

    monkeypatch.setattr(running, "run_once", note)
    run_all(list(WORKLOADS), ["xoscar", "pyro5"], repeats=1, quick=True, on_run=lambda run: None)

    assert asked == [
        ("actor_latency", "xoscar"),
        ("actor_latency", "pyro5"),
        ("actor_throughput", "xoscar"),
        ("actor_throughput", "pyro5"),
        ("actor_create", "xoscar"),
        ("actor_array", "xoscar"),
    ]


@pytest.mark.parametrize("system", ["xoscar", "pyro5"])
def test_a_peer_that_has_only_actors_is_measured_where_it_is_installed(system: str) -> None:
    if not is_installed(system):
        pytest.skip(f"{PROFILES[system].title} is not installed")

    run = run_once("actor_latency", system, 0, quick=True)

    assert (run.error, run.left_behind) == ("", [])
    assert run.metrics["calls"] == 300


def test_a_run_that_does_not_end_is_killed_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "first_result", WORKLOADS["first_result"]._replace(timeout_seconds=0.2))

    run = run_once("first_result", "processpool", 0, quick=False)

    assert run.metrics == {}
    assert run.error.startswith("did not end within 0.2 s")


def test_a_run_that_fails_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "start_program", lambda system: "raise SystemExit('no such luck')")

    run = run_once("start", "processpool", 0, quick=True)

    assert run.metrics == {}
    assert "exit status 1" in run.error
    assert "no such luck" in run.error


def test_an_interrupted_harness_reports_what_it_has_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "start",
        "first_result",
        "--systems",
        "processpool",
        "--repeats",
        "1",
        "--json",
        str(path),
    ]
    harness = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert harness.stderr is not None
    while "[1] start processpool" not in harness.stderr.readline():
        assert harness.poll() is None
    drivers: List[int] = []
    while not drivers:  # `first_result` has begun; it takes two seconds.
        drivers = processes.descendants(harness.pid)

    harness.terminate()
    printed, complained = harness.communicate(timeout=40)

    assert harness.returncode == 128 + 2
    assert "interrupted" in complained
    assert "process start to first result" in printed
    assert [run["workload"] for run in json.loads(path.read_text(encoding="utf-8"))["runs"]] == ["start"]
    assert not any(processes.is_running(pid) for pid in drivers)


@pytest.mark.parametrize("arguments", [["no_such_workload"], ["--systems", "no_such_system"], ["--repeats", "0"]])
def test_arguments_that_make_no_sense_are_refused(arguments: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        compare(arguments)

    assert refused.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_a_system_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROFILES, "ray", PROFILES["ray"]._replace(needs="a_module_that_nobody_has"))

    assert not is_installed("ray")
    assert compare(["start", "--systems", "ray"]) == 2
    assert capsys.readouterr().err == "Ray is not installed and left out\n"
