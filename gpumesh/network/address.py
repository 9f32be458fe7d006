"""The one address of a mesh and the ways people write it."""

from __future__ import annotations

import re

from gpumesh.config import DEFAULT_PORT
from gpumesh.model.records import NamedTuple

SCHEMES = ("http", "https", "gpumesh", "tcp")
_URL = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    r"(?:\[(?P<six>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]+(?:%[^\]\s]+)?)\]|(?P<host>[^\[\]/:\s@?#%]+))"
    r"(?::(?P<port>[0-9]{1,9}))?/?\Z"
)


class Address(NamedTuple):
    """Host (name, IPv4 or IPv6 without brackets) and port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The form people copy: `http://host:port`."""
        return f"http://{self}"


def parse_address(text: str) -> Address:
    """`http://host:8000`, `https://`, `gpumesh://`, `tcp://` or bare `host:port` as an address.

    The port defaults to 8000, after `https://` to 443: there a proxy or tunnel stands in front of the coordinator.

    Raises:
        ValueError: Not an address; the message says what to write.
    """
    match = _URL.match(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not an address; write host:port, http://host:port or http://[ipv6]:port")
    scheme = match["scheme"]
    if scheme and scheme.lower() not in SCHEMES:
        raise ValueError(f"{text!r} has the scheme {scheme!r}; use one of {', '.join(SCHEMES)} or none")
    default = 443 if scheme and scheme.lower() == "https" else DEFAULT_PORT
    port = int(match["port"]) if match["port"] else default
    if not 0 < port < 65536:
        raise ValueError(f"{text!r} has the port {port}; ports are 1 to 65535")
    return Address(match["six"] or match["host"], port)
