"""Objects over real sockets, between both kinds of links, on both kinds of loops."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterator, List

import pytest

from gpumesh.client.link import MeshLink, dial, local_facts
from gpumesh.config import FETCH_WINDOW_BYTES, MIB
from gpumesh.network.address import parse_address
from gpumesh.protocol.connection import OBJECT_TRANSFER, Closed, Connection, Established, ObjectDelivered
from gpumesh.protocol.messages import Answer, CancelFetch, FetchObject, ObjectAt, ObjectSent, Query
from gpumesh.runtime.link import PeerLink, Turn

NUMBER = OBJECT_TRANSFER | 1
VALUE = os.urandom(MIB) * 24 + b"end"
TIMEOUT = 30.0


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]
    return asyncio.new_event_loop()


class Peer:
    """A listener on a loop of its own thread: it answers Query, sends VALUE to whoever fetches, and fetches when it is told to."""

    def __init__(self, kind: str) -> None:
        self.loop = new_loop(kind)
        self.links: List[PeerLink] = []
        self.events: List[Any] = []
        self.target = mmap.mmap(-1, len(VALUE))
        self.has = threading.Event()  # What the test waits for.
        self._wanted: Callable[[Any], bool] = lambda event: False
        self._thread = threading.Thread(target=self._run)
        self.port = 0

    def __enter__(self) -> Peer:
        turn = Turn()

        def accept() -> PeerLink:
            now = self.loop.time()
            connection = Connection.listen(token="secret", nonce=os.urandom(32), mesh="m", now=now, facts=local_facts())
            self.links.append(PeerLink(self.loop, connection, self._on_events, turn))
            return self.links[-1]

        self._server = self.loop.run_until_complete(self.loop.create_server(accept, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

        async def close() -> None:
            self._server.close()
            for link in self.links:
                link.abort()
            await self._server.wait_closed()

        self.loop.run_until_complete(close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _run(self) -> None:
        self.loop.run_forever()

    def _on_events(self, link: PeerLink, events: List[Any]) -> None:
        self.events.extend(events)
        for event in events:
            if type(event) is Query:
                link.send(Answer(event.number, None, ""))
            elif type(event) is FetchObject:
                link.connection.send_object(event.number, [VALUE[:1000], memoryview(VALUE)[1000:]], event.window)
                link.flush_soon()
            if self._wanted(event):
                self.has.set()

    def call(self, act: Callable[[PeerLink], None]) -> None:
        self.loop.call_soon_threadsafe(lambda: act(self.links[-1]))

    def fetch(self) -> None:
        def ask(link: PeerLink) -> None:
            link.connection.receive_into(NUMBER, self.target)
            link.send(FetchObject(NUMBER, 1, FETCH_WINDOW_BYTES))

        self.call(ask)

    def expect(self, kind: Any) -> None:
        self._wanted = lambda event: type(event) is kind

    def wait(self) -> None:
        assert self.has.wait(TIMEOUT), self.events


class Client:
    """A blocking link, driven by the test's thread alone."""

    def __init__(self, port: int) -> None:
        self.link: MeshLink = dial(parse_address(f"127.0.0.1:{port}"), token="secret", timeout=5, facts=local_facts())[0]
        self.events: List[Any] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.link.close("")
        self.link.release()

    def until(self, kind: Any) -> Any:
        """Serve until such an event has come."""
        end = time.monotonic() + TIMEOUT
        while True:
            for event in self.events:
                if type(event) is kind:
                    self.events.remove(event)
                    return event
            assert time.monotonic() < end, self.events
            readable, writable = self.link.wait(1.0, writable=self.link.wants_write)
            if writable:
                self.link.flush()
            if readable:
                self.events.extend(self.link.receive() or [])


@pytest.fixture(params=["uvloop", "asyncio"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    with Peer(request.param) as peer:
        yield peer


def test_a_client_fetches_an_object_and_small_answers_do_not_wait_for_it(peer: Peer) -> None:
    with Client(peer.port) as client:
        target = mmap.mmap(-1, len(VALUE))
        client.link.connection.receive_into(NUMBER, target)
        peer.expect(ObjectDelivered)
        client.link.send([FetchObject(NUMBER, 1, FETCH_WINDOW_BYTES)])
        answers = 0
        while not any(type(event) is ObjectSent for event in client.events):
            client.link.send([Query(answers, "x", {})])
            assert client.until(Answer).number == answers
            answers += 1

        peer.wait()
        assert answers > 2
        assert target[:] == VALUE
        assert not client.link.connection.has_object_transfers
        target.close()


def test_a_client_sends_an_object_and_small_questions_do_not_wait_for_it(peer: Peer) -> None:
    with Client(peer.port) as client:
        peer.expect(ObjectSent)
        peer.fetch()
        fetch = client.until(FetchObject)
        with client.link.lock:
            client.link.connection.send_object(fetch.number, [VALUE], fetch.window)
        client.link.flush()
        answers = 0
        while not any(type(event) is ObjectDelivered for event in client.events):
            client.link.send([Query(answers, "x", {})])
            assert client.until(Answer).number == answers
            answers += 1

        peer.wait()
        assert answers > 2
        assert peer.target[:] == VALUE
        assert not client.link.connection.has_object_transfers


def test_a_transfer_given_up_leaves_the_connection_usable(peer: Peer) -> None:
    with Client(peer.port) as client:
        target = bytearray(len(VALUE))
        connection = client.link.connection
        connection.receive_into(NUMBER, target)
        client.link.send([FetchObject(NUMBER, 1, FETCH_WINDOW_BYTES)])
        while connection._targets[NUMBER].filled < 2 * FETCH_WINDOW_BYTES:
            client.link.wait(1.0)
            assert not client.link.receive()
        with client.link.lock:
            connection.forget_transfer(NUMBER)
            connection.send(CancelFetch(NUMBER))
        client.link.flush()
        client.link.send([Query(1, "x", {})])
        assert client.until(Answer).number == 1
        target.append(0)

        again = bytearray(len(VALUE))
        connection.receive_into(NUMBER + 1, again)
        client.link.send([FetchObject(NUMBER + 1, 1, FETCH_WINDOW_BYTES)])
        assert client.until(ObjectSent) == ObjectSent(NUMBER + 1)
        assert again == VALUE
        assert ObjectSent(NUMBER) not in client.events


def test_a_connection_that_breaks_in_the_middle_lets_go_of_memory_on_both_sides(peer: Peer) -> None:
    with Client(peer.port) as client:
        peer.expect(Closed)
        target = bytearray(len(VALUE))
        client.link.connection.receive_into(NUMBER, target)
        client.link.send([FetchObject(NUMBER, 1, FETCH_WINDOW_BYTES)])
        while client.link.connection._targets[NUMBER].filled < FETCH_WINDOW_BYTES:
            client.link.wait(1.0)
            client.link.receive()
        client.link.cut()
        assert type(client.until(Closed)) is Closed

        target.append(0)
        peer.wait()
        assert not peer.links[-1].connection.has_object_transfers


@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
def test_two_loops_fetch_from_each_other_at_once(kind: str) -> None:
    loop = new_loop(kind)
    turn = Turn()
    done: Dict[PeerLink, List[Any]] = {}
    targets: Dict[PeerLink, mmap.mmap] = {}
    finished = loop.create_future()

    def on_events(link: PeerLink, events: List[Any]) -> None:
        for event in events:
            if type(event) is Established:
                targets[link] = mmap.mmap(-1, len(VALUE))
                link.connection.receive_into(NUMBER, targets[link])
                link.send(FetchObject(NUMBER, 1, FETCH_WINDOW_BYTES))
            elif type(event) is FetchObject:
                link.connection.send_object(event.number, [VALUE], event.window)
                link.flush_soon()
            else:
                done.setdefault(link, []).append(event)
        if sum(map(len, done.values())) == 4 and not finished.done():
            finished.set_result(None)

    async def main() -> None:
        facts, now = local_facts(), loop.time()
        one, other = socket.socketpair()
        dialer = Connection.dial(role="worker", token="t", nonce=os.urandom(32), now=now, facts=facts)
        listener = Connection.listen(token="t", nonce=os.urandom(32), mesh="m", now=now, facts=facts)
        for sock, connection in ((one, dialer), (other, listener)):
            sock.setblocking(False)
            link = PeerLink(loop, connection, on_events, turn)
            await loop.create_connection(lambda link=link: link, sock=sock)  # type: ignore[misc]
        await asyncio.wait_for(finished, TIMEOUT)
        for link in targets:
            link.close("")

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()

    assert len(targets) == 2
    for link, target in targets.items():
        assert target[:] == VALUE
        assert set(done[link]) == {ObjectSent(NUMBER), ObjectDelivered(NUMBER)}


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="no such option here")
def test_little_waits_unsent_in_the_sockets_of_both_links(peer: Peer) -> None:
    with Client(peer.port) as client:
        client.link.send([Query(1, "x", {})])
        client.until(Answer)
        theirs = peer.links[-1]._transport.get_extra_info("socket")  # type: ignore[union-attr]
        for sock in (client.link.sock, theirs):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) <= 256 * 1024


def test_a_peer_without_the_object_says_so(peer: Peer) -> None:
    with Client(peer.port) as client:
        peer.expect(ObjectAt)
        peer.fetch()
        fetch = client.until(FetchObject)
        client.link.send([ObjectAt(fetch.number, fetch.oid, "", 0, None, "lost: it is not here any more")])

        peer.wait()
        peer.target.close()  # Nothing holds it.


def test_who_sends_something_small_does_not_write_chunks_that_another_thread_is_to_write() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        receiver = Connection.trusted()
        target = bytearray(len(VALUE))
        receiver.receive_into(NUMBER, target, len(VALUE))
        receiver.send(FetchObject(NUMBER, 1, len(VALUE)))
        there.sendall(b"".join(receiver.data_to_send()))
        link = MeshLink(here, Connection.trusted())
        assert link.receive() == [FetchObject(NUMBER, 1, len(VALUE))]
        link.connection.send_object(NUMBER, [VALUE], len(VALUE))
        while not link.wants_write or link.wait(0, writable=True)[1]:
            link.flush()

        received: List[Any] = []

        def read() -> None:
            buffer = receiver.get_buffer()
            received.extend(receiver.buffer_updated(there.recv_into(buffer), 0.0))

        outgoing = link.connection._outgoing[NUMBER]
        before = outgoing.offset
        while not received:
            link.send([Query(1, "x", {})])
            read()
        assert outgoing.offset == before
        assert link.wants_write

        while ObjectSent(NUMBER) not in received:
            link.flush()
            read()
        assert target == VALUE
        assert not link.wants_write
