"""`python -m gpumesh.network.announcer`: announces one mesh on the local networks until its standard input ends.

A process of its own: what strangers send on these networks costs the coordinator neither time nor memory, and when that ends, however it
does, this one says goodbye for it. The first line that it reads is a JSON object with the fields of `Announced`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any, Dict, List, Optional, Tuple

from gpumesh.config import ANNOUNCE_CHECK_SECONDS, PROTOCOL_VERSION
from gpumesh.model.records import NamedTuple
from gpumesh.network.address import Address, parse_address
from gpumesh.network.announcement import SERVICE, Announcement, to_txt
from gpumesh.network.interfaces import host_addresses
from gpumesh.network.ranking import ANY, ANY_IPV4, HostAddress, rank
from gpumesh.version import __version__

_CACHE_NAMES = 4096  # Of zeroconf, which keeps whatever anybody sends; beyond, it starts anew.
_MAX_LABEL_BYTES = 63
_MAX_HOSTS = 24  # Addresses in one announcement; it fits one packet.


class Announced(NamedTuple):
    """What to announce."""

    mesh: str
    name: str
    certificate: str  # Beginning of its SHA-256 in hexadecimal; "" without TLS.
    host: str  # Where the coordinator listens; "" for everywhere.
    port: int
    named: List[str]  # Addresses that somebody has given by hand, as URLs.


def hosts_to_announce(host: str, addresses: List[HostAddress]) -> List[str]:
    """The IPs of a coordinator that listens on `host`, without the zones, which mean something else elsewhere."""
    if host not in ANY:
        return [host.partition("%")[0]]
    found = [each.ip for each in rank(addresses) if host != ANY_IPV4 or ":" not in each.ip]
    return list(dict.fromkeys(ip.partition("%")[0] for ip in found))[:_MAX_HOSTS]


def label(name: str, mesh: str) -> str:
    """A name for the service that nobody else has, and that people can read."""
    end = f" {mesh[:12]}"
    plain = "".join(letter for letter in name if letter.isprintable() and letter not in "\\.")
    while len((plain + end).encode("utf-8", "replace")) > _MAX_LABEL_BYTES:
        plain = plain[:-1]
    return plain + end


class Announcer:
    """Announces until `close`."""

    def __init__(self, announced: Announced) -> None:
        self._announced = announced
        self._zeroconf: Any = None
        self._interfaces: Tuple[HostAddress, ...] = ()

    def look(self) -> None:
        """Follow this machine's addresses; to be called now and then.

        Raises:
            OSError: Nothing can be sent on any network.
        """
        addresses = tuple(host_addresses())
        is_full = self._zeroconf is not None and len(self._zeroconf.cache.cache) > _CACHE_NAMES
        if addresses == self._interfaces and not is_full:
            return
        self._interfaces = addresses
        self.close()
        if hosts_to_announce(self._announced.host, list(addresses)) or self._announced.named:
            self._open()

    def _open(self) -> None:
        from zeroconf import ServiceInfo

        from gpumesh.network.discovery import open_zeroconf

        told = self._announced
        announcement = Announcement(told.mesh, told.name, told.certificate, __version__, PROTOCOL_VERSION, ())
        named: List[Address] = [parse_address(each) for each in told.named]
        info = ServiceInfo(
            SERVICE,
            f"{label(told.name, told.mesh)}.{SERVICE}",
            port=told.port,
            properties=to_txt(announcement, named),
            server=f"gpumesh-{told.mesh[:16]}.local.",
            parsed_addresses=hosts_to_announce(told.host, list(self._interfaces)),
        )
        self._zeroconf = open_zeroconf()
        self._zeroconf.register_service(info, cooperating_responders=True)  # The name is nobody else's: it need not be probed.

    def close(self) -> None:
        """Say goodbye, if anything was announced."""
        found, self._zeroconf = self._zeroconf, None
        if found is not None:
            found.close()


def main() -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's; when that ends, so does this.
    announcer: Optional[Announcer] = None
    try:
        told: Dict[str, Any] = json.loads(_first_line())
        announcer = Announcer(Announced(**told))
        over = threading.Event()
        threading.Thread(target=_wait_for_the_end, args=(over,), daemon=True).start()
        is_complained = False
        while True:
            try:
                announcer.look()
                is_complained = False
            except OSError as error:
                if not is_complained:
                    sys.stderr.write(f"gpumesh: others cannot find this mesh by themselves: {error.strerror or error}\n")
                is_complained = True
            if over.wait(ANNOUNCE_CHECK_SECONDS):
                break
    finally:
        if announcer is not None:
            announcer.close()


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)  # Nothing may stay in a buffer.
        if not letter:
            break
        line += letter
    return line


def _wait_for_the_end(over: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    over.set()


if __name__ == "__main__":
    main()
