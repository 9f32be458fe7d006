"""A coordinator in miniature for the client's tests: real sockets, real protocol, answers chosen by the test."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from gpumesh.model.outcomes import Status
from gpumesh.protocol.connection import Connection, Established, PeerFacts
from gpumesh.protocol.messages import (
    Answer,
    CancelTasks,
    DefineFunction,
    DefineSpec,
    Query,
    RegisterClient,
    SubmitTasks,
    TaskResults,
)
from gpumesh.serialization.values import dumps

FACTS = PeerFacts("0", "3.11", "test")
Result = Tuple[int, int, Any, float]


class FakeMesh:
    """Listens on loopback. By default each task returns its own sequence number at once, on worker "w"."""

    def __init__(self, *, token: str = "secret", workers: int = 1, port: int = 0, answers: bool = True) -> None:
        self.token = token
        self.workers = workers
        self.answers = answers  # False: the test sends the results itself.
        self.on_submit: Optional[Callable[[int, Any], Result]] = None
        self.on_query: Callable[[Query], Any] = lambda query: [] if query.what == "workers" else {"asked": query.what}
        self.received: List[Any] = []
        self.tasks: Dict[int, Any] = {}  # id -> payload
        self.cancelled: List[int] = []
        self.connections: List[Tuple[socket.socket, Connection]] = []
        self._changed = threading.Condition()
        self._is_stopped = False
        self._lock = threading.RLock()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeMesh:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and drop everybody."""
        self._is_stopped = True
        self._thread.join(5)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Cut all connections, as a crash would."""
        with self._lock:
            for sock, _ in self.connections:
                sock.close()
            self.connections = []

    def send(self, *messages: Any) -> None:
        """To the last client."""
        with self._lock:
            sock, connection = self.connections[-1]
            for message in messages:
                connection.send(message)
            self._flush(sock, connection)

    def finish(
        self, task_id: int, value: Any = None, *, status: int = Status.OK, payload: Any = None, worker: str = "w"
    ) -> None:
        """Send one result."""
        body = dumps(value) if payload is None else payload
        self.send(TaskResults(worker, [(task_id, int(status), body, 0.5)]))

    def until(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        """Wait for what the mesh has received."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), f"did not come about; received {self.received[-5:]}"

    def _run(self) -> None:
        while not self._is_stopped:
            with self._lock:
                socks = [sock for sock, _ in self.connections]
            try:
                ready, _, _ = select.select([self._listener, *socks], [], [], 0.02)
            except (OSError, ValueError):
                continue  # `drop` closed one meanwhile.
            for sock in ready:
                if sock is self._listener:
                    self._accept()
                else:
                    self._receive(sock)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection.listen(token=self.token, nonce=os.urandom(32), mesh="m", now=time.monotonic(), facts=FACTS)
        connection.workers = self.workers
        with self._lock:
            self.connections.append((sock, connection))

    def _receive(self, sock: socket.socket) -> None:
        with self._lock:
            connection = dict(self.connections).get(sock)
            if connection is None:
                return
            try:
                count = sock.recv_into(connection.get_buffer())
            except OSError:
                count = 0
            now = time.monotonic()
            events = connection.buffer_updated(count, now) if count else connection.receive_eof(now)
            results: List[Result] = []
            with self._changed:
                for event in events:
                    self._on_event(connection, event, results)
                self._changed.notify_all()
            if results:
                connection.send(TaskResults("w", results))
            self._flush(sock, connection)
            if not count:
                sock.close()
                self.connections = [pair for pair in self.connections if pair[0] is not sock]

    def _on_event(self, connection: Connection, event: Any, results: List[Result]) -> None:
        kind = type(event)
        if kind in (RegisterClient, DefineFunction, DefineSpec, Established):
            self.received.append(event)
        elif kind is SubmitTasks:
            self.received.append(event)
            for task_id, payload in zip(event.task_ids, event.payloads):
                self.tasks[task_id] = payload
                if self.on_submit is not None:
                    results.append(self.on_submit(task_id, payload))
                elif self.answers:
                    results.append((task_id, 0, dumps(task_id & 0xFFFFFFFF), 0.25))
        elif kind is CancelTasks:
            self.cancelled.extend(event.task_ids)
            if self.answers:
                results.extend((task_id, int(Status.CANCELLED), {"reason": ""}, 0.0) for task_id in event.task_ids)
        elif kind is Query:
            connection.send(Answer(event.number, self.on_query(event), ""))

    def _flush(self, sock: socket.socket, connection: Connection) -> None:
        while True:
            parts = connection.data_to_send()
            if not parts:
                return
            for part in parts:
                try:
                    sock.sendall(part)
                except OSError:
                    return


class Exported:
    """What serialization.functions would have made."""

    digest = b"d" * 16
    body = b"body"
    name = "work"
    python = ""
