"""What announcements and looks amount to; what strangers announce is cleaned, bounded and harmless."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumesh.config import PROTOCOL_VERSION
from gpumesh.network.address import INSECURE, Address
from gpumesh.network.announcement import (
    MAX_ADDRESSES,
    MAX_ANNOUNCEMENTS,
    MAX_MESHES,
    MAX_NAME,
    MAX_PER_MESH,
    Announcement,
    Look,
    Mesh,
    Sightings,
    from_txt,
    to_txt,
)
from gpumesh.network.announcer import hosts_to_announce, label
from gpumesh.network.ranking import BRIDGE, LAN, LOOPBACK, HostAddress

CERTIFICATE = "ab" * 16
ONE, TWO = Address("192.168.1.20", 8000), Address("100.64.0.20", 8000)


def announced(
    mesh: str = "feed0001", certificate: str = CERTIFICATE, protocol: int = PROTOCOL_VERSION, *at: Address
) -> Announcement:
    return Announcement(mesh, "den", certificate, "0.1.0", protocol, at or (ONE, TWO))


def answer(mesh: str = "feed0001", certificate: str = CERTIFICATE + "cd" * 16) -> Look:
    return Look("mesh", "", mesh, certificate)


def only(sightings: Sightings) -> Mesh:
    (mesh,) = sightings.meshes()
    return mesh


def received(texts: Dict[str, str]) -> Dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in texts.items()}


def test_what_is_announced_arrives() -> None:
    sent = announced()

    assert from_txt(received(to_txt(sent)), ["192.168.1.20", "100.64.0.20"], 8000) == sent


def test_nothing_of_it_is_secret_and_it_is_short() -> None:
    texts = to_txt(announced(), [Address(f"host-{number}.example", 9000) for number in range(100)])

    assert set(texts) == {"id", "name", "cert", "tls", "v", "p", "at"}
    assert all(len(name) + 1 + len(value) <= 255 for name, value in texts.items())


def test_named_addresses_arrive_with_their_ports() -> None:
    texts = received(to_txt(announced(), [Address("mesh.example", 9000)]))

    found = from_txt(texts, ["192.168.1.20"], 8000)

    assert found is not None
    assert found.addresses == (Address("mesh.example", 9000), ONE)


def test_without_tls_the_way_says_so() -> None:
    found = from_txt(received(to_txt(announced(certificate=""))), ["192.168.1.20"], 8000)

    assert found is not None
    assert found.addresses == (Address("192.168.1.20", 8000, INSECURE),)


def test_addresses_that_mean_the_reader_or_nobody_are_left_out() -> None:
    texts = received(
        {**to_txt(announced()), "at": "http://localhost:1 http://127.0.0.1:2 http://[::1]:3 :rubbish: http://0.0.0.0:1"}
    )

    found = from_txt(texts, ["127.0.0.1", "::1", "169.254.1.1", "fe80::1", "0.0.0.0", "224.0.0.1", "10.0.0.7"], 8000)

    assert found is not None
    assert found.addresses == (Address("10.0.0.7", 8000),)


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {b"id": b"", b"p": b"1"},
        {b"id": b"feed", b"p": b"one"},
        {b"id": b"fe\x1bed", b"p": b"1"},
        {b"id": b"../../etc", b"p": b"1"},
        {b"id": b"feed", b"p": "\N{ARABIC-INDIC DIGIT ONE}".encode()},
        {b"id": b"feed", b"p": b"1", b"cert": b"not hexadecimal"},
        {b"id": None, b"p": None},
    ],
)
def test_what_is_no_announcement_of_a_mesh_is_none(texts: Dict[bytes, Any]) -> None:
    assert from_txt(texts, ["10.0.0.7"], 8000) is None


def test_one_entry_with_the_address_that_answers() -> None:
    sightings = Sightings(5.0)
    for interface in ("one", "two"):  # The same mesh by two networks.
        sightings.seen(interface, announced())

    assert sightings.due(0.0) == [ONE, TWO]
    sightings.looked(ONE, Look("timeout", "nothing answers", "", ""), 1.0)
    assert not only(sightings).is_settled
    sightings.looked(TWO, answer(), 1.0)

    mesh = only(sightings)
    assert mesh.addresses == (ONE, TWO)
    assert mesh.address == TWO
    assert mesh.is_joinable
    assert mesh.is_settled


@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (
            Look("refused", "nothing listens", "", ""),
            "192.168.1.20:8000 (refused): nothing listens (and 1 more of its addresses)",
        ),
        (Look("version", "it speaks 9", "", ""), "192.168.1.20:8000 (version): it speaks 9 (and 1 more of its addresses)"),
        (Look("no IPv6", "", "", ""), "192.168.1.20:8000 (no IPv6) (and 1 more of its addresses)"),
        (
            answer(mesh="0ther000"),
            "192.168.1.20:8000 (another mesh): mesh 0ther000 answers there (and 1 more of its addresses)",
        ),
        (
            answer(certificate="00" * 32),
            "192.168.1.20:8000 (other certificate): what answers there shows another certificate than the announced one; somebody may stand between (and 1 more of its addresses)",
        ),
        (
            answer(certificate=""),
            "192.168.1.20:8000 (no TLS): what answers there does not encrypt, and the mesh is announced as one that does (and 1 more of its addresses)",
        ),
    ],
)
def test_why_a_mesh_that_was_seen_cannot_be_joined(look: Look, reason: str) -> None:
    sightings = Sightings(5.0)
    sightings.seen("one", announced())
    sightings.due(0.0)
    sightings.looked(ONE, look, 1.0)
    sightings.looked(TWO, Look("failed", "no idea", "", ""), 1.0)

    mesh = only(sightings)
    assert mesh.reason == reason
    assert not mesh.is_joinable


def test_another_version_need_not_be_looked_at() -> None:
    sightings = Sightings(5.0)
    sightings.seen("one", announced(protocol=PROTOCOL_VERSION + 1))

    assert "install the same gpumesh version" in only(sightings).reason


def test_another_certificate_for_the_same_mesh_is_flagged_and_keeps_nobody_out() -> None:
    sightings = Sightings(5.0)
    forged = Address("192.168.1.66", 8000)
    sightings.seen("forged", announced("feed0001", "66" * 16, PROTOCOL_VERSION, forged))
    sightings.seen("true", announced())
    for address in sightings.due(0.0):
        sightings.looked(address, answer() if address != forged else answer(certificate="66" * 32), 1.0)

    mesh = only(sightings)
    assert "2 different certificates" in mesh.warning
    assert set(mesh.answering) == {ONE, TWO, forged}
    assert mesh.is_joinable  # Only one that knows the token opens to whoever joins.


def test_looks_are_made_anew_and_what_was_known_holds_until_then() -> None:
    sightings = Sightings(5.0)
    sightings.seen("one", announced("feed0001", CERTIFICATE, PROTOCOL_VERSION, ONE))
    assert sightings.due(0.0) == [ONE]
    assert sightings.due(1.0) == []
    sightings.looked(ONE, answer(), 1.0)

    assert sightings.due(5.9) == []
    assert sightings.due(6.0) == [ONE]
    assert only(sightings).is_joinable
    sightings.looked(ONE, Look("refused", "gone", "", ""), 7.0)
    assert not only(sightings).is_joinable


def test_what_is_taken_back_is_gone_with_its_looks() -> None:
    sightings = Sightings(5.0)
    sightings.seen("one", announced())
    sightings.due(0.0)
    sightings.gone("one")
    sightings.looked(ONE, answer(), 1.0)

    assert sightings.meshes() == []
    assert sightings.due(100.0) == []


def test_a_flood_leaves_those_that_were_there_and_is_counted() -> None:
    sightings = Sightings(5.0)
    sightings.seen("true", announced())
    for number in range(3000):
        sightings.seen(
            f"flood {number}", announced(f"f100d{number}", CERTIFICATE, PROTOCOL_VERSION, Address("10.0.0.1", 1 + number))
        )
    for number in range(100):
        sightings.seen(
            f"same {number}", announced("feed0001", f"{number:032x}", PROTOCOL_VERSION, Address("10.0.0.2", 1 + number))
        )

    meshes = sightings.meshes()
    assert len(meshes) == MAX_MESHES
    assert meshes[0].addresses[:2] == (ONE, Address("10.0.0.2", 1))
    assert TWO in meshes[0].addresses
    assert len(meshes[0].addresses) <= MAX_ADDRESSES
    assert sightings.left_out == 3000 - (MAX_MESHES - 1) + 100 - (MAX_PER_MESH - 1)
    assert len(sightings.due(0.0)) <= MAX_ANNOUNCEMENTS * MAX_ADDRESSES


TEXTS = st.dictionaries(
    st.sampled_from([b"id", b"name", b"cert", b"tls", b"v", b"p", b"at", b"x"]),
    st.one_of(
        st.none(),
        st.binary(max_size=300),
        st.sampled_from([b"feed", b"1", b"0", CERTIFICATE.encode(), b"\x1b[2Jden", b"x" * 9000]),
    ),
)
HOSTS = st.lists(st.one_of(st.ip_addresses().map(str), st.text(max_size=20)), max_size=60)


@given(TEXTS, HOSTS, st.integers(-1, 70_000))
@settings(max_examples=300)
def test_anything_received_is_refused_or_clean_and_bounded(texts: Dict[bytes, Any], hosts: List[str], port: int) -> None:
    found = from_txt(texts, hosts, port)

    if found is None:
        return
    assert all(text.isprintable() for text in (found.mesh, found.name, found.certificate, found.gpumesh))
    assert len(found.name) <= MAX_NAME
    assert len(found.mesh) <= 64
    assert len(found.addresses) <= MAX_ADDRESSES
    sightings = Sightings(5.0)
    assert sightings.seen("one", found)
    assert only(sightings).id == found.mesh


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["seen", "gone", "due", "looked"]),
            st.integers(0, 5),
            st.sampled_from(["aa", "bb"]),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_a_mesh_is_joinable_only_where_it_has_answered_as_itself(steps: List[Tuple[str, int, str, int]]) -> None:
    sightings = Sightings(2.0)
    truth: Dict[Address, Look] = {}
    asked: List[Address] = []
    for now, (what, number, mesh, certificate) in enumerate(steps):
        address = Address(f"10.0.0.{number + 1}", 8000)
        if what == "seen":
            sightings.seen(str(number), announced(mesh, f"{certificate:032x}", PROTOCOL_VERSION, address))
        elif what == "gone":
            sightings.gone(str(number))
        elif what == "due":
            asked += sightings.due(float(now))
        elif asked:
            at = asked.pop()
            truth[at] = answer(mesh, f"{certificate:064x}" if number % 2 else f"{certificate:032x}".ljust(64, "0"))
            sightings.looked(at, truth[at], float(now))

        meshes = sightings.meshes()
        assert len({each.id for each in meshes}) == len(meshes)
        for each in meshes:
            assert set(each.answering) <= set(each.addresses)
            for at in each.answering:
                assert truth[at].mesh == each.id
            assert each.is_joinable == bool(each.answering)
            assert not (each.reason and each.answering)


def test_addresses_of_a_coordinator_without_zones_loopback_and_bridges() -> None:
    here = [
        HostAddress("127.0.0.1", "lo", LOOPBACK),
        HostAddress("172.17.0.1", "docker0", BRIDGE),
        HostAddress("192.168.1.20", "eth0", LAN),
        HostAddress("fe80::1%eth0", "eth0", LAN),
    ]

    assert hosts_to_announce("", here) == ["192.168.1.20", "fe80::1"]
    assert hosts_to_announce("0.0.0.0", here) == ["192.168.1.20"]
    assert hosts_to_announce("10.0.0.1", here) == ["10.0.0.1"]


@given(st.text(max_size=100))
def test_any_name_fits_a_label(name: str) -> None:
    found = label(name, "0123456789abcdef")

    assert found.endswith(" 0123456789ab")
    assert len(found.encode("utf-8", "replace")) <= 63
