"""Announcements by somebody who wants to be joined, or to be seen, or to fill tables: hints, and no more."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any, Dict, List

import pytest

from gpumesh.config import PROTOCOL_VERSION
from gpumesh.network.address import Address
from gpumesh.network.announcement import (
    MAX_ADDRESSES,
    MAX_ANNOUNCEMENTS,
    MAX_MESHES,
    MAX_NAME,
    Look,
    Sightings,
    clean,
    from_txt,
)
from gpumesh.network.probing import MESH, probe, prove
from gpumesh.protocol import frames
from gpumesh.protocol.messages import Challenge, Welcome
from tests.support.guarded import TOKEN, Guarded
from tests.support.peers import Server, encoded

HONEST: Dict[Any, Any] = {
    b"id": b"9f8e7d6c5b4a3928",
    b"name": b"lab",
    b"cert": b"ab" * 16,
    b"tls": b"1",
    b"v": b"0.1.0",
    b"p": b"1",
}
NASTY = (
    b"\x1b[2J\x1b]0;owned\x07", b"\x00" * 100, b"a" * 10_000, b"\xff\xfe\xfd", "\u202egpj.exe\u200b".encode(), b"\n\rjoin me\n", b"",
    b"../../etc/passwd", b"$(reboot)", b"`id`", b"%s%s%n", b"<script>", "\uff11\uff12".encode(), b"-1", b"99999999999999999999", b" ",
)  # fmt: skip
HOSTS = [
    "192.168.1.5",
    "fe80::1%eth0",
    "127.0.0.1",
    "::1",
    "0.0.0.0",
    "::",
    "224.0.0.1",
    "localhost",
    "::ffff:127.0.0.1",
    "x" * 300,
    "",
]


def check(found: Any) -> None:
    """What is fit for a terminal and for dialing."""
    for text in (found.mesh, found.name, found.certificate, found.gpumesh):
        assert text.isprintable(), repr(text)
    assert len(found.name) <= MAX_NAME
    assert len(found.mesh) <= 64
    assert len(found.addresses) <= MAX_ADDRESSES
    for address in found.addresses:
        assert 0 < address.port < 65536
        assert not address.host.startswith(("127.", "::1", "0.0.0.0", "224.")), address
        assert str(address).isprintable()


@pytest.mark.parametrize("field", [b"id", b"name", b"cert", b"tls", b"v", b"p", b"at", b"unknown", None], ids=str)
def test_what_is_announced_is_cleaned_and_bounded(field: Any) -> None:
    for value in (*NASTY, None, "text", 5, [b"x"]):
        found = from_txt({**HONEST, field: value}, HOSTS, 8000)
        if found is not None:
            check(found)


@pytest.mark.parametrize(
    "host", ["127.1", "127.0.1", "0x7f.1", "2130706433", "0177.0.0.1", "127.0.0.1.", "127.M.0.1", "loc\u0430lhost"]
)
def test_no_form_of_an_address_that_means_the_reader_himself_is_taken(host: str) -> None:
    found = from_txt({**HONEST, b"at": f"http://{host}:8000".encode()}, ["192.168.1.5"], 8000)
    assert found is not None
    assert [address.host for address in found.addresses] == ["192.168.1.5"]


def test_random_announcements_are_refused_or_clean() -> None:
    chance = random.Random(1)
    fields = [*HONEST, b"at"]
    for _ in range(5000):
        texts = {field: chance.choice((*NASTY, HONEST.get(field, b""))) for field in chance.sample(fields, chance.randrange(8))}
        texts[chance.choice(fields)] = chance.randbytes(chance.randrange(40))
        found = from_txt(texts, chance.sample(HOSTS, 4), chance.choice((0, -1, 80, 8000, 65536, 2**40)))
        if found is not None:
            check(found)


def test_a_flood_of_announcements_fills_no_table() -> None:
    sightings = Sightings(5.0)
    honest = from_txt(HONEST, ["192.168.1.5"], 8000)
    assert honest is not None
    sightings.seen("honest", honest)
    for number in range(1500):
        forged = from_txt({**HONEST, b"id": f"{number:016x}".encode()}, [f"10.0.{number % 256}.7"], 8000)
        assert forged is not None
        sightings.seen(f"forged {number}", forged)
        forged = from_txt(HONEST, [f"10.1.{number % 256}.7"], 8000)  # And of the honest one's id.
        assert forged is not None
        sightings.seen(f"of the same id {number}", forged)

    meshes = sightings.meshes()
    assert len(meshes) <= MAX_MESHES
    assert honest.mesh in {mesh.id for mesh in meshes}
    assert len(sightings.due(0.0)) <= MAX_ANNOUNCEMENTS * MAX_ADDRESSES
    assert sightings.left_out > 0


def test_an_address_that_answers_as_another_mesh_or_with_another_certificate_is_not_joined() -> None:
    sightings = Sightings(5.0)
    announced = from_txt(HONEST, ["192.168.1.5", "192.168.1.6", "192.168.1.7"], 8000)
    assert announced is not None
    sightings.seen("honest", announced)
    addresses = sightings.due(0.0)
    for address, look in zip(
        addresses,
        (
            Look(MESH, "", "0" * 16, "ab" * 32),  # Another mesh.
            Look(MESH, "", announced.mesh, "cd" * 32),  # Another certificate.
            Look("other", "a web server is there", "", ""),
        ),
    ):
        sightings.looked(address, look, 1.0)

    mesh = sightings.meshes()[0]
    assert not mesh.is_joinable
    assert mesh.reason


def false_coordinator(mesh: str, heard: List[bytes]) -> Any:
    """It says what a coordinator says, accepts everything, and keeps what it hears."""

    def serve(sock: socket.socket) -> None:
        sock.sendall(frames.PREAMBLE + encoded(Challenge(bytes(32), mesh, "0.1.0", "3.11")))
        with contextlib.suppress(OSError):
            sock.settimeout(5)
            while True:
                data = sock.recv(65536)
                if not data:
                    return
                heard.append(data)
                sock.sendall(encoded(Welcome(bytes(32), 3)))

    return serve


def test_a_look_at_a_false_mesh_tells_it_nothing() -> None:
    heard: List[bytes] = []
    with Server(false_coordinator("9f8e7d6c5b4a3928", heard)) as server:
        found = probe(Address("127.0.0.1", server.port), 5.0)

    assert found.kind == MESH, "it cannot be told from a mesh by looking"
    said = frames.FrameDecoder().feed(b"".join(heard)[frames.PREAMBLE_BYTES :])
    assert 0x03 not in {frame.kind for frame in said}, "no proof, so nothing to guess a token by"


def test_a_false_mesh_is_not_joined() -> None:
    heard: List[bytes] = []
    with Server(false_coordinator("9f8e7d6c5b4a3928", heard)) as server:
        problem = prove(Address("127.0.0.1", server.port), TOKEN, 5.0)

    assert problem
    assert TOKEN.encode() not in b"".join(heard)


def test_the_true_one_is_joined(guarded: Guarded) -> None:
    """So that what is refused above is refused for the reason that is meant."""
    address = Address("127.0.0.1", guarded.port)
    assert probe(address, 5.0).mesh == guarded.coordinator.mesh
    assert prove(address, TOKEN, 5.0) == ""
    assert prove(address, TOKEN + "x", 5.0) != ""


def test_what_a_coordinator_says_of_itself_is_cleaned_too() -> None:
    nasty = "\x1b[2Jmesh\n"
    with Server(false_coordinator(nasty, [])) as server:
        found = probe(Address("127.0.0.1", server.port), 5.0)

    assert all(str(field).isprintable() for field in found[1:6])
    assert clean(nasty, 40).isprintable()
    assert PROTOCOL_VERSION == 1
