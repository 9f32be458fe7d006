"""Workloads of gpumesh's wire, forced over TCP on loopback. They start their own mesh and need no opened system."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from typing import Any, Callable, Dict, Iterator, List

from benchmarks.far import Far
from benchmarks.figures import Metrics, percentile
from benchmarks.functions import first, kept_array, new_array, noop
from benchmarks.objects import GIGABYTE, check
from benchmarks.plain_copy import FRESH, REUSED, PlainCopy
from benchmarks.systems import System

ROUNDS = 15  # Of every way, taking turns with the plain copies; the first is not counted.
ROUND_SECONDS = 12.0  # For each of the two clients: no further round is begun then.
LEAST_ROUNDS = 3
IDLE_CALLS = 500
TRANSFERS = 3  # In each direction.


def cross_host(system: System, megabytes: int) -> Metrics:
    """An array over one TCP connection in four ways, and by plain blocking sockets to another process in between."""
    array = new_array(megabytes)
    seconds: Dict[str, List[float]] = {}

    def clock(way: str, act: Callable[[Any], Any], item: Any) -> Any:
        before = time.perf_counter()
        value = act(item)
        seconds.setdefault(way, []).append(time.perf_counter() - before)
        return value

    with contextlib.ExitStack() as ends:
        plain = {
            way: ends.enter_context(PlainCopy(memory)) for way, memory in (("plain_fresh", FRESH), ("plain_reused", REUSED))
        }
        far = ends.enter_context(Far(slots=1))  # One, so that no round is the first of a runner but the very first.

        def turns() -> Iterator[int]:
            end = time.perf_counter() + ROUND_SECONDS
            for mark in range(ROUNDS):
                if mark >= LEAST_ROUNDS and time.perf_counter() > end:
                    return
                array[0] = array[-1] = mark
                for way, receiver in plain.items():
                    clock(way, receiver.copy, array)
                yield mark

        with far.client(is_far=False) as mesh:
            look, make = _caller(mesh, first), _caller(mesh, kept_array)

            def make_and_look(mark: int) -> float:
                return float(make((megabytes, mark))[-1])

            for mark in turns():
                ref = mesh.put(array)
                check(clock("argument", look, ref), mark)
                ref = None
                check(clock("result", make_and_look, mark), mark)
        with far.client(is_far=True) as mesh:

            def get_and_look(ref: Any) -> float:
                return float(mesh.get(ref)[-1])

            for mark in turns():
                ref = clock("put", mesh.put, array)
                check(clock("get", get_and_look, ref), mark)
                ref = None
    medians = {way: percentile(found[1:], 50) for way, found in seconds.items()}
    metrics = {f"{way}_gb_s": array.nbytes / median / GIGABYTE for way, median in medians.items()}
    for way in ("put", "get", "argument", "result"):
        metrics[f"{way}_over_plain"] = medians["plain_fresh"] / medians[way]
    return metrics


def latency_under_transfer(system: System, megabytes: int) -> Metrics:
    """Round trips of a no-op while a large value is under way on the same connection: the client's, then the worker's."""
    array = new_array(megabytes)
    metrics: Metrics = {}
    with Far(slots=2) as far, concurrent.futures.ThreadPoolExecutor(1) as thread:
        with far.client(is_far=True) as mesh:

            def put() -> float:
                return _timed(lambda: mesh.put(array))

            _measure("client", _caller(mesh, noop), lambda: thread.submit(put), array.nbytes, metrics)
        with far.client(is_far=False) as mesh:
            look = _caller(mesh, first)

            def fetch(ref: Any) -> float:
                return _timed(lambda: check(look(ref), array[0]))

            _measure("worker", _caller(mesh, noop), lambda: thread.submit(fetch, mesh.put(array)), array.nbytes, metrics)
    return metrics


def _measure(
    direction: str,
    call: Callable[[Any], Any],
    start: Callable[[], concurrent.futures.Future[float]],
    nbytes: int,
    metrics: Metrics,
) -> None:
    """Round trips at rest, then during some transfers; `start` starts one, which results in its seconds."""
    idle = [_timed(lambda: call(None)) for _ in range(IDLE_CALLS)]
    during: List[float] = []
    rates: List[float] = []
    for _ in range(TRANSFERS):
        transfer = start()
        while not transfer.done():
            during.append(_timed(lambda: call(None)))
        rates.append(nbytes / transfer.result() / GIGABYTE)
    for name, seconds in (("idle_", idle), ("", during)):
        metrics[f"{direction}_{name}p50_ms"] = percentile(seconds, 50) * 1e3
        metrics[f"{direction}_{name}p99_ms"] = percentile(seconds, 99) * 1e3
    metrics[f"{direction}_worst_ms"] = max(during) * 1e3
    metrics[f"{direction}_calls"] = len(during)
    metrics[f"{direction}_gb_s"] = percentile(rates, 50)


def _timed(act: Callable[[], Any]) -> float:
    before = time.perf_counter()
    act()
    return time.perf_counter() - before


def _caller(mesh: Any, function: Callable[..., Any]) -> Callable[[Any], Any]:
    from gpumesh import accelerate

    remote = accelerate(mesh)(function).remote
    return lambda item: remote(item).result()
