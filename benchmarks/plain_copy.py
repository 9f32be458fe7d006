"""What bare blocking sockets do: the same bytes from this process to another over loopback. The reference for `cross_host`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

FRESH, REUSED = "fresh", "reused"  # The receiver's memory: a new numpy array for each copy, or the same one again.
_LENGTH_BYTES = 8


class PlainCopy:
    """A process that receives copies, one at a time; it ends with the block."""

    def __init__(self, memory: str) -> None:
        self._memory = memory

    def __enter__(self) -> PlainCopy:
        command = [sys.executable, "-m", "benchmarks.plain_copy", self._memory]
        self.receiver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self.receiver.stdout is not None
        port = int(self.receiver.stdout.readline())
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
        self.receiver.communicate(timeout=10)

    def copy(self, array: Any) -> float:
        """Seconds until the receiver has said that all of it is there.

        Raises:
            ConnectionError: It did not say so.
        """
        view = memoryview(array).cast("B")
        before = time.perf_counter()
        self._socket.sendall(len(view).to_bytes(_LENGTH_BYTES, "little"))
        self._socket.sendall(view)
        answer = self._socket.recv(1)
        elapsed = time.perf_counter() - before
        if answer != view[-1:]:
            raise ConnectionError(f"the receiver answered {answer!r} instead of the last byte")
        return elapsed


def receive(memory: str) -> None:
    """Be the other process: print the port, then receive from the one who connects until he leaves."""
    import numpy

    kept: Any = None
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            head = connection.recv(_LENGTH_BYTES, socket.MSG_WAITALL)
            if not head:
                return
            wanted = int.from_bytes(head, "little")
            if memory == FRESH or kept is None or len(kept) != wanted:
                kept = None  # Before the new one, so that the old one's memory is given back.
                kept = numpy.empty(wanted, dtype=numpy.uint8)
            view = memoryview(kept)
            received = 0
            while received < wanted:
                count = connection.recv_into(view[received:])
                if not count:
                    return
                received += count
            connection.sendall(view[-1:])
            del view


if __name__ == "__main__":
    receive(sys.argv[1])
