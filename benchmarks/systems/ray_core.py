"""Ray on this machine alone: two workers, no dashboard, no usage reports."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from benchmarks import processes
from benchmarks.systems import SLOTS

START = f"""
import logging

import ray


def noop():
    return 1


ray.init(num_cpus={SLOTS}, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
print(ray.get(ray.remote(noop).remote()), flush=True)
ray.shutdown()
"""


class Ray:
    """`remote` and `get` of the list of all refs."""

    streams = False
    getter = "ray"

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


SYSTEM = Ray
