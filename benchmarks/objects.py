"""Workloads of values: each takes an opened system and moves arrays of float64 through it. Every value is looked at."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List

from benchmarks import processes
from benchmarks.figures import Metrics, percentile
from benchmarks.functions import (
    ITEMS_PER_MEGABYTE,
    SLICE,
    facts,
    first,
    increment,
    kept_array,
    length,
    new_array,
    timed_get,
    total,
)
from benchmarks.systems import System

MEGABYTE = 1e6
GIGABYTE = 1e9

ROUNDS = 20  # At most; the first is told apart, since memory that was never used costs a fault for each page.
LEAST_ROUNDS = 4
ROUND_SECONDS = 8.0  # After so long no further round is begun.
GET_MEGABYTES = (1, 10, 100, 1000)
GET_ROUNDS = 5
REF_CALLS = 300
BROADCAST_TASKS = 8
CHAIN_ROUNDS = 3
SMALL_BYTES = 1000
SPILL_MEGABYTES = 100


def put_repeated(system: System, megabytes: int) -> Metrics:
    """The same array again and again, the ref of the round before dropped first."""
    array = new_array(megabytes)
    seconds: List[float] = []
    ref = None
    for mark in _rounds():
        array[0] = array[-1] = mark
        ref = None
        before = time.perf_counter()
        ref = system.put(array)
        seconds.append(time.perf_counter() - before)
    found = system.get(ref)
    check((found[0], found[-1]), (array[0], array[-1]))
    return {**_rates(array.nbytes, seconds), "rounds": len(seconds)}


def put_small(system: System, count: int) -> Metrics:
    """Values of 1 kB, all held; a task with the last one ends the clock, so that none is still under way."""
    values = [index.to_bytes(4, "little") * (SMALL_BYTES // 4) for index in range(count)]
    call = system.caller(length)
    call(system.put(values[0]))
    before = time.perf_counter()
    refs = [system.put(value) for value in values]
    found = call(refs[-1])
    elapsed = time.perf_counter() - before
    check((found, system.get(refs[count // 2])), (SMALL_BYTES, values[count // 2]))
    return {"per_s": count / elapsed, "puts": count}


def get_other_process(system: System, most_megabytes: int) -> Metrics:
    """One element of values of several sizes, each new and never read before: by `get` inside a task, and as an argument."""
    metrics: Metrics = {}
    sizes = [size for size in GET_MEGABYTES if size <= most_megabytes]
    call_first, call_get = system.caller(first), system.caller(timed_get)
    array = new_array(max(sizes))
    for size in sizes:
        part = array[: size * ITEMS_PER_MEGABYTE]
        argument: List[float] = []
        inside: List[float] = []
        for mark in range(1 + GET_ROUNDS):  # The first is not counted.
            part[0] = mark
            ref = system.put(part)
            before = time.perf_counter()
            check(call_first(ref), mark)
            argument.append(time.perf_counter() - before)
            del ref
            if system.getter is not None:
                ref = system.put(part)
                seconds, value = call_get((system.getter, [ref]))
                check(value, mark)
                inside.append(seconds)
                del ref
        metrics[f"argument_{size}mb_ms"] = percentile(argument[1:], 50) * 1e3
        if inside:
            metrics[f"get_{size}mb_ms"] = percentile(inside[1:], 50) * 1e3
    for way in ("argument", "get"):
        smallest, largest = (metrics.get(f"{way}_{size}mb_ms") for size in (sizes[0], sizes[-1]))
        if smallest is not None and largest is not None:
            metrics[f"{way}_largest_over_smallest"] = largest / smallest
    return metrics


def ref_argument(system: System, megabytes: int) -> Metrics:
    """The same ref for many tasks that look at one element: one after the other, and all at once."""
    array = new_array(megabytes)
    array[0] = 7
    ref = system.put(array)
    call, submit = system.caller(first), system.submitter(first)
    system.gather([submit(ref) for _ in range(20)])
    seconds: List[float] = []
    end = time.perf_counter() + ROUND_SECONDS
    while len(seconds) < REF_CALLS and time.perf_counter() < end:
        before = time.perf_counter()
        value = call(ref)
        seconds.append(time.perf_counter() - before)
        check(value, 7)
    before = time.perf_counter()
    values = system.gather([submit(ref) for _ in range(REF_CALLS)])
    at_once = time.perf_counter() - before
    check(values, [7.0] * REF_CALLS)
    one = percentile(seconds, 50)
    return {
        "call_gb_s": array.nbytes / one / GIGABYTE,
        "calls_per_s": 1 / one,
        "at_once_gb_s": REF_CALLS * array.nbytes / at_once / GIGABYTE,
        "at_once_per_s": REF_CALLS / at_once,
    }


def return_100mb(system: System, megabytes: int) -> Metrics:
    """A task returns an array, the driver looks at both ends and drops it."""
    call = system.caller(kept_array)
    seconds: List[float] = []
    for mark in _rounds():
        before = time.perf_counter()
        array = call((megabytes, mark))
        ends = (array[0], array[-1])
        seconds.append(time.perf_counter() - before)
        check(ends, (mark, mark))
        nbytes = array.nbytes
        del array
    return {**_rates(nbytes, seconds), "rounds": len(seconds)}


def broadcast(system: System, megabytes: int) -> Metrics:
    """One array, put once, that several tasks add up, all at once."""
    array = new_array(megabytes)
    submit = system.submitter(total)
    with_put: List[float] = []
    tasks_only: List[float] = []
    rest = float(array[1:].sum())
    for mark in _rounds():
        array[0] = mark
        before = time.perf_counter()
        ref = system.put(array)
        put = time.perf_counter()
        sums = system.gather([submit(ref) for _ in range(BROADCAST_TASKS)])
        after = time.perf_counter()
        with_put.append(after - before)
        tasks_only.append(after - put)
        del ref
        check(sums, [rest + mark] * BROADCAST_TASKS)  # To the last bit: sums of whole numbers below 2 ** 53, in any order.
    return {
        "cold_s": with_put[0],
        "seconds": percentile(with_put[1:], 50),
        "tasks_s": percentile(tasks_only[1:], 50),
        "rounds": len(with_put),
    }


def chain(system: System, steps: int) -> Metrics:
    """Each task's argument is the future of the one before; only the last result is asked for."""
    submit = system.submitter(increment)

    def run(steps: int) -> float:
        before = time.perf_counter()
        future = submit(0)
        for _ in range(steps - 1):
            future = submit(future)
        (last,) = system.gather([future])
        elapsed = time.perf_counter() - before
        check(last, steps)
        return elapsed

    run(max(2, steps // 10))
    seconds = percentile([run(steps) for _ in range(CHAIN_ROUNDS)], 50)
    return {"seconds": seconds, "step_ms": seconds / steps * 1e3, "steps": steps}


def store_spill(system: System, count: int) -> Metrics:
    """More arrays than the store has memory for: all are kept, then each is read and checked, by turns in the driver and in a task."""
    array = new_array(SPILL_MEGABYTES)
    middle = len(array) // 2
    call = system.caller(facts)
    with processes.PeakMemory(system.stores()) as peak:
        before = time.perf_counter()
        refs = []
        for mark in range(count):
            array[0] = array[-1] = mark
            array[middle : middle + SLICE] = mark
            refs.append(system.put(array))
        put = time.perf_counter()
        for mark, ref in enumerate(refs):
            check(facts(system.get(ref)) if mark % 2 else call(ref), (mark, mark, mark * SLICE))
        after = time.perf_counter()
    return {
        "put_s": put - before,
        "read_s": after - put,
        "resident_mb": peak.resident_bytes / MEGABYTE,
        "processes_mb": peak.peak_bytes / MEGABYTE,
        "shared_mb": peak.shared_bytes / MEGABYTE,
        "objects": count,
    }


def _rounds() -> Iterator[int]:
    end = time.perf_counter() + ROUND_SECONDS
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            return
        yield number


def _rates(nbytes: int, seconds: List[float]) -> Dict[str, float]:
    rates = [nbytes / elapsed / GIGABYTE for elapsed in seconds]
    return {"cold_gb_s": rates[0], "warm_gb_s": percentile(rates[1:], 50), "slowest_warm_gb_s": min(rates[1:])}


def check(found: Any, expected: Any) -> None:
    """No figure without the right values."""
    if found != expected:
        raise AssertionError(f"wrong results: {found!r} instead of {expected!r}")
