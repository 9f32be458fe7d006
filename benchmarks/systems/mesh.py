"""gpumesh: an embedded mesh of one worker with two slots."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence

from benchmarks import processes
from benchmarks.far import Commands
from benchmarks.functions import SPEED, Performer
from benchmarks.systems import SLOTS, Machine, Timed, time_calls

START = f"""
from gpumesh import GPUMesh, accelerate


def noop():
    return 1


with GPUMesh.local(workers=1, slots={SLOTS}) as mesh:
    print(accelerate(mesh)(noop).remote().result(), flush=True)
"""


def fan_out(function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
    """Inside a task: one task for each item, all at once; all results."""
    import gpumesh

    remote = gpumesh.accelerate(gpumesh.current_mesh())(function).remote
    return [future.result() for future in [remote(item) for item in items]]


class Mesh:
    """`f.remote` for one future each, `f.map` for a stream."""

    streams = True
    getter = "gpumesh"
    is_told = True

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

    def create_actors(self, count: int) -> List[Any]:
        create = self._mesh.actor(Performer).remote
        return [create() for _ in range(count)]

    def end_actors(self, actors: List[Any]) -> None:
        for actor in actors:
            actor.kill()

    def timed_calls(self, actor: Any, method: str, items: Iterable[Any], *, seconds: float) -> Timed:
        remote = getattr(actor, method).remote
        return time_calls(lambda item: remote(item).result(), items, seconds=seconds)

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        remote = getattr(actor, method).remote
        return [future.result() for future in [remote(item) for item in items]]

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        return [future.result() for future in [getattr(actor, method).remote(item) for actor in actors]]

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        return iter(actor.numbers.stream(count))

    @contextlib.contextmanager
    def machines(self, machines: Sequence[Machine]) -> Iterator[MeshOfMachines]:
        with Commands() as commands:
            for place, machine in enumerate(machines):
                # A tag for the warm-up, which must reach every one of them.
                told = ["--slots", "1", "--score", str(machine.score), "--tag", f"machine={place}"]
                commands.join(*told, environment={SPEED: str(machine.speed)})
            with commands.client() as mesh:
                yield MeshOfMachines(mesh, len(machines))


class MeshOfMachines:
    """`gpumesh serve` and one `gpumesh join` for each machine."""

    ways = ("",)

    def __init__(self, mesh: Any, count: int) -> None:
        self._mesh = mesh
        self._count = count

    def warm_up(self, function: Callable[..., Any]) -> None:
        from gpumesh import accelerate

        futures = [accelerate(self._mesh, tags={"machine": str(place)})(function).remote(None) for place in range(self._count)]
        for future in futures:
            future.result()

    def run(self, function: Callable[..., Any], items: Sequence[Any], *, way: str, is_idempotent: bool) -> List[Any]:
        from gpumesh import accelerate

        return list(accelerate(self._mesh, idempotent=is_idempotent)(function).map([(item,) for item in items]))

    def worker_of(self, pid: int) -> int:
        return processes.parent(processes.parent(pid))  # The agent, above the process that starts runners.


SYSTEM = Mesh
