"""F64: as it is started by default, a mesh does nothing for whoever has no token, and tells nothing, in any language that its port speaks."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Set, Tuple

import psutil
import pytest

from gpumesh.errors import AuthenticationError
from gpumesh.network.tls import client_context
from gpumesh.protocol import frames
from gpumesh.protocol import messages as msg
from gpumesh.protocol.connection import LATER
from tests.integration.programs import Program, started_programs
from tests.support import tasks
from tests.support.client import Client
from tests.support.guarded import shake
from tests.support.peers import encoded, own_address, read_to_end
from tests.support.processes import free_port

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
PATHS = ("/", "/healthz", "/metrics", "/mesh", "/workers", "/jobs", "/api/jobs", "/api/jobs/1", "/dashboard", "/../etc/passwd")
STRANGERS: Dict[str, Dict[str, str]] = {
    "nothing": {},
    "an empty token": {"Authorization": "Bearer "},
    "an empty password": {"Authorization": "Basic Og=="},
    "a wrong token": {"Authorization": "Bearer guess"},
    "a cookie": {"Cookie": "token=guess"},
    "a page of another site": {"Origin": "http://evil.example", "Referer": "http://evil.example/page"},
    "a name that leads here for a moment": {"Host": "evil.example", "Origin": "http://evil.example"},
    "a WebSocket of a page": {
        "Origin": "http://evil.example", "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    },
}  # fmt: skip


class Served(NamedTuple):
    program: Program
    host: str  # Of this machine, as others see it.
    port: int
    token: str
    secrets: Set[str]  # What no stranger may learn.


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = Path(tmp_path_factory.mktemp("home"))
    host, port = own_address(), free_port()
    with started_programs(folder) as programs:
        program = programs.gpumesh("serve", "--port", str(port), "--slots", "1", "--score", "1")
        program.wait_for("Ctrl-C to stop")
        token = json.loads(next(folder.rglob("connection.json")).read_text())["token"]
        with Client(f"127.0.0.1:{port}", token) as client:
            client.remote(tasks.noop, 1).result(20)
            ids = {str(worker["id"]) for worker in client.workers()}
        yield Served(program, host, port, token, {token, *ids})


def test_without_a_token_one_is_made_up(served: Served) -> None:
    assert len(served.token) == 64
    assert served.token not in served.program.output


def test_one_port_is_open_and_nothing_else(served: Served) -> None:
    listening: List[Tuple[str, int]] = []
    for process in [psutil.Process(served.program.process.pid), *served.program.remember_children()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN:
                    listening.append((each.laddr.ip, each.laddr.port))

    assert {port for _, port in listening} == {served.port}


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_no_verb_does_or_tells_anything(served: Served, who: str, tls: bool) -> None:
    for verb in VERBS:
        for path in PATHS:
            status, text = request(served, verb, path, STRANGERS[who], tls=tls)
            assert not any(secret in text for secret in served.secrets), (verb, path, text)
            assert status not in (101, 201, 202, 204), (verb, path)
            if status == 200:
                assert path in ("/", "/healthz"), (verb, path)
                assert verb in ("GET", "HEAD"), (verb, path)
                assert "score" not in text


def request(served: Served, verb: str, path: str, headers: Dict[str, str], *, tls: bool) -> Tuple[int, str]:
    context = client_context(["http/1.1"])
    connection: http.client.HTTPConnection = (
        http.client.HTTPSConnection(served.host, served.port, timeout=10, context=context)
        if tls
        else http.client.HTTPConnection(served.host, served.port, timeout=10)
    )
    with contextlib.closing(connection):
        try:
            connection.request(verb, path, body=b"{}" if verb in ("POST", "PUT", "PATCH") else None, headers=headers)
            answer = connection.getresponse()
            return answer.status, f"{answer.headers}{answer.read().decode(errors='replace')}"
        except (http.client.HTTPException, ConnectionError):
            return 0, ""  # Hung up: nothing was told.


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    "message",
    [
        msg.RegisterClient(1, "nobody"),
        msg.RegisterWorker("nobody", ()),
        msg.SubmitTasks(0, [1], [b""]),
        msg.Query(1, "workers", {}),
        msg.CancelTasks([1]),
        msg.ChangeJob(1, "j-1", "kill"),
        msg.KillActor(1, 1, True),
        msg.RotateToken(1, bytes(16), 0.0),
        msg.FetchObject(1 << 31, 1, 1),
        msg.TasksFinished([(1, 1, 0, b"", 0.0)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_no_message_is_heard_before_the_token_was_shown(served: Served, message: object, tls: bool) -> None:
    hello = encoded(msg.Hello("client", bytes(32), "0", "3.11", "test"))
    raw = socket.create_connection((served.host, served.port), 10)
    with client_context(["gpumesh/1"]).wrap_socket(raw, server_hostname="gpumesh") if tls else raw as sock:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            sock.sendall(frames.PREAMBLE + hello + encoded(message))
        answer = read_to_end(sock)

    assert not any(secret.encode() in answer for secret in served.secrets)
    assert len(answer) < 600


@pytest.mark.parametrize("role", ["client", "worker"])
@pytest.mark.parametrize("token", ["", "guess"])
def test_an_empty_token_is_a_wrong_one(served: Served, role: str, token: str) -> None:
    raw = socket.create_connection((served.host, served.port), 10)
    with client_context().wrap_socket(raw, server_hostname="gpumesh") as sock:
        connection, _ = shake(sock, token, role=role)

    assert not connection.established
    error = connection.error
    assert isinstance(error, AuthenticationError) or getattr(error, "refusal", "") == LATER, error  # It has guessed before.


def test_whoever_has_the_token_did_not_notice(served: Served) -> None:
    with Client(f"127.0.0.1:{served.port}", served.token) as client:
        assert client.remote(tasks.noop, 1).result(20) == 1
    assert "Traceback" not in served.program.output
