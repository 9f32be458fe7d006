"""One connection between a client and another process that answers as a coordinator does, into memory that is used again and again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any, Dict, List

from gpumesh.client.link import MeshLink, dial, local_facts
from gpumesh.config import FETCH_WINDOW_BYTES, MIB
from gpumesh.network.address import parse_address
from gpumesh.protocol.connection import OBJECT_TRANSFER, Connection, Established, ObjectDelivered
from gpumesh.protocol.messages import Answer, FetchObject, ObjectSent, Query

TOKEN = "a token for one measurement"
_NUMBER = OBJECT_TRANSFER + 1


class LinkCopy:
    """A client's connection and the process at its other end; that ends with the block.

    Args:
        scheme: Of the address: "http" is plain on loopback, "https" is inside TLS.
    """

    def __init__(self, scheme: str, megabytes: int) -> None:
        self._scheme = scheme
        self._memory = bytearray(megabytes * MIB)

    def __enter__(self) -> LinkCopy:
        command = [sys.executable, "-m", "benchmarks.secured_link", str(len(self._memory))]
        self._other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._other.stdout is not None
        address = parse_address(f"{self._scheme}://127.0.0.1:{int(self._other.stdout.readline())}")
        self._link: MeshLink = dial(address, token=TOKEN, timeout=10, facts=local_facts())[0]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._link.close("")
        self._link.release()
        self._other.communicate(timeout=10)

    def receive(self) -> float:
        """Seconds until all of the other side's memory is here."""
        before = time.perf_counter()
        self._link.connection.receive_into(_NUMBER, self._memory)
        self._link.send([FetchObject(_NUMBER, 1, FETCH_WINDOW_BYTES)])
        self._until(ObjectSent)
        return time.perf_counter() - before

    def send(self) -> float:
        """Seconds until the other side says that it has all of ours."""
        before = time.perf_counter()
        self._link.send([Query(1, "take", {})])
        fetch = self._until(FetchObject)
        with self._link.lock:
            self._link.connection.send_object(fetch.number, [self._memory], fetch.window)
        self._link.flush()
        self._until(Answer)
        return time.perf_counter() - before

    def _until(self, kind: Any) -> Any:
        link = self._link
        while True:
            readable, writable = link.wait(10.0, writable=link.wants_write)
            if writable:
                link.flush()
            for event in (link.receive() or ()) if readable else ():
                if type(event) is kind:
                    return event
                if type(event) is not ObjectDelivered:
                    raise RuntimeError(f"the other side said {event!r}")


def answer(size: int) -> None:
    """Be the other process: print the port, answer one client, end with the input."""
    import tempfile

    from gpumesh.network.certificates import load_or_make_identity
    from gpumesh.network.tcp import listen
    from gpumesh.runtime.doorway import Doorway
    from gpumesh.runtime.link import PeerLink, Turn
    from gpumesh.runtime.loop import new_event_loop

    loop = new_event_loop()
    memory = bytearray(size)
    turn = Turn()

    def on_events(link: PeerLink, events: List[Any]) -> None:
        for event in events:
            kind = type(event)
            if kind is Established:
                door.settle(link)
            elif kind is FetchObject:
                link.connection.send_object(event.number, [memory], event.window)
                link.flush_soon()
            elif kind is Query:
                link.connection.receive_into(_NUMBER, memory)
                link.send(FetchObject(_NUMBER, 1, FETCH_WINDOW_BYTES))
            elif kind is ObjectSent:
                link.send(Answer(1, None, ""))

    def make_link(binding: bytes) -> PeerLink:
        options: Dict[str, Any] = {"token": TOKEN, "nonce": os.urandom(32), "mesh": "m", "now": loop.time()}
        return PeerLink(loop, Connection.listen(facts=local_facts(), binding=binding, **options), on_events, turn)

    async def serve() -> None:
        listener = listen("127.0.0.1", 0)
        door.open(listener)
        print(listener.getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.buffer.read)
        await door.close()

    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        identity = load_or_make_identity(folder)
        door = Doorway(loop, make_link, on_refused=lambda address, why: None, identity=identity)
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.close()


if __name__ == "__main__":
    answer(int(sys.argv[1]))
