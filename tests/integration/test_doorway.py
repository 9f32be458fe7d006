"""The one port of a coordinator: what it takes plain, in TLS and by HTTP, from here and from elsewhere, and crowds before it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import psutil
import pytest

from gpumesh.config import HANDSHAKE_SECONDS, PENDING_HANDSHAKES
from gpumesh.errors import MeshUnavailableError
from gpumesh.network.certificates import load_or_make_identity
from gpumesh.network.tls import client_context
from gpumesh.protocol import frames
from gpumesh.protocol.connection import Established
from gpumesh.protocol.messages import Goodbye
from gpumesh.runtime import doorway, doorway_http, loop
from gpumesh.runtime.embedded import start_coordinator
from tests.integration.programs import ROOT, started_programs
from tests.support.client import Client
from tests.support.guarded import TOKEN, Guarded, shake, tls_connect
from tests.support.peers import connect, read_to_end
from tests.support.processes import descriptors, resident_bytes, until

TAKES_LONG = 20.0
ELSEWHERE = "203.0.113.9:4000"


@pytest.fixture(params=["asyncio", "uvloop"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    """A coordinator with a certificate, on either kind of event loop; nothing goes wrong unheard, nothing is left open."""
    if request.param == "asyncio":
        monkeypatch.setattr(loop, "new_event_loop", asyncio.new_event_loop)
    else:
        pytest.importorskip("uvloop")
    guarded = Guarded(tmp_path)
    yield guarded
    if not guarded.is_over:
        guarded.close()
    assert guarded.log.about("Traceback") == []
    assert guarded.log.about("could not be taken in") == []
    gc.collect()


def admitted(guarded: Guarded, address: str = ELSEWHERE) -> socket.socket:
    """The other end of a pipe that has come to the door as a WebSocket's does."""
    mine, theirs = socket.socketpair()
    mine.settimeout(TAKES_LONG)
    guarded.look(lambda coordinator: coordinator.door.admit(theirs, address))
    return mine


def in_tls(sock: socket.socket, protocol: str = "gpumesh/1") -> ssl.SSLSocket:
    return client_context([protocol]).wrap_socket(sock, server_hostname="gpumesh")


def opens(sock: Any, token: str) -> str:
    """ "" if the handshake on this connection succeeds, else what is said against it. The connection is closed."""
    with sock:
        connection, events = shake(sock, token)
        if type(events[0]) is not Established:
            return str(events[0].error)
        connection.send(Goodbye("that was all"))
        with contextlib.suppress(OSError):
            for part in connection.data_to_send():
                sock.sendall(part)
        return ""


def test_on_this_machine_with_and_without_tls(guarded: Guarded) -> None:
    for sock in (connect(guarded.port), tls_connect(guarded.port)):
        assert opens(sock, guarded.token) == ""
    until(lambda: guarded.strangers() == 0)


def test_from_elsewhere_only_inside_tls(guarded: Guarded) -> None:
    assert "this mesh speaks TLS with other machines" in opens(admitted(guarded), guarded.token)
    assert opens(in_tls(admitted(guarded)), guarded.token) == ""
    until(lambda: guarded.strangers() == 0)
    (line,) = guarded.log.about("203.0.113.9")
    assert "speaks TLS" in line


@pytest.mark.parametrize("inside", ["plain", "TLS"])
def test_a_pipe_within_a_pipe_is_closed(guarded: Guarded, inside: str) -> None:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(admitted(guarded))
        if inside == "TLS":
            sock = stack.enter_context(in_tls(sock, "http/1.1"))
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /mesh HTTP/1.1\r\n\r\n")
            received = read_to_end(sock, TAKES_LONG)
            assert b"200" not in received
            assert b"101" not in received
    until(lambda: guarded.strangers() == 0)


def test_who_begins_as_nobody_here_does_is_refused_at_once(guarded: Guarded) -> None:
    strangers = {
        b"SSH-2.0-OpenSSH_9.6\r\n": "an SSH client",
        b"hello": "something that starts with b'hello'",
        b"\x03": r"something that starts with b'\x03'",
    }
    for way in ("plain", "TLS", "piped"):
        for first in strangers:
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(admitted(guarded) if way == "piped" else connect(guarded.port))
                if way == "TLS":
                    sock = stack.enter_context(in_tls(sock, "http/1.1"))
                began = time.monotonic()
                sock.sendall(first)
                assert read_to_end(sock, TAKES_LONG) == b"", (way, first)
                assert time.monotonic() - began < HANDSHAKE_SECONDS / 2, (way, first)
    until(lambda: guarded.strangers() == 0)
    for who in strangers.values():
        lines = [
            line for line in guarded.log.about("refused") if line.endswith(f"the other side is {who}, no member of a mesh")
        ]
        assert len(lines) == 2, "once for each address"


def test_a_line_that_cannot_begin_a_request_is_answered_at_once(guarded: Guarded) -> None:
    for first in (b"EHLO mail.example\r\n", b"GET /\r\n"):
        with connect(guarded.port) as sock:
            sock.sendall(first)
            assert read_to_end(sock, HANDSHAKE_SECONDS / 2).startswith(b"HTTP/1.1 400 ")
    until(lambda: guarded.strangers() == 0)


def test_500_who_say_nothing_hold_nobody_up(guarded: Guarded) -> None:
    assert opens(tls_connect(guarded.port), guarded.token) == ""  # What is loaded at the first.
    before = resident_bytes(os.getpid())
    with contextlib.ExitStack() as crowd:
        for _ in range(500):
            crowd.enter_context(connect(guarded.port))

        began = time.monotonic()
        assert opens(tls_connect(guarded.port), guarded.token) == ""
        assert time.monotonic() - began < 1.0
        assert guarded.strangers() <= PENDING_HANDSHAKES
        assert resident_bytes(os.getpid()) - before < 20 << 20
    until(lambda: guarded.strangers() == 0)
    assert len(guarded.log.about("too many unfinished handshakes")) == 1


@pytest.mark.parametrize(
    "first",
    [frames.PREAMBLE[:3], b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\nHost: "],
    ids=["half a preamble", "half a TLS greeting", "half a request"],
)
def test_200_who_begin_and_stop_hold_nobody_up_for_long(guarded: Guarded, first: bytes) -> None:
    assert opens(tls_connect(guarded.port), guarded.token) == ""
    idle = descriptors()
    with contextlib.ExitStack() as crowd:
        for _ in range(200):
            sock = crowd.enter_context(connect(guarded.port))
            with contextlib.suppress(OSError):
                sock.sendall(first)

        began = time.monotonic()
        assert opens(tls_connect(guarded.port), guarded.token) == ""
        assert time.monotonic() - began < 2.0  # 0.1 s for each 64 who came before, on a busy machine.
        assert guarded.strangers() <= PENDING_HANDSHAKES
    until(lambda: guarded.strangers() == 0, TAKES_LONG)
    until(lambda: descriptors() <= idle)


def test_whoever_says_nothing_or_never_ends_a_request_has_a_few_seconds(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(doorway_http, "HANDSHAKE_SECONDS", 0.3)
    began = time.monotonic()
    with connect(guarded.port) as silent, connect(guarded.port) as slow, tls_connect(guarded.port, "http/1.1") as inside:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        for sock in (silent, slow, inside):
            assert read_to_end(sock) == b""
    assert 0.25 < time.monotonic() - began < 3.0


def test_a_head_without_end_is_cut_off(guarded: Guarded) -> None:
    with connect(guarded.port) as sock:
        with contextlib.suppress(OSError):
            for _ in range(200):
                sock.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")
        assert read_to_end(sock).startswith((b"HTTP/1.1 431", b""))
    until(lambda: guarded.strangers() == 0)


def test_whoever_tries_tokens_is_refused_and_others_are_not(guarded: Guarded) -> None:
    for _ in range(6):
        assert "the token was refused" in opens(in_tls(admitted(guarded)), "wrong")

    until(lambda: guarded.strangers() == 0)
    assert "too many wrong tokens from this address; try again in 1 s" in opens(in_tls(admitted(guarded)), guarded.token)
    assert "too many wrong tokens" in opens(admitted(guarded), guarded.token)
    assert opens(in_tls(admitted(guarded, "203.0.113.10:4000")), guarded.token) == ""
    assert opens(connect(guarded.port), guarded.token) == ""
    assert len(guarded.log.about("203.0.113.9")) == 2  # The wrong token, and that it is refused: each once.


@pytest.mark.parametrize("kind", ["silent", "mesh", "TLS greeting", "TLS", "HTTP"])
def test_nothing_of_strangers_outlives_the_coordinator(guarded: Guarded, kind: str) -> None:
    assert opens(tls_connect(guarded.port), guarded.token) == ""
    until(lambda: guarded.strangers() == 0)
    begin: Callable[[], Any] = {
        "silent": lambda: connect(guarded.port),
        "TLS": lambda: tls_connect(guarded.port),
    }.get(kind, lambda: connect(guarded.port))
    first = {"mesh": frames.PREAMBLE, "TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00", "HTTP": b"GET / HTTP/1.1\r\n"}.get(
        kind, b""
    )
    idle = descriptors()
    socks: List[Any] = [begin() for _ in range(20)]
    for sock in socks:
        sock.sendall(first)
    until(lambda: guarded.strangers() == 20)

    guarded.close()

    assert descriptors() < idle + len(socks)
    for sock in socks:
        sock.close()


def test_a_coordinator_of_a_program_speaks_tls_with_other_machines() -> None:
    with start_coordinator(0, host="") as handle, Client(handle.url, handle.token) as client:
        fingerprint = handle._coordinator.door.fingerprint
        assert client.workers() == []
    with start_coordinator(0) as here:
        assert here._coordinator.door.fingerprint == b""
    assert fingerprint == load_or_make_identity().fingerprint


LIMITED = """
import resource, sys, time
from gpumesh.runtime.embedded import start_coordinator
with start_coordinator(port=0, token="secret") as coordinator:
    print(coordinator.url, flush=True)
    sys.stdin.readline()
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    print("limited", flush=True)
    sys.stdin.readline()
"""


def test_a_system_without_descriptors_delays_and_does_not_spin() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", LIMITED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        port = int(program.stdout.readline().rpartition(":")[2])
        assert opens(connect(port), "secret") == ""
        print(file=program.stdin, flush=True)
        assert program.stdout.readline() == "limited\n"
        process = psutil.Process(program.pid)
        with contextlib.ExitStack() as crowd:
            for _ in range(60):
                crowd.enter_context(connect(port))
            until(lambda: process.num_fds() >= 40)
            cpu = sum(process.cpu_times()[:2])
            time.sleep(1.0)  # For as long as that, it must do next to nothing.
            assert sum(process.cpu_times()[:2]) - cpu < 0.3
        assert opens(connect(port), "secret") == ""
        print(file=program.stdin, flush=True)
        assert program.wait(TAKES_LONG) == 0
        assert program.stderr.read().count("cannot accept connections now") == 1


def test_serve_to_others_in_tls_and_only_on_purpose_without(tmp_path: Path) -> None:
    with started_programs(tmp_path) as programs:
        words = ("serve", "--port", "0", "--no-self-worker", "--no-discovery")
        server = programs.gpumesh(*words, GPUMESH_TOKEN=TOKEN)
        url = server.wait_for(r"gpumesh join (http://\S+)").group(1)
        if "127.0.0.1" in url:
            pytest.skip("this machine has no network")
        with Client(url, TOKEN) as client:
            assert client.workers() == []
        with Client(url.replace("http://", "insecure://"), TOKEN) as client:
            with pytest.raises(MeshUnavailableError, match=r"speaks TLS with other machines; write http:// in its address"):
                client.workers()

        refused = programs.gpumesh(*words, "--insecure", GPUMESH_TOKEN=TOKEN)
        assert refused.wait() == 2
        server = programs.gpumesh(*words, "--insecure", "--yes", GPUMESH_TOKEN=TOKEN)
        url = server.wait_for(r"gpumesh join (insecure://\S+)").group(1)
        with Client(url, TOKEN) as client:
            assert client.workers() == []
        with Client(url.replace("insecure://", "http://"), TOKEN) as client:
            with pytest.raises(MeshUnavailableError, match=f"accept that and write {url}"):
                client.workers()
