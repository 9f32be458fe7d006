"""The runner's socket: shared by the threads of a task, and never left in the middle of a frame by an interrupt.

Promises:

1. Frames leave whole and in order, whichever threads send.
2. One thread at a time receives, whoever waits for something; the others sleep until it has brought news.
3. An interrupt that comes while the main thread is in here is raised when it leaves, or as soon as it waits.
4. An answer that nobody waits for any more goes to `on_stray`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from itertools import count
from time import monotonic
from typing import Any, Callable, Dict, List, Optional

from gpumesh.protocol.connection import Connection

OnMessage = Callable[[Any, Any], None]


class RunnerChannel:
    """Talks with the agent.

    Args:
        sock: A blocking stream socket.
        on_message: (kind, message) for what is no answer; on the thread that received it.
        on_stray: An answer that came too late.
    """

    def __init__(self, sock: socket.socket, on_message: OnMessage, on_stray: Callable[[Any], None]) -> None:
        self.is_busy = False  # The main thread is in here, and not waiting: an interrupt must wait.
        self.is_interrupted = False  # One came meanwhile.
        self._socket = sock
        self._connection = Connection.trusted()
        self._on_message = on_message
        self._on_stray = on_stray
        self._main = threading.get_ident()
        self._sending = threading.Lock()
        self._turn = threading.Condition(threading.Lock())
        self._is_reading = False
        self._has_threads = False  # A thread other than the main one has asked for something.
        self._numbers = count(1)
        self._asked: List[int] = []  # By the main thread, since its task began.
        self._answers: Dict[int, Any] = {}  # Number of a question -> its answer, None until that is here.

    # --- sending

    def send(self, *messages: Any) -> None:
        """Send these in one go; returns when the kernel has them."""
        is_main = threading.get_ident() == self._main
        if is_main:
            self.is_busy = True
        try:
            connection = self._connection
            with self._sending:
                for message in messages:
                    connection.send(message)
                while True:
                    parts = connection.data_to_send()
                    if not parts:
                        break
                    for part in parts:
                        self._socket.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # The agent is gone.
        finally:
            if is_main:
                self._leave()

    # --- receiving

    def receive(self, is_enough: Callable[[], Any]) -> bool:
        """The idle main thread: take in what comes, once, or until it is enough; False at the end of the stream."""
        if not self._has_threads:
            self._is_reading = True
            if not self._has_threads:
                try:
                    is_open = self._take_in()
                finally:
                    self._is_reading = False
                if self._has_threads:
                    with self._turn:
                        self._turn.notify_all()
                return is_open
            self._is_reading = False
        with self._turn:
            self._turn.notify_all()
            return self._receive_until(is_enough, None, is_main=False)

    # --- questions

    def ask(self, make: Callable[[int], Any]) -> int:
        """Send the question that `make` makes with a fresh number; the number, for `answer_to`."""
        number = next(self._numbers)
        if threading.get_ident() == self._main:
            self._asked.append(number)
        self._answers[number] = None
        self.send(make(number))
        return number

    def answer_to(self, number: int, deadline: Optional[float] = None) -> Any:
        """Wait for an answer, receiving whatever else comes meanwhile; None when it has not come by then (monotonic time).

        Whatever ends the wait, the answer is no one's afterwards.
        """
        answers = self._answers
        is_main = threading.get_ident() == self._main
        if is_main:
            self.is_busy = True
        else:
            self._has_threads = True
        try:
            try:
                with self._turn:
                    if not self._receive_until(lambda: answers[number] is not None, deadline, is_main=is_main):
                        os._exit(0)  # The agent is gone.
            finally:
                if is_main:
                    self._leave()
        except BaseException:
            self.forget([number])
            raise
        return answers.pop(number)

    def wait_until(self, is_enough: Callable[[], Any], deadline: Optional[float] = None) -> bool:
        """Wait, on any thread, for something that what is received brings about; False when it has not come by then."""
        is_main = threading.get_ident() == self._main
        if is_main:
            self.is_busy = True
        else:
            self._has_threads = True
        try:
            with self._turn:
                if not self._receive_until(is_enough, deadline, is_main=is_main):
                    os._exit(0)  # The agent is gone.
        finally:
            if is_main:
                self._leave()
        return bool(is_enough())

    def look_again(self) -> None:
        """What somebody waits for may have come about in another way; of use where the main thread receives."""
        with self._turn:
            self._turn.notify_all()

    def fileno(self) -> int:
        """For an event loop that calls `receive_now` when something has come."""
        return self._socket.fileno()

    def receive_now(self) -> None:
        """Take in what has come, on the main thread, unless another thread is about to."""
        self.is_busy = True
        try:
            with self._turn:
                if not self._is_reading and self._poll(0.0) and not self._take_in():
                    os._exit(0)  # The agent is gone.
                self._turn.notify_all()
        finally:
            self._leave()

    def forget(self, numbers: List[int]) -> None:
        """Nobody waits for these answers any more."""
        for number in numbers:
            answer = self._answers.pop(number, None)
            if answer is not None:
                self._on_stray(answer)

    def end_task(self) -> None:
        """The task is over: what it has asked for and was interrupted before it waited, nobody waits for."""
        if self._asked:
            self.forget(self._asked)
            self._asked.clear()

    def take_answer(self, message: Any) -> None:
        """From `on_message`: this is an answer."""
        number = message.number
        if number in self._answers:
            self._answers[number] = message
        else:
            self._on_stray(message)

    # --- inside

    def _receive_until(self, is_enough: Callable[[], Any], deadline: Optional[float], *, is_main: bool) -> bool:
        """With the turn taken: receive, or wait while another thread does; False at the end of the stream."""
        turn = self._turn
        while not is_enough():
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                return True
            if self._is_reading:
                self._wait(turn.wait, left, is_main)
                continue
            self._is_reading = True
            turn.release()
            try:
                is_open = not self._wait(self._poll, left, is_main) or self._take_in()
            finally:
                turn.acquire()
                self._is_reading = False
                turn.notify_all()
            if not is_open:
                return False
        return True

    def _poll(self, seconds: Optional[float]) -> bool:
        """Wait until something can be received. Taking it in is another step: an interrupt must not come between the two."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def _take_in(self) -> bool:
        try:
            received = self._socket.recv_into(self._connection.get_buffer())
        except ConnectionResetError:
            received = 0
        if not received:
            return False
        for message in self._connection.buffer_updated(received, 0.0):
            self._on_message(type(message), message)
        return True

    def _wait(self, wait: Callable[[Optional[float]], bool], seconds: Optional[float], is_main: bool) -> bool:
        if not is_main:
            return wait(seconds)
        self._leave()
        try:
            return wait(seconds)
        finally:
            self.is_busy = True

    def _leave(self) -> None:
        self.is_busy = False
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
