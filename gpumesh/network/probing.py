"""Who answers at an address: connects, reads what a coordinator says before any proof, and knows what else it may be.

No token is needed and none is used, except by `prove`. Everything here blocks, never longer than it is told to.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any, List, Optional, Tuple

from gpumesh.config import CONNECT_SECONDS, PROTOCOL_VERSION
from gpumesh.errors import AuthenticationError, MeshError, MeshUnavailableError, ProtocolError, VersionMismatchError
from gpumesh.model.records import NamedTuple
from gpumesh.network import connecting, reasons
from gpumesh.network.address import HTTPS, INSECURE, PORT, WEBSOCKET, Address, is_loopback
from gpumesh.network.announcement import clean as clean
from gpumesh.network.reasons import FAILED as FAILED
from gpumesh.network.reasons import NO_IPV6 as NO_IPV6
from gpumesh.network.reasons import NO_ROUTE as NO_ROUTE
from gpumesh.network.reasons import REFUSED as REFUSED
from gpumesh.network.reasons import TIMEOUT as TIMEOUT
from gpumesh.protocol import codec, frames, strangers
from gpumesh.protocol.auth import NONCE_BYTES
from gpumesh.protocol.connection import LOOKED, TLS, Closed, Connection, Established
from gpumesh.protocol.messages import Challenge, Hello, Refused
from gpumesh.version import __version__

# Kinds of what came out; `reasons` has those of no connection.
MESH = "mesh"  # A coordinator that this side can talk to.
VERSION = "version"  # One that speaks another version of the protocol.
BUSY = "busy"  # One that takes nobody at the moment, or nobody from here.
WEB = "web"  # HTTP inside TLS, as asked for by https://: a proxy or tunnel, behind which a coordinator may be.
OTHER = "other"  # Something else has the port.
SILENT = "silent"  # Connected, and then nothing.
NO_NAME = "no such name"

_SILENCE = f"something {strangers.SAYS_NOTHING}; it is no gpumesh coordinator, or it hangs"
_READ_BYTES = 4096  # More than all that a coordinator says before a proof.


class ProbeResult(NamedTuple):
    """What answers at an address."""

    address: Address
    kind: str  # See the module's constants.
    text: str  # For people: a clause that says what is there, and what to do if it is not a mesh. "" for a mesh.
    mesh: str = ""  # The coordinator's id.
    gpumesh: str = ""  # Its version.
    python: str = ""
    protocol: int = 0
    certificate: str = ""  # SHA-256 of the certificate that it showed, in hexadecimal; "" without TLS.
    ip: str = ""  # That was connected to.
    stranger: str = ""  # Who is there in place of a mesh, as `strangers` calls them; "" where that is not known.
    seconds: float = 0.0  # From the start to the answer.

    @property
    def is_mesh(self) -> bool:
        """Whether a mesh answers that can be joined with its token."""
        return self.kind == MESH


def probe(address: Address, timeout: float) -> ProbeResult:
    """Look who is there, without a token; at most `timeout` seconds.

    Of several IPs behind a name the first that answers counts. Through the HTTP proxy of this network, where one is named for this address.
    """
    started = time.monotonic()
    deadline = started + timeout
    if address.way == HTTPS:
        try:
            proxy = connecting.proxy_for(address)
        except ProtocolError as error:
            return ProbeResult(address, FAILED, str(error))
        if proxy is not None:
            return _probe_web(ProbeResult(address, "", ""), None, deadline)._replace(seconds=time.monotonic() - started)
    kind, text, targets = resolve(address.host, address.port, timeout)
    result = ProbeResult(address, kind, text)
    for number, target in enumerate(targets):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        result = _probe_at(address, target, time.monotonic() + left / (len(targets) - number))
        if result.kind in (MESH, VERSION, BUSY, WEB):
            break
    return result._replace(seconds=time.monotonic() - started)


def resolve(host: str, port: int, timeout: float = CONNECT_SECONDS) -> Tuple[str, str, List[Tuple[Any, Any]]]:
    """Where a host is: (kind and text of what went wrong, or "", and the (family, address) pairs to connect to)."""
    try:
        found = connecting.resolve(Address(host, port), timeout)
    except MeshUnavailableError as error:
        if ":" in host:
            return NO_IPV6, "this machine has no such IPv6 network", []
        return NO_NAME, f"{error} (better: the machine's IP address)", []
    return "", "", [(family, name) for family, _, _, _, name in found]


def connect(target: Tuple[Any, Any], deadline: float) -> socket.socket:
    """A connected TCP socket.

    Raises:
        OSError: As `explain` can tell.
    """
    family, name = target
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(name)
        connecting.settle(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def explain(error: OSError, host: str) -> Tuple[str, str]:
    """What an error of `connect` means: kind, and a clause for people with what to do."""
    kind, clause, advice = reasons.why(error, host)
    return kind, f"{clause}; {advice}"


def _probe_at(address: Address, target: Tuple[Any, Any], deadline: float) -> ProbeResult:
    ip = str(target[1][0])
    blank = ProbeResult(address, "", "", ip=ip)
    if address.way in (HTTPS, WEBSOCKET):
        return _probe_web(blank, target, deadline)
    plain_first = address.way == INSECURE or is_loopback(ip)
    found = _look(blank, target, deadline, inside_tls=not plain_first)
    if address.way == INSECURE:
        return found
    if plain_first:  # A coordinator that speaks TLS only says so.
        wants_tls = found.kind == BUSY and found.text == TLS
        return _look(blank, target, deadline, inside_tls=True) if wants_tls else found
    if found.kind in (OTHER, SILENT) and not found.certificate:  # Nothing that speaks TLS; a mesh without it?
        plain = _look(blank, target, deadline, inside_tls=False)
        return plain if plain.kind in (MESH, VERSION, BUSY) or found.kind == OTHER else found
    return found


def _look(blank: ProbeResult, target: Tuple[Any, Any], deadline: float, *, inside_tls: bool) -> ProbeResult:
    try:
        sock = connect(target, deadline)
    except OSError as error:
        kind, text = explain(error, blank.address.host)
        return blank._replace(kind=kind, text=text)
    certificate = ""
    try:
        if inside_tls:
            sock, certificate = _wrap(sock, deadline, ("gpumesh/1",))
            blank = blank._replace(certificate=certificate)
        return _converse(blank, sock, deadline)
    except (TimeoutError, socket.timeout):
        return blank._replace(kind=SILENT, text=_SILENCE)
    except OSError as error:
        if str(getattr(error, "reason", None) or "").endswith("NO_APPLICATION_PROTOCOL"):
            return _stranger(blank, strangers.TLS)
        text = f"what listens there is no gpumesh coordinator ({reasons.said(error)})"
        return blank._replace(kind=OTHER, text=text)
    finally:
        sock.close()


def _wrap(sock: socket.socket, deadline: float, protocols: Tuple[str, ...]) -> Tuple[socket.socket, str]:
    """The same socket inside TLS, and the hash of the certificate that the other side has shown."""
    tls, binding = connecting.secure(sock, protocols, deadline - time.monotonic())
    return tls, binding.hex()


def _converse(blank: ProbeResult, sock: socket.socket, deadline: float) -> ProbeResult:
    encoder = codec.Encoder()

    def encoded(message: Any) -> bytes:
        tag, body, _ = encoder.encode(message)
        return b"".join(bytes(part) for part in frames.encode_frame(tag, body))

    facts = connecting.local_facts()
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    hello = Hello("client", os.urandom(NONCE_BYTES), facts.gpumesh, facts.python, facts.platform)
    sock.sendall(frames.PREAMBLE + encoded(hello))
    decoder = frames.FrameDecoder(stepwise=True)
    preamble: Optional[bytes] = None
    received = 0
    while received < _READ_BYTES:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        buffer = decoder.get_buffer()
        count = sock.recv_into(buffer, min(len(buffer), _READ_BYTES))
        if not count:
            break
        received += count
        decoder.buffer_updated(count)
        if preamble is None:
            waiting = decoder.peek()
            if waiting[: len(frames.MAGIC)] != frames.MAGIC[: len(waiting)]:
                return _stranger(blank, strangers.who(waiting))
            preamble = decoder.take(frames.PREAMBLE_BYTES)
            if preamble is None:
                continue
            blank = blank._replace(protocol=int.from_bytes(preamble[6:], "little"))
            if preamble != frames.PREAMBLE:
                return blank._replace(
                    kind=VERSION, text=str(strangers.other_version(blank.protocol, PROTOCOL_VERSION, __version__))
                )
        try:
            frame = decoder.next_frame()
            if frame is None and decoder.failure is None:
                continue
            if frame is None:
                break
            message = codec.decode_handshake(frame)
        except ProtocolError:
            break
        if type(message) is Challenge:
            sock.sendall(encoded(Refused(LOOKED, "")))
            return blank._replace(
                kind=MESH, mesh=clean(message.mesh, 64), gpumesh=clean(message.gpumesh, 32), python=clean(message.python, 16)
            )
        if type(message) is Refused:
            if message.reason == "version":
                return blank._replace(kind=VERSION, text=clean(message.text, 200))
            return blank._replace(kind=BUSY, text=TLS if message.reason == TLS else clean(message.text, 200))
        break
    if preamble is not None:
        return blank._replace(kind=OTHER, text="what listens there began like a gpumesh coordinator and then broke off")
    return blank._replace(kind=OTHER, text=strangers.HUNG_UP)


def _stranger(blank: ProbeResult, name: str) -> ProbeResult:
    return blank._replace(kind=OTHER, text=f"the other side is {name}, {strangers.NO_COORDINATOR}", stranger=name)


def _probe_web(blank: ProbeResult, target: Optional[Tuple[Any, Any]], deadline: float) -> ProbeResult:
    """Of a proxy or tunnel one sees that it speaks TLS or HTTP; whether a mesh is behind it, whoever joins sees.

    Args:
        target: None: the address, through the HTTP proxy of this network.
    """
    try:
        if target is None:
            sock = connecting.connect(blank.address, deadline - time.monotonic())
        else:
            sock = connect(target, deadline)
    except MeshError as error:
        return blank._replace(kind=FAILED, text=str(error))
    except OSError as error:
        kind, text = explain(error, blank.address.host)
        return blank._replace(kind=kind, text=text)
    try:
        if blank.address.way == HTTPS:
            sock, certificate = _wrap(sock, deadline, ("gpumesh/1", "http/1.1"))
            blank = blank._replace(certificate=certificate)
            if sock.selected_alpn_protocol() == "gpumesh/1":  # type: ignore[attr-defined]
                return _converse(blank, sock, deadline)
        request = f"GET /healthz HTTP/1.1\r\nHost: {blank.address}\r\nConnection: close\r\n\r\n"
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(request.encode("ascii", "replace"))
        answer = sock.recv(_READ_BYTES)
        if not answer.startswith(b"HTTP/"):
            return _stranger(blank, strangers.who(answer))
        status = clean(answer.split(b"\r\n", 1)[0].decode("latin-1"), 60)
        return blank._replace(kind=WEB, text=f"a web server or tunnel answers ({status})")
    except (TimeoutError, socket.timeout):
        return blank._replace(kind=SILENT, text=_SILENCE)
    except OSError as error:
        text = f"no HTTPS server ({reasons.said(error)})"
        return blank._replace(kind=OTHER, text=text)
    finally:
        sock.close()


def prove(address: Address, token: str, timeout: float, *, mesh: str = "") -> str:
    """Shake hands with the token, as a worker that then leaves again: why a machine with it could not join there, "" if it could.

    Args:
        mesh: The id that the coordinator is expected to have.
    """
    deadline = time.monotonic() + timeout
    if address.way == HTTPS:
        try:
            if connecting.proxy_for(address) is not None:
                return prove_through(connecting.connect(address, timeout), token, deadline - time.monotonic())
        except MeshError as error:
            return str(error)
    _, text, targets = resolve(address.host, address.port, timeout)
    for target in targets[:4]:
        try:
            sock = connect(target, deadline)
        except OSError as error:
            text = explain(error, address.host)[1]
            continue
        try:
            plain = address.way == INSECURE or is_loopback(str(target[1][0]))
            text = _shake(sock, token, deadline, inside_tls=not plain)
            if text == TLS and plain and address.way == PORT:
                sock.close()
                sock = connect(target, deadline)
                text = _shake(sock, token, deadline, inside_tls=True)
        except (TimeoutError, socket.timeout):
            text = "it does not answer in time"
        except OSError as error:
            text = f"the connection broke ({reasons.said(error)})"
        finally:
            sock.close()
        if not text:
            return ""
    return text


def prove_through(pipe: socket.socket, token: str, timeout: float) -> str:
    """The same through a pipe (`network.websocket`) or tunnel that leads to a coordinator; that is closed."""
    try:
        return _shake(pipe, token, time.monotonic() + timeout, inside_tls=True)
    except (TimeoutError, socket.timeout):
        return "it does not answer in time"
    except OSError as error:
        return f"the connection broke ({reasons.said(error)})"
    finally:
        pipe.close()


def _shake(sock: socket.socket, token: str, deadline: float, *, inside_tls: bool) -> str:
    binding = b""
    wrapped: socket.socket = sock
    if inside_tls:
        wrapped, certificate = _wrap(sock, deadline, ("gpumesh/1",))
        binding = bytes.fromhex(certificate)
    try:
        now = time.monotonic()
        connection = Connection.dial(
            role="worker", token=token, nonce=os.urandom(NONCE_BYTES), now=now, facts=connecting.local_facts(), binding=binding
        )
        while True:
            wrapped.settimeout(max(0.001, deadline - time.monotonic()))
            for part in connection.data_to_send():
                wrapped.sendall(part)
            count = wrapped.recv_into(connection.get_buffer())
            now = time.monotonic()
            events = connection.buffer_updated(count, now) if count else connection.receive_eof(now)
            for event in events:
                if type(event) is Established:
                    connection.close(LOOKED)
                    for part in connection.data_to_send():
                        wrapped.sendall(part)
                    return ""
                if type(event) is Closed:
                    return _why(event.error)
    finally:
        if wrapped is not sock:
            wrapped.close()


def _why(error: Optional[MeshError]) -> str:
    if error is None:
        return "it left"
    if getattr(error, "refusal", "") == TLS:
        return TLS
    if isinstance(error, AuthenticationError):
        return str(error)
    if isinstance(error, VersionMismatchError):
        return str(error)
    return str(error) or type(error).__name__
