"""The functions that the workloads run, and the class that they make actors of. A module of their own, so that worker processes import nothing else for them."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any, Dict, Iterator, List, Tuple

ITEMS_PER_MEGABYTE = 125_000  # Of 8 bytes.
SLICE = 1000  # Elements that `facts` adds up.
SPEED = "MACHINE_SPEED"  # In the environment of a worker that stands for a machine of this speed; no system reads it.

_kept: Dict[int, Any] = {}  # Of `kept_array`, at most one.


def noop(item: Any = None) -> None:
    """Do nothing: what is left is the system."""


def echo(document: Dict[str, Any]) -> Dict[str, Any]:
    """Give the argument back."""
    return document


def nap(seconds: float) -> None:
    """Keep a slot for a while without using a core."""
    time.sleep(seconds)


def speed() -> float:
    """That of the machine which this process stands for."""
    return float(os.environ[SPEED])


def sleeping_work(item: Tuple[int, float]) -> Tuple[int, float]:
    """Takes `seconds` on a machine of speed 1, and no core; which item it was, and the speed of the machine that did it."""
    index, seconds = item
    time.sleep(seconds / speed())
    return index, speed()


def recorded(item: Tuple[int, float, str]) -> int:
    """The same, which first leaves a file that says who runs where since when; the item's number."""
    index, seconds, folder = item
    name = f"{index}-{os.getpid()}-{speed()!r}-{time.monotonic_ns()}"
    with open(os.path.join(folder, name), "wb"):
        pass
    time.sleep(seconds)
    return index


def burning_work(item: Tuple[int, float]) -> Tuple[int, float]:
    """The same in processor time, for computers with a core for each machine."""
    index, seconds = item
    end = time.process_time() + seconds / speed()
    while time.process_time() < end:
        pass
    return index, speed()


def parent(item: Tuple[str, int, float]) -> int:
    """A task that starts tasks: so many naps, all at once, through `fan_out` of a module; how many have ended when it does."""
    module, children, seconds = item
    return len(importlib.import_module(module).fan_out(nap, [seconds] * children))


def increment(number: int) -> int:
    """One more: a step of a chain."""
    return number + 1


def length(value: bytes) -> int:
    """How long it is."""
    return len(value)


def first(array: Any) -> float:
    """Look at one element of a large array, so that what is measured is how the array got there."""
    return float(array[0])


def total(array: Any) -> float:
    """Read all of a large array."""
    return float(array.sum())


def facts(array: Any) -> Tuple[float, float, float]:
    """First, last, and the sum of a slice in the middle."""
    middle = len(array) // 2
    return float(array[0]), float(array[-1]), float(array[middle : middle + SLICE].sum())


def timed_get(item: Tuple[str, List[Any]]) -> Tuple[float, float]:
    """Inside a task: the seconds until the value of a ref is here, and its first element. The ref comes in a list, so that it stays one."""
    module, (ref,) = item
    get = importlib.import_module(module).get
    before = time.perf_counter()
    value = float(get(ref)[0])
    return time.perf_counter() - before, value


def kept_array(item: Tuple[int, int]) -> Any:
    """An array of so many megabytes that the process keeps, marked with a number: a result that costs nothing to make."""
    megabytes, mark = item
    array = _kept.get(megabytes)
    if array is None:
        _kept.clear()
        array = _kept[megabytes] = new_array(megabytes)
    array[0] = array[-1] = mark
    return array


def new_array(megabytes: int) -> Any:
    """An array of float64, all of it touched."""
    import numpy  # Here, so that the workers of other workloads do without.

    return numpy.arange(megabytes * ITEMS_PER_MEGABYTE, dtype=numpy.float64)


class Performer:
    """An actor that counts what it is asked to do."""

    def __init__(self) -> None:
        self._calls = 0

    def noop(self, item: Any = None) -> None:
        """Do nothing but count."""
        self._calls += 1

    def calls(self, item: Any = None) -> int:
        """How many no-ops there were."""
        return self._calls

    def total(self, array: Any) -> float:
        """Read all of an array."""
        return float(array.sum())

    def numbers(self, count: int) -> Iterator[int]:
        """So many of them, one by one, as fast as they are taken."""
        for number in range(count):  # noqa: UP028 - Ray cannot drive `yield from` a range.
            yield number
