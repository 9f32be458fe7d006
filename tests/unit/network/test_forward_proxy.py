"""Which addresses go by the HTTP proxy of this machine's network, and what it means when that does not let us through."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Callable, Iterator, List, Mapping, Tuple

import pytest

from gpumesh.errors import MeshError, MeshUnavailableError, ProtocolError
from gpumesh.network import connecting
from gpumesh.network.address import Address, parse_address
from gpumesh.network.forward_proxy import Proxy, open_tunnel, proxy_for, without_login
from gpumesh.runtime import piping
from tests.support.processes import free_port

MESH = "https://mesh.example.org"
PROXY = "http://proxy.example.net:3128"


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        (MESH, {}, None),
        (MESH, {"HTTPS_PROXY": " "}, None),
        (MESH, {"HTTPS_PROXY": PROXY}, ("proxy.example.net", 3128, "HTTPS_PROXY")),
        ("wss://mesh.example.org", {"https_proxy": PROXY}, ("proxy.example.net", 3128, "https_proxy")),
        (MESH, {"ALL_PROXY": PROXY}, ("proxy.example.net", 3128, "ALL_PROXY")),
        (MESH, {"all_proxy": PROXY}, ("proxy.example.net", 3128, "all_proxy")),
        (MESH, {"HTTPS_PROXY": "http://one:1", "ALL_PROXY": "socks5://two:2"}, ("one", 1, "HTTPS_PROXY")),
        (MESH, {"https_proxy": "http://one:1", "HTTPS_PROXY": "http://two:2"}, ("one", 1, "https_proxy")),
        (MESH, {"HTTPS_PROXY": "one:1"}, ("one", 1, "HTTPS_PROXY")),
        (MESH, {"HTTPS_PROXY": "http://one/"}, ("one", 80, "HTTPS_PROXY")),
        (MESH, {"HTTPS_PROXY": "http://[fd00::7]:3128"}, ("fd00::7", 3128, "HTTPS_PROXY")),
        (MESH, {"HTTPS_PROXY": "http://user:p@ss@one:1"}, ("one", 1, "HTTPS_PROXY")),
        (MESH, {"HTTP_PROXY": PROXY, "http_proxy": PROXY}, None),
        # What is not https:// is never caught by one, nor is this machine itself.
        ("http://mesh.example.org", {"HTTPS_PROXY": PROXY, "HTTP_PROXY": PROXY, "ALL_PROXY": PROXY}, None),
        ("mesh.example.org:8000", {"HTTPS_PROXY": PROXY, "http_proxy": PROXY, "ALL_PROXY": PROXY}, None),
        ("ws://mesh.example.org", {"HTTPS_PROXY": PROXY, "HTTP_PROXY": PROXY, "ALL_PROXY": PROXY}, None),
        ("insecure://mesh.example.org", {"HTTPS_PROXY": PROXY, "HTTP_PROXY": PROXY, "ALL_PROXY": PROXY}, None),
        ("https://127.0.0.1:8000", {"HTTPS_PROXY": PROXY}, None),
        ("https://[::1]:8000", {"HTTPS_PROXY": PROXY}, None),
        ("https://LOCALHOST:8000", {"HTTPS_PROXY": PROXY}, None),
    ],
)
def test_which_proxy_is_used(url: str, environment: Mapping[str, str], expected: object) -> None:
    proxy = proxy_for(parse_address(url), environment)
    assert (proxy and (proxy.address.host, proxy.address.port, proxy.variable)) == expected


@pytest.mark.parametrize(
    ("url", "exceptions", "is_direct"),
    [
        (MESH, "*", True),
        (MESH, "", False),
        (MESH, "mesh.example.org", True),
        (MESH, "MESH.example.ORG", True),
        (MESH, "other.net, example.org", True),
        (MESH, "other.net .example.org", True),
        (MESH, "*.example.org", True),
        (MESH, "ample.org", False),
        (MESH, "a.mesh.example.org", False),
        (MESH, "mesh.example.org:443", True),
        (MESH, "mesh.example.org:8000", False),
        (MESH, "., ,*.", False),
        ("https://10.1.2.3", "10.1.2.3", True),
        ("https://10.1.2.3", "10.0.0.0/8", True),
        ("https://10.1.2.3", "10.1.3.0/24", False),
        ("https://10.1.2.3", "nonsense/8", False),
        (MESH, "10.0.0.0/8", False),
        ("https://[fd00::7]:8000", "fd00::7", True),
        ("https://[fd00::7]:8000", "[fd00::7]:8000", True),
        ("https://[fd00::7]:8000", "[fd00::7]", True),
        ("https://[fd00::7]:8000", "[fd00::7]:443", False),
        ("https://[fd00::7]:8000", "fd00::/16", True),
    ],
)
def test_what_no_proxy_lists_is_reached_directly(url: str, exceptions: str, is_direct: bool) -> None:
    address = parse_address(url)
    assert (proxy_for(address, {"HTTPS_PROXY": PROXY, "NO_PROXY": exceptions}) is None) == is_direct
    assert (proxy_for(address, {"HTTPS_PROXY": PROXY, "no_proxy": exceptions, "NO_PROXY": ""}) is None) == is_direct


@pytest.mark.parametrize(
    "value",
    [
        "https://user:secret@one:1",
        "socks5h://user:secret@one:1",
        "http://user:secret@",
        "http://user:secret@one:0",
        "http://user:secret@one:70000",
        "http://user:secret@one:1/path",
        "http://user:secret@one two:1",
        "http://user:secret@one:1\r\nX: y",
    ],
)
def test_what_cannot_be_used_is_told_without_the_password(value: str) -> None:
    with pytest.raises(ProtocolError, match=r"^HTTPS_PROXY names .*; .+") as caught:
        proxy_for(parse_address(MESH), {"HTTPS_PROXY": value})
    assert "secret" not in str(caught.value)


def test_its_login_is_decoded_and_shown_nowhere() -> None:
    proxy = proxy_for(parse_address(MESH), {"HTTPS_PROXY": "http://us%C3%A9r:p%40%3a%25s@one:1"})
    assert proxy is not None
    assert proxy.headers()["Proxy-Authorization"] == "Basic dXPDqXI6cEA6JXM="  # usér:p@:%s
    assert proxy.url == "http://one:1"
    assert "p%40" not in repr(proxy)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://me:secret@one:1", "http://...@one:1"),
        ("me:sec@ret@one:1", "...@one:1"),
        ("http://me:sec://ret@one:1", "http://...@one:1"),
        ("http://one:1", "http://one:1"),
        ("localhost,10.0.0.0/8", "localhost,10.0.0.0/8"),
    ],
)
def test_a_variable_is_shown_without_its_login(value: str, shown: str) -> None:
    assert without_login(value) == shown


# --- what it answers

Answer = Callable[[bytes], Tuple[Proxy, List[bytes]]]


@pytest.fixture
def answer() -> Iterator[Answer]:
    """Proxies that answer one request with these bytes, and then hang up; what each was asked."""
    with contextlib.ExitStack() as ends:

        def make(data: bytes) -> Tuple[Proxy, List[bytes]]:
            listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
            asked: List[bytes] = []

            def serve() -> None:
                with listener.accept()[0] as sock:
                    listener.close()  # Nobody else comes in.
                    asked.append(sock.recv(65536))
                    sock.sendall(data)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            ends.callback(thread.join, 5.0)
            return Proxy(Address("127.0.0.1", listener.getsockname()[1]), "HTTPS_PROXY", "me:secret"), asked

        yield make


BASIC = b'Proxy-Authenticate: Negotiate\r\nProxy-Authenticate: Basic realm="x"\r\n'
REFUSALS = [
    (b"HTTP/1.1 403 Forbidden\r\n\r\n<html>", ProtocolError, "does not let us through to mesh.example.org:443 (status 403)"),
    (b"HTTP/1.0 405 No\r\nX: y\r\n\r\n", ProtocolError, "(many allow port 443 alone)"),
    (b"HTTP/1.1 407 Login\r\n" + BASIC + b"\r\n", ProtocolError, "does not take the user name and password of HTTPS_PROXY"),
    (b"HTTP/1.1 407 Login\r\nProxy-Authenticate: NTLM\r\n\r\n", ProtocolError, "wants a login by NTLM (status 407)"),
    (b"HTTP/1.1 429 Slow\r\n\r\n", MeshUnavailableError, "does not reach mesh.example.org:443 (status 429)"),
    (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", MeshUnavailableError, "does not reach mesh.example.org:443 (status 502)"),
    (b"", MeshUnavailableError, "closed the connection before it had reached mesh.example.org:443"),
]


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        *REFUSALS,
        (b"SSH-2.0-OpenSSH_9.0\r\n", ProtocolError, "is no HTTP proxy; correct HTTPS_PROXY"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000, ProtocolError, "is no HTTP proxy"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", ProtocolError, "is no HTTP proxy"),
    ],
)
def test_a_proxy_that_does_not_let_us_through_says_why(answer: Answer, data: bytes, kind: type, text: str) -> None:
    proxy, _ = answer(data)
    with pytest.raises(MeshError) as caught:
        open_tunnel(proxy, parse_address(MESH), 5.0)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert proxy.url in str(caught.value)
    assert "; " in str(caught.value), "and what to do"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("data", "kind", "text"), REFUSALS[:-1])
def test_a_websocket_through_it_says_the_same(
    answer: Answer, data: bytes, kind: type, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, asked = answer(data)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{proxy.address}")
    with pytest.raises(MeshError) as caught:
        piping.open_pipe(parse_address(MESH), timeout=5.0)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert "secret" not in str(caught.value)
    assert asked[0].startswith(b"CONNECT mesh.example.org:443 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n" in asked[0]


def test_what_is_asked_of_it_and_what_comes_behind(answer: Answer) -> None:
    proxy, asked = answer(b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n")
    with open_tunnel(proxy, parse_address("https://[fd00::7]:8000"), 5.0) as sock:
        sock.settimeout(5.0)
        assert sock.recv(1) == b""
    head = asked[0].split(b"\r\n")
    assert head[:2] == [b"CONNECT [fd00::7]:8000 HTTP/1.1", b"Host: [fd00::7]:8000"]
    assert b"Proxy-Authorization: Basic bWU6c2VjcmV0" in head
    assert head[-2:] == [b"", b""]


def test_one_that_hangs_up_later_is_named(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, _ = answer(b"HTTP/1.1 200 OK\r\n\r\n")
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{proxy.address}")
    sock = connecting.connect(parse_address(MESH), 5.0)
    with pytest.raises(OSError) as caught:
        connecting.secure(sock, ("http/1.1",), 5.0)
    told = str(connecting.explain(parse_address(MESH), caught.value, 5.0))
    assert told.startswith(f"mesh.example.org:443 (through the HTTP proxy {proxy.url}) broke the TLS handshake off ")
    assert "secret" not in told


def test_one_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{port}")
    for dial in (
        lambda: connecting.connect(parse_address(MESH), 5.0),
        lambda: piping.open_pipe(parse_address(MESH), timeout=5.0),
    ):
        with pytest.raises(
            MeshUnavailableError, match=rf"proxy http://127.0.0.1:{port} cannot be reached .*correct https_proxy"
        ) as caught:
            dial()
        assert "secret" not in str(caught.value)


def test_one_that_says_nothing_is_not_waited_for_longer_than_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(Address("127.0.0.1", listener.getsockname()[1]), "HTTPS_PROXY")
        with pytest.raises(MeshUnavailableError, match=r"has not reached mesh\.example\.org:443 within 0\.2 s; "):
            open_tunnel(proxy, parse_address(MESH), 0.2)
