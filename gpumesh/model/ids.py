"""Identifiers and how people read them."""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", int)
"""`client number << 32 | sequence`: unique in a mesh, a machine word, cheap as a key and on the wire."""

ClientNumber = NewType("ClientNumber", int)
"""31 random bits that a client draws for itself; the coordinator refuses one that is taken."""

WorkerId = NewType("WorkerId", str)
"""16 hexadecimal digits, drawn anew by each start of a worker agent."""

SEQUENCE_BITS = 32
SEQUENCE_LIMIT = 1 << SEQUENCE_BITS
CLIENT_LIMIT = 1 << 31


def make_task_id(client: ClientNumber, sequence: int) -> TaskId:
    """The id of a client's `sequence`-th task, 0 <= sequence < 2**32."""
    return TaskId((client << SEQUENCE_BITS) | sequence)


def client_of(task_id: TaskId) -> ClientNumber:
    """Whose task it is."""
    return ClientNumber(task_id >> SEQUENCE_BITS)


def show_task(task_id: TaskId) -> str:
    """The form people read and type: `t-1a2b3c4d-17`."""
    return f"t-{task_id >> SEQUENCE_BITS:08x}-{task_id & (SEQUENCE_LIMIT - 1)}"
