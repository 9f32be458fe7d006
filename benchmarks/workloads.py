"""What is measured: the workloads of small tasks, which take an opened system and return its figures, and the list of all workloads.

Those of values are in objects.py, those of actors and of tasks within tasks in actors.py, those of the wire in transfers.py, that of joining in quickjoin.py, those of jobs in jobs.py, those of deaths in deaths.py, those of unlike machines in unlike.py, `start` is in running.py.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from benchmarks import processes
from benchmarks.actors import actor_array, actor_create, actor_latency, actor_stream, actor_throughput, nested
from benchmarks.deaths import deaths
from benchmarks.figures import Metrics, percentile
from benchmarks.functions import echo, nap, noop
from benchmarks.jobs import jobs
from benchmarks.objects import (
    MEGABYTE,
    broadcast,
    chain,
    get_other_process,
    put_repeated,
    put_small,
    ref_argument,
    return_100mb,
    store_spill,
)
from benchmarks.quickjoin import quickjoin
from benchmarks.secured import tls_bulk, tls_latency
from benchmarks.systems import OF_TASKS, SLOTS, System
from benchmarks.transfers import cross_host, latency_under_transfer
from benchmarks.unlike import unlike, unlike_burning

NAP_SECONDS = 0.02  # The tasks of `first_result`.
PAD_BYTES = 1000  # The documents of `small_args`.
ROUNDS = 3  # A throughput is the median of so many in one process.
LATENCY_SECONDS = 6.0  # `noop_latency` ends then, however slow the system is.


class Size(NamedTuple):
    """How much of a workload a system gets, as it understands it: tasks, seconds, megabytes. Slow systems get fewer tasks where the figure is a rate."""

    full: Dict[str, int]
    quick: Dict[str, int]

    def of(self, system: str, *, quick: bool) -> int:
        sizes = self.quick if quick else self.full
        return sizes.get(system, sizes["*"])


class Workload(NamedTuple):
    """One workload, and what running it once takes."""

    run: Optional[Callable[[Any, int], Metrics]]  # With a system that has what it needs. None: measured from outside.
    size: Size
    timeout_seconds: float  # For one run of one system, its start and end included.
    most_repeats: Dict[str, int] = {}  # For systems that take minutes.
    systems: Tuple[str, ...] = OF_TASKS  # For which there is such a thing.
    needs_system: bool = True  # Opened and warm; False: the workload starts what it measures itself.
    object_bytes: Optional[int] = None  # The store's limit.
    is_default: bool = True  # False: runs only when it is named.


def warm_up(system: System) -> None:
    """Every worker has started and run something when this returns."""
    system.gather(system.submit_all(nap, [0.01] * 20 * SLOTS))


def noop_latency(system: System, count: int) -> Metrics:
    """One no-op at a time: submit, wait, next."""
    call = system.caller(noop)
    for item in range(100):
        call(item)
    seconds: List[float] = []
    clock = time.perf_counter
    end = clock() + LATENCY_SECONDS
    for item in range(count):
        before = clock()
        call(item)
        after = clock()
        seconds.append(after - before)
        if after > end:
            break
    return {"p50_us": percentile(seconds, 50) * 1e6, "p99_us": percentile(seconds, 99) * 1e6, "tasks": len(seconds)}


def noop_throughput(system: System, count: int) -> Metrics:
    """Many no-ops at once, through one future each and, where there is such a thing, through a stream."""
    return _throughput(system, noop, list(range(count)))


def small_args(system: System, count: int) -> Metrics:
    """Many tasks that take a dictionary of 1 kB and give it back."""
    documents = [{"i": index, "pad": "x" * PAD_BYTES} for index in range(count)]
    return _throughput(system, echo, documents, expected=documents)


def _throughput(system: System, function: Callable[..., Any], items: Sequence[Any], expected: Optional[Any] = None) -> Metrics:
    ways: Dict[str, Callable[[Sequence[Any]], List[Any]]] = {
        "futures_per_s": lambda items: system.gather(system.submit_all(function, items)),
    }
    if system.streams:
        ways["stream_per_s"] = lambda items: list(system.stream(function, items))
    metrics: Metrics = {"tasks": len(items)}
    for metric, way in ways.items():
        way(items[: max(1, len(items) // 10)])
        rates = []
        for _ in range(ROUNDS):
            before = time.perf_counter()
            results = way(items)
            rates.append(len(items) / (time.perf_counter() - before))
            if len(results) != len(items) or (expected is not None and results != expected):
                raise AssertionError("wrong results")
            del results
        metrics[metric] = percentile(rates, 50)
    return metrics


def first_result(system: System, count: int) -> Metrics:
    """Tasks of 20 ms that use no processor: when the first result is in the driver's hands, and when the last."""
    before = time.perf_counter()
    stream = system.stream(nap, [NAP_SECONDS] * SLOTS)
    next(stream)
    unused_before = time.perf_counter() - before  # The process's first stream: what it loads and sets up is told apart.
    list(stream)
    before = time.perf_counter()
    stream = system.stream(nap, [NAP_SECONDS] * count)
    next(stream)
    first = time.perf_counter() - before
    arrived = 1 + sum(1 for _ in stream)
    total = time.perf_counter() - before
    if arrived != count:
        raise AssertionError("wrong results")
    return {
        "first_ms": first * 1e3,
        "first_of_process_ms": unused_before * 1e3,
        "total_s": total,
        "total_over_ideal": total / (count * NAP_SECONDS / SLOTS),
        "tasks": count,
    }


def idle_memory(system: System, seconds: int) -> Metrics:
    """Memory and processor time of a warm system that has nothing to do, `seconds` of rest after its last task."""
    warm_up(system)
    gc.collect()
    time.sleep(max(1.0, seconds * 0.8))  # The rest belongs to what is measured: systems give memory back in idle moments.
    pids = processes.descendants(os.getpid())
    system_bytes = sum(map(processes.pss_bytes, pids))
    driver_bytes = processes.pss_bytes(os.getpid())
    used_before = sum(map(processes.fine_cpu_seconds, pids))
    before = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - before
    used = sum(map(processes.fine_cpu_seconds, pids)) - used_before
    return {
        "system_mb": system_bytes / MEGABYTE,
        "with_driver_mb": (system_bytes + driver_bytes) / MEGABYTE,
        "cpu_percent": 100 * used / elapsed,
        "processes": len(pids),
    }


def many_pending(system: System, count: int) -> Metrics:
    """A long queue of no-ops, one future each, all held until the last result; then dropped."""
    pids = [os.getpid(), *system.heads()]

    def memory() -> int:
        return sum(map(processes.pss_bytes, pids))

    items = list(range(count))
    gc.collect()
    with processes.PeakMemory(pids) as peak:  # All memory is read beside the watcher, which shares the interpreter's pages.
        before_bytes = memory()
        before = time.perf_counter()
        futures = system.submit_all(noop, items)
        submitted = time.perf_counter() - before
        results = system.gather(futures)
        total = time.perf_counter() - before
        held_bytes = memory()  # The watcher may have come too late for a short run.
        if len(results) != count:
            raise AssertionError("wrong results")
        del futures, results
        gc.collect()
        time.sleep(1.0)  # Refs that were dropped are released by messages.
        gc.collect()
        after_bytes = memory()
    return {
        "submit_s": submitted,
        "total_s": total,
        "peak_mb": max(peak.peak_bytes, held_bytes) / MEGABYTE,
        "before_mb": before_bytes / MEGABYTE,
        "after_mb": after_bytes / MEGABYTE,
        "after_over_before": after_bytes / before_bytes,
        "tasks": count,
    }


STORES = ("gpumesh", "ray", "dask")  # Systems whose values can be put, and whose futures can be arguments.
ACTORS = (
    "gpumesh",
    "ray",
    "xoscar",
    "dask",
)  # Systems that start actors when they are asked to; a server of Pyro5 has what it has.
MEGABYTES = Size({"*": 100}, {"*": 4})  # Of one array.

WORKLOADS: Dict[str, Workload] = {
    "noop_latency": Workload(noop_latency, Size({"*": 3000}, {"*": 300, "dask": 100}), 60.0),
    "noop_throughput": Workload(
        noop_throughput,
        Size({"*": 50_000, "ray": 5000, "dask": 2000}, {"*": 10_000, "ray": 1000, "dask": 300}),
        90.0,
    ),
    "small_args": Workload(
        small_args,
        Size({"*": 20_000, "ray": 5000, "dask": 2000}, {"*": 5000, "ray": 1000, "dask": 300}),
        90.0,
    ),
    "first_result": Workload(first_result, Size({"*": 200}, {"*": 50}), 60.0),
    "start": Workload(None, Size({"*": 5}, {"*": 1}), 60.0),
    "idle_memory": Workload(idle_memory, Size({"*": 10}, {"*": 2}), 60.0, {"ray": 2, "dask": 2}),
    "many_pending": Workload(many_pending, Size({"*": 100_000}, {"*": 10_000, "dask": 3000}), 400.0, {"ray": 1, "dask": 1}),
    "put_repeated": Workload(put_repeated, MEGABYTES, 60.0, systems=STORES),
    "put_small": Workload(put_small, Size({"*": 5000, "dask": 500}, {"*": 500, "dask": 50}), 60.0, systems=STORES),
    "get_other_process": Workload(get_other_process, Size({"*": 1000}, {"*": 10}), 90.0, systems=STORES),
    "ref_argument": Workload(ref_argument, MEGABYTES, 60.0, systems=STORES),
    "return_100mb": Workload(return_100mb, MEGABYTES, 60.0),
    "broadcast": Workload(broadcast, MEGABYTES, 60.0),
    "chain_1000": Workload(chain, Size({"*": 1000}, {"*": 100}), 60.0, systems=STORES),
    "store_spill": Workload(
        store_spill,
        Size({"*": 100}, {"*": 8}),
        120.0,
        {"gpumesh": 1, "ray": 1},
        systems=("gpumesh", "ray"),
        object_bytes=500_000_000,
    ),
    "actor_latency": Workload(actor_latency, Size({"*": 3000}, {"*": 300, "dask": 100}), 60.0, systems=(*ACTORS, "pyro5")),
    "actor_throughput": Workload(
        actor_throughput,
        Size({"*": 20_000, "ray": 5000, "xoscar": 10_000, "dask": 2000}, {"*": 5000, "ray": 1000, "dask": 300}),
        120.0,
        systems=(*ACTORS, "pyro5"),
    ),
    "actor_create": Workload(actor_create, Size({"*": 20}, {"*": 4}), 90.0, systems=ACTORS),
    "actor_array": Workload(actor_array, Size({"*": 300}, {"*": 30}), 60.0, systems=("gpumesh", "ray", "xoscar")),
    "actor_stream": Workload(
        actor_stream, Size({"*": 20_000, "ray": 3000}, {"*": 2000, "ray": 300}), 90.0, systems=("gpumesh", "ray")
    ),
    "nested": Workload(nested, Size({"*": 100}, {"*": 10}), 240.0, systems=STORES),
    "cross_host": Workload(cross_host, MEGABYTES, 90.0, systems=("gpumesh",), needs_system=False),
    "latency_under_transfer": Workload(
        latency_under_transfer, Size({"*": 2000}, {"*": 200}), 90.0, systems=("gpumesh",), needs_system=False
    ),
    "tls_latency": Workload(tls_latency, Size({"*": 4000}, {"*": 400}), 90.0, systems=("gpumesh",), needs_system=False),
    "tls_bulk": Workload(tls_bulk, MEGABYTES, 180.0, systems=("gpumesh",), needs_system=False),
    "deaths": Workload(deaths, Size({"*": 40}, {"*": 12}), 180.0, systems=STORES, needs_system=False),
    "quickjoin": Workload(quickjoin, Size({"*": 3}, {"*": 1}), 240.0, systems=("gpumesh",), needs_system=False),
    "jobs": Workload(jobs, Size({"*": 50_000}, {"*": 2000}), 120.0, systems=("gpumesh",), needs_system=False),
    "unlike": Workload(unlike, Size({"*": 1000}, {"*": 100}), 240.0, {"ray": 1}, systems=STORES, needs_system=False),
    "unlike_burning": Workload(
        unlike_burning, Size({"*": 1000}, {"*": 100}), 400.0, systems=STORES, needs_system=False, is_default=False
    ),
}
