"""What a mesh says of itself on the local network, and what many such announcements and looks at their addresses amount to; pure.

Anyone on the network can announce anything. So all of this is a hint: what it says is cleaned and bounded here, and whoever joins proves
the token to the mesh, which proves it in turn.

Promises:

1. One entry per mesh id, whatever the number of announcements, networks and addresses by which it comes.
2. Never more than MAX_MESHES meshes, MAX_ADDRESSES addresses of each and MAX_ANNOUNCEMENTS announcements; the first to come stay, and
   `left_out` counts the others.
3. Addresses that mean the reader's own machine, or nobody, are never looked at.
4. A mesh is joinable only at an address that really answered with its id and with a certificate that was announced.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from gpumesh.config import PROTOCOL_VERSION
from gpumesh.model.records import NamedTuple
from gpumesh.model.shown import clean as clean
from gpumesh.network.address import INSECURE, PORT, Address, parse_address
from gpumesh.network.ranking import rank_peers
from gpumesh.protocol import strangers
from gpumesh.version import __version__

SERVICE = "_gpumesh._tcp.local."
MAX_MESHES = 64  # More than a table shows; a classroom has fewer.
MAX_ANNOUNCEMENTS = 256
MAX_PER_MESH = 4  # Announcements: one, and some of others who use its id.
MAX_ADDRESSES = 12
MAX_NAME = 40
CERTIFICATE_DIGITS = 32  # 16 of the hash's 32 bytes, in hexadecimal.
_ID_LETTERS = frozenset("0123456789abcdefABCDEF-")
_NAME_LETTERS = frozenset("0123456789abcdefghijklmnopqrstuvwxyz-_.")
_MAX_TEXT = 255  # One string of a TXT record.


class Announcement(NamedTuple):
    """One announcement, cleaned."""

    mesh: str  # Its id.
    name: str
    certificate: str  # Beginning of its SHA-256 in hexadecimal; "" for a mesh without TLS.
    gpumesh: str
    protocol: int
    addresses: Tuple[Address, ...]  # The most promising first.


class Look(NamedTuple):
    """What came out of a look at an address; `probing.ProbeResult` has these and more."""

    kind: str
    text: str
    mesh: str
    certificate: str


class Mesh(NamedTuple):
    """A mesh that is announced here."""

    id: str
    name: str
    addresses: Tuple[Address, ...]  # All that it announces and that may lead there, the most promising first.
    answering: Tuple[Address, ...]  # Those of them at which it answers, in the same order.
    certificate: str  # Beginning of the SHA-256; "" without TLS.
    gpumesh: str
    protocol: int
    reason: str  # Why it cannot be joined; "" if it can, or while that is not known.
    warning: str  # Something is strange about it, which keeps nobody from joining.
    is_settled: bool  # Every address has been looked at.

    @property
    def address(self) -> Optional[Address]:
        """Where it answers."""
        return self.answering[0] if self.answering else None

    @property
    def is_joinable(self) -> bool:
        """Whether it answers, so that only the token decides."""
        return bool(self.answering) and not self.reason


def to_txt(announcement: Announcement, named: Iterable[Address] = ()) -> Dict[str, str]:
    """The strings of the TXT record.

    Args:
        named: Addresses that somebody has given by hand; the others travel as the service's own.
    """
    at = ""
    for address in named:
        longer = f"{at} {address.url}".strip()
        if len(longer) > _MAX_TEXT - 8:
            break
        at = longer
    texts = {
        "id": announcement.mesh,
        "name": announcement.name,
        "cert": announcement.certificate[:CERTIFICATE_DIGITS],
        "tls": "1" if announcement.certificate else "0",
        "v": announcement.gpumesh,
        "p": str(announcement.protocol),
    }
    return {**texts, "at": at} if at else texts


def from_txt(texts: Mapping[Any, Any], hosts: Iterable[str], port: int) -> Optional[Announcement]:
    """A received announcement, cleaned; None if it is none of a mesh.

    Args:
        texts: Of the TXT record, bytes to bytes (or None).
        hosts: IPs of the service, IPv6 link-local with the zone of the interface by which they came.
        port: Of the service.
    """

    def text(name: str, limit: int) -> str:
        value = texts.get(name.encode()) or b""
        return clean(value[: 4 * limit + 4].decode("utf-8", "replace"), limit) if isinstance(value, bytes) else ""

    mesh = text("id", 64)
    protocol = text("p", 5)
    if not mesh or not set(mesh) <= _ID_LETTERS or not protocol.isdecimal() or not protocol.isascii():
        return None
    certificate = text("cert", CERTIFICATE_DIGITS).lower() if text("tls", 1) != "0" else ""
    if not set(certificate) <= set("0123456789abcdef"):
        return None
    way = PORT if certificate else INSECURE
    addresses: List[Address] = []
    for each in text("at", _MAX_TEXT).split(" ")[:MAX_ADDRESSES]:
        try:
            address = parse_address(each)
        except ValueError:
            continue
        if _is_ip(address.host) or _is_name(address.host):
            addresses.append(address)
    if 0 < port < 65536:
        addresses += [Address(host, port, way) for host in list(hosts)[: 4 * MAX_ADDRESSES] if _is_ip(host)]
    name = text("name", MAX_NAME).strip() or mesh[:8]
    return Announcement(
        mesh, name, certificate, text("v", 32), int(protocol), tuple(rank_peers(dict.fromkeys(addresses))[:MAX_ADDRESSES])
    )


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return host.isprintable()


def _is_name(host: str) -> bool:
    """Whether this can be looked up as a name only: 127.1 and 0x7f.1 are addresses to the system, and 2130706433 is, too."""
    last = host.rstrip(".").rpartition(".")[2].lower()
    return _NAME_LETTERS.issuperset(host.lower()) and not last.isdecimal() and not last.startswith("0x")


class Sightings:
    """Announcements and looks come in, meshes come out; see the module's promises.

    Args:
        again_seconds: After so long an address is looked at again.
    """

    def __init__(self, again_seconds: float) -> None:
        self._again_seconds = again_seconds
        self._announced: Dict[str, Announcement] = {}  # By the service's name; in the order of their coming.
        self._looks: Dict[Address, Tuple[float, Optional[Look]]] = {}  # When, and what; None: it is being looked at.
        self._left_out: Dict[str, None] = {}

    @property
    def left_out(self) -> int:
        """Announcements that there was no room for, as far as they were counted."""
        return len(self._left_out)

    def seen(self, name: str, announcement: Announcement) -> bool:
        """An announcement came, or came anew; whether there is room for it."""
        if name not in self._announced:
            of_mesh = sum(1 for each in self._announced.values() if each.mesh == announcement.mesh)
            is_new = of_mesh == 0
            if (
                len(self._announced) >= MAX_ANNOUNCEMENTS
                or of_mesh >= MAX_PER_MESH
                or (is_new and len({each.mesh for each in self._announced.values()}) >= MAX_MESHES)
            ):
                if len(self._left_out) < 10_000:
                    self._left_out[name] = None
                return False
        self._left_out.pop(name, None)
        self._announced[name] = announcement
        self._forget_looks()
        return True

    def gone(self, name: str) -> None:
        """An announcement was taken back, or has run out."""
        self._left_out.pop(name, None)
        if self._announced.pop(name, None) is not None:
            self._forget_looks()

    def due(self, now: float) -> List[Address]:
        """Addresses to look at now; each is answered by `looked`."""
        found = []
        for address in self._addresses():
            when, look = self._looks.get(address, (float("-inf"), Look("", "", "", "")))
            if look is not None and now - when >= self._again_seconds:
                found.append(address)
        for address in found:
            earlier = self._looks.get(address)
            if earlier is None:
                self._looks[address] = (now, None)
            else:
                self._looks[address] = (now, earlier[1])  # What was known holds until there is news.
        return found

    def looked(self, address: Address, look: Look, now: float) -> None:
        """What a look at an address has shown."""
        if address in self._looks:
            self._looks[address] = (now, look)

    def meshes(self) -> List[Mesh]:
        """One entry per mesh, in the order of their coming."""
        by_id: Dict[str, List[Announcement]] = {}
        for announcement in self._announced.values():
            by_id.setdefault(announcement.mesh, []).append(announcement)
        return [self._mesh(mesh, found) for mesh, found in by_id.items()]

    def _mesh(self, mesh: str, found: List[Announcement]) -> Mesh:
        first = found[0]
        addresses = _merged(found)
        certificates = list(dict.fromkeys(each.certificate for each in found))
        answering, complaints = [], []
        is_settled = True
        for address in addresses:
            look = self._looks.get(address, (0.0, None))[1]
            if look is None:
                is_settled = False
                continue
            complaint = _complaint(mesh, certificates, look)
            if complaint is None:
                answering.append(address)
            else:
                complaints.append((complaint[0], f"{address} {complaint[1]}"))
        warning = ""
        if len(certificates) > 1:
            warning = (
                f"it is announced with {len(certificates)} different certificates; "
                "somebody may pose as it, or two coordinators use one database"
            )
        reason = ""
        if first.protocol != PROTOCOL_VERSION and all(each.protocol != PROTOCOL_VERSION for each in found):
            reason = str(strangers.other_version(first.protocol, PROTOCOL_VERSION, __version__, peer=first.gpumesh))
        elif not addresses:
            reason = "it announces no address that another machine could use; `gpumesh serve --advertise ADDRESS` there"
        elif not answering and is_settled:
            reason = min(complaints)[1]
            if len(complaints) > 1:
                reason += f" (and {len(complaints) - 1} more of its addresses)"
        return Mesh(
            mesh,
            first.name,
            tuple(addresses),
            tuple(answering),
            first.certificate,
            first.gpumesh,
            first.protocol,
            reason,
            warning,
            is_settled,
        )

    def _addresses(self) -> List[Address]:
        by_id: Dict[str, List[Announcement]] = {}
        for each in self._announced.values():
            by_id.setdefault(each.mesh, []).append(each)
        return list(dict.fromkeys(address for found in by_id.values() for address in _merged(found)))

    def _forget_looks(self) -> None:
        wanted = set(self._addresses())
        for address in [each for each in self._looks if each not in wanted]:
            del self._looks[address]


def _merged(found: List[Announcement]) -> List[Address]:
    """Of each of them its share of the places: who uses somebody else's id does not push that one's addresses out."""
    share = max(1, MAX_ADDRESSES // len(found)) if len(found) > 1 else MAX_ADDRESSES
    return rank_peers(dict.fromkeys(address for each in found for address in each.addresses[:share]))


_NO_CERTIFICATE, _OTHER_MESH, _REST = 0, 1, 2
_TELLING = ("version", "busy", "other", "silent", "refused", "timeout", "no such name", "no route", "no IPv6")  # Most first.


def _complaint(mesh: str, certificates: List[str], look: Look) -> Optional[Tuple[int, str]]:
    """Why an address is not that of this mesh; the smaller the number, the more it tells."""
    if look.kind == "web":
        return None  # A tunnel that somebody has named; what is behind it, whoever joins sees.
    if look.kind != "mesh":
        place = _TELLING.index(look.kind) if look.kind in _TELLING else len(_TELLING)
        return _REST + place, f"({look.kind}): {look.text}" if look.text else f"({look.kind})"
    if look.mesh != mesh:
        return _OTHER_MESH, f"(another mesh): mesh {look.mesh[:8]} answers there"
    if not look.certificate and "" not in certificates:
        return _NO_CERTIFICATE, "(no TLS): what answers there does not encrypt, and the mesh is announced as one that does"
    if look.certificate and not any(each and look.certificate.startswith(each) for each in certificates):
        return (
            _NO_CERTIFICATE,
            "(other certificate): what answers there shows another certificate than the announced one; somebody may stand between",
        )
    return None
