"""Dask's distributed scheduler: a LocalCluster of two single-threaded worker processes, the scheduler in the driver, no dashboard."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence

from benchmarks import processes
from benchmarks.functions import SPEED, Performer
from benchmarks.systems import SLOTS, Machine, Timed, time_calls

START = f"""
from distributed import Client, LocalCluster


def noop():
    return 1


if __name__ == "__main__":
    with LocalCluster(n_workers={SLOTS}, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        print(client.submit(noop).result(), flush=True)
"""


def fan_out(function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
    """Inside a task: one task for each item, all at once; all results."""
    import distributed

    untyped: Any = distributed
    with untyped.worker_client() as client:
        results: List[Any] = client.gather([client.submit(function, item, pure=False) for item in items])
    return results


class Dask:
    """`client.submit` for one future each and `client.gather`."""

    streams = False
    getter = None  # A future inside a container arrives as its value.
    is_told = False

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        import distributed

        untyped: Any = distributed
        self._as_completed = untyped.as_completed
        self._cluster = untyped.LocalCluster(
            n_workers=SLOTS, threads_per_worker=1, dashboard_address=None, silence_logs=logging.ERROR
        )
        self._client = untyped.Client(self._cluster)

    def close(self) -> None:
        self._client.close()
        self._cluster.close()

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        submit = self._client.submit
        return lambda item: submit(function, item, pure=False).result()

    def submitter(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        submit = self._client.submit
        return lambda item: submit(function, item, pure=False)

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        submit = self._client.submit
        return [submit(function, item, pure=False) for item in items]

    def gather(self, futures: List[Any]) -> List[Any]:
        results: List[Any] = self._client.gather(futures)
        return results

    def stream(self, function: Callable[..., Any], items: Sequence[Any]) -> Iterator[Any]:
        for _, result in self._as_completed(self.submit_all(function, items), with_results=True):
            yield result

    def put(self, value: Any) -> Any:
        return self._client.scatter(value, hash=False)  # Hashing would nearly halve its rate.

    def get(self, ref: Any) -> Any:
        return ref.result()

    def heads(self) -> List[int]:
        return []  # The scheduler runs in the driver.

    def stores(self) -> List[int]:
        return processes.descendants(os.getpid())  # Values lie in the memory of the workers.

    def create_actors(self, count: int) -> List[Any]:
        futures = [self._client.submit(Performer, actor=True, pure=False) for _ in range(count)]
        return [future.result() for future in futures]  # There are no calls before that.

    def end_actors(self, actors: List[Any]) -> None:
        actors.clear()  # They live as long as their futures, which they hold.

    def timed_calls(self, actor: Any, method: str, items: Iterable[Any], *, seconds: float) -> Timed:
        call = getattr(actor, method)
        return time_calls(lambda item: call(item).result(), items, seconds=seconds)

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        call = getattr(actor, method)
        return [future.result() for future in [call(item) for item in items]]

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        return [future.result() for future in [getattr(actor, method)(item) for actor in actors]]

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        raise NotImplementedError("an actor of Dask cannot give its results one by one")

    @contextlib.contextmanager
    def machines(self, machines: Sequence[Machine]) -> Iterator[DaskMachines]:
        import distributed

        untyped: Any = distributed
        workers = {
            place: {
                "cls": untyped.Nanny,  # As in a LocalCluster, which cannot give each an environment of its own.
                "options": {"nthreads": 1, "env": {SPEED: str(machine.speed)}, "silence_logs": logging.ERROR},
            }
            for place, machine in enumerate(machines)
        }
        scheduler = {"cls": untyped.Scheduler, "options": {"dashboard": False, "dashboard_address": None}}
        with untyped.SpecCluster(workers, scheduler, silence_logs=logging.ERROR) as cluster, untyped.Client(cluster) as client:
            client.wait_for_workers(len(machines))
            yield DaskMachines(client)


class DaskMachines:
    """A scheduler in the driver and one process with one thread for each machine."""

    ways = ("",)

    def __init__(self, client: Any) -> None:
        self._client = client

    def warm_up(self, function: Callable[..., Any]) -> None:
        workers = list(self._client.scheduler_info()["workers"])
        self._client.gather([self._client.submit(function, None, pure=False, workers=[worker]) for worker in workers])

    def run(self, function: Callable[..., Any], items: Sequence[Any], *, way: str, is_idempotent: bool) -> List[Any]:
        futures = [self._client.submit(function, item, pure=False) for item in items]
        results: List[Any] = self._client.gather(futures)
        return results

    def worker_of(self, pid: int) -> int:
        return pid  # Above it is only what starts it again.


SYSTEM = Dask
