"""The slot of a task, with threads that wait at the same time, against a scripted agent on the other end of the socket."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any, Callable, Iterator, List, Tuple

import pytest

from gpumesh.protocol.connection import Connection
from gpumesh.protocol.messages import SlotGranted, TaskWaits
from gpumesh.runtime.runner_channel import RunnerChannel
from gpumesh.runtime.runner_slots import LOOSE_SECONDS, TaskSlot
from tests.support.processes import until

SOON = 20.0
TASK = 7
AWAY, ASKS = TaskWaits(TASK, True), TaskWaits(TASK, False)


class Site:
    """A process with one task, and its agent."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.number, self.task = 1, TASK
        self.flushes = 0
        self.channel = RunnerChannel(ours, self._on_message, lambda answer: None)
        self.slot = TaskSlot(self.channel, lambda: (self.number, self.task), self._flush)
        self._socket = theirs
        self._connection = Connection.trusted()
        self._heard: List[Any] = []

    def _flush(self) -> None:
        self.flushes += 1

    def _on_message(self, kind: Any, message: Any) -> None:
        assert kind is SlotGranted
        self.slot.on_granted(message.task_id)

    def hear(self) -> Any:
        """The next that the agent is told."""
        while not self._heard:
            received = self._socket.recv_into(self._connection.get_buffer())
            self._heard += self._connection.buffer_updated(received, 0.0)
        return self._heard.pop(0)

    def hears_nothing(self) -> bool:
        return not self._heard and not select.select([self._socket], [], [], 5 * LOOSE_SECONDS)[0]

    def grant(self, task: int = TASK) -> None:
        self._connection.send(SlotGranted(task))
        for part in self._connection.data_to_send():
            self._socket.sendall(part)


@pytest.fixture
def site() -> Iterator[Site]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(SOON)
    yield Site(ours, theirs)
    theirs.close()
    ours.close()


def beside(act: Callable[[], Any]) -> Tuple[threading.Thread, List[Any]]:
    done: List[Any] = []
    thread = threading.Thread(target=lambda: done.append(act()), daemon=True)
    thread.start()
    return thread, done


def test_it_is_given_away_and_taken_back_before_the_task_goes_on(site: Site) -> None:
    number = site.slot.begin()
    assert site.hear() == AWAY
    assert site.flushes == 1

    thread, done = beside(lambda: site.slot.end(number))
    assert site.hear() == ASKS
    assert not done
    site.grant()
    thread.join(SOON)
    assert done


def test_while_one_thread_waits_others_neither_give_nor_take(site: Site) -> None:
    first, second = site.slot.begin(), site.slot.begin()
    assert site.hear() == AWAY

    site.slot.end(first)
    assert site.hears_nothing()

    thread, done = beside(lambda: site.slot.end(second))
    assert site.hear() == ASKS
    site.grant()
    thread.join(SOON)
    assert done


def test_who_begins_to_wait_while_another_asks_gives_it_away_again(site: Site) -> None:
    first = site.slot.begin()
    assert site.hear() == AWAY
    asking, asked = beside(lambda: site.slot.end(first))
    assert site.hear() == ASKS

    second = site.slot.begin()
    assert site.hear() == AWAY
    site.grant()  # Void, or from before: the one that asked works on while the other waits.
    asking.join(SOON)
    assert asked

    thread, done = beside(lambda: site.slot.end(second))
    assert site.hear() == ASKS
    assert not done
    site.grant()
    thread.join(SOON)
    assert done


def test_who_is_interrupted_asks_and_does_not_wait(site: Site) -> None:
    number = site.slot.begin()
    assert site.hear() == AWAY

    site.slot.end(number, goes_on=False)
    assert site.hear() == ASKS

    again = site.slot.begin()  # In its own clean-up.
    assert site.hear() == AWAY
    thread, done = beside(lambda: site.slot.end(again))
    assert site.hear() == ASKS
    site.grant()  # The answer to the first.
    assert not done
    site.grant()
    thread.join(SOON)
    assert done


def test_who_waits_again_in_a_moment_asks_for_nothing(site: Site) -> None:
    number = site.slot.begin()
    assert site.hear() == AWAY
    for _ in range(20):
        site.slot.end(number, is_brief=True)
        assert site.slot.begin() == number

    assert site.hears_nothing()


def test_who_does_not_wait_again_gets_in_line_and_is_not_stopped(site: Site) -> None:
    number = site.slot.begin()
    assert site.hear() == AWAY

    started = time.monotonic()
    site.slot.end(number, is_brief=True)
    assert site.hear() == ASKS
    assert time.monotonic() - started >= LOOSE_SECONDS

    site.grant()
    site.channel.receive(lambda: True)
    assert site.slot.begin() == number
    assert site.hear() == AWAY


def test_a_task_that_ends_without_it_leaves_nothing_for_the_next(site: Site) -> None:
    number = site.slot.begin()
    assert site.hear() == AWAY
    site.slot.end_task()
    site.number, site.task = 2, TASK + 1

    site.slot.end(number)  # A thread that it has left behind.
    assert site.hears_nothing()
    other = site.slot.begin()
    assert site.hear() == TaskWaits(TASK + 1, True)
    thread, done = beside(lambda: site.slot.end(other))
    assert site.hear() == TaskWaits(TASK + 1, False)
    site.grant()  # Of the task before.
    site.grant(TASK + 1)
    thread.join(SOON)
    assert done


def test_between_tasks_there_is_none(site: Site) -> None:
    site.number = site.task = 0

    site.slot.end(site.slot.begin())
    assert site.hears_nothing()


def test_many_threads_at_once_end_as_they_began(site: Site) -> None:
    """Whatever comes in between, in the end the slot is the task's."""
    stop = threading.Event()
    balance: List[int] = []

    def agent() -> None:
        while not stop.is_set():
            message = site.hear()
            balance.append(1 if message.waits else -1)
            if not message.waits:
                site.grant()

    def work() -> None:
        for step in range(50):
            number = site.slot.begin()
            if step % 3 == 0:
                time.sleep(0.0001)
            site.slot.end(number, goes_on=step % 7 != 0, is_brief=step % 5 == 0)

    listening, _ = beside(agent)
    workers = [beside(work) for _ in range(6)]
    for thread, done in workers:
        thread.join(SOON)
        assert done
    site.slot.end(site.slot.begin())

    until(lambda: sum(balance) == 0, SOON, what="as many questions as gifts")
    stop.set()
    site.slot.begin()  # The last that the agent hears.
    listening.join(SOON)
    assert not listening.is_alive()
