"""The ways people write where a mesh is."""

from __future__ import annotations

from typing import Any

import pytest

from gpumesh.network.address import HTTPS, INSECURE, PORT, WEBSOCKET, Address, is_loopback, parse_address, plain_ip


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("http://box:8000", "box", 8000),
        ("https://mesh.example.org:444", "mesh.example.org", 444),
        ("gpumesh://box:9000", "box", 9000),
        ("tcp://10.0.0.7:9000", "10.0.0.7", 9000),
        ("box:9000", "box", 9000),
        ("box", "box", 8000),
        ("http://box", "box", 8000),
        ("http://box/", "box", 8000),
        ("HTTP://Box:1/", "Box", 1),
        ("https://mesh.example.org", "mesh.example.org", 443),
        ("[::1]:8000", "::1", 8000),
        ("http://[fe80::1%eth0]:8000/", "fe80::1%eth0", 8000),
        ("[::]", "::", 8000),
        ("[::ffff:10.0.0.7]:80", "::ffff:10.0.0.7", 80),
        ("  box:65535\n", "box", 65535),
        ("my_box-2.local:1", "my_box-2.local", 1),
    ],
)
def test_all_spellings_name_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text).is_at(Address(host, port))


@pytest.mark.parametrize(
    ("text", "way", "shown"),
    [
        ("box", PORT, "http://box:8000"),
        ("http://box", PORT, "http://box:8000"),
        ("tcp://box", PORT, "http://box:8000"),
        ("gpumesh://box", PORT, "http://box:8000"),
        ("https://box", HTTPS, "https://box:443"),
        ("wss://box:9", HTTPS, "https://box:9"),
        ("ws://box", WEBSOCKET, "ws://box:80"),
        ("Insecure://box", INSECURE, "insecure://box:8000"),
    ],
)
def test_the_scheme_says_the_way(text: str, way: str, shown: str) -> None:
    address = parse_address(text)

    assert address.way == way
    assert address.url == shown
    assert parse_address(shown) == address


def test_only_the_way_to_the_port_itself_can_be_insecure() -> None:
    assert parse_address("box").insecurely() == Address("box", 8000, INSECURE)
    assert parse_address("https://box").insecurely() == Address("box", 443, HTTPS)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_addresses_of_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.7", "127.0.0.example.org", "::", "fe80::1%eth0", "::ffff:10.0.0.7", "localhost", ""])
def test_addresses_and_names_of_others(host: str) -> None:
    assert not is_loopback(host)


def test_ipv4_through_an_ipv6_socket_is_shown_as_ipv4() -> None:
    assert [plain_ip(host) for host in ("::ffff:10.0.0.7", "10.0.0.7", "::1")] == ["10.0.0.7", "10.0.0.7", "::1"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not an address; write host:port, http://host:port or http://[ipv6]:port"),
        ("http://", "is not an address"),
        (":8000", "is not an address"),
        ("box:", "is not an address"),
        ("box:port", "is not an address"),
        ("box:-1", "is not an address"),
        ("box:80:80", "is not an address"),
        ("::1", "is not an address"),
        ("[]:80", "is not an address"),
        ("[box]:80", "is not an address"),
        ("[10.0.0.7]:80", "is not an address"),
        ("http://box:80/path", "is not an address"),
        ("http://box?x=1", "is not an address"),
        ("http://box#top", "is not an address"),
        ("http://ann@box:80", "is not an address"),
        ("two words:80", "is not an address"),
        ("box\n:80", "is not an address"),
        ("box:99999999999999999999", "is not an address"),
        ("box:\u0661\u0662", "is not an address"),
        (None, "None is not an address"),
        (8000, "8000 is not an address"),
        (b"box:80", "is not an address"),
        ("ftp://box:80", "has the scheme 'ftp'; use one of http, gpumesh, tcp, https, wss, ws, insecure or none"),
        ("box:0", "has the port 0; ports are 1 to 65535"),
        ("box:65536", "has the port 65536; ports are 1 to 65535"),
    ],
)
def test_anything_else_is_refused_with_what_to_write(text: Any, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_address(text)
    assert why in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["box:8000", "[::1]:8000", "[fe80::1%eth0]:80"])
def test_an_address_is_shown_as_it_can_be_typed(text: str) -> None:
    address = parse_address(text)

    assert str(address) == text
    assert address.url == f"http://{text}"
    assert parse_address(address.url) == address
