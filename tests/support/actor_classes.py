"""Classes of actors for tests: light, as the processes of actors import them."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from typing import Any, List

from gpumesh.runtime.actor_exit import exit_actor


class Counter:
    """What most tests need."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, by: int = 1) -> int:
        self.value += by
        return self.value

    def fail(self, error: BaseException) -> None:
        raise error

    def wait_for(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.002)
        return path

    def modules(self) -> List[str]:
        return sorted(sys.modules)

    def garbage(self) -> int:
        """What only the collector finds, since it was switched off."""
        found = gc.collect()
        gc.disable()
        return found

    def __call__(self, what: str) -> str:
        return f"called with {what}"

    def close(self) -> None:
        print(f"closed at {self.value}")

    def __del__(self) -> None:
        print("deleted")


class Leaving(Counter):
    def leave(self) -> None:
        try:
            exit_actor()
        except Exception:  # What every second method has must not keep an actor alive.
            print("not to be caught")


class Meeting:
    """Calls that wait for each other."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self.order: Any = []
        self.here = self.most = 0
        self.lock = threading.Lock()

    def meet(self) -> str:
        self.barrier.wait(20)
        return threading.current_thread().name

    def count(self, number: int) -> int:
        with self.lock:
            self.order.append(number)
            self.here += 1
            self.most = max(self.most, self.here)
        time.sleep(0.002)
        with self.lock:
            self.here -= 1
        return number

    def counted(self) -> Any:
        return self.order, self.most
