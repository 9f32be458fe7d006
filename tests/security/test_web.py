"""HTTP on a real coordinator's port: every verb on every path with every Host, Origin and token; the mesh is told of to who may know."""

from __future__ import annotations

import base64
import itertools
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

import pytest

pytest.importorskip("aiohttp")

from gpumesh.protocol import auth
from tests.support.guarded import TOKEN, Guarded, tls_connect
from tests.support.mesh_peer import MeshPeer
from tests.support.peers import connect, read_to_end

VERBS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND")
PATHS = (
    "/",
    "/healthz",
    "/metrics",
    "/mesh",
    "/jobs",
    "/metrics/",
    "/../metrics",
    "/%6detrics",
    "//metrics",
    "/Metrics",
    "/.git/config",
)
HOSTS = {"own": True, "localhost": True, "evil.example": False, "127.0.0.1.evil.example": False, "": False}
ORIGINS: Tuple[Optional[str], ...] = (None, "own", "null", "http://evil.example", "https://127.0.0.1")
BOX = "a-machine-nobody-knows"
_READ = ("GET", "HEAD")


def bearer(token: str) -> str:
    return f"Bearer {token}"


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"ann:{token}".encode()).decode()


TOKENS: Dict[str, Tuple[Optional[str], str]] = {  # What is sent, and what it grants.
    "none": (None, ""),
    "full": (bearer(TOKEN), "full"),
    "full as a password": (basic(TOKEN), "full"),
    "metrics": (bearer(auth.metrics_token(TOKEN)), "full"),
    "worker": (bearer(auth.worker_token(TOKEN)), "worker"),
    "wrong": (bearer(TOKEN + "x"), ""),
    "empty": (bearer(""), ""),
    "no scheme": (TOKEN, ""),
    "not base64": ("Basic ???", ""),
}


class Asker:
    """Asks one question after the other, on one connection while the other side keeps it."""

    def __init__(self, guarded: Guarded, *, tls: bool) -> None:
        self._guarded = guarded
        self._tls = tls
        self._sock: Any = None

    def ask(self, head: str) -> Tuple[int, bytes]:
        """(status, all that was answered)."""
        for _ in range(2):
            if self._sock is None:
                self._sock = tls_connect(self._guarded.port, "http/1.1") if self._tls else connect(self._guarded.port)
            try:
                self._sock.sendall(head.encode())
                answer = self._read(head.startswith("HEAD "))
            except OSError:
                answer = b""
            if answer:
                break
            self.close()
        status = int(re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)[1])  # type: ignore[index]
        if re.search(rb"(?im)^connection: close", answer):
            self.close()
        return status, answer

    def _read(self, is_head: bool) -> bytes:
        answer = b""
        while b"\r\n\r\n" not in answer:
            more = self._sock.recv(65536)
            if not more:
                return answer
            answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"(?im)^content-length: (\d+)", head)
        while not is_head and length is not None and len(body) < int(length[1]):
            more = self._sock.recv(65536)
            if not more:
                break
            body += more
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


@pytest.fixture(params=[False, True], ids=["http", "https"])
def asker(request: pytest.FixtureRequest, guarded: Guarded) -> Iterator[Asker]:
    made = Asker(guarded, tls=request.param)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _box(guarded: Guarded) -> Iterator[None]:
    """Something to tell of."""
    with MeshPeer(guarded.port, TOKEN, worker=BOX) as worker:
        yield
        worker.connection.close("done")
        worker.flush()
        read_to_end(worker.socket)


def head_of(guarded: Guarded, asker: Asker, verb: str, path: str, host: str, origin: Optional[str], token: str) -> str:
    own = f"127.0.0.1:{guarded.port}"
    lines = [f"{verb} {path} HTTP/1.1", f"Host: {own if host == 'own' else host}"]
    if origin is not None:
        lines.append("Origin: " + (("https://" if asker._tls else "http://") + own if origin == "own" else origin))
    if TOKENS[token][0] is not None:
        lines.append(f"Authorization: {TOKENS[token][0]}")
    return "\r\n".join(lines) + "\r\n\r\n"


def expected(verb: str, path: str, host: str, origin: Optional[str], token: str) -> int:
    """What a reader of docs/security.md would expect."""
    if not HOSTS[host] and path != "/mesh":
        return 421
    # The Origin is our own only if the request was sent to that Host, too.
    if origin is not None and (origin != "own" or path == "/mesh" or host != "own"):
        return 403
    if path == "/%6detrics":
        path = "/metrics"  # The same thing, written differently, and guarded the same.
    if path not in ("/", "/healthz", "/metrics", "/mesh"):
        return 404
    if verb not in (_READ if path != "/mesh" else ("GET",)):
        return 405
    if path == "/mesh":
        return 426
    grant, is_asking = TOKENS[token][1], TOKENS[token][0] is not None
    if path == "/healthz" or (path == "/" and not is_asking):
        return 200
    return 200 if grant == "full" else 403 if grant == "worker" else 401


def check(guarded: Guarded, asker: Asker, asked: Tuple[str, str, str, Optional[str], str]) -> Optional[str]:
    _, path, _, _, token = asked
    status, answer = asker.ask(head_of(guarded, asker, *asked))
    if status != expected(*asked):
        return f"{asked}: {status}, not {expected(*asked)}"
    may_know = status == 200 and TOKENS[token][1] == "full" and path not in ("/healthz",)
    for secret in (BOX, guarded.coordinator.mesh, TOKEN):
        if secret.encode() in answer and not (may_know and secret != TOKEN):
            return f"{asked}: tells {secret!r}"
    if re.search(rb"(?im)^access-control-allow", answer):
        return f"{asked}: lets other sites read it"
    if re.search(rb"(?i)aiohttp|python/", answer):
        return f"{asked}: tells what it is made of"
    return None


def test_without_a_token_nothing_is_told_whatever_is_asked(guarded: Guarded, asker: Asker) -> None:
    asked = list(itertools.product(VERBS, PATHS, HOSTS, ORIGINS, ["none"]))
    wrong = [found for found in (check(guarded, asker, each) for each in asked) if found]
    assert wrong == []
    assert len(asked) == len(VERBS) * len(PATHS) * len(HOSTS) * len(ORIGINS)


def test_a_token_helps_only_the_right_one_to_the_right_place(guarded: Guarded, asker: Asker) -> None:
    wrong: List[str] = []
    for each in itertools.product(
        ("GET", "HEAD", "POST"), ("/", "/healthz", "/metrics", "/jobs"), HOSTS, (None, "own", "null"), TOKENS
    ):
        if TOKENS[each[4]][1] == "" and each[4] != "none":
            guarded.forgive()
        found = check(guarded, asker, each)
        if found:
            wrong.append(found)
    assert wrong == []


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello",
        "GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "POST /mesh HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n",
        "GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        "GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n folded\r\n\r\n",
        "GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        (
            "GET /mesh HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nOrigin: http://localhost\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        ),
        "GET /mesh HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + "X: y\r\n" * 5000 + "\r\n",
        "GET /" + "a" * 100_000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + "a" * 20_000 + "\r\n\r\n",
    ],
    ids=range(19),
)
def test_odd_requests_learn_nothing(guarded: Guarded, asker: Asker, head: str) -> None:
    sock = tls_connect(guarded.port, "http/1.1") if asker._tls else connect(guarded.port)
    with sock:
        try:
            sock.sendall(head.encode())
            sock.settimeout(10)
            answer = sock.recv(65536)
        except ConnectionError:
            answer = b""
    assert not re.match(rb"HTTP/1\.[01] 101", answer)
    if re.match(rb"HTTP/1\.[01] 200", answer):
        assert b"gpumesh" in answer  # The page without facts.
    for secret in (BOX, guarded.coordinator.mesh, TOKEN):
        assert secret.encode() not in answer


def test_wrong_tokens_over_http_shut_the_door(guarded: Guarded, asker: Asker) -> None:
    statuses = []
    for _ in range(12):
        statuses.append(asker.ask(head_of(guarded, asker, "GET", "/metrics", "own", None, "wrong"))[0])
    assert statuses[0] == 401
    assert 429 in statuses
    assert asker.ask(head_of(guarded, asker, "GET", "/metrics", "own", None, "full"))[0] == 429, (
        "the right one has to wait, too"
    )
    guarded.forgive()
    assert asker.ask(head_of(guarded, asker, "GET", "/metrics", "own", None, "full"))[0] == 200


PROXIED = ("X-Forwarded-For: 198.51.100.7", "Forwarded: for=198.51.100.7", "Via: 1.1 tunnel", "Host: mesh.tunnel.example")


@pytest.mark.parametrize("sign", PROXIED)
def test_the_full_token_is_not_taken_where_a_proxy_has_read_it(guarded: Guarded, sign: str) -> None:
    """The name of a tunnel is one of the coordinator's: `serve --public` adds it, `--advertise` does."""
    guarded.coordinator.names.add("mesh.tunnel.example")
    asker = Asker(guarded, tls=False)

    def ask(path: str, token: str) -> Tuple[int, bytes]:
        host = sign if sign.startswith("Host") else f"Host: 127.0.0.1:{guarded.port}\r\n{sign}"
        return asker.ask(f"GET {path} HTTP/1.1\r\n{host}\r\nAuthorization: {TOKENS[token][0]}\r\n\r\n")

    for path in ("/", "/metrics"):
        status, answer = ask(path, "full")
        assert (status, BOX.encode() in answer) == (403, False)
        assert b"token metrics" in answer
        assert ask(path, "metrics")[0] == 200
    asker.close()


@pytest.mark.parametrize("sign", PROXIED)
def test_wrong_tokens_through_a_tunnel_do_not_shut_out_this_machine(guarded: Guarded, sign: str) -> None:
    asker, own = Asker(guarded, tls=False), Asker(guarded, tls=False)
    guarded.coordinator.names.add("mesh.tunnel.example")
    host = sign if sign.startswith("Host") else f"Host: 127.0.0.1:{guarded.port}\r\n{sign}"
    statuses = [
        asker.ask(f"GET /metrics HTTP/1.1\r\n{host}\r\nAuthorization: {TOKENS['wrong'][0]}\r\n\r\n")[0] for _ in range(12)
    ]
    assert 429 in statuses
    assert own.ask(head_of(guarded, own, "GET", "/metrics", "own", None, "full"))[0] == 200
    asker.close()
    own.close()
    guarded.forgive()
