"""A coordinator on a thread of a program ends when it is told to, whoever does not listen any more; nothing of such peers is left."""

from __future__ import annotations

import gc
import socket
import time
from typing import Iterator

import pytest

from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import DefineFunction, DefineSpec, Goodbye, MeshChanged, Query, SubmitTasks
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.runtime.loop import LoopThread
from tests.support.mesh_peer import MeshPeer
from tests.support.processes import descriptors, until

SPEC = TaskSpec(b"f" * 16, "train")
STOP_SECONDS = 4.0  # Far above what goodbyes are given, far below what the system gives to a peer that does not read.


class Served:
    """A coordinator on a thread of its own, on a port whose connections keep little in the system: what is not read soon waits here."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port = self.listener.getsockname()[1]
        self.thread = LoopThread("coordinator")
        self.coordinator = self.thread.call(self._start, timeout=5.0)
        self.idle = descriptors()

    async def _start(self) -> Coordinator:
        coordinator = Coordinator(token="secret")
        await coordinator.start(self.listener)
        return coordinator

    def peer(self, *, client: int = 0, worker: str = "") -> MeshPeer:
        return MeshPeer(self.port, "secret", client=client, worker=worker)

    def stop(self) -> None:
        """As `start_coordinator(...).stop()`."""
        self.thread.call(self.coordinator.stop, timeout=5.0)
        self.thread.stop()
        gc.collect()  # What the event loop did not close says so.


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    if not served.thread.loop.is_closed():
        served.stop()


def read_nothing(peer: MeshPeer) -> None:
    """Ask until the coordinator reads no more either: far more is on its way to this peer than the system keeps."""
    peer.socket.settimeout(0.5)
    try:
        for number in range(20_000):  # The answers, which nobody reads, are far larger than the questions.
            peer.send(Query(number, "workers", {}))
    except TimeoutError:
        pass


def leave_without_reading(served: Served) -> MeshPeer:
    """A worker that says goodbye with most of a task's 800 KB unread and its socket open; the coordinator has heard of it."""
    client = served.peer(client=7)
    worker = served.peer(worker="deaf")
    client.expect(MeshChanged)
    first = 7 << SEQUENCE_BITS
    client.send(
        DefineFunction(SPEC.function, b"body"),
        DefineSpec(1, SPEC),
        SubmitTasks(1, [first], [bytes(800_000)]),
        SubmitTasks(1, [first + 1], [b""]),
    )
    worker.send(Goodbye("leaving"))
    while client.expect(MeshChanged).workers:
        pass
    client.close()
    return worker


def test_a_client_that_does_not_read_its_answers_does_not_hold_up_the_end(served: Served) -> None:
    client = served.peer(client=7)
    workers = [served.peer(worker=f"w{number}") for number in range(20)]
    read_nothing(client)

    began = time.monotonic()
    served.stop()

    assert time.monotonic() - began < STOP_SECONDS
    for peer in (client, *workers):
        peer.close()


def test_what_waits_for_a_peer_that_left_without_reading_does_not_outlive_the_coordinator(served: Served) -> None:
    worker = leave_without_reading(served)

    served.stop()

    assert descriptors() < served.idle + 1  # Only our own end of that connection, and a loop and a port less.
    worker.close()


def test_a_peer_that_left_without_reading_is_closed_on_soon(served: Served) -> None:
    worker = leave_without_reading(served)
    assert (
        descriptors() >= served.idle + 3
    )  # Both ends of that connection, and what the event loop keeps from its first one on.

    until(lambda: descriptors() == served.idle + 2, STOP_SECONDS, what="only our own end of that connection is left")

    worker.close()


def test_whoever_is_just_being_accepted_at_the_end_is_closed_on(served: Served) -> None:
    callers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]

    served.stop()

    assert descriptors() < served.idle + len(callers)
    for caller in callers:
        caller.close()
