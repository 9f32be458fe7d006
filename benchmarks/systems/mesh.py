"""gpumesh: an embedded mesh of one worker with two slots."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, List, Optional, Sequence

from benchmarks import processes
from benchmarks.systems import SLOTS

START = f"""
from gpumesh import GPUMesh, accelerate


def noop():
    return 1


with GPUMesh.local(workers=1, slots={SLOTS}) as mesh:
    print(accelerate(mesh)(noop).remote().result(), flush=True)
"""


class Mesh:
    """`f.remote` for one future each, `f.map` for a stream."""

    streams = True
    getter = "gpumesh"

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        from gpumesh import GPUMesh

        if object_bytes is not None:
            os.environ["GPUMESH_OBJECT_MEMORY"] = str(object_bytes)
        self._mesh = GPUMesh.local(workers=1, slots=SLOTS)

    def close(self) -> None:
        self._mesh.close()

    def _accelerated(self, function: Callable[..., Any]) -> Any:
        from gpumesh import accelerate

        return accelerate(self._mesh)(function)

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        remote = self._accelerated(function).remote
        return lambda item: remote(item).result()

    def submitter(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        remote: Callable[[Any], Any] = self._accelerated(function).remote
        return remote

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        remote = self._accelerated(function).remote
        return [remote(item) for item in items]

    def gather(self, futures: List[Any]) -> List[Any]:
        return [future.result() for future in futures]

    def stream(self, function: Callable[..., Any], items: Sequence[Any]) -> Iterator[Any]:
        if items and isinstance(items[0], dict):
            items = [(item,) for item in items]  # A bare dict would be keyword arguments.
        return iter(self._accelerated(function).map(items))

    def put(self, value: Any) -> Any:
        return self._mesh.put(value)

    def get(self, ref: Any) -> Any:
        return self._mesh.get(ref)

    def heads(self) -> List[int]:
        return processes.named("gpumesh-coord")

    def stores(self) -> List[int]:
        return processes.named("gpumesh-coord", "gpumesh-worker")


SYSTEM = Mesh
