"""The workload of unlike machines: what it asks of a system, what it makes of the answers; and one small mesh of real processes."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import pytest

from benchmarks import processes
from benchmarks.figures import ROWS
from benchmarks.functions import SPEED, noop, sleeping_work
from benchmarks.systems import Machine, mesh
from benchmarks.unlike import SITES, UNEVEN, bound, unlike
from benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")


class Here:
    """Runs nothing, but notes what it was asked to; every task is done by the first machine."""

    def __init__(self, *, is_told: bool, ways: Tuple[str, ...] = ("",)) -> None:
        self.is_told = is_told
        self.ways = ways
        self.sites: List[List[Machine]] = []
        self.ran: List[Tuple[int, str, bool]] = []
        self.warmed = 0

    @contextlib.contextmanager
    def machines(self, machines: Sequence[Machine]) -> Iterator[Here]:
        self.sites.append(list(machines))
        yield self

    def warm_up(self, function: Callable[..., Any]) -> None:
        assert function is noop, "another than the one that is measured"
        self.warmed += 1

    def run(self, function: Callable[..., Any], items: Sequence[Any], *, way: str, is_idempotent: bool) -> List[Any]:
        assert function is sleeping_work
        self.ran.append((len(items), way, is_idempotent))
        return [(index, self.sites[-1][0].speed) for index, _ in reversed(items)]


def test_a_system_that_can_be_told_runs_every_case_warm() -> None:
    system = Here(is_told=True)

    metrics = unlike(system, 1)

    assert system.ran == [(200, "", False), (60, "", False), (60, "", True), (60, "", False), (300, "", False)]
    assert system.warmed == 5
    assert [[machine.score for machine in machines] for machines in system.sites] == [
        [1, 1, 1, 1],
        [20, 10, 2, 0.2],
        [1, 1, 1, 1],
        pytest.approx([2, 100, 0.2, 2]),
    ]
    assert metrics["second_on_20"] == 60
    assert metrics["second_on_0.2"] == 0


def test_a_system_that_can_be_told_nothing_runs_what_differs_for_it_in_each_of_its_ways() -> None:
    system = Here(is_told=False, ways=("", "spread"))

    metrics = unlike(system, 1)

    assert system.ran == [(count, way, False) for count in (200, 60, 300) for way in ("", "spread")]
    assert {"even_over_bound", "spread_even_over_bound", "right_over_bound"} <= set(metrics)
    assert "unseen_over_bound" not in metrics


def test_a_result_that_is_missing_or_there_twice_fails_the_run() -> None:
    class Careless(Here):
        def run(self, function: Callable[..., Any], items: Sequence[Any], *, way: str, is_idempotent: bool) -> List[Any]:
            results = super().run(function, items, way=way, is_idempotent=is_idempotent)
            return [*results[1:], results[-1]]

    with pytest.raises(AssertionError, match="wrong results"):
        unlike(Careless(is_told=True), 1)


def test_every_figure_of_the_table_is_one_that_some_case_gives() -> None:
    told = unlike(Here(is_told=True), 1)
    not_told = unlike(Here(is_told=False, ways=("", "spread")), 1)

    for row in ROWS:
        if row.workload == "unlike":
            assert row.metric in {**told, **not_told}
            assert row.metric_of("dask") in not_told
    assert not any(row.bars for row in ROWS if row.workload == "unlike_burning")
    assert not WORKLOADS["unlike_burning"].is_default


def test_the_bound_is_that_of_machines_that_are_busy_until_the_end() -> None:
    bounds: Dict[str, float] = {case.name: bound(site, case, 1.0) for site in SITES for case in site.cases}

    assert bounds["even"] == pytest.approx(200 / 18)
    assert bounds["right"] == bounds["unseen"] == bounds["second"] == pytest.approx(60 / sum(UNEVEN))


def test_real_workers_have_the_speeds_and_the_mesh_does_not_know_them() -> None:
    before = set(processes.descendants(os.getpid()))
    with mesh.SYSTEM().machines([Machine(40.0, 3.0), Machine(20.0, 3.0)]) as machines:
        machines.warm_up(noop)

        results = machines.run(sleeping_work, [(index, 2.0) for index in range(12)], way="", is_idempotent=False)

        assert {worker["score"] for worker in machines._mesh.workers()} == {3.0}
    assert sorted(index for index, _ in results) == list(range(12))
    assert {speed for _, speed in results} == {40.0, 20.0}
    assert SPEED not in os.environ
    assert set(processes.descendants(os.getpid())) <= before
