"""The runner's socket shared by threads, and interrupts at every moment, against a scripted agent on the other end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any, Callable, Iterator, List, Optional

import pytest

from gpumesh.protocol.connection import Connection
from gpumesh.protocol.messages import LocateObject, ObjectAt, PutObject, RunTasks
from gpumesh.runtime.runner_channel import RunnerChannel
from tests.support.processes import until

MB = 1_000_000


class Agent:
    """Reads questions and answers them when told to."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._connection = Connection.trusted()

    def read(self, count: int = 1) -> List[Any]:
        """The next messages."""
        found: List[Any] = []
        while len(found) < count:
            received = self._socket.recv_into(self._connection.get_buffer())
            assert received, "the runner closed its socket"
            found += self._connection.buffer_updated(received, 0.0)
        return found

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._connection.send(message)
        for part in self._connection.data_to_send():
            self._socket.sendall(part)

    def answer(self, question: LocateObject) -> None:
        self.send(ObjectAt(question.number, question.oid, f"/{question.oid}", 8, None, ""))


class Runner:
    """As much of a runner as a channel needs."""

    def __init__(self, sock: socket.socket) -> None:
        self.tasks: List[Any] = []
        self.stray: List[Any] = []
        self.channel = RunnerChannel(sock, self._on_message, self.stray.append)
        self.is_executing = True

    def _on_message(self, kind: Any, message: Any) -> None:
        if kind is ObjectAt:
            self.channel.take_answer(message)
        else:
            self.tasks.append(message)

    def locate(self, oid: int, deadline: Optional[float] = None) -> Any:
        return self.channel.answer_to(self.channel.ask(lambda number: LocateObject(number, oid)), deadline)

    def on_signal(self, number: int, frame: Any) -> None:
        if self.channel.is_busy:
            self.channel.is_interrupted = True
        else:
            raise KeyboardInterrupt


@pytest.fixture
def pair() -> Iterator[Any]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    runner = Runner(ours)
    before = signal.signal(signal.SIGINT, runner.on_signal)
    yield runner, Agent(theirs)
    signal.signal(signal.SIGINT, before)
    theirs.close()
    ours.close()


def beside(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_tasks_that_come_before_the_answer_are_kept(pair: Any) -> None:
    runner, agent = pair

    def script() -> None:
        (question,) = agent.read()
        agent.send(RunTasks(1, [(5, 1, b"later")]))
        agent.answer(question)

    thread = beside(script)
    assert runner.locate(7).path == "/7"
    thread.join(10)
    assert runner.tasks == [RunTasks(1, ((5, 1, b"later"),))]


def test_threads_get_their_own_answers_in_whatever_order_they_come(pair: Any) -> None:
    runner, agent = pair
    found = {}

    def one(oid: int) -> None:
        found[oid] = runner.locate(oid).path

    threads = [beside(lambda oid=oid: one(oid)) for oid in range(1, 9)]  # type: ignore[misc]
    questions = agent.read(9 - 1)

    def script() -> None:
        questions.extend(agent.read())
        for question in reversed(questions):
            agent.answer(question)

    other = beside(script)
    one(9)
    for thread in [*threads, other]:
        thread.join(10)
    assert found == {oid: f"/{oid}" for oid in range(1, 10)}


def test_a_thread_that_waits_is_served_while_the_main_thread_is_idle(pair: Any) -> None:
    runner, agent = pair
    found: List[Any] = []
    thread = beside(lambda: found.append(runner.locate(3)))

    def script() -> None:
        (question,) = agent.read()
        agent.answer(question)
        thread.join(10)
        agent.send(RunTasks(1, []))

    other = beside(script)
    while not runner.tasks:
        assert runner.channel.receive(runner.tasks.__len__)
    other.join(10)
    assert found[0].path == "/3"


def test_the_main_thread_waits_while_another_receives(pair: Any) -> None:
    runner, agent = pair
    found: List[Any] = []
    thread = beside(lambda: found.append(runner.locate(3)))
    (question,) = agent.read()
    until(lambda: runner.channel._is_reading)

    def script() -> None:
        agent.send(RunTasks(1, []))
        agent.answer(question)

    other = beside(script)
    assert runner.channel.receive(runner.tasks.__len__)
    assert len(runner.tasks) == 1
    other.join(10)
    thread.join(10)
    assert found[0].path == "/3"


def test_an_interrupt_ends_the_wait_and_the_late_answer_is_stray(pair: Any) -> None:
    runner, agent = pair
    questions: List[Any] = []

    def script() -> None:
        questions.extend(agent.read())
        interrupt()

    thread = beside(script)
    with pytest.raises(KeyboardInterrupt):
        runner.locate(7)
    thread.join(10)
    runner.channel.end_task()  # It may have come while the question was being sent.
    agent.answer(questions[0])
    thread = beside(lambda: agent.answer(agent.read()[0]))
    assert runner.locate(8).path == "/8"
    assert [answer.oid for answer in runner.stray] == [7]
    thread.join(10)


def test_an_interrupt_in_the_middle_of_a_frame_comes_after_it(pair: Any) -> None:
    runner, agent = pair
    data = bytes(60_000)
    messages = [PutObject(number, 1, "", data, []) for number in range(200)]  # Far more than a socket holds.
    beside(lambda: (until(lambda: runner.channel.is_busy), time.sleep(0.1), interrupt()))
    found: List[Any] = []

    def script() -> None:
        until(lambda: runner.channel.is_interrupted)
        found.extend(agent.read(200))

    thread = beside(script)
    with pytest.raises(KeyboardInterrupt):
        runner.channel.send(*messages)
    thread.join(10)
    assert [message.oid for message in found] == list(range(200))
    assert not runner.channel.is_interrupted


def test_what_does_not_come_in_time_is_stray_when_it_comes(pair: Any) -> None:
    runner, agent = pair
    assert runner.locate(7, time.monotonic() + 0.05) is None
    agent.answer(agent.read()[0])
    thread = beside(lambda: agent.answer(agent.read()[0]))
    assert runner.locate(8).path == "/8"
    thread.join(10)
    assert [answer.oid for answer in runner.stray] == [7]


def test_hundreds_of_interrupts_lose_no_answer(pair: Any) -> None:
    runner, agent = pair
    stop = threading.Event()
    over: List[Any] = []

    def script() -> None:
        while True:
            for message in agent.read():
                if type(message) is PutObject:
                    over.append(message)
                    return
                agent.answer(message)

    def disturb() -> None:
        while not stop.wait(0.002):
            interrupt()

    thread, other = beside(script), beside(disturb)
    asked = answered = 0
    try:
        while answered < 300:
            try:
                asked += 1
                assert runner.locate(asked).oid == asked
                answered += 1
            except KeyboardInterrupt:
                pass
    finally:
        stop.set()
        while True:
            try:
                other.join(10)
                break
            except KeyboardInterrupt:
                continue
    runner.channel.send(PutObject(1, 1, "", b"", []))
    thread.join(10)
    assert over
    assert not runner.channel.is_busy
