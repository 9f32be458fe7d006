"""Where a mesh is, the way to it, and the forms in which people write both."""

from __future__ import annotations

import re

from gpumesh.config import DEFAULT_PORT
from gpumesh.model.records import NamedTuple

PORT = ""  # The coordinator's port, as it is: TLS, unless it is on this very machine.
HTTPS = "https"  # The coordinator's port, or an HTTPS proxy or tunnel that stands before it.
WEBSOCKET = "ws"  # A proxy that speaks plain HTTP and stands before it.
INSECURE = "insecure"  # The coordinator's port, without TLS in any case.

_WAYS = {
    "": PORT,
    "http": PORT,
    "gpumesh": PORT,
    "tcp": PORT,
    "https": HTTPS,
    "wss": HTTPS,
    "ws": WEBSOCKET,
    "insecure": INSECURE,
}
SCHEMES = tuple(scheme for scheme in _WAYS if scheme)
_DEFAULT_PORTS = {HTTPS: 443, WEBSOCKET: 80}
_SCHEME_OF = {PORT: "http", HTTPS: "https", WEBSOCKET: "ws", INSECURE: "insecure"}
_URL = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    r"(?:\[(?P<six>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]+(?:%[^\]\s]+)?)\]|(?P<host>[^\[\]/:\s@?#%]+))"
    r"(?::(?P<port>[0-9]{1,9}))?/?\Z"
)


class Address(NamedTuple):
    """Host (name, IPv4 or IPv6 without brackets), port, and the way there: PORT, HTTPS, WEBSOCKET or INSECURE."""

    host: str
    port: int
    way: str = PORT

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The form people copy: `http://host:port`, or the scheme of another way."""
        return f"{_SCHEME_OF[self.way]}://{self}"

    def is_at(self, other: Address) -> bool:
        """Whether both name the same host and port, whatever the way: the same mesh, as far as one can tell by that."""
        return (self.host, self.port) == (other.host, other.port)

    def insecurely(self) -> Address:
        """The same place without TLS, if the way would be the port's; a proxy or tunnel stays what it is."""
        return self._replace(way=INSECURE) if self.way == PORT else self


def parse_address(text: str) -> Address:
    """`http://host:8000`, `gpumesh://`, `tcp://`, bare `host:port`, `https://`, `ws://`, `wss://` or `insecure://` as an address.

    The port defaults to 8000, after `https://` and `wss://` to 443 and after `ws://` to 80: there a proxy or tunnel stands in front of the
    coordinator.

    Raises:
        ValueError: Not an address; the message says what to write.
    """
    match = _URL.match(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not an address; write host:port, http://host:port or http://[ipv6]:port")
    scheme = (match["scheme"] or "").lower()
    if scheme not in _WAYS:
        raise ValueError(f"{text!r} has the scheme {match['scheme']!r}; use one of {', '.join(SCHEMES)} or none")
    way = _WAYS[scheme]
    port = int(match["port"]) if match["port"] else _DEFAULT_PORTS.get(way, DEFAULT_PORT)
    if not 0 < port < 65536:
        raise ValueError(f"{text!r} has the port {port}; ports are 1 to 65535")
    return Address(match["six"] or match["host"], port, way)


def is_loopback(host: str) -> bool:
    """Whether an IP address, as text, is one of this machine alone: 127.0.0.0/8, ::1, also as IPv4 in IPv6. A name is not."""
    text = plain_ip(host.partition("%")[0])  # Without the module `ipaddress`, whose import takes 5 ms.
    return text == "::1" or (text.startswith("127.") and text.replace(".", "").isdecimal() and text.count(".") == 3)


def plain_ip(host: str) -> str:
    """A peer's IP as people know it: an IPv4 address that came through an IPv6 socket (`::ffff:10.0.0.7`) without its prefix."""
    if host.startswith("::ffff:") and "." in host:
        return host[len("::ffff:") :]
    return host
