"""The HTTP proxy of this machine's network, where the environment names one: `https://` goes through it, as with other programs.

    we ── CONNECT host:port ── proxy ── coordinator, or what stands before it: TLS with us, of which the proxy sees the outside

Only `https://` and `wss://` addresses go by it. Its password is in no text, log line or representation.
"""

from __future__ import annotations

import binascii
import os
import re
import socket
import time
from typing import Iterable, Mapping, Optional, Tuple

from gpumesh.errors import MeshError, MeshUnavailableError, ProtocolError
from gpumesh.network import connecting
from gpumesh.network.address import HTTPS, Address, is_loopback
from gpumesh.network.announcement import clean
from gpumesh.version import __version__

_VALUE = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?(?:(?P<login>.*)@)?"
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%[^\]\s]+)?)\]|(?P<host>[^\[\]/:\s@?#%]+))(?::(?P<port>[0-9]{1,5}))?/?\Z",
    re.DOTALL,
)
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_DEFAULT_PORT = 80
_HEAD_BYTES = 16 * 1024  # Of an answer; proxies write pages of error behind it.
_LATER = (408, 425, 429)  # Refusals that may be none the next time.


class Proxy:
    """A proxy that the environment names.

    Args:
        variable: That names it.
        login: "USER:PASSWORD" as it stands there, percent-encoded; "" without one.
    """

    __slots__ = ("_login", "address", "variable")

    def __init__(self, address: Address, variable: str, login: str = "") -> None:
        self.address = address
        self.variable = variable
        self._login = login

    @property
    def url(self) -> str:
        """For people and for others who connect to it; without the login."""
        return f"http://{self.address}"

    @property
    def has_login(self) -> bool:
        """Whether a user name is known."""
        return bool(self._login)

    def headers(self) -> Mapping[str, str]:
        """Of a request to connect: who asks, and the login."""
        headers = {"User-Agent": f"gpumesh/{__version__}"}
        if self._login:
            user, _, password = self._login.partition(":")
            pair = b":".join(
                _ESCAPE.sub(lambda found: binascii.unhexlify(found[1]), part.encode()) for part in (user, password)
            )
            headers["Proxy-Authorization"] = f"Basic {binascii.b2a_base64(pair, newline=False).decode('ascii')}"
        return headers

    def __repr__(self) -> str:
        return f"Proxy({self.url!r}, {self.variable!r})"


def proxy_for(address: Address, environment: Optional[Mapping[str, str]] = None) -> Optional[Proxy]:
    """By which proxy this address is reached; None: directly.

    `https_proxy` counts before `HTTPS_PROXY`, and both before `all_proxy` and `ALL_PROXY`. `no_proxy`, else `NO_PROXY`, lists what is
    reached directly, with commas or spaces between: `*`, names with all below them, IP addresses and networks (10.0.0.0/8), each with
    `:port` for that port alone. This machine itself always is.

    Raises:
        ProtocolError: What is named there cannot be used; the message says what to write.
    """
    environment = os.environ if environment is None else environment
    if address.way != HTTPS:
        return None
    named = ((name, environment.get(name, "").strip()) for name in connecting.PROXY_VARIABLES)
    variable, value = next(((name, value) for name, value in named if value), ("", ""))
    if not value or _is_direct(address, environment.get("no_proxy") or environment.get("NO_PROXY") or ""):
        return None
    match = _VALUE.match(value)
    port = int(match["port"] or _DEFAULT_PORT) if match is not None else 0
    if match is None or not 0 < port < 65536:
        raise ProtocolError(f"{variable} names no proxy that could be called; write http://HOST:PORT there, or unset it")
    scheme = (match["scheme"] or "http").lower()
    if scheme != "http":
        raise ProtocolError(
            f"{variable} names a proxy by {scheme}://, and {address} can be reached only through one by http://; name such a one "
            f"in HTTPS_PROXY, {_or_directly(address)}"
        )
    return Proxy(Address(match["six"] or match["host"], port), variable, match["login"] or "")


def without_login(value: str) -> str:
    """What a variable says, for people to see: with `...` for user and password."""
    return re.sub(r"\A([A-Za-z][A-Za-z0-9+.-]*://)?.*@", r"\1...@", value, flags=re.DOTALL)


def open_tunnel(proxy: Proxy, address: Address, timeout: float) -> socket.socket:
    """Connect to `address` through the proxy, which looks up the name; for whoever waits in his own thread.

    Args:
        timeout: Seconds for all of it.

    Returns:
        A connected socket, non-blocking, as if it led there directly.

    Raises:
        MeshUnavailableError: The proxy is not there, or does not reach that place.
        ProtocolError: It does not let us through, or is no proxy.
    """
    deadline = time.monotonic() + timeout
    try:
        sock = connecting.connect(proxy.address, timeout)
    except MeshUnavailableError as error:
        raise unreachable(proxy, address, str(error).partition("; ")[0]) from None
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(_request(proxy, address))
        status, schemes = _answer(sock, deadline, proxy, address)
        if not 200 <= status < 300:
            raise refused(proxy, address, status, schemes)
        sock.setblocking(False)
        return sock
    except BaseException as error:
        sock.close()
        if isinstance(error, socket.timeout):
            raise MeshUnavailableError(
                f"the HTTP proxy {proxy.url} has not reached {address} within {timeout:g} s; check the address, and that proxy"
            ) from None
        if isinstance(error, OSError) and not isinstance(error, MeshError):
            raise closed(proxy, address) from None
        raise


def unreachable(proxy: Proxy, address: Address, why: str) -> MeshUnavailableError:
    """Nobody answers where the proxy should be."""
    return MeshUnavailableError(
        f"the HTTP proxy {proxy.url} cannot be reached ({why}); start it, or correct {proxy.variable}, {_or_directly(address)}"
    )


def closed(proxy: Proxy, address: Address) -> MeshUnavailableError:
    """It has hung up without a word."""
    return MeshUnavailableError(
        f"the HTTP proxy {proxy.url} closed the connection before it had reached {address}; look at its log, or correct "
        f"{proxy.variable}, {_or_directly(address)}"
    )


def refused(proxy: Proxy, address: Address, status: int, schemes: Iterable[str] = ()) -> MeshError:
    """It has answered, and not let us through.

    Args:
        schemes: Kinds of login that it takes, as in `Proxy-Authenticate`.
    """
    if status == 407:
        kinds = [clean(scheme.split()[0], 20) for scheme in schemes if scheme.split()]
        if kinds and "basic" not in [kind.lower() for kind in kinds]:
            return ProtocolError(
                f"the HTTP proxy {proxy.url} wants a login by {' or '.join(kinds)} (status 407), and only Basic is known here; "
                f"name a proxy of this machine that logs in there in {proxy.variable}, {_or_directly(address)}"
            )
        if proxy.has_login:
            return ProtocolError(
                f"the HTTP proxy {proxy.url} does not take the user name and password of {proxy.variable} (status 407); correct "
                "them there, with @, : and % in them written as %40, %3A and %25"
            )
        return ProtocolError(
            f"the HTTP proxy {proxy.url} wants a user name and a password (status 407); set "
            f"{proxy.variable}=http://USER:PASSWORD@{proxy.address}"
        )
    if status >= 500 or status in _LATER:
        return MeshUnavailableError(
            f"the HTTP proxy {proxy.url} does not reach {address} (status {status}); check the address, and that the coordinator, or "
            f"what stands before it, runs there, {_or_directly(address)}"
        )
    return ProtocolError(
        f"the HTTP proxy {proxy.url} does not let us through to {address} (status {status}); have it allow that host and port "
        f"(many allow port 443 alone), {_or_directly(address)}"
    )


def _or_directly(address: Address) -> str:
    return f"or add {address.host} to NO_PROXY to go there directly"


def _request(proxy: Proxy, address: Address) -> bytes:
    try:
        host = address.host.encode("ascii") if address.host.isascii() else address.host.encode("idna")
    except UnicodeError:
        raise MeshUnavailableError(f"the host name {address.host!r} cannot be asked for; check its spelling") from None
    where = (b"[%b]:%d" if b":" in host else b"%b:%d") % (host, address.port)
    lines = [b"CONNECT %b HTTP/1.1" % where, b"Host: %b" % where]
    lines += [f"{name}: {value}".encode("ascii") for name, value in proxy.headers().items()]
    return b"\r\n".join([*lines, b"", b""])


def _answer(sock: socket.socket, deadline: float, proxy: Proxy, address: Address) -> Tuple[int, Iterable[str]]:
    """(status, kinds of login that it takes)."""
    head = bytearray()
    while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(_HEAD_BYTES)
        if not part:
            break
        head += part
    if not head:
        raise closed(proxy, address)
    lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    match = re.match(r"HTTP/1\.[01] ([1-9][0-9]{2})(?: |\Z)", lines[0])
    if match is None or b"\r\n\r\n" not in head:
        raise ProtocolError(f"what answers at {proxy.url} is no HTTP proxy; correct {proxy.variable}, {_or_directly(address)}")
    fields = (line.partition(":") for line in lines[1:])
    return int(match[1]), [value.strip() for name, _, value in fields if name.strip().lower() == "proxy-authenticate"]


def _is_direct(address: Address, exceptions: str) -> bool:
    host = address.host.lower().rstrip(".")
    if is_loopback(host) or host == "localhost" or host.endswith(".localhost"):
        return True
    return any(_names(entry, host, address.port) for entry in exceptions.lower().replace(",", " ").split())


def _names(entry: str, host: str, port: int) -> bool:
    """Whether one entry of NO_PROXY means this host and port."""
    if entry == "*":
        return True
    if "/" in entry:
        import ipaddress

        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    if entry.startswith("[") or entry.count(":") == 1:
        entry, _, wanted = entry.rpartition(":") if not entry.endswith("]") else (entry, "", "")
        if wanted and wanted != str(port):
            return False
        entry = entry.strip("[]")
    entry = entry.lstrip("*").strip(".")
    return bool(entry) and (host == entry or host.endswith(f".{entry}"))
