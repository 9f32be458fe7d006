"""A coordinator on a thread of a program ends when it is told to, whoever does not listen any more."""

from __future__ import annotations

import time

from gpumesh import GPUMesh
from gpumesh.protocol.messages import Query
from tests.support.mesh_peer import MeshPeer

STOP_SECONDS = 4.0  # Far above what goodbyes are given, far below what the system gives to a peer that does not read.


def test_a_client_that_does_not_read_its_answers_does_not_hold_up_the_end() -> None:
    handle = GPUMesh.start_coordinator(port=0)
    client = MeshPeer(int(handle.url.rpartition(":")[2]), handle.token, client=7)
    workers = [MeshPeer(int(handle.url.rpartition(":")[2]), handle.token, worker=f"w{number}") for number in range(20)]
    try:
        client.socket.settimeout(0.5)
        try:
            for number in range(20_000):  # The answers, which nobody reads, are far larger than the questions.
                client.send(Query(number, "workers", {}))
        except TimeoutError:
            pass  # The coordinator reads no more of them either.

        began = time.monotonic()
        handle.stop()

        assert time.monotonic() - began < STOP_SECONDS
    finally:
        for peer in (client, *workers):
            peer.socket.close()
