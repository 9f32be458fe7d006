"""A user's value as bytes that nobody but its consumer opens."""

from __future__ import annotations

from typing import Any, List, Union


class OutOfBand:
    """A pickle and the large buffers it refers to, in order: `parts[0]` is the pickle (protocol 5).

    The parts are bytes-like; they travel beside a message's body, never inside it.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: List[Any]) -> None:
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutOfBand) and [bytes(p) for p in self.parts] == [bytes(p) for p in other.parts]

    def __hash__(self) -> int:
        return hash(tuple(bytes(part) for part in self.parts))

    def __repr__(self) -> str:
        return f"OutOfBand({len(self.parts)} parts, {self.nbytes} bytes)"


Payload = Union[bytes, OutOfBand]
"""Small values are one `bytes`; values with large buffers are `OutOfBand`."""


def payload_bytes(payload: Payload) -> int:
    """Size of a payload in bytes."""
    return len(payload) if isinstance(payload, bytes) else payload.nbytes
