"""A user's value as bytes that nobody but its consumer opens, and how the parts of a call lie on the wire."""

from __future__ import annotations

from typing import Any, List, Tuple, Union

from gpumesh.model.records import NamedTuple


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


class Stored:
    """A value that lies in the object store: `oid` names it, `nbytes` is the size of its container (store.container)."""

    __slots__ = ("oid", "nbytes")

    def __init__(self, oid: int, nbytes: int) -> None:
        self.oid = oid
        self.nbytes = nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stored) and self.oid == other.oid

    def __hash__(self) -> int:
        return hash(self.oid)

    def __repr__(self) -> str:
        return f"Stored({self.oid:#x}, {self.nbytes} bytes)"


class Later:
    """The value of a task that has not ended, as far as its submitter knows."""

    __slots__ = ("task_id",)

    def __init__(self, task_id: int) -> None:
        self.task_id = task_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Later) and self.task_id == other.task_id

    def __hash__(self) -> int:
        return hash(self.task_id)

    def __repr__(self) -> str:
        return f"Later({self.task_id:#x})"


Body = Union[bytes, OutOfBand]
"""What lies in a message itself."""

Payload = Union[bytes, OutOfBand, Stored]
"""Small values are one `bytes`; a few large buffers in a small message are `OutOfBand`; what is over 64 KiB is `Stored`."""


class Bundle(NamedTuple):
    """A payload that refers to other values. On the wire a plain array, where any other payload is not one.

    Attributes:
        value: A call's arguments, or a result.
        inputs: (place, value) of a call: what stands in that position or under that keyword, a Payload or Later.
        refs: Objects that `value` refers to.
    """

    value: Any
    inputs: Tuple[Tuple[Union[int, str], Any], ...] = ()
    refs: Tuple[int, ...] = ()


_PAYLOADS = (bytes, OutOfBand, Stored)


def is_payload(payload: Any) -> bool:
    """Whether this can be the arguments or the result of a task."""
    if not isinstance(payload, tuple):
        return type(payload) in _PAYLOADS
    if len(payload) < len(Bundle._fields) or type(payload[0]) not in _PAYLOADS:
        return False
    inputs, refs = payload[1:3]
    if not isinstance(inputs, tuple) or not isinstance(refs, tuple) or any(type(oid) is not int for oid in refs):
        return False
    return all(
        isinstance(each, tuple) and len(each) == 2 and type(each[0]) in (int, str) and type(each[1]) in (*_PAYLOADS, Later)
        for each in inputs
    )


def payload_bytes(payload: Any) -> int:
    """Size of a payload in bytes, as it lies in a message."""
    if type(payload) is bytes:
        return len(payload)
    if type(payload) is OutOfBand:
        return payload.nbytes
    if isinstance(payload, tuple):
        return payload_bytes(payload[0]) + sum(payload_bytes(value) for _, value in payload[1]) + 8 * len(payload[2])
    return 16


def mentioned(payload: Any) -> List[int]:
    """The objects in a payload, each as often as it is mentioned."""
    if type(payload) is Stored:
        return [payload.oid]
    if not isinstance(payload, tuple):
        return []
    oids = list(payload[2])
    if type(payload[0]) is Stored:
        oids.append(payload[0].oid)
    oids.extend(value.oid for _, value in payload[1] if type(value) is Stored)
    return oids
