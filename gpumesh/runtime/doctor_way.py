"""The way from this machine to a mesh, step by step: name, route, TCP, TLS, who is there, token, clock, versions.

Each step needs the one before it; the first that fails is the last that is told.
"""

from __future__ import annotations

import contextlib
import email.utils
import socket
import time
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Union

from gpumesh.config import DOCTOR_STEP_SECONDS
from gpumesh.errors import MeshError, ProtocolError
from gpumesh.network import connecting, probing
from gpumesh.network.address import HTTPS, INSECURE, PORT, WEBSOCKET, Address, is_loopback
from gpumesh.network.probing import ProbeResult, probe
from gpumesh.protocol import auth
from gpumesh.runtime import doctor_judging as judge
from gpumesh.runtime.findings import FAULT, HERE, MESH, Finding, fault, note, ok, warning

_HEAD_BYTES = 4096


AskWorkers = Callable[[Address, str], Union[str, Sequence[Mapping[str, Any]]]]
"""Who works for the mesh at an address, asked with a token; or why that is not known. Clients can ask, and live on a floor above this one."""


def check_way(address: Address, token: Optional[str], ask_workers: AskWorkers) -> List[Finding]:
    """All steps, as far as they go.

    Through an HTTP proxy of this machine's network it is one step to the mesh's port: the proxy looks up the name, and finds the way.

    Args:
        token: None: steps that need one are left out, and that is told.
    """
    found: List[Finding] = []
    targets: List[Optional[Tuple[Any, Any]]] = [None]
    proxied = check_proxy(address)
    if proxied is not None:
        found.append(proxied)
    else:
        named, known = check_name(address)
        found.append(named)
        if named.state == FAULT:
            return found
        found += check_route_and_tcp(address, known)
        targets = [*known]
    if found[-1].state == FAULT:
        return found
    result = probe(address, DOCTOR_STEP_SECONDS)
    if address.way != INSECURE:
        found += check_tls(result)
    found += check_identity(result)
    if found[-1].state == FAULT:
        return found
    found.append(check_clock(address, targets))
    if token is None:
        found.append(
            note("token", "no token is known here; nothing more can be checked", "give --token-file, or set GPUMESH_TOKEN")
        )
        return found
    proved = check_token(address, token, result, ask_workers)
    found.append(proved)
    if proved.state != FAULT:
        found += check_versions(address, token, result, ask_workers)
    return found


def check_proxy(address: Address) -> Optional[Finding]:
    """Whether the HTTP proxy of this machine's network reaches it; None: it is reached directly."""
    started = time.monotonic()
    proxy = None
    try:
        proxy = connecting.proxy_for(address)
        if proxy is None:
            return None
        connecting.connect(address, DOCTOR_STEP_SECONDS).close()
    except MeshError as error:
        # A proxy that is there and finds no way on is not this machine's fault.
        is_beyond = proxy is not None and not isinstance(error, ProtocolError) and _takes_connections(proxy.address)
        clause, _, advice = str(error).partition("; ")
        return fault("proxy", clause, advice, place=MESH if is_beyond else HERE)
    took = 1000 * (time.monotonic() - started)
    return ok("proxy", f"the HTTP proxy {proxy.url} ({proxy.variable}) connects to {address}, within {took:.1f} ms")


def _takes_connections(address: Address) -> bool:
    try:
        connecting.connect(address, DOCTOR_STEP_SECONDS).close()
    except MeshError:
        return False
    return True


def check_name(address: Address) -> Tuple[Finding, List[Tuple[Any, Any]]]:
    """Whether the host is known here, and where to connect to."""
    _, text, targets = probing.resolve(address.host, address.port)
    if text:
        clause, _, advice = text.partition("; ")
        return fault("name", clause, advice), []
    ips = list(dict.fromkeys(str(name[0]) for _, name in targets))
    if ips == [address.host]:
        return ok("name", f"{address.host} is an IP address; no name has to be looked up"), targets
    return ok("name", f"{address.host} is {', '.join(ips)}"), targets


def check_route_and_tcp(address: Address, targets: List[Tuple[Any, Any]]) -> List[Finding]:
    """Whether there is a way there, and whether somebody takes connections."""
    last: List[Finding] = []
    for family, name in targets:
        source = _source(family, name)
        route = ok("route", f"the way to {name[0]} begins at {source} of this machine") if source else None
        deadline = time.monotonic() + DOCTOR_STEP_SECONDS / len(targets)
        started = time.monotonic()
        try:
            probing.connect((family, name), deadline).close()
        except OSError as error:
            kind, text = probing.explain(error, address.host)
            clause, _, advice = text.partition("; ")
            if kind == probing.TIMEOUT:
                clause, advice = text.replace("; ", ": ", 1), ""
            if kind in (probing.NO_ROUTE, probing.NO_IPV6):
                last = [fault("route", f"{name[0]}: {clause}", advice)]
            else:
                failed = fault("tcp", f"{address}: {clause}", _what_to_do(kind, address, advice), place=MESH)
                last = [route, failed] if route is not None else [failed]
            continue
        took = 1000 * (time.monotonic() - started)
        opened = ok("tcp", f"port {address.port} takes connections, within {took:.1f} ms", place=MESH)
        return [route, opened] if route is not None else [opened]
    return last


def check_tls(result: ProbeResult) -> List[Finding]:
    """Whether what is said will be encrypted."""
    if result.certificate:
        shown = ":".join(result.certificate[index : index + 2] for index in range(0, 32, 2))
        if result.kind == probing.WEB:
            text = (
                f"a proxy or tunnel speaks TLS (SHA-256 of its certificate: {shown}); inside it the mesh speaks TLS once more"
            )
            return [ok("tls", text, place=MESH)]
        return [ok("tls", f"it speaks TLS; its certificate's SHA-256 begins with {shown}", place=MESH)]
    if is_loopback(result.ip):
        return [ok("tls", "it is this very machine; no TLS is needed", place=MESH)]
    if result.is_mesh:
        return [
            warning(
                "tls",
                "it speaks no TLS: others on the way can read and change what is said",
                "start it without --insecure, or say that you mean it: insecure://...",
                place=MESH,
            )
        ]
    return []


def check_identity(result: ProbeResult) -> List[Finding]:
    """Whether a gpumesh coordinator is there, and one that this gpumesh can talk to."""
    if result.is_mesh:
        return [ok("coordinator", f"it is a gpumesh coordinator, of mesh {result.mesh} (gpumesh {result.gpumesh})", place=MESH)]
    if result.kind == probing.WEB:
        return [ok("coordinator", f"{result.text}; a coordinator may be behind it", place=MESH)]
    clause, _, advice = result.text.partition("; ")
    if result.kind == probing.BUSY:
        return [fault("coordinator", f"it takes nobody now: {clause}", advice or "try again in a minute", place=MESH)]
    check = "version" if result.kind == probing.VERSION else "coordinator"
    return [fault(check, clause, advice or "check host and port", place=MESH)]


def check_token(address: Address, token: str, result: ProbeResult, ask_workers: AskWorkers) -> Finding:
    """Whether the mesh knows this token, and what it is good for."""
    kind = auth.kind_of(token)
    if kind == auth.METRICS:
        return fault(
            "token", "this token reads metrics and nothing else", "use the one of `gpumesh token` or `gpumesh token worker`"
        )
    if address.way in (HTTPS, WEBSOCKET):
        return _token_by_connecting(address, token, ask_workers)
    problem = probing.prove(address, token, DOCTOR_STEP_SECONDS, mesh=result.mesh)
    if problem:
        clause, _, advice = problem.partition("; ")
        return fault("token", clause, advice)
    if kind == auth.WORKER:
        return ok("token", "the mesh knows this token; it lends a machine and can do nothing else")
    return ok("token", "the mesh knows this token, and it can do everything")


def check_clock(address: Address, targets: Sequence[Optional[Tuple[Any, Any]]]) -> Finding:
    """How far the coordinator's clock is from this one; of no consequence but for people who compare logs."""
    answer = _head(address, targets)
    if answer is None:
        return note("clock", "its clock is not known: it answers no HTTP", place=MESH)
    return judge.clock(*answer)


def check_versions(address: Address, token: str, result: ProbeResult, ask_workers: AskWorkers) -> List[Finding]:
    """Whether all machines of the mesh go together."""
    from gpumesh.runtime.facts import peer_facts

    mine = peer_facts()
    here = (mine.python, mine.gpumesh)
    if auth.kind_of(token) != auth.FULL:
        found = judge.versions(here, result.gpumesh, [])
        return [*found, note("versions", "those of the other workers can be seen with the full token only", place=MESH)]
    workers = ask_workers(address, token)
    if isinstance(workers, str):
        return [warning("versions", f"the mesh does not say who works for it: {workers}", place=MESH)]
    return judge.versions(here, result.gpumesh, workers)


def _token_by_connecting(address: Address, token: str, ask_workers: AskWorkers) -> Finding:
    if auth.kind_of(token) == auth.WORKER:
        return note("token", "whether the mesh behind a proxy knows a worker's token shows only when a machine joins")
    workers = ask_workers(address, token)
    if isinstance(workers, str):
        clause, _, advice = workers.partition("; ")
        return fault("token", clause, advice)
    return ok("token", "the mesh knows this token, and it can do everything")


def _source(family: Any, name: Any) -> str:
    """Which address of this machine the routing table takes for a target; "" if none. Sends nothing."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(name)
        return str(sock.getsockname()[0])
    return ""


def _what_to_do(kind: str, address: Address, advice: str) -> str:
    if kind == probing.TIMEOUT:
        from gpumesh.runtime.doctor_firewall import FIREWALLD, UFW, advice_for

        there = f"{advice_for(UFW, address.port)}, or {advice_for(FIREWALLD, address.port)}"
        return (
            f"on that machine see whether `gpumesh doctor` runs well, and let the port through its firewall ({there}); from another "
            "network use a tunnel there: gpumesh serve --public, or --tailscale"
        )
    return advice or "start `gpumesh serve` there, and check host and port"


def _head(address: Address, targets: Sequence[Optional[Tuple[Any, Any]]]) -> Optional[Tuple[float, float]]:
    """(seconds that the coordinator's clock is ahead, by how much that may be wrong), from the date in an HTTP answer."""
    for target in targets:
        deadline = time.monotonic() + DOCTOR_STEP_SECONDS
        is_near = target is not None and is_loopback(str(target[1][0]))
        try:
            if target is None:  # Through the proxy.
                sock = connecting.connect(address, DOCTOR_STEP_SECONDS)
                sock.settimeout(DOCTOR_STEP_SECONDS)
            else:
                sock = probing.connect(target, deadline)
            try:
                if address.way == HTTPS or (address.way == PORT and not is_near):
                    sock = _inside_tls(sock)
                before = time.time()
                sock.sendall(
                    f"GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode("ascii", "replace")
                )
                date = _date_in(sock, deadline)
                after = time.time()
            finally:
                sock.close()
        except OSError:
            continue
        if date is None:
            return None
        # Whole seconds, cut off: half of one is added, and half of one may be wrong.
        return date + 0.5 - (before + after) / 2, 0.5 + abs(after - before) / 2
    return None


def _inside_tls(sock: socket.socket) -> socket.socket:
    from gpumesh.network.tls import HTTP_PROTOCOL, client_context

    return client_context((HTTP_PROTOCOL,)).wrap_socket(sock)


def _date_in(sock: socket.socket, deadline: float) -> Optional[float]:
    """The date of an HTTP answer, in seconds since 1970; None if it has none."""
    data = b""
    while b"\r\n\r\n" not in data and len(data) < _HEAD_BYTES:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(_HEAD_BYTES)
        if not part:
            break
        data += part
    for line in data.decode("latin-1").split("\r\n"):
        name, _, value = line.partition(":")
        parsed = email.utils.parsedate_tz(value) if name.strip().lower() == "date" else None
        if parsed is not None:
            return float(email.utils.mktime_tz(parsed))
    return None
