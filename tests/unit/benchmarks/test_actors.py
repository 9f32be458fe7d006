"""The workloads of actors, and of tasks within tasks, on a system without processes: what they count, and that no wrong result passes."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence

import pytest

from benchmarks import actors
from benchmarks.figures import ROWS
from benchmarks.functions import Performer
from benchmarks.systems import Timed, time_calls
from benchmarks.workloads import WORKLOADS

pytest.importorskip("numpy")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")

OF_ACTORS = ("actor_latency", "actor_throughput", "actor_create", "actor_array", "actor_stream", "nested")


def fan_out(function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
    """What `parent` calls: it finds this module by the class of the system."""
    return [function(item) for item in items]


class Here:
    """Runs every call at once, in this process."""

    def __init__(self) -> None:
        self.created = 0
        self.ended = 0

    def create_actors(self, count: int) -> List[Any]:
        self.created += count
        return [Performer() for _ in range(count)]

    def end_actors(self, actors: List[Any]) -> None:
        self.ended += len(actors)

    def timed_calls(self, actor: Any, method: str, items: Iterable[Any], *, seconds: float) -> Timed:
        return time_calls(getattr(actor, method), items, seconds=seconds)

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        return [getattr(actor, method)(item) for item in items]

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        return [getattr(actor, method)(item) for actor in actors]

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        return iter(actor.numbers(count))

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        return [function(item) for item in items]

    def gather(self, futures: List[Any]) -> List[Any]:
        return futures


class Twice(Here):
    """Runs every call a second time."""

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        super().call_all(actor, method, items)
        return super().call_all(actor, method, items)

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        return [actor.noop() or getattr(actor, method)(item) for actor in actors]

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        for number in actor.numbers(count):
            yield number
            yield number

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        return super().submit_all(function, [*items, *items])


class Unordered(Here):
    """Mixes up results."""

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        return super().call_all(actor, method, items)[::-1]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "CHILD_SECONDS", 0.0001)
    monkeypatch.setattr(actors, "WARM_CALLS", 5)


def run(workload: str, system: Any, size: int) -> Dict[str, float]:
    ran = WORKLOADS[workload].run
    assert ran is not None
    return ran(system, size)


@pytest.mark.parametrize("workload", OF_ACTORS)
def test_a_workload_gives_every_figure_that_the_table_shows(workload: str) -> None:
    metrics = run(workload, Here(), 10)

    assert {row.metric for row in ROWS if row.workload == workload} <= set(metrics)
    assert all(value > 0 for value in metrics.values())


@pytest.mark.parametrize("workload", ["actor_latency", "actor_throughput", "actor_create", "actor_stream", "nested"])
def test_what_ran_or_came_twice_is_no_figure(workload: str) -> None:
    with pytest.raises(AssertionError, match="wrong results"):
        run(workload, Twice(), 10)


def test_results_in_another_order_are_no_figure() -> None:
    with pytest.raises(AssertionError, match="wrong results"):
        run("actor_array", Unordered(), 10)


def test_all_actors_that_were_created_are_ended() -> None:
    system = Here()

    metrics = run("actor_create", system, 20)

    assert (system.created, system.ended) == (21, 21)
    assert metrics["actors"] == 20


def test_naps_on_all_slots_until_the_end_would_be_the_ideal() -> None:
    metrics = run("nested", Here(), 10)

    assert metrics["tasks"] == 100
    assert metrics["total_over_ideal"] == pytest.approx(metrics["seconds"] / (100 * 0.0001 / 2))
    assert metrics["first_over_ideal"] == pytest.approx(metrics["first_s"] / (100 * 0.0001 / 2))


def test_no_more_calls_are_begun_when_the_time_is_over() -> None:
    timed = time_calls(lambda item: item, [1, 2, 3], seconds=-1.0)

    assert timed.results == [1]
    assert len(timed.seconds) == 1
