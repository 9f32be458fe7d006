"""Connecting and the I/O thread's waiting, with sockets on loopback."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from gpumesh.client.link import Poller, _after, dial, local_facts
from gpumesh.errors import AuthenticationError, MeshUnavailableError
from gpumesh.network.address import parse_address
from tests.unit.client.fake_mesh import FakeMesh


def test_a_handshake_ends_with_the_number_of_workers() -> None:
    with FakeMesh(workers=3) as mesh:
        link, established, rest = dial(parse_address(mesh.url), token="secret", timeout=5, facts=local_facts())
        assert (established.workers, established.mesh, rest) == (3, "m", [])
        link.close("test")
        link.release()


def test_a_host_name_is_looked_up() -> None:
    with FakeMesh() as mesh:
        link, _, _ = dial(parse_address(f"localhost:{mesh.port}"), token="secret", timeout=5, facts=local_facts())
        link.close("test")
        link.release()


def test_an_error_of_the_handshake_names_the_address() -> None:
    with FakeMesh() as mesh, pytest.raises(AuthenticationError, match=rf"127\.0\.0\.1:{mesh.port}: "):
        dial(parse_address(mesh.url), token="wrong", timeout=5, facts=local_facts())


def test_a_full_queue_of_connections_ends_with_the_timeout() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        target = server.getsockname()
        fill = [socket.socket() for _ in range(8)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(target)
        began = time.monotonic()
        with pytest.raises(MeshUnavailableError):
            dial(parse_address(f"127.0.0.1:{target[1]}"), token="", timeout=0.3, facts=local_facts())
        assert time.monotonic() - began < 3
        for sock in fill:
            sock.close()


@pytest.mark.parametrize(("sent", "left"), [(0, b"abcdef"), (1, b"bcdef"), (2, b"cdef"), (5, b"f"), (6, b"")])
def test_what_the_socket_did_not_take_is_kept(sent: int, left: bytes) -> None:
    assert b"".join(bytes(part) for part in _after([b"ab", memoryview(b"cd"), b"ef"], sent)) == left


@pytest.mark.parametrize("has_epoll", [True, False])
def test_the_poller_tells_reads_writes_and_wake_ups_apart(has_epoll: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_epoll:
        monkeypatch.delattr("select.epoll", raising=False)
    poller = Poller()
    here, there = socket.socketpair()
    poller.watch(here)

    assert poller.wait(0) == (False, False, False)
    poller.wake()
    assert poller.wait(1) == (False, False, True)
    there.send(b"x")
    assert poller.wait(1) == (True, False, False)
    poller.set_read(False)
    assert poller.wait(0) == (False, False, False)
    poller.set_write(True)
    assert poller.wait(1) == (False, True, False)
    poller.set_write(False)
    poller.set_read(True)
    there.close()
    assert poller.wait(1)[0]
    poller.forget()
    assert poller.wait(0) == (False, False, False)
    here.close()
    poller.close()
    poller.wake()


def test_a_session_works_without_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumesh.client.session import Session
    from gpumesh.client.waiting import wait
    from tests.unit.client.test_session import start

    def none() -> Any:
        raise AssertionError

    monkeypatch.delattr("select.epoll", raising=False)
    with FakeMesh() as mesh:
        session = Session(url=mesh.url, token="secret", start_local=none)
        futures = [start(session) for _ in range(1000)]
        assert futures[0].result(10) == 0
        assert len(wait(futures, 10).done) == 1000
        assert session.query("anything") == {"asked": "anything"}
        session.close()
