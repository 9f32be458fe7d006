"""A client or worker of a real coordinator, driven message by message from a test."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, List, Sequence, Type

from gpumesh.model.resources import DeviceFacts, WorkerFacts
from gpumesh.protocol.messages import Pong, RegisterClient, RegisterWorker
from tests.support.peers import handshake


class MeshPeer:
    """One authenticated and registered connection.

    Args:
        held: What a worker that is back still has, as in RegisterWorker.
        resumes: It is a client that is back.
    """

    def __init__(
        self,
        port: int,
        token: str,
        *,
        client: int = 0,
        worker: str = "",
        slots: int = 1,
        devices: Sequence[DeviceFacts] = (),
        held: Sequence[Any] = (),
        resumes: bool = False,
    ) -> None:
        self.socket, self.connection = handshake(port, token, role="worker" if worker else "client")
        self.seen: List[Any] = []
        if worker:
            facts = WorkerFacts(hostname=worker, slots=slots, cores=slots, devices=tuple(devices), pid=os.getpid())
            self.send(RegisterWorker(worker, facts, tuple(held)))
        else:
            self.send(RegisterClient(client, f"client {client}", resumes))

    def send(self, *messages: Any) -> None:
        """Send messages, each at once."""
        for message in messages:
            self.connection.send(message)
        self.flush()

    def flush(self) -> None:
        """All that may leave now."""
        while True:
            parts = self.connection.data_to_send()
            if not parts:
                return
            for part in parts:
                self.socket.sendall(part)

    def expect(self, kind: Type[Any], timeout: float = 10.0) -> Any:
        """The next message of this kind; others are kept in `seen`."""
        deadline = time.monotonic() + timeout
        while True:
            for position, message in enumerate(self.seen):
                if type(message) is kind:
                    return self.seen.pop(position)
            self._receive(deadline)

    def quiet(self, seconds: float = 0.1) -> List[Any]:
        """What came until nothing came for a while."""
        try:
            while self.connection.established:
                self._receive(time.monotonic() + seconds)
        except TimeoutError:
            pass
        seen, self.seen = self.seen, []
        return seen

    def _receive(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not told in time; seen: {self.seen}")
        self.socket.settimeout(left)
        try:
            count = self.socket.recv_into(self.connection.get_buffer())
        except socket.timeout:
            raise TimeoutError(f"not told in time; seen: {self.seen}") from None
        events = self.connection.buffer_updated(count, time.monotonic()) if count else self.connection.receive_eof(0.0)
        self.socket.settimeout(None)
        self.flush()
        self.seen.extend(event for event in events if type(event) is not Pong)

    def close(self) -> None:
        """Cut the line."""
        self.socket.close()

    def __enter__(self) -> MeshPeer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
