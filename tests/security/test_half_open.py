"""Connections that say nothing, or half a word, of every kind the port knows: bounded, gone in time, and in nobody's way."""

from __future__ import annotations

import contextlib
import gc
import socket
import time
from pathlib import Path
from typing import Iterator, List

import pytest

from gpumesh import config
from gpumesh.protocol import connection, frames
from gpumesh.protocol.messages import Answer, Hello, Query
from gpumesh.runtime import doorway, doorway_http
from tests.support.guarded import TOKEN, Guarded, tls_connect
from tests.support.mesh_peer import MeshPeer
from tests.support.peers import connect, encoded
from tests.support.processes import descriptors, until

CROWD = 160
HELLO = encoded(Hello("client", bytes(32), "0", "3.11", "test"))
HALVES = {
    "nothing": b"",
    "half a preamble": frames.PREAMBLE[:3],
    "half a header": frames.PREAMBLE + b"\x10\x00",
    "gigabytes announced": frames.PREAMBLE + b"\xff\xff\xff\xff\x01\x00\x00\x00",
    "no proof": frames.PREAMBLE + HELLO,
    "half a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00",
    "a TLS hello that announces more": b"\x16\x03\x01\xff\xff\x01\xff\xff\xff",
    "half a request": b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    "a letter": b"G",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(Path(tmp_path_factory.mktemp("site"))) as guarded:
        serve_one(guarded, 1)
        yield guarded


def serve_one(site: Guarded, number: int) -> float:
    """Seconds until somebody who really comes has an answer."""
    started = time.monotonic()
    with MeshPeer(site.port, TOKEN, client=number) as peer:
        peer.send(Query(1, "workers", {}))
        peer.expect(Answer)
        taken = time.monotonic() - started
        peer.connection.close("done")
        peer.flush()
    return taken


def crowd(port: int, first: bytes, count: int) -> List[socket.socket]:
    socks = []
    for _ in range(count):
        sock = connect(port)
        with contextlib.suppress(OSError):
            sock.sendall(first)
        socks.append(sock)
    return socks


@pytest.mark.parametrize("half", HALVES)
def test_who_really_comes_is_served_beside_hundreds_who_say_nothing(site: Guarded, half: str) -> None:
    held = descriptors()
    socks = crowd(site.port, HALVES[half], CROWD)
    try:
        # Who has spoken is given a moment, for which others wait outside: 64 at a time.
        assert serve_one(site, 2) < (
            1.0 if half == "nothing" else 1.0 + CROWD / config.PENDING_HANDSHAKES * config.CROWDED_SECONDS
        )
        assert site.strangers() <= config.PENDING_HANDSHAKES
        theirs = descriptors() - held - len(socks)
        assert theirs <= config.PENDING_HANDSHAKES + 8, f"{theirs} descriptors are held for those who say nothing"
        for _ in range(5):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(b"\0")
        assert serve_one(site, 3) < 1.0
    finally:
        for sock in socks:
            sock.close()
    until(lambda: site.strangers() == 0)


def test_a_tls_peer_that_says_nothing_inside_is_one_of_them(site: Guarded) -> None:
    socks = [tls_connect(site.port, protocol) for protocol in ("gpumesh/1", "http/1.1") for _ in range(20)]
    try:
        assert serve_one(site, 4) < 1.0
        assert 0 < site.strangers() <= config.PENDING_HANDSHAKES
    finally:
        for sock in socks:
            sock.close()
    until(lambda: site.strangers() == 0)


def test_they_are_gone_when_their_time_is_over_however_they_trickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds at once, and all of them send a byte now and then, which never completes anything."""
    seconds = 1.0
    for module in (connection, doorway, doorway_http):
        assert module.HANDSHAKE_SECONDS == config.HANDSHAKE_SECONDS
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", seconds)
    with Guarded(tmp_path) as site:
        serve_one(site, 1)
        started = time.monotonic()
        socks = [sock for first in HALVES.values() for sock in crowd(site.port, first, 2)]
        socks += [tls_connect(site.port, "http/1.1")]
        try:
            alive = list(socks)
            while alive and time.monotonic() - started < 5 * seconds:
                for sock in list(alive):
                    sock.settimeout(0.01)
                    try:
                        sock.send(b"a")
                        if not sock.recv(4096):
                            alive.remove(sock)
                    except socket.timeout:
                        continue
                    except OSError:
                        alive.remove(sock)
            assert alive == []
            assert time.monotonic() - started < 3 * seconds
            until(lambda: site.strangers() == 0)
        finally:
            for sock in socks:
                sock.close()


def test_memory_is_flat(site: Guarded) -> None:
    def once(first: bytes) -> None:
        for sock in crowd(site.port, first, 40):
            sock.close()
        until(lambda: site.strangers() == 0)

    for first in HALVES.values():
        once(first)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(3):
        for first in HALVES.values():
            once(first)
    gc.collect()
    assert len(gc.get_objects()) - before < 2000, "a thousand strangers have left something"
    assert site.log.about("Traceback") == []
