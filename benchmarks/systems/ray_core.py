"""Ray on this machine alone: two workers, no dashboard, no usage reports."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

from benchmarks import processes
from benchmarks.functions import SPEED, Performer
from benchmarks.systems import SLOTS, Machine, Timed, time_calls

START = f"""
import logging

import ray


def noop():
    return 1


ray.init(num_cpus={SLOTS}, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
print(ray.get(ray.remote(noop).remote()), flush=True)
ray.shutdown()
"""


def fan_out(function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
    """Inside a task: one task for each item, all at once; all results."""
    import ray

    remote = ray.remote(function).remote
    results: List[Any] = ray.get([remote(item) for item in items])
    return results


class Ray:
    """`remote` and `get` of the list of all refs."""

    streams = False
    getter = "ray"
    is_told = False

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        import ray

        self._ray = ray
        options: Dict[str, Any] = {} if object_bytes is None else {"object_store_memory": object_bytes}
        ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)

    def close(self) -> None:
        self._ray.shutdown()

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        get, remote = self._ray.get, self._ray.remote(function).remote
        return lambda item: get(remote(item))

    def submitter(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        remote: Callable[[Any], Any] = self._ray.remote(function).remote
        return remote

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        remote = self._ray.remote(function).remote
        return [remote(item) for item in items]

    def gather(self, futures: List[Any]) -> List[Any]:
        results: List[Any] = self._ray.get(futures)
        return results

    def stream(self, function: Callable[..., Any], items: Sequence[Any]) -> Iterator[Any]:
        waiting = self.submit_all(function, items)
        while waiting:
            ready, waiting = self._ray.wait(waiting)
            yield from self._ray.get(ready)

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def get(self, ref: Any) -> Any:
        return self._ray.get(ref)

    def heads(self) -> List[int]:
        return processes.named("gcs_server", "raylet")

    def stores(self) -> List[int]:
        return processes.named("raylet")  # The store is a thread of it.

    def create_actors(self, count: int) -> List[Any]:
        create = self._ray.remote(Performer).remote
        return [create() for _ in range(count)]

    def end_actors(self, actors: List[Any]) -> None:
        for actor in actors:
            self._ray.kill(actor)

    def timed_calls(self, actor: Any, method: str, items: Iterable[Any], *, seconds: float) -> Timed:
        get, remote = self._ray.get, getattr(actor, method).remote
        return time_calls(lambda item: get(remote(item)), items, seconds=seconds)

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        remote = getattr(actor, method).remote
        results: List[Any] = self._ray.get([remote(item) for item in items])
        return results

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        results: List[Any] = self._ray.get([getattr(actor, method).remote(item) for actor in actors])
        return results

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        for ref in actor.numbers.options(num_returns="streaming").remote(count):
            yield self._ray.get(ref)

    @contextlib.contextmanager
    def machines(self, machines: Sequence[Machine]) -> Iterator[RayMachines]:
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(shutdown_at_exit=False)
        try:
            for place, machine in enumerate(machines):
                own = {"env_vars": {SPEED: str(machine.speed)}, "resources": {f"machine{place}": 1}}
                cluster.add_node(num_cpus=1, include_dashboard=False, **own)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield RayMachines(ray, len(machines))
        finally:
            ray.shutdown()
            cluster.shutdown()


class RayMachines:
    """One raylet for each machine, the first of them the head."""

    ways = ("", "spread")

    def __init__(self, ray: Any, count: int) -> None:
        self._ray = ray
        self._count = count

    def warm_up(self, function: Callable[..., Any]) -> None:
        remote = self._ray.remote(function)
        places = [remote.options(resources={f"machine{place}": 1}) for place in range(self._count)]
        self._ray.get([place.remote(None) for place in places])

    def run(self, function: Callable[..., Any], items: Sequence[Any], *, way: str, is_idempotent: bool) -> List[Any]:
        remote = self._ray.remote(function)
        if way == "spread":
            remote = remote.options(scheduling_strategy="SPREAD")
        results: List[Any] = self._ray.get([remote.remote(item) for item in items])
        return results

    def worker_of(self, pid: int) -> int:
        return processes.parent(pid)  # The raylet.


SYSTEM = Ray
