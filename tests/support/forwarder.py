"""`python -m tests.support.forwarder PORT HOST:PORT`: passes each connection on, as a port that a router or a tunnel forwards."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading


def pump(source: socket.socket, target: socket.socket) -> None:
    """One direction, until its end."""
    with contextlib.suppress(OSError):
        while True:
            data = source.recv(1 << 18)
            if not data:
                break
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def carry(sock: socket.socket, host: str, port: int) -> None:
    """One connection."""
    with sock, contextlib.suppress(OSError), socket.create_connection((host, port), 5) as inner:
        inner.settimeout(None)
        there = threading.Thread(target=pump, args=(sock, inner), daemon=True)
        there.start()
        pump(inner, sock)
        there.join()


def main() -> None:
    host, _, port = sys.argv[2].rpartition(":")
    with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as listener:
        print("forwarding", flush=True)
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=carry, args=(sock, host, int(port)), daemon=True).start()


if __name__ == "__main__":
    main()
