"""The workloads of values on a system without processes: what they count, and that no wrong value passes."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import pytest

from benchmarks import objects
from benchmarks.figures import ROWS
from benchmarks.systems import System
from benchmarks.workloads import WORKLOADS

pytest.importorskip("numpy")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")

OF_VALUES = ("put_repeated", "put_small", "ref_argument", "return_100mb", "broadcast", "chain_1000")


class Ref:
    """The value itself, kept apart from what may be done to the original."""

    def __init__(self, value: Any) -> None:
        self.value = value.copy() if hasattr(value, "copy") else value


def get(ref: Ref) -> Any:
    """What a task calls: `getter` names this module."""
    return ref.value


class Here:
    """Runs everything at once, in this process; keeps the sizes of what was put."""

    streams = False
    getter: Optional[str] = None

    def __init__(self) -> None:
        self.put_sizes: List[int] = []

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        raise AssertionError("opened by child.py only")

    def close(self) -> None:
        raise AssertionError("closed by child.py only")

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda item: function(item.value if isinstance(item, Ref) else item)

    submitter = caller

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        return [self.caller(function)(item) for item in items]

    def gather(self, futures: List[Any]) -> List[Any]:
        return futures

    def stream(self, function: Callable[..., Any], items: Sequence[Any]) -> Iterator[Any]:
        return iter(self.submit_all(function, items))

    def put(self, value: Any) -> Any:
        self.put_sizes.append(getattr(value, "nbytes", 0) or len(value))
        return Ref(value)

    def get(self, ref: Any) -> Any:
        return ref.value

    def heads(self) -> List[int]:
        return []

    def stores(self) -> List[int]:
        return []


class Stale(Here):
    """Gives back what was put first, whatever is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._first: Optional[Ref] = None

    def put(self, value: Any) -> Any:
        ref = super().put(value)
        if self._first is None:
            self._first = ref
        return self._first


class Idle(Here):
    """Runs nothing."""

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda item: item

    submitter = caller


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "ROUNDS", 4)
    monkeypatch.setattr(objects, "GET_ROUNDS", 1)


def run(workload: str, system: System, size: int) -> Dict[str, float]:
    ran = WORKLOADS[workload].run
    assert ran is not None
    return ran(system, size)


@pytest.mark.parametrize("workload", OF_VALUES)
def test_a_workload_gives_every_figure_that_the_table_shows(workload: str) -> None:
    metrics = run(workload, Here(), 2)

    assert {row.metric for row in ROWS if row.workload == workload} <= set(metrics)
    assert all(value > 0 for value in metrics.values())


@pytest.mark.parametrize("workload", ["put_repeated", "put_small", "broadcast"])
def test_a_value_of_another_round_is_no_figure(workload: str) -> None:
    with pytest.raises(AssertionError, match="wrong results"):
        run(workload, Stale(), 2)


@pytest.mark.parametrize("workload", ["ref_argument", "chain_1000"])
def test_a_task_that_did_not_run_is_no_figure(workload: str) -> None:
    with pytest.raises(AssertionError, match="wrong results"):
        run(workload, Idle(), 2)


def test_every_put_is_of_the_size_asked_for() -> None:
    system = Here()

    run("put_repeated", system, 3)

    assert system.put_sizes == [3_000_000] * 4


def test_times_of_get_are_of_all_sizes_up_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Here()
    monkeypatch.setitem(sys.modules, "a_system", sys.modules[__name__])
    system.getter = "a_system"

    metrics = run("get_other_process", system, 10)

    assert set(metrics) == {
        *(f"{way}_{size}mb_ms" for way in ("argument", "get") for size in (1, 10)),
        "argument_largest_over_smallest",
        "get_largest_over_smallest",
    }
    assert metrics["get_largest_over_smallest"] == metrics["get_10mb_ms"] / metrics["get_1mb_ms"]


def test_a_system_whose_tasks_cannot_get_has_no_such_figure() -> None:
    metrics = run("get_other_process", Here(), 1)

    assert set(metrics) == {"argument_1mb_ms", "argument_largest_over_smallest"}


def test_all_values_that_spill_are_read_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "SPILL_MEGABYTES", 1)
    system = Here()

    metrics = run("store_spill", system, 5)

    assert system.put_sizes == [1_000_000] * 5
    assert metrics["objects"] == 5
    assert {row.metric for row in ROWS if row.workload == "store_spill"} <= set(metrics)


def test_a_spilled_value_that_comes_back_wrong_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "SPILL_MEGABYTES", 1)

    with pytest.raises(AssertionError, match=r"wrong results: \(0\.0, 0\.0, 0\.0\) instead of \(1, 1, 1000\)"):
        run("store_spill", Stale(), 2)
