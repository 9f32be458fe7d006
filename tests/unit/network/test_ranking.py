"""Which addresses others are told, and in which order."""

from __future__ import annotations

import ipaddress
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.network.address import Address
from gpumesh.network.interfaces import host_addresses
from gpumesh.network.ranking import (
    BRIDGE,
    LAN,
    LOOPBACK,
    VPN,
    HostAddress,
    advertised,
    is_only_local,
    kind_of_interface,
    parse_advertised,
    rank,
    rank_peers,
)


def test_lan_before_vpn_before_public_and_link_local_ipv6_last() -> None:
    order = [
        HostAddress("192.168.1.20", "wlan0", LAN),
        HostAddress("fd00::20", "wlan0", LAN),
        HostAddress("100.101.102.103", "tailscale0", VPN),
        HostAddress("fd7a:115c:a1e0::1", "tailscale0", VPN),
        HostAddress("203.0.114.9", "eth1", LAN),
        HostAddress("2a01:4f8::1", "eth1", LAN),
        HostAddress("fe80::1%wlan0", "wlan0", LAN),
    ]

    assert rank(reversed(order)) == order


def test_what_leads_nowhere_for_others_is_never_told() -> None:
    never = [
        HostAddress("127.0.0.1", "lo", LOOPBACK),
        HostAddress("127.0.1.1", "eth0", LAN),
        HostAddress("::1", "lo", LOOPBACK),
        HostAddress("169.254.7.7", "eth0", LAN),
        HostAddress("172.17.0.1", "docker0", BRIDGE),
        HostAddress("fe80::1%docker0", "docker0", BRIDGE),
        HostAddress("fe80::1%tailscale0", "tailscale0", VPN),
        HostAddress("fe80::1", "eth0", LAN),
        HostAddress("10.0.0.9", "eth2", LAN, is_up=False),
        HostAddress("0.0.0.0", "eth0", LAN),
        HostAddress("224.0.0.251", "eth0", LAN),
    ]

    assert rank(never) == []
    assert advertised("", 8000, never) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("eth0", LAN), ("enp3s0", LAN), ("wlp2s0", LAN), ("br0", LAN), ("bond0", LAN), ("Ethernet 2", LAN), ("en0", LAN),
        ("docker0", BRIDGE), ("br-0123456789ab", BRIDGE), ("podman1", BRIDGE), ("cni0", BRIDGE), ("veth12ab", BRIDGE),
        ("virbr0", BRIDGE), ("vEthernet (WSL)", BRIDGE), ("vmnet8", BRIDGE), ("bridge100", BRIDGE),
        ("tailscale0", VPN), ("wg0", VPN), ("utun4", VPN), ("tun0", VPN), ("ztabcdef12", VPN), ("ppp0", VPN), ("lo", LOOPBACK),
    ],
)  # fmt: skip
def test_interfaces_are_known_by_their_names(name: str, kind: str) -> None:
    assert kind_of_interface(name) == kind


def test_who_listens_on_one_address_tells_of_that_one() -> None:
    here = [HostAddress("192.168.1.20", "eth0", LAN), HostAddress("fd00::20", "eth0", LAN)]

    assert advertised("10.1.2.3", 80, here) == [Address("10.1.2.3", 80)]
    assert advertised("0.0.0.0", 80, here) == [Address("192.168.1.20", 80)]
    assert advertised("", 80, here) == [Address("192.168.1.20", 80), Address("fd00::20", 80)]
    assert advertised("127.0.0.1", 80, here) == []
    assert is_only_local("localhost")
    assert is_only_local("::1")
    assert not is_only_local("10.1.2.3")


def test_what_somebody_names_comes_first_whatever_it_is() -> None:
    here = [HostAddress("192.168.1.20", "eth0", LAN)]
    named = [parse_advertised("mesh.example"), parse_advertised("172.17.0.1:9000"), parse_advertised("https://t.example")]

    assert [each.url for each in advertised("", 8000, here, named)] == [
        "http://mesh.example:8000",
        "http://172.17.0.1:9000",
        "https://t.example:443",
        "http://192.168.1.20:8000",
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", Address("10.0.0.1", 0)),
        ("10.0.0.1:9", Address("10.0.0.1", 9)),
        ("fd00::1", Address("fd00::1", 0)),
        ("[fd00::1]", Address("fd00::1", 0)),
        ("[fd00::1]:8", Address("fd00::1", 8)),
        ("http://box:81", Address("box", 81)),
    ],
)
def test_forms_of_an_advertised_address(text: str, address: Address) -> None:
    assert parse_advertised(text) == address


@pytest.mark.parametrize("text", ["", "127.0.0.1", "[::1]:80", "localhost", "0.0.0.0:80", "::", "two words", "box:0"])
def test_an_address_that_means_nothing_to_others_cannot_be_advertised(text: str) -> None:
    with pytest.raises(ValueError):
        parse_advertised(text)


IPS = st.one_of(
    st.ip_addresses().map(str),
    st.integers(0, 2**64 - 1).map(lambda number: f"{ipaddress.IPv6Address((0xFE80 << 112) + number)}%eth0"),
    st.sampled_from(["127.0.0.1", "169.254.0.1", "10.0.0.1", "100.64.0.1", "::1", "::ffff:127.0.0.1", "fd00::1"]),
)
NAMES = st.sampled_from(["eth0", "lo", "docker0", "br-0123456789ab", "wg0", "tailscale0", "virbr0", "en0"])


@st.composite
def addresses(draw: st.DrawFn) -> List[HostAddress]:
    found = []
    for ip, name in draw(st.lists(st.tuples(IPS, NAMES), max_size=12)):
        found.append(HostAddress(ip, name, kind_of_interface(name), draw(st.booleans())))
    return found


@given(addresses())
def test_ranked_addresses_are_some_of_those_given_and_all_of_use(given_ones: List[HostAddress]) -> None:
    ranked = rank(given_ones)

    assert set(ranked) <= set(given_ones)
    assert len({each.ip for each in ranked}) == len(ranked)
    for each in ranked:
        ip = ipaddress.ip_address(each.ip.partition("%")[0])
        mapped = getattr(ip, "ipv4_mapped", None) or ip
        assert each.is_up
        assert each.kind in (LAN, VPN)
        assert not any((mapped.is_loopback, mapped.is_multicast, mapped.is_unspecified))
        assert not mapped.is_link_local or "%" in each.ip
    kinds = [VPN if each.kind == VPN else LAN for each in ranked if not each.ip.startswith("fe80") and _is_private(each.ip)]
    assert kinds == sorted(kinds, key=lambda kind: kind == VPN)
    assert rank(ranked) == ranked


def _is_private(ip: str) -> bool:
    parsed = ipaddress.ip_address(ip.partition("%")[0])
    return parsed in ipaddress.ip_network("10.0.0.0/8") if parsed.version == 4 else False


@given(st.lists(st.tuples(IPS, st.integers(1, 65535)), max_size=12))
def test_nobody_looks_at_addresses_of_their_own_because_a_stranger_said_so(pairs: List[tuple[str, int]]) -> None:
    kept = rank_peers([Address(ip, port) for ip, port in pairs])

    for address in kept:
        parsed = ipaddress.ip_address(address.host.partition("%")[0])
        assert not (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
    assert set(kept) <= {Address(ip, port) for ip, port in pairs}


def test_this_machine_knows_its_addresses_without_asking_anybody() -> None:
    found = host_addresses()

    assert HostAddress("127.0.0.1", "lo", LOOPBACK) in [each._replace(interface="lo") for each in found]
    for each in found:
        ipaddress.ip_address(each.ip.partition("%")[0])
        assert ("%" in each.ip) == each.ip.startswith("fe80:")
