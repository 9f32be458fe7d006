"""A class of actors for tests in a real mesh; light, as the processes of actors import it."""

from __future__ import annotations

import os
import time
from typing import Any, List

import gpumesh


class Keeper:
    """Keeps arrays, and says what happens to it."""

    def __init__(self, log: str = "") -> None:
        self.log = log
        self.kept: List[Any] = []
        self.ref: Any = None

    def pid(self) -> int:
        return os.getpid()

    def add(self, number: int) -> int:
        self.kept.append(number)
        return len(self.kept)

    def total(self, array: Any) -> float:
        array += 1  # Nobody else sees this.
        self.kept.append(array)
        return float(array.sum())

    def last(self) -> Any:
        return self.kept[-1]

    def put(self, value: Any) -> Any:
        self.ref = gpumesh.put(value)
        return self.ref

    def get(self) -> Any:
        return gpumesh.get(self.ref)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def note(self, text: str) -> None:
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(text)

    def fail(self) -> None:
        raise ValueError("as asked")

    def leave(self) -> None:
        gpumesh.exit_actor()

    def crash(self) -> None:
        os._exit(3)

    def close(self) -> None:
        if self.log:
            self.note("closed ")
