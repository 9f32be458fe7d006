"""Ray on this machine alone: two workers, no dashboard, no usage reports."""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Iterator, List, Sequence

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

    def open(self) -> None:
        import ray

        self._ray = ray
        ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)

    def close(self) -> None:
        self._ray.shutdown()

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        get, remote = self._ray.get, self._ray.remote(function).remote
        return lambda item: get(remote(item))

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

    def heads(self) -> List[int]:
        return [pid for pid in processes.descendants(os.getpid()) if processes.name(pid) in ("gcs_server", "raylet")]


SYSTEM = Ray
