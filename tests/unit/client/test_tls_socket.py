"""A socket inside TLS that one thread writes while another reads, with what OpenSSL keeps to itself."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from typing import Any, Iterator, List, Tuple

import pytest

from gpumesh.client.link import SecureLink
from gpumesh.client.tls_socket import RECORD_BYTES, TURN_BYTES, TlsSocket, _first_of
from gpumesh.network.certificates import Identity, load_or_make_identity
from gpumesh.network.tls import MESH_PROTOCOL, client_context, server_context


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_make_identity(str(tmp_path_factory.mktemp("state")))


@contextlib.contextmanager
def pair(identity: Identity) -> Iterator[Tuple[TlsSocket, ssl.SSLSocket]]:
    """Ours, and the blocking other end."""
    here, there = socket.socketpair()
    accepted: List[ssl.SSLSocket] = []
    server = threading.Thread(
        target=lambda: accepted.append(server_context(identity).wrap_socket(there, server_side=True)), daemon=True
    )
    server.start()
    tls = client_context().wrap_socket(here)
    server.join(10)
    tls.setblocking(False)
    accepted[0].settimeout(20)
    ours = TlsSocket(tls)
    try:
        yield ours, accepted[0]
    finally:
        ours.close()
        accepted[0].close()


def wait_readable(sock: Any) -> None:
    assert select.select([sock], [], [], 10)[0]


def test_both_have_agreed_on_the_mesh(identity: Identity) -> None:
    with pair(identity) as (ours, _):
        assert ours.protocol == MESH_PROTOCOL


def test_a_read_takes_all_records_that_are_there_and_fit(identity: Identity) -> None:
    data = os.urandom(3 * RECORD_BYTES)
    with pair(identity) as (ours, other):
        other.sendall(data)
        wait_readable(ours)
        target = bytearray(len(data))
        assert ours.recv_into(memoryview(target)) == len(data)
        assert target == data
        assert ours.pending() == 0
        with pytest.raises(BlockingIOError):
            ours.recv_into(memoryview(target))


def test_what_does_not_fit_is_pending(identity: Identity) -> None:
    with pair(identity) as (ours, other):
        other.sendall(b"x" * 1000)
        wait_readable(ours)
        assert ours.recv_into(memoryview(bytearray(300))) == 300
        assert ours.pending() == 700
        assert not select.select([ours], [], [], 0)[0]  # The kernel knows nothing of it.
        assert ours.recv_into(memoryview(bytearray(1000))) == 700


class Sips:
    """A connection that takes a hundred bytes at a time, as one does at the end of a chunk."""

    has_data = False

    def __init__(self) -> None:
        self._cup = bytearray(100)

    def get_buffer(self) -> memoryview:
        return memoryview(self._cup)

    def buffer_updated(self, count: int, now: float) -> List[bytes]:
        return [bytes(self._cup[:count])]

    def next_deadline(self) -> float:
        return float("inf")


def test_a_link_leaves_nothing_pending(identity: Identity) -> None:
    """One record, of which the link's buffer takes a part: whoever polls the socket would never hear of the rest."""
    data = os.urandom(1050)
    with pair(identity) as (ours, other):
        sips: Any = Sips()
        link = SecureLink(ours, sips)
        other.sendall(data)
        wait_readable(ours)
        assert b"".join(link.receive() or ()) == data
        assert ours.pending() == 0


def test_what_a_full_socket_did_not_take_goes_first_the_next_time(identity: Identity) -> None:
    data = [os.urandom(size) for size in (10, 5 * TURN_BYTES, 100, RECORD_BYTES, 3)] * 8
    with pair(identity) as (ours, other):
        parts: List[Any] = list(data)
        received = bytearray()
        was_full = False
        while parts:
            sent = ours.sendmsg(parts)
            if not sent:
                was_full = True
                received += other.recv(1 << 20)
            while sent:
                taken = min(sent, len(parts[0]))
                sent -= taken
                parts[0] = parts[0][taken:]
                if not parts[0]:
                    del parts[0]
        whole = b"".join(data)
        while len(received) < len(whole):
            received += other.recv(1 << 20)
        assert was_full
        assert received == whole


def test_two_threads_use_it_at_once(identity: Identity) -> None:
    """Both directions, full all the time: neither waits for the other for ever, nothing is lost or mixed up."""
    size = 24 << 20
    up, down = os.urandom(1 << 20) * (size >> 20), os.urandom(1 << 20) * (size >> 20)
    got_up, got_down = bytearray(), bytearray(size)
    with pair(identity) as (ours, other):

        def peer() -> None:  # A blocking SSL socket may be used by one thread alone: turn by turn.
            other.setblocking(False)
            out = memoryview(down)
            while out or len(got_up) < size:
                select.select([other], [other] if out else [], [], 10)
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    got_up.extend(other.recv(1 << 18))
                if out:
                    with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        out = out[other.send(out[: 1 << 16]) :]

        def write() -> None:
            view = memoryview(up)
            while view:
                sent = ours.sendmsg([view])
                view = view[sent:]
                if not sent:
                    select.select([], [ours], [], 10)

        threads = [threading.Thread(target=each, daemon=True) for each in (peer, write)]
        for thread in threads:
            thread.start()
        filled = 0
        while filled < size:
            with contextlib.suppress(BlockingIOError):
                filled += ours.recv_into(memoryview(got_down)[filled : filled + (1 << 18)])
                continue
            wait_readable(ours)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert bytes(got_up) == up
    assert bytes(got_down) == down


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_the_end_is_no_bytes(identity: Identity, says_goodbye: bool) -> None:
    with pair(identity) as (ours, other):
        if says_goodbye:
            other.settimeout(0.2)
            with contextlib.suppress(OSError):
                other.unwrap()
        other.close()
        wait_readable(ours)
        assert ours.recv_into(memoryview(bytearray(10))) == 0


def test_a_thread_that_waits_hears_of_a_cut(identity: Identity) -> None:
    with pair(identity) as (ours, _):
        ours.shutdown(socket.SHUT_RDWR)
        wait_readable(ours)
        assert ours.recv_into(memoryview(bytearray(10))) == 0
        with pytest.raises(OSError):
            ours.send(b"x")


def test_small_parts_share_a_record_and_large_ones_are_not_copied() -> None:
    large = bytes(RECORD_BYTES)
    assert _first_of([b"head", large]) == b"head" + large[4:]
    assert _first_of([b"a", b"b", b"c"]) == b"abc"
    assert _first_of([large, b"x"]) is large
    assert len(_first_of([bytes(2 * TURN_BYTES)])) == TURN_BYTES


def test_a_forged_record_breaks_the_connection(identity: Identity) -> None:
    here, there = socket.socketpair()
    accepted: List[ssl.SSLSocket] = []
    server = threading.Thread(
        target=lambda: accepted.append(server_context(identity).wrap_socket(there, server_side=True)), daemon=True
    )
    server.start()
    tls = client_context().wrap_socket(here)
    server.join(10)
    tls.setblocking(False)
    ours = TlsSocket(tls)
    raw = socket.socket(fileno=os.dup(accepted[0].fileno()))
    raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    wait_readable(ours)
    with pytest.raises(ssl.SSLError):
        ours.recv_into(memoryview(bytearray(100)))
    raw.close()
    accepted[0].close()
    ours.close()
