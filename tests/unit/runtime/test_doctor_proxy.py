"""What `gpumesh doctor` says of the HTTP proxy of this machine's network, and whose fault it is."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Callable, Iterator

import pytest

from gpumesh.network.address import parse_address
from gpumesh.runtime.doctor_way import check_proxy, check_way
from gpumesh.runtime.findings import FAULT, HERE, MESH, OK
from tests.support.processes import free_port

ADDRESS = parse_address("https://mesh.example.org")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Set HTTPS_PROXY to one that gives everybody this answer."""
    with contextlib.ExitStack() as ends:

        def make(data: bytes) -> None:
            listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        with listener.accept()[0] as sock:
                            if sock.recv(65536):
                                sock.sendall(data)

            threading.Thread(target=serve, daemon=True).start()
            ends.callback(listener.shutdown, socket.SHUT_RDWR)
            monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{listener.getsockname()[1]}")

        yield make


@pytest.mark.parametrize(
    ("data", "state", "place", "text"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", OK, HERE, "(https_proxy) connects to mesh.example.org:443, within "),
        (b"HTTP/1.1 403 No\r\n\r\n", FAULT, HERE, "does not let us through to mesh.example.org:443 (status 403)"),
        (b"HTTP/1.1 407 No\r\n\r\n", FAULT, HERE, "does not take the user name and password of https_proxy (status 407)"),
        (b"HTTP/1.1 504 No\r\n\r\n", FAULT, MESH, "does not reach mesh.example.org:443 (status 504)"),
    ],
)
def test_what_it_answers(answer: Callable[[bytes], None], data: bytes, state: str, place: str, text: str) -> None:
    answer(data)
    found = check_proxy(ADDRESS)
    assert found is not None
    assert (found.check, found.state, found.place) == ("proxy", state, place)
    assert text in found.text
    assert bool(found.advice) == (state == FAULT)
    assert "secret" not in found.text + found.advice


@pytest.mark.parametrize("value", ["http://me:secret@127.0.0.1:{free}", "socks5://me:secret@proxy.example.net:1080"])
def test_one_that_cannot_be_used_is_the_only_step_that_is_told(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", value.format(free=free_port()))
    (found,) = check_way(ADDRESS, None, lambda address, token: "not asked")
    assert (found.check, found.state, found.place) == ("proxy", FAULT, HERE)
    assert found.advice
    assert "secret" not in found.text + found.advice


def test_without_one_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert check_proxy(ADDRESS) is None
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    assert check_proxy(ADDRESS) is None
