"""Workloads on unlike machines: each worker divides the time of its tasks by a speed that the system is not told.

The figure is wall time over the bound, the number of tasks times their length over the sum of all speeds.
"""

from __future__ import annotations

import time
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

from benchmarks.figures import Metrics
from benchmarks.functions import burning_work, noop, sleeping_work
from benchmarks.systems import Machine, Machines, SystemOfMachines

EVEN = (10.0, 5.0, 2.0, 1.0)
UNEVEN = (20.0, 10.0, 2.0, 0.2)
WRONG = (0.1, 10.0, 0.1, 10.0)  # Times the speed: the slowest claims to be like the fastest, which plays it down.


class Case(NamedTuple):
    """One call of a function on all machines."""

    name: str  # The figure is `{name}_over_bound`.
    title: str
    tasks: int
    is_idempotent: bool = False
    is_for_all: bool = True  # Whether systems that cannot be told anything run it, too; for them some cases are the same.


class Site(NamedTuple):
    """Machines, and the cases that run on them one after the other, on the same running system."""

    machines: Tuple[Machine, ...]
    cases: Tuple[Case, ...]


def _machines(speeds: Sequence[float], scores: Sequence[float]) -> Tuple[Machine, ...]:
    return tuple(Machine(speed, score) for speed, score in zip(speeds, scores))


SITES: Tuple[Site, ...] = (
    Site(
        _machines(EVEN, [1.0] * 4),
        (Case("even", "speeds 10 5 2 1, 200 tasks: scores equal", 200),),
    ),
    Site(
        _machines(UNEVEN, UNEVEN),
        (Case("right", "speeds 20 10 2 0.2, 60 tasks: scores right", 60),),
    ),
    Site(
        _machines(UNEVEN, [1.0] * 4),
        (
            Case("unseen", "the same: scores equal, never seen, idempotent", 60, is_idempotent=True, is_for_all=False),
            Case("second", "the same: its second call, not idempotent", 60, is_for_all=False),
        ),
    ),
    Site(
        _machines(UNEVEN, [speed * factor for speed, factor in zip(UNEVEN, WRONG)]),
        (Case("wrong", "the same, 300 tasks: scores wrong by 10 x", 300),),
    ),
)


def unlike(system: Any, milliseconds: int) -> Metrics:
    """Tasks of so many milliseconds on a machine of speed 1, slept: four workers compute nothing at the same time on two cores."""
    return _all_sites(system, sleeping_work, milliseconds / 1000)


def unlike_burning(system: Any, milliseconds: int) -> Metrics:
    """The same in processor time; it says something only where each worker has a core of its own."""
    return _all_sites(system, burning_work, milliseconds / 1000)


def _all_sites(system: SystemOfMachines, function: Callable[..., Any], seconds: float) -> Metrics:
    metrics: Metrics = {}
    for site in SITES:
        cases = [case for case in site.cases if case.is_for_all or system.is_told]
        if cases:
            with system.machines(site.machines) as machines:
                for case in cases:
                    for way in machines.ways:
                        metrics.update(_run(machines, function, site, case, seconds, way))
    return metrics


def _run(machines: Machines, function: Callable[..., Any], site: Site, case: Case, seconds: float, way: str) -> Metrics:
    machines.warm_up(noop)
    items: List[Tuple[int, float]] = [(index, seconds) for index in range(case.tasks)]
    before = time.perf_counter()
    results = machines.run(function, items, way=way, is_idempotent=case.is_idempotent)
    elapsed = time.perf_counter() - before
    if sorted(index for index, _ in results) != list(range(case.tasks)):
        raise AssertionError("wrong results")
    name = f"{way}_{case.name}" if way else case.name
    metrics = {f"{name}_s": elapsed, f"{name}_over_bound": elapsed / bound(site, case, seconds)}
    for machine in site.machines:
        metrics[f"{name}_on_{machine.speed:g}"] = sum(speed == machine.speed for _, speed in results)
    return metrics


def bound(site: Site, case: Case, seconds: float) -> float:
    """The wall time that no system can beat: all machines busy until the very end."""
    return case.tasks * seconds / sum(machine.speed for machine in site.machines)
