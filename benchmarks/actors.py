"""Workloads of actors, each with an opened system, and of tasks that start tasks. Every result is counted or compared."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List, Sequence

from benchmarks.figures import Metrics, percentile
from benchmarks.functions import new_array, parent
from benchmarks.objects import check
from benchmarks.systems import SLOTS, System, SystemOfActors

WARM_CALLS = 200
LATENCY_SECONDS = 6.0  # `actor_latency` ends then, however slow the system is; so does the first part of `actor_array`.
ROUNDS = 3  # A rate is the median of so many in one process.
ARRAYS = 8  # Different ones, so that calls under way at the same time do not share one.
FIRST_ITEMS = 20  # Streams of which only the first item is timed.
CHILDREN = 10
CHILD_SECONDS = 0.005
NESTED_ROUNDS = 2


def actor_latency(system: SystemOfActors, count: int) -> Metrics:
    """One no-op at a time: call, wait, next."""
    (actor,) = system.create_actors(1)
    system.call_all(actor, "noop", range(WARM_CALLS))
    timed = system.timed_calls(actor, "noop", range(count), seconds=LATENCY_SECONDS)
    check(system.call_all(actor, "calls", [None]), [WARM_CALLS + len(timed.seconds)])
    return {
        "p50_us": percentile(timed.seconds, 50) * 1e6,
        "p99_us": percentile(timed.seconds, 99) * 1e6,
        "calls": len(timed.seconds),
    }


def actor_throughput(system: SystemOfActors, count: int) -> Metrics:
    """Many no-ops of one actor: all are submitted, then all results fetched."""
    (actor,) = system.create_actors(1)
    system.call_all(actor, "noop", range(WARM_CALLS))
    seconds = [_seconds_of_calls(system, actor, "noop", range(count), [None] * count) for _ in range(ROUNDS)]
    check(system.call_all(actor, "calls", [None]), [WARM_CALLS + ROUNDS * count])
    return {"per_s": count / percentile(seconds, 50), "calls": count}


def actor_create(system: SystemOfActors, count: int) -> Metrics:
    """Actors from nothing, until the first call of each has come back. What a first call ever needs is there: one actor was called before."""
    before_them = system.create_actors(1)
    check(system.call_each(before_them, "calls", None), [0])
    before = time.perf_counter()
    actors = system.create_actors(count)
    created = time.perf_counter()
    found = system.call_each(actors, "calls", None)
    after = time.perf_counter()
    check(found, [0] * count)
    system.end_actors(before_them)
    system.end_actors(actors)
    return {"seconds": after - before, "create_s": created - before, "actors": count}


def actor_array(system: SystemOfActors, count: int) -> Metrics:
    """An array of 1 MB as argument, all of it read by the actor: one call after the other, and many submitted at once."""
    (actor,) = system.create_actors(1)
    arrays = [new_array(1) for _ in range(ARRAYS)]
    rest = float(arrays[0][1:].sum())

    def marked() -> Iterator[Any]:
        for mark in range(count):
            arrays[0][0] = mark  # The call before has ended.
            yield arrays[0]

    items = [arrays[index % ARRAYS] for index in range(count)]
    for place, array in enumerate(arrays):
        array[0] = place
    sums = [rest + index % ARRAYS for index in range(count)]  # Exact: whole numbers below 2 ** 53.
    check(system.call_all(actor, "total", items[:ARRAYS]), sums[:ARRAYS])
    seconds = [_seconds_of_calls(system, actor, "total", items, sums) for _ in range(ROUNDS)]
    timed = system.timed_calls(actor, "total", marked(), seconds=LATENCY_SECONDS)
    check(timed.results, [rest + mark for mark in range(len(timed.results))])
    return {
        "at_once_per_s": count / percentile(seconds, 50),
        "calls_per_s": 1 / percentile(timed.seconds, 50),
        "calls": len(timed.results),
    }


def actor_stream(system: SystemOfActors, count: int) -> Metrics:
    """Small numbers out of a generator method as fast as they can be taken, and how long the first one takes."""
    (actor,) = system.create_actors(1)
    for _ in range(2):
        check(list(system.stream_of_actor(actor, WARM_CALLS)), list(range(WARM_CALLS)))
    firsts: List[float] = []
    for _ in range(FIRST_ITEMS):
        before = time.perf_counter()
        stream = system.stream_of_actor(actor, 2)
        check(next(stream), 0)
        firsts.append(time.perf_counter() - before)
        check(list(stream), [1])
    rates: List[float] = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        found = list(system.stream_of_actor(actor, count))
        rates.append(count / (time.perf_counter() - before))
        check(found, list(range(count)))
    return {"items_per_s": percentile(rates, 50), "first_ms": percentile(firsts, 50) * 1e3, "items": count}


def nested(system: System, parents: int) -> Metrics:
    """Tasks that each start ten of 5 ms and wait for them, over what the naps alone take on all slots.

    A system may need more processes than slots for that: the first time, which starts them, is told apart.
    """
    items = [(type(system).__module__, CHILDREN, CHILD_SECONDS)] * parents
    ideal = parents * CHILDREN * CHILD_SECONDS / SLOTS
    seconds: List[float] = []
    for _ in range(1 + NESTED_ROUNDS):
        before = time.perf_counter()
        found = system.gather(system.submit_all(parent, items))
        seconds.append(time.perf_counter() - before)
        check(found, [CHILDREN] * parents)
    metrics: Dict[str, float] = {"seconds": percentile(seconds[1:], 50), "first_s": seconds[0], "tasks": parents * CHILDREN}
    return {**metrics, "total_over_ideal": metrics["seconds"] / ideal, "first_over_ideal": seconds[0] / ideal}


def _seconds_of_calls(system: SystemOfActors, actor: Any, method: str, items: Sequence[Any], expected: List[Any]) -> float:
    before = time.perf_counter()
    results = system.call_all(actor, method, items)
    elapsed = time.perf_counter() - before
    if results != expected:
        raise AssertionError("wrong results")
    return elapsed
