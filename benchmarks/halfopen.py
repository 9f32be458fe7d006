"""`python -m benchmarks halfopen`: hundreds of connections that say nothing, or half a word, and one machine that really joins."""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import threading
import time
from typing import Any, Dict, Sequence, Set

from gpumesh.protocol import frames
from gpumesh.protocol.messages import Hello
from gpumesh.runtime.embedded import EmbeddedMesh, add_worker
from tests.support.peers import encoded
from tests.support.processes import descriptors, resident_bytes, until

KINDS: Dict[str, bytes] = {
    "silent": b"",
    "half a preamble": frames.PREAMBLE[:3],
    "no proof": frames.PREAMBLE + encoded(Hello("client", bytes(32), "0", "3.11", "test")),
    "half a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00",
    "half a request": b"GET / HTTP/1.1\r\nHost: x\r\n",
}


def main(arguments: Sequence[str]) -> int:
    """Measure and print one line of JSON for each kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks halfopen", description=__doc__)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3, help="joins of each kind (default 3)")
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    options = parser.parse_args(arguments)
    for kind in options.kind or list(KINDS):
        print(json.dumps(measure(kind, connections=options.connections, repeats=options.repeats)), flush=True)
    return 0


def measure(kind: str, *, connections: int, repeats: int) -> Dict[str, Any]:
    """How long a machine takes to join: alone, beside the others, and while others of another address come back whenever they are dropped."""
    with EmbeddedMesh(workers=1, slots=1) as mesh:
        coordinator = mesh.processes["coordinator"]
        alone = [_join(mesh) for _ in range(repeats)]
        before = resident_bytes(coordinator)
        crowd = Crowd(mesh.address.port, KINDS[kind], connections)
        try:
            beside = [_join(mesh) for _ in range(repeats)]
        finally:
            crowd.close()
        crowd = Crowd(mesh.address.port, KINDS[kind], connections, source="127.0.0.2")
        try:
            crowd.storm()
            within = [_join(mesh) for _ in range(repeats)]
            figures = {
                "kind": kind,
                "connections": connections,
                "join_alone_seconds": [round(seconds, 3) for seconds in alone],
                "join_beside_seconds": [round(seconds, 3) for seconds in beside],
                "join_in_storm_seconds": [round(seconds, 3) for seconds in within],
                "connections_in_storm": crowd.opened,
                "coordinator_descriptors": descriptors(coordinator),
                "coordinator_grown_mib": round((resident_bytes(coordinator) - before) / 2**20, 1),
            }
        finally:
            crowd.close()
    return figures


def _join(mesh: EmbeddedMesh) -> float:
    """From asking for a worker to the mesh having it."""
    from tests.support.client import Client

    with Client(mesh.url, mesh.token) as client:

        def alive() -> Set[str]:
            return {each["id"] for each in client.workers() if each["alive"]}

        until(lambda: bool(alive()), timeout=30)
        known = alive()
        started = time.perf_counter()
        worker = add_worker(mesh.url, token=mesh.token, slots=1)
        try:
            until(lambda: bool(alive() - known), timeout=30)
            return time.perf_counter() - started
        finally:
            worker.stop()
            until(lambda: not alive() - known, timeout=30)


class Crowd:
    """Connections that have all sent the same and stay open."""

    def __init__(self, port: int, first: bytes, count: int, *, source: str = "127.0.0.1") -> None:
        self.opened = 0
        self._source = source
        self._port = port
        self._first = first
        self._selector = selectors.DefaultSelector()
        for _ in range(count):
            self._keep(self._open())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._reopen, daemon=True)

    def _open(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), 30, (self._source, 0))
        with contextlib.suppress(OSError):
            sock.sendall(self._first)
        self.opened += 1
        return sock

    def _keep(self, sock: socket.socket) -> None:
        self._selector.register(sock, selectors.EVENT_READ)

    def storm(self) -> None:
        """From now on each that is dropped comes back at once."""
        self.opened = 0
        self._thread.start()

    def _reopen(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(0.05):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                with contextlib.suppress(OSError):
                    self._keep(self._open())

    def close(self) -> None:
        """All of them leave."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(30)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
