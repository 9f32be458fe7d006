"""Which of a machine's addresses others should try, and in which order; pure, and nothing here asks the system."""

from __future__ import annotations

import ipaddress
import re
from typing import Iterable, List, Optional, Union

from gpumesh.model.records import NamedTuple
from gpumesh.network.address import INSECURE, PORT, Address, parse_address, plain_ip

LAN = "lan"
VPN = "vpn"  # An overlay: whoever is in it reaches it, wherever they are.
BRIDGE = "bridge"  # Between this machine and what it runs itself: containers, virtual machines, WSL.
LOOPBACK = "loopback"

ANY_IPV4, ANY_IPV6 = "0.0.0.0", "::"
ANY = ("", ANY_IPV4, ANY_IPV6)

_IP = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]

# Names as the systems and the programs that make such interfaces give them; a `br0` or `bond0` that somebody made is their LAN.
_BRIDGES = re.compile(
    r"docker|br-[0-9a-f]{12}$|podman|cni|veth|virbr|vnet\d|vmnet|vboxnet|virtualbox|lxcbr|lxdbr|incusbr|flannel|cali|weave|kube|"
    r"nerdctl|vethernet|bridge1\d\d$|cilium|lxc|dummy|ifb",
    re.IGNORECASE,
)
_VPNS = re.compile(
    r"tailscale|ts\d|wg|tun|tap|utun|ppp|zt|nebula|ham\d|wt\d|nordlynx|proton|cscotun|gpd\d|ipsec|vpn|netbird|warp|cloudflarewarp",
    re.IGNORECASE,
)
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598; what tailnets use.
_TAILNET = ipaddress.ip_network("fd7a:115c:a1e0::/48")
_ULA = ipaddress.ip_network("fc00::/7")

_NEVER = 99
_LAST = 7  # IPv6 link-local: works, for who is on the same cable and names their own interface for it.


class HostAddress(NamedTuple):
    """One address of this machine."""

    ip: str  # Without brackets; IPv6 link-local with its zone, `fe80::1%eth0`.
    interface: str
    kind: str  # LAN, VPN, BRIDGE or LOOPBACK.
    is_up: bool = True

    @property
    def what(self) -> str:
        """For people: where it leads."""
        return {LAN: "LAN", VPN: "VPN", BRIDGE: "bridge to containers or virtual machines", LOOPBACK: "this machine"}[
            "vpn" if self.kind == LAN and _is_tailnet(_parse(self.ip)) else self.kind
        ]


def kind_of_interface(name: str, *, is_loopback: bool = False) -> str:
    """LAN, VPN, BRIDGE or LOOPBACK, by an interface's name."""
    if is_loopback or name == "lo":
        return LOOPBACK
    if _BRIDGES.match(name):
        return BRIDGE
    return VPN if _VPNS.match(name) else LAN


def rank_of(ip: str, kind: str = LAN) -> int:
    """How promising an address is for others, 0 the most; `is_for_others` says which are not at all.

    LAN before VPN before public; IPv4 before IPv6 of the same sort, since every network carries it; IPv6 link-local last.
    """
    parsed = _parse(ip)
    if parsed is None or kind in (BRIDGE, LOOPBACK):
        return _NEVER
    if parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast or str(parsed) == "255.255.255.255":
        return _NEVER
    six = parsed.version == 6
    if parsed.is_link_local:
        return _LAST if six and kind == LAN and "%" in ip else _NEVER
    if parsed.is_reserved and not six:
        return _NEVER
    if kind == VPN or _is_tailnet(parsed):
        return 3 if six else 2
    if not six:
        return 4 if parsed.is_global else 0
    if parsed in _ULA:
        return 1
    return 5 if parsed.is_global else 6


def is_for_others(ip: str, kind: str = LAN) -> bool:
    """Whether somebody on another machine could connect to it; never so for loopback, bridges, and link-local IPv4."""
    return rank_of(ip, kind) < _NEVER


def rank(addresses: Iterable[HostAddress]) -> List[HostAddress]:
    """Those for others, of interfaces that are up, the most promising first; each IP once, equals as they came."""
    found: List[HostAddress] = []
    seen = set()
    for address in sorted(addresses, key=lambda each: rank_of(each.ip, each.kind)):
        if address.is_up and is_for_others(address.ip, address.kind) and address.ip not in seen:
            seen.add(address.ip)
            found.append(address)
    return found


def advertised(bound: str, port: int, addresses: Iterable[HostAddress], given: Iterable[Address] = ()) -> List[Address]:
    """Under which addresses others reach a server that listens on `bound`, the most promising first.

    Args:
        bound: An IP or name, or `""`, `"0.0.0.0"`, `"::"` for all interfaces.
        port: That it listens on.
        addresses: Of this machine.
        given: What somebody has named, as `parse_advertised` returns it; they come first, whatever they are.

    Returns:
        Nothing, where it listens on loopback alone or there is no network, and nothing is given.
    """
    found = [each if each.port else each._replace(port=port) for each in given]
    if bound in ANY:
        found += [
            Address(each.ip, port) for each in rank(addresses) if bound != ANY_IPV4 or ":" not in each.ip
        ]  # "::" takes IPv4 as well.
    elif not _is_loopback(bound):
        found.append(Address(plain_ip(bound), port))
    return list(dict.fromkeys(found))


def is_only_local(bound: str) -> bool:
    """Whether nobody on another machine reaches a server that listens there."""
    return _is_loopback(bound)


def rank_peers(addresses: Iterable[Address]) -> List[Address]:
    """Somebody else's addresses in the order in which to try them; those that lead nowhere, or to this machine itself, are left out."""
    kept = {address: rank_of(address.host) for address in addresses}
    named = {address for address in kept if _parse(address.host) is None and not _is_loopback(address.host)}
    order = [address for address, place in kept.items() if place < _NEVER or address in named]
    return sorted(order, key=lambda address: 0 if address in named else kept[address])


def parse_advertised(text: str) -> Address:
    """`HOST`, `HOST:PORT` or an address of any form, as an address; its port is 0 where none is named that would be other than the listener's.

    Raises:
        ValueError: Not an address, or one that means another machine to everyone.
    """
    bare = text.strip()
    if ":" in bare and _parse(bare) is not None:  # An IPv6 address without brackets.
        address = Address(bare, 0)
    else:
        address = parse_address(bare)
        rest = bare.rpartition("]")[2] if "]" in bare else bare.rpartition("/")[2] or bare
        if address.way in (PORT, INSECURE) and not re.search(r":[0-9]+/?\Z", rest):
            address = address._replace(port=0)
    if address.host in ANY or _is_loopback(address.host):
        raise ValueError(f"{text!r} means another machine to each who reads it; give an address at which others reach this one")
    return address


def _parse(ip: str) -> Optional[_IP]:
    try:
        parsed = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(parsed, "ipv4_mapped", None)
    return mapped if mapped is not None else parsed


def _is_tailnet(parsed: Optional[_IP]) -> bool:
    if parsed is None:
        return False
    return parsed in (_SHARED if parsed.version == 4 else _TAILNET)


def _is_loopback(host: str) -> bool:
    parsed = _parse(host)
    return parsed.is_loopback if parsed is not None else host.lower().rstrip(".").endswith("localhost")
