"""The standard library's ProcessPoolExecutor, forked workers."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from typing import Any, Callable, Iterator, List, Optional, Sequence

from benchmarks.systems import SLOTS

START = f"""
import concurrent.futures
import multiprocessing


def noop():
    return 1


with concurrent.futures.ProcessPoolExecutor({SLOTS}, mp_context=multiprocessing.get_context("fork")) as executor:
    print(executor.submit(noop).result(), flush=True)
"""


class ProcessPool:
    """`submit` for one future each, `map` with its default of one item per message for a stream."""

    streams = False
    getter = None

    def open(self, *, object_bytes: Optional[int] = None) -> None:
        self._executor = concurrent.futures.ProcessPoolExecutor(SLOTS, mp_context=multiprocessing.get_context("fork"))

    def close(self) -> None:
        self._executor.shutdown()

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        submit = self._executor.submit
        return lambda item: submit(function, item).result()

    def submitter(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        submit = self._executor.submit
        return lambda item: submit(function, item)

    def submit_all(self, function: Callable[..., Any], items: Sequence[Any]) -> List[Any]:
        submit = self._executor.submit
        return [submit(function, item) for item in items]

    def gather(self, futures: List[Any]) -> List[Any]:
        return [future.result() for future in futures]

    def stream(self, function: Callable[..., Any], items: Sequence[Any]) -> Iterator[Any]:
        return self._executor.map(function, items)

    def put(self, value: Any) -> Any:
        return value  # It has no store: the value goes with every task.

    def get(self, ref: Any) -> Any:
        return ref

    def heads(self) -> List[int]:
        return []  # The driver holds them.

    def stores(self) -> List[int]:
        return []


SYSTEM = ProcessPool
