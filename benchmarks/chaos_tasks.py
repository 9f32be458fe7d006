"""What the chaos run lets workers do, and what it expects back. Loads nothing that a runner does not have anyway."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Tuple

NUMBER_BYTES = 8


def noop(number: int) -> int:
    """The least that can be done."""
    return number


def nap(number: int, seconds: float) -> int:
    """Keep a slot for a while."""
    time.sleep(seconds)
    return number


def pattern(number: int, nbytes: int) -> bytes:
    """About `nbytes` bytes that only this number has."""
    return number.to_bytes(NUMBER_BYTES, "little") * (nbytes // NUMBER_BYTES)


def blob(number: int, nbytes: int) -> bytes:
    """A value that travels inside the pickle."""
    return pattern(number, nbytes)


def buffer(number: int, nbytes: int) -> bytearray:
    """A value that travels beside the pickle."""
    return bytearray(pattern(number, nbytes))


def measure(number: int, data: bytes) -> Tuple[int, int]:
    """What became of a large argument: its length, and the number that it was made of."""
    return int.from_bytes(data[-NUMBER_BYTES:], "little") if data else number, len(data)


def fail(number: int) -> None:
    """End with an exception."""
    raise ValueError(f"task {number} fails on purpose")


def mark(number: int, seconds: float, path: str) -> int:
    """Leave a line at the start and one at the end, in one file that all tasks share: appending one line is atomic."""
    _append(path, f"start {number} {os.getpid()} {time.monotonic():.6f}\n")
    time.sleep(seconds)
    _append(path, f"end {number} {os.getpid()} {time.monotonic():.6f}\n")
    return number


def follow(before: int, number: int) -> Tuple[int, int]:
    """The second of two tasks: it has the result of the first among its arguments."""
    return before, number


def mixed(kind: str, number: int, argument: float) -> Any:
    """One item of a map."""
    return ITEMS[kind](number, argument)


def _append(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


ITEMS: Dict[str, Any] = {
    "noop": lambda number, _: noop(number),
    "nap": nap,
    "blob": lambda number, nbytes: blob(number, int(nbytes)),
    "fail": lambda number, _: fail(number),
}
