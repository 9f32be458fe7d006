"""One file per system that is measured, each with the same face. Importing this package imports none of the systems."""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    cast,
)

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


class SystemOfActors(Protocol):
    """What a system that has actors has beside `open` and `close`. They are of the class `Performer`; a method takes one argument."""

    def create_actors(self, count: int) -> List[Any]:
        """So many actors; need not wait until they are there."""

    def end_actors(self, actors: List[Any]) -> None:
        """End them."""

    def timed_calls(self, actor: Any, method: str, items: Iterable[Any], *, seconds: float) -> Timed:
        """One call with each item, one after the other, as a user would write it in a loop; at the end of `seconds` no more."""

    def call_all(self, actor: Any, method: str, items: Sequence[Any]) -> List[Any]:
        """One call with each item, all submitted before the first result is asked for; all results, in order."""

    def call_each(self, actors: Sequence[Any], method: str, item: Any) -> List[Any]:
        """One call of each actor, all submitted before the first result is asked for; all results, in order."""

    def stream_of_actor(self, actor: Any, count: int) -> Iterator[int]:
        """What its generator method `numbers` gives, each as soon as it can be had."""


class Timed(NamedTuple):
    """Calls that were made one after the other."""

    seconds: List[float]  # Of each.
    results: List[Any]


def time_calls(call: Callable[[Any], Any], items: Iterable[Any], *, seconds: float) -> Timed:
    """Call with one item after the other, until they or the seconds are at their end."""
    timed = Timed([], [])
    clock = time.perf_counter
    end = clock() + seconds
    for item in items:
        before = clock()
        result = call(item)
        after = clock()
        timed.seconds.append(after - before)
        timed.results.append(result)
        if after > end:
            break
    return timed


class Profile(NamedTuple):
    """What can be said about a system without importing it."""

    title: str
    module: str  # Of this package: holds SYSTEM, the class, and START, a program that prints one result.
    needs: Optional[str]  # The module that must be installed.
    distribution: Optional[str]  # Whose version is recorded.
    has_tasks: bool = True  # False: it has actors only, and no more of the face of `System` than `open` and `close`.


PROFILES: Dict[str, Profile] = {
    "gpumesh": Profile("gpumesh", "mesh", "gpumesh", "gpumesh"),
    "processpool": Profile("ProcessPool", "processpool", None, None),
    "ray": Profile("Ray", "ray_core", "ray", "ray"),
    "dask": Profile("Dask", "dask_distributed", "distributed", "distributed"),
    "xoscar": Profile("xoscar", "xoscar_pool", "xoscar", "xoscar", has_tasks=False),
    "pyro5": Profile("Pyro5", "pyro_daemon", "Pyro5", "Pyro5", has_tasks=False),
}
OF_TASKS = tuple(name for name, profile in PROFILES.items() if profile.has_tasks)


def is_installed(system: str) -> bool:
    """Whether the system can be measured here."""
    needs = PROFILES[system].needs
    return needs is None or importlib.util.find_spec(needs) is not None


def module_of(system: str) -> str:
    """The full name of the system's module, for tasks that are to import it."""
    return f"benchmarks.systems.{PROFILES[system].module}"


def create(system: str) -> System:
    """The system's adapter, not opened."""
    module = importlib.import_module(module_of(system))
    return cast(System, module.SYSTEM())


def start_program(system: str) -> str:
    """A whole program, as a user would write it: from nothing to one printed result."""
    module = importlib.import_module(module_of(system))
    return cast(str, module.START)
