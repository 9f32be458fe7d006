"""HTTP on the coordinator's port: what anybody gets, what the token opens, and who is turned away."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
from html.parser import HTMLParser
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Set

import pytest

from gpumesh.network.certificates import load_or_make_identity
from gpumesh.network.tcp import listen
from gpumesh.protocol import auth
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.runtime.loop import LoopThread

TOKEN = "a token of this test's own"


class Site:
    """A coordinator in this process, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.thread = LoopThread("test-coordinator")
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]

        async def start() -> Coordinator:
            coordinator = Coordinator(token=TOKEN, identity=load_or_make_identity(str(folder)))
            coordinator.names.add("Mesh.Example.com")
            await coordinator.start(listener)
            return coordinator

        self.coordinator = self.thread.call(start, timeout=5.0)

    def ask(
        self, path: str, headers: Optional[Dict[str, str]] = None, *, verb: str = "GET", tls: bool = False, body: str = ""
    ) -> Answer:
        connection: http.client.HTTPConnection
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=5, context=context)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(verb, path, body or None, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode())
        finally:
            connection.close()

    def say(self, data: bytes) -> bytes:
        """What comes back until the end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
            sock.sendall(data)
            parts = []
            while part := sock.recv(65536):
                parts.append(part)
            return b"".join(parts)

    def forget_failures(self) -> None:
        """Wrong tokens of before, which would keep this very address out."""

        async def forget() -> None:
            self.coordinator.door.admission._records.clear()

        self.thread.call(forget, timeout=5.0)

    def close(self) -> None:
        self.thread.call(self.coordinator.stop, timeout=5.0)
        self.thread.stop()


class Answer(NamedTuple):
    status: int
    headers: Dict[str, str]
    text: str


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("identity"))
    yield site
    site.close()


@pytest.fixture
def site(living: Site) -> Site:
    living.forget_failures()
    return living


def bearer(token: str) -> Dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(user: str, token: str) -> Dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()}


VERBS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND")


@pytest.mark.parametrize("verb", VERBS)
def test_verbs(site: Site, verb: str) -> None:
    statuses = {path: site.ask(path, verb=verb).status for path in ("/", "/healthz", "/metrics", "/mesh", "/else")}
    known = {"GET": (200, 200, 401, 426, 404), "HEAD": (200, 200, 401, 405, 404)}
    assert tuple(statuses.values()) == known.get(verb, (405, 405, 405, 405, 404))


@pytest.mark.parametrize("tls", [False, True])
def test_health_is_told_to_anybody_and_says_nothing_else(site: Site, tls: bool) -> None:
    answer = site.ask("/healthz", tls=tls)
    assert (answer.status, answer.text) == (200, "ok\n")


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/mesh", "/else"])
def test_every_answer_forbids_what_a_browser_might_do_with_it(site: Site, path: str) -> None:
    headers = site.ask(path).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["server"] == "gpumesh", "no versions for strangers"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(TOKEN), 200),
        (basic("", TOKEN), 200),
        (basic("anybody", TOKEN), 200),
        (bearer(auth.metrics_token(TOKEN)), 200),
        (bearer(auth.worker_token(TOKEN)), 403),
        (bearer(TOKEN + "x"), 401),
        (bearer(TOKEN[:-1]), 401),
        (bearer(""), 401),
        (basic(TOKEN, ""), 401),
        ({"Authorization": "Basic not base64!"}, 401),
        ({"Authorization": "Basic /w=="}, 401),
        ({"Authorization": f"Digest {TOKEN}"}, 401),
        ({"X-Token": TOKEN}, 401),
        ({"Cookie": f"token={TOKEN}"}, 401),
        ({}, 401),
    ],
    ids=str,
)
def test_figures_take_the_token(site: Site, headers: Dict[str, str], status: int) -> None:
    answer = site.ask("/metrics", headers)
    assert answer.status == status
    assert ("gpumesh_info" in answer.text) is (status == 200)
    assert ("www-authenticate" in answer.headers) is (status == 401)
    assert TOKEN not in answer.text


def test_a_token_in_the_address_is_not_taken(site: Site) -> None:
    assert site.ask(f"/metrics?token={TOKEN.replace(' ', '%20')}").status == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:1234", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),
        ("mesh.example.com", 200),
        ("MESH.EXAMPLE.COM:443", 200),
        (socket.gethostname(), 200),
        ("evil.example.com", 421),
        ("127.0.0.1.evil.example.com", 421),
        ("localhost.evil.example.com", 421),
        ("", 421),
    ],
)
def test_only_names_of_this_machine_are_answered(site: Site, host: str, status: int) -> None:
    assert site.ask("/", {"Host": host, **bearer(auth.metrics_token(TOKEN))}).status == status


def test_two_hosts_or_none_are_no_request(site: Site) -> None:
    assert site.say(b"GET / HTTP/1.1\r\n\r\n").split(b" ")[1] == b"400"
    assert site.say(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n").split(b" ")[1] == b"400"


@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", "http://127.0.0.1", "https://127.0.0.1:{port}", ""])
def test_pages_of_others_learn_nothing(site: Site, origin: str) -> None:
    headers = {"Origin": origin.format(port=site.port), **bearer(TOKEN)}
    assert {site.ask(path, headers).status for path in ("/", "/metrics", "/mesh")} == {403}


def test_its_own_page_may_ask(site: Site) -> None:
    assert site.ask("/metrics", {"Origin": f"http://127.0.0.1:{site.port}", **bearer(TOKEN)}).status == 200
    assert site.ask("/metrics", {"Origin": f"https://127.0.0.1:{site.port}", **bearer(TOKEN)}, tls=True).status == 200


def test_no_page_opens_the_websocket_not_even_its_own(site: Site) -> None:
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "A" * 22 + "==",
    }
    assert site.ask("/mesh", {"Origin": f"http://127.0.0.1:{site.port}", **upgrade}).status == 403
    assert site.ask("/mesh", {"Upgrade": "h2c", "Connection": "Upgrade"}).status == 426
    assert site.ask("/mesh", {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "7"}).status == 400


def test_requests_with_a_body_are_not_read(site: Site) -> None:
    assert site.ask("/", bearer(TOKEN), body="x").status == 413
    endless = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ff\r\n" + b"x" * 255
    answer = site.say(endless)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 8000 + b"\r\n\r\n",
        b"GET /" + b"x" * 8000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_no_request_is_told_so_and_closed(site: Site, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    answer = site.say(data)
    assert answer.split(b" ")[1] == b"400"
    assert b"aiohttp" not in answer
    assert b"Python" not in answer
    assert caplog.records == []


def test_wrong_tokens_count_at_the_door(site: Site) -> None:
    """As those of the mesh do: guessing over HTTP is no faster."""
    statuses = [site.ask("/metrics", bearer(f"guess {number}")).status for number in range(10)]
    assert statuses[:5] == [401] * 5
    assert statuses[-1] == 429
    refused = site.ask("/metrics", bearer(TOKEN))
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert site.ask("/healthz").status == 200
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "A" * 22 + "==",
    }
    assert site.ask("/mesh", upgrade).status == 429


class _Page(HTMLParser):
    """What a browser would load, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Set[str] = set()
        self.loaded: List[str] = []
        self.shown = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "data", "action")]  # type: ignore[attr-defined]

    def handle_data(self, data: str) -> None:
        self.shown += data


def test_the_page_tells_a_stranger_nothing(site: Site) -> None:
    answer = site.ask("/")
    page = _Page(answer.text)
    assert answer.status == 200
    assert site.coordinator.mesh not in answer.text
    assert socket.gethostname() not in answer.text
    assert re.search(r"\d+\.\d+\.\d+", answer.text) is None, "a version, or an address"
    assert page.loaded == []
    assert "script" not in page.tags
    assert site.ask("/?login").headers["www-authenticate"].startswith("Basic ")


def test_the_page_with_the_token_says_what_the_mesh_does(site: Site) -> None:
    answer = site.ask("/", basic("me", TOKEN))
    page = _Page(answer.text)
    assert answer.status == 200
    assert site.coordinator.mesh in page.shown
    assert "0 tasks ended" in page.shown
    assert page.loaded == []


def test_figures_have_the_form_of_prometheus(site: Site) -> None:
    answer = site.ask("/metrics", bearer(TOKEN))
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    told: Dict[str, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            told[name] = kind
        elif not line.startswith("# HELP "):
            match = re.fullmatch(r'(\w+)(\{\w+="(?:[^"\\]|\\.)*"(?:,\w+="(?:[^"\\]|\\.)*")*\})? (-?[0-9.e+-]+)', line)
            assert match is not None, line
            assert match[1] in told, "a sample before its type"
            assert (told[match[1]] == "counter") is match[1].endswith("_total")
    assert {"gpumesh_workers", "gpumesh_tasks", "gpumesh_tasks_ended_total", "gpumesh_refusals_total"} <= set(told)
