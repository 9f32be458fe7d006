"""The CPU benchmark: what it prints, what is remembered, and what happens when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from gpumesh.devices import benchmark, children
from gpumesh.devices.scoring import PRIOR_LOOP_RATE, cpu_prior, device_score

FIGURES: Dict[str, Any] = {"loop_rate": 2e7, "numpy": "2.0", "rate_flops": 1.2e11, "bandwidth": 1.8e10}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    file = tmp_path / "cache" / "cpu.json"
    monkeypatch.setattr(benchmark, "cache_file", lambda: str(file))
    monkeypatch.setattr("gpumesh.devices.detect.usable_cores", lambda: 2)  # Those that FIGURES are of.
    return file


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> List[int]:
    """Replaces the subprocess; one entry for each time it would have run."""
    calls: List[int] = []

    def measure() -> Dict[str, Any]:
        calls.append(1)
        return FIGURES

    monkeypatch.setattr(benchmark, "measure_in_subprocess", measure)
    return calls


def test_the_real_benchmark_measures_this_machine() -> None:
    figures = benchmark.measure_in_subprocess()

    assert figures["loop_rate"] > 1e5
    assert figures["rate_flops"] > 1e8
    assert figures["bandwidth"] > 1e8
    assert 0 < benchmark.score_of(figures, 1) < 100


def test_the_benchmark_ends_with_whoever_started_it() -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "gpumesh.devices.benchmark", children.WITH_PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    printed, _ = started.communicate(timeout=20)  # Closes its standard input first.

    assert (started.returncode, printed) == (1, b"")


def test_a_figure_is_measured_once_and_then_remembered(runs: List[int], cache: Path) -> None:
    assert benchmark.cached_cpu_score() is None

    first = benchmark.measure_cpu_score()
    again = benchmark.measure_cpu_score()

    assert first == again == benchmark.cached_cpu_score() == device_score(1.2e11, 1.8e10)
    assert len(runs) == 1
    (entry,) = json.loads(cache.read_text()).values()
    assert entry == {**FIGURES, "score": first}


def test_force_measures_again(runs: List[int]) -> None:
    benchmark.measure_cpu_score()
    benchmark.measure_cpu_score(force=True)

    assert len(runs) == 2


def test_figures_of_other_machines_are_kept_and_not_taken(runs: List[int], cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(json.dumps({"another machine": {"score": 3.0}}))

    benchmark.measure_cpu_score()

    assert len(runs) == 1
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"', "null"])
def test_a_damaged_cache_is_measured_over(content: str, runs: List[int], cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(content)

    benchmark.measure_cpu_score()

    assert len(runs) == 1
    assert len(json.loads(cache.read_text())) == 1


@pytest.mark.parametrize("score", [0, -1, "fast", None, float("nan"), float("inf")])
def test_a_remembered_score_that_is_no_weight_is_ignored(score: object, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(json.dumps({benchmark._key(): {"score": score}}))

    assert benchmark.cached_cpu_score() is None


def test_a_cache_that_cannot_be_written_costs_only_the_next_measurement(
    runs: List[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setattr(benchmark, "cache_file", lambda: str(blocker / "cpu.json"))

    assert benchmark.measure_cpu_score() == benchmark.measure_cpu_score()
    assert len(runs) == 2


@pytest.mark.parametrize(
    "failure",
    [
        OSError("no memory"),
        subprocess.CalledProcessError(-9, "python"),
        subprocess.TimeoutExpired("python", 60),
        ValueError("not JSON"),
    ],
)
def test_a_benchmark_that_fails_leaves_an_estimate(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Dict[str, Any]:
        raise failure

    monkeypatch.setattr(benchmark, "measure_in_subprocess", fail)

    assert 0 < benchmark.measure_cpu_score() < 100
    assert "the CPU benchmark failed" in caplog.text
    assert benchmark.cached_cpu_score() is None


def test_without_numpy_the_plain_loop_gives_a_rough_score() -> None:
    figures = {"loop_rate": PRIOR_LOOP_RATE / 2, "numpy": None}

    assert benchmark.score_of(figures, 4) == cpu_prior(4, speed=0.5)


@pytest.mark.parametrize("figures", [{}, {"loop_rate": "x"}, {"loop_rate": 1.0, "rate_flops": 1.0}])
def test_incomplete_figures_leave_an_estimate(figures: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "measure_in_subprocess", lambda: figures)

    assert 0 < benchmark.measure_cpu_score() < 100


@pytest.mark.skipif(sys.platform != "linux", reason="the shortcut past platformdirs exists on Linux only")
@pytest.mark.parametrize("home", ["", "/somewhere/else"])
def test_the_cache_lies_where_platformdirs_says(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", home)
        assert os.path.dirname(benchmark.cache_file()) == platformdirs.user_cache_dir("gpumesh", appauthor=False)


def test_all_figures_are_told_by_their_names(runs: List[int]) -> None:
    measured = benchmark.measure_cpu(save=False)

    assert dict(measured.rates) == {"float32": 1.2e11, "bandwidth": 1.8e10, "python": 2e7}
    assert benchmark.cached_cpu() is None


def test_a_cpu_far_from_what_its_cores_promise_is_measured_twice_and_the_better_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = {**FIGURES, "rate_flops": 1e9}
    answers = [slow, FIGURES]
    monkeypatch.setattr(benchmark, "measure_in_subprocess", lambda: answers.pop(0))

    assert benchmark.measure_cpu().score == device_score(1.2e11, 1.8e10)
    assert answers == []


def test_a_cpu_that_really_is_slow_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{**FIGURES, "rate_flops": 1e9}, {**FIGURES, "rate_flops": 0.9e9}]
    monkeypatch.setattr(benchmark, "measure_in_subprocess", lambda: answers.pop(0))

    assert benchmark.measure_cpu().score == device_score(1e9, 1.8e10)
