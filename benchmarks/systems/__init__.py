"""One file per system that is measured, each with the same face. Importing this package imports none of the systems."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Protocol, Sequence, Tuple, cast

SLOTS = 2  # Worker processes of every system.


class System(Protocol):
    """How a workload drives one system. Made in the driver process; everything runs in `SLOTS` worker processes."""

    streams: bool  # Whether `stream` is a way of its own to run many small tasks, worth a figure beside one future each.
    getter: Optional[str]  # The module whose `get` a task calls with a ref; None: tasks cannot.

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        """Start the system; need not wait for its workers. `object_bytes` limits its object store, where it has one."""

    def close(self) -> None:
        """End its processes."""

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        """One call with one argument, there and back, as a user would write it in a loop."""

    def submitter(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        """A future for one call with one argument, which may be a ref or a future."""

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        """One future for each item."""

    def gather(self, futures: List[Any]) -> List[Any]:
        """Their results, in order."""

    def stream(self, function: Callable[..., Any], items: Sequence[Any]) -> Iterator[Any]:
        """One task for each item, results as soon as they can be had, none chunked by hand."""

    def put(self, value: Any) -> Any:
        """A ref to a value in the object store, which lives as long as the ref; without a store the value itself."""

    def get(self, ref: Any) -> Any:
        """The value of a ref, in the driver."""

    def heads(self) -> List[int]:
        """Processes beside the driver that hold tasks which nothing runs yet."""

    def stores(self) -> List[int]:
        """Processes that keep or manage objects."""


class Machine(NamedTuple):
    """A computer that one single-slot worker process stands for."""

    speed: float  # In the process's environment, where only the tasks look.
    score: float  # What a system that asks for a score is told.


class Machines(Protocol):
    """A running system with one worker for each of some unlike machines."""

    ways: Tuple[str, ...]  # Of placing tasks; "" is the default.

    def warm_up(self, function: Callable[..., Any]) -> None:
        """Run it once on each of them, with `None`; all have joined when this returns."""

    def run(self, function: Callable[..., Any], items: Sequence[Any], *, way: str, is_idempotent: bool) -> List[Any]:
        """One task for each item, all at once; all results, in any order."""

    def worker_of(self, pid: int) -> int:
        """The process that stands for the whole machine on which this one runs tasks; itself if there is none but that."""


class SystemOfMachines(Protocol):
    """What a system that can run on several machines has beside the face of `System`."""

    is_told: bool  # Whether it can be told scores, and which functions may run twice.

    def machines(self, machines: Sequence[Machine]) -> ContextManager[Machines]:
        """Start it with one worker for each; end it with the block."""


class Profile(NamedTuple):
    """What can be said about a system without importing it."""

    title: str
    module: str  # Of this package: holds SYSTEM, the class, and START, a program that prints one result.
    needs: Optional[str]  # The module that must be installed.
    distribution: Optional[str]  # Whose version is recorded.


PROFILES: Dict[str, Profile] = {
    "gpumesh": Profile("gpumesh", "mesh", "gpumesh", "gpumesh"),
    "processpool": Profile("ProcessPool", "processpool", None, None),
    "ray": Profile("Ray", "ray_core", "ray", "ray"),
    "dask": Profile("Dask", "dask_distributed", "distributed", "distributed"),
}


def is_installed(system: str) -> bool:
    """Whether the system can be measured here."""
    needs = PROFILES[system].needs
    return needs is None or importlib.util.find_spec(needs) is not None


def create(system: str) -> System:
    """The system's adapter, not opened."""
    module = importlib.import_module(f"benchmarks.systems.{PROFILES[system].module}")
    return cast(System, module.SYSTEM())


def start_program(system: str) -> str:
    """A whole program, as a user would write it: from nothing to one printed result."""
    module = importlib.import_module(f"benchmarks.systems.{PROFILES[system].module}")
    return cast(str, module.START)
