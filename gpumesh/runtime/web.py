"""HTTP on the coordinator's port: a page for people, figures for Prometheus, and the WebSocket through which the mesh passes proxies.

    GET /         a page; with the token, what the mesh does
    GET /healthz  "ok" to anybody
    GET /metrics  figures, with the token (the full one, or the one for metrics)
    GET /mesh     a WebSocket whose bytes are a connection to this port

Loaded when somebody speaks HTTP for the first time. Promises:

1. Without a token nothing is told of the mesh. A wrong one counts at the door like one of the mesh (`protocol.admission`), and a right one
   is taken only where nobody else can read it: inside TLS, or from this machine. Through a proxy, which can, the full one is taken by none.
2. A page of another site learns nothing: no request with a foreign Origin or Host is answered, the WebSocket takes none with an Origin.
3. No request with a body is read. (How many there may be, and for how long, is the door's business: `runtime.doorway`.)
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from aiohttp import hdrs, web

from gpumesh.config import (
    GOODBYE_SECONDS,
    HTTP_FIGURES_SECONDS,
    HTTP_IDLE_SECONDS,
    HTTP_LINE_BYTES,
    WEBSOCKET_MESSAGE_BYTES,
)
from gpumesh.network import websocket
from gpumesh.network.address import is_loopback, plain_ip
from gpumesh.protocol import auth
from gpumesh.protocol.admission import network_of
from gpumesh.runtime import web_metrics, web_page
from gpumesh.runtime.doorway import FROM_TUNNEL

if TYPE_CHECKING:
    from gpumesh.runtime.coordinator import Coordinator

logger = logging.getLogger("gpumesh.coordinator")

_VERBS: Dict[str, Tuple[str, ...]] = {
    "/": ("GET", "HEAD"),
    "/healthz": ("GET", "HEAD"),
    "/metrics": ("GET", "HEAD"),
    websocket.PATH: ("GET",),
}
_TEXT = "text/plain"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_HEADERS = {
    "Server": "gpumesh",  # Else it is the versions of Python and aiohttp.
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": web_page.POLICY,
}
_PASSED_ON = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")  # What proxies and tunnels add.
_READ_ON_THE_WAY = (
    "this has come through a proxy or tunnel, which has read the mesh's full token; use the one that `gpumesh token metrics` shows, and if "
    "you do not trust whoever runs it, `gpumesh token rotate`\n"
)
_CHALLENGE = 'Basic realm="gpumesh: any name, the token as the password", charset="UTF-8"'


class Web:
    """See the module's promises. Every method runs on the loop's thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._server = web.Server(self._handle, access_log=None)
        self._names = {"localhost", *_own_names()}
        self._figures: Optional[Tuple[float, Dict[str, Any]]] = None  # When they were taken, and what they were.

    def protocol(self) -> asyncio.BaseProtocol:
        """What speaks HTTP on one connection."""
        return _Handler(self._server, self._loop)

    async def close(self) -> None:
        """Close every connection."""
        await self._server.shutdown(GOODBYE_SECONDS)

    # --- requests

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        refusal = self._problem(request)
        if refusal is not None:
            return refusal
        path = request.path
        if path == "/healthz":
            return _answer(200, "ok\n")
        if path == websocket.PATH:
            return await self._mesh(request)
        if path == "/" and not (request.headers.get(hdrs.AUTHORIZATION) or request.query_string == web_page.LOGIN):
            return _answer(200, web_page.render(None), kind="text/html")
        denial = self._denial(request)
        if denial is not None:
            return denial
        figures = self._take_figures()
        if path == "/":
            return _answer(200, web_page.render(figures), kind="text/html")
        return _answer(200, web_metrics.render(figures), kind=_METRICS)

    def _problem(self, request: web.BaseRequest) -> Optional[web.Response]:
        """Why this is not looked at any further; None: it is."""
        verbs = _VERBS.get(request.path)
        hosts = request.headers.getall(hdrs.HOST, [])
        if len(hosts) != 1:
            return _answer(400, "a request names one host\n")
        if request.can_read_body:
            return _answer(413, "nothing here takes a body\n")
        if request.path != websocket.PATH and not self._is_ours(hosts[0]):
            return _answer(
                421, f"this is not {hosts[0][:100]!r}; use an address of the coordinator, or start it with --advertise\n"
            )
        origins = request.headers.getall(hdrs.ORIGIN, [])
        scheme = "https" if request.secure else "http"
        if origins and (request.path == websocket.PATH or origins != [f"{scheme}://{hosts[0]}"]):
            return _answer(403, "pages of other sites have no business here\n")
        if verbs is None:
            return _answer(404, "there is nothing here; see / and /healthz\n")
        if request.method not in verbs:
            return _answer(405, f"only {' and '.join(verbs)}\n", Allow=", ".join(verbs))
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine: an address, or one of its names. Else some name was made to point here."""
        name = _name_of(host)
        return _is_ip(name) or name in self._names or name in {each.lower() for each in self._coordinator.names}

    def _is_passed_on(self, request: web.BaseRequest) -> bool:
        """Whether a proxy or tunnel stands between: it says so itself, or the request is for its name and has come from this machine."""
        if any(name in request.headers for name in _PASSED_ON):
            return True
        host = _name_of(request.headers.get(hdrs.HOST, ""))
        return not request.secure and host not in self._names and not _is_ip(host)

    def _caller(self, request: web.BaseRequest) -> str:
        """Under which IP address it is counted."""
        host = _host(request)
        return FROM_TUNNEL if is_loopback(host) and self._is_passed_on(request) else host

    def _address(self, request: web.BaseRequest) -> str:
        """`host:port` of who calls."""
        name = request.transport.get_extra_info("peername") if request.transport is not None else None
        if not isinstance(name, tuple):
            return "?"
        host = self._caller(request)
        return f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}"

    def _denial(self, request: web.BaseRequest) -> Optional[web.Response]:
        """Why this request may not see figures; None: it may."""
        door, now, host = self._coordinator.door, self._loop.time(), self._caller(request)
        wait = door.admission.is_shut(network_of(host), now)
        if wait:
            return _later(f"too many wrong tokens from your address; try again in {wait:.0f} s\n", wait)
        given = request.headers.getall(hdrs.AUTHORIZATION, [])
        if not given:
            return _answer(
                401, "this takes the token, as a bearer token or as a password\n", **{"WWW-Authenticate": _CHALLENGE}
            )
        if not request.secure and not is_loopback(host):
            return _answer(403, "a token is taken only inside TLS; use https://\n")
        token = _token_of(given[0]) if len(given) == 1 else ""
        grant = self._coordinator.tokens.grant_of(token, now) if token else ""
        if grant == auth.FULL and self._is_passed_on(request):
            return _answer(403, _READ_ON_THE_WAY)
        if grant in (auth.FULL, auth.METRICS):
            return None
        if grant == auth.WORKER:
            return _answer(403, "this token lends a machine and nothing else; use the full one, or `gpumesh token metrics`\n")
        door.admission.proof_failed(network_of(host), now, is_local=is_loopback(host))
        door.tell(self._address(request), "a wrong token over HTTP")
        return _answer(401, "this token is not the mesh's; see `gpumesh token`\n", **{"WWW-Authenticate": _CHALLENGE})

    def _take_figures(self) -> Dict[str, Any]:
        now = self._loop.time()
        if self._figures is None or now - self._figures[0] >= HTTP_FIGURES_SECONDS:
            self._figures = (now, self._coordinator.figures())
        return self._figures[1]

    async def _mesh(self, request: web.BaseRequest) -> web.StreamResponse:
        """Whoever comes through here comes to the door, like everybody else."""
        door, address = self._coordinator.door, self._address(request)
        wait = door.admission.is_shut(network_of(self._caller(request)), self._loop.time())
        if wait:
            return _later(f"too many wrong tokens from your address; try again in {wait:.0f} s\n", wait)
        if request.headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket":
            return _answer(426, "this is for `gpumesh join`, by WebSocket\n", Upgrade="websocket", Connection="Upgrade")
        ws = web.WebSocketResponse(timeout=GOODBYE_SECONDS, compress=False, max_msg_size=WEBSOCKET_MESSAGE_BYTES)
        ws.headers["Server"] = _HEADERS["Server"]
        try:
            await ws.prepare(request)
        except web.HTTPException as error:
            return _answer(error.status, "this is no WebSocket handshake\n")
        transport = request.transport
        if transport is None:  # It has gone already.
            return ws
        door.upgraded(transport)  # From here it counts as what it is to the mesh.
        mine, theirs = socket.socketpair()
        door.admit(theirs, address)
        await websocket.carry(ws, mine, abort=transport.abort)
        return ws


class _Handler(web.RequestHandler):
    """aiohttp's, quiet about what strangers send."""

    __slots__ = ()

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # As the documentation says: none.
            keepalive_timeout=HTTP_IDLE_SECONDS,
            lingering_time=0,
            max_line_size=HTTP_LINE_BYTES,
            max_field_size=HTTP_LINE_BYTES,
            auto_decompress=False,
        )

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: Optional[BaseException] = None, message: Optional[str] = None
    ) -> web.StreamResponse:
        """The answer to what is no request, or where we have failed."""
        if status >= 500:
            logger.error("answering %.100r over HTTP has failed", request.path, exc_info=exc)
        answer = _answer(status, "this is not a request of HTTP/1.1\n" if status < 500 else "that has failed here\n")
        answer.force_close()
        return answer


# --- answers


def _answer(status: int, text: str, *, kind: str = _TEXT, **headers: str) -> web.Response:
    if ";" not in kind:
        kind = f"{kind}; charset=utf-8"
    response = web.Response(status=status, body=text.encode(), headers={**_HEADERS, "Content-Type": kind, **headers})
    if status in (400, 413):
        response.force_close()  # Who knows what comes behind.
    return response


def _later(text: str, seconds: float) -> web.Response:
    return _answer(429, text, **{"Retry-After": str(int(seconds) + 1)})


def _token_of(header: str) -> str:
    """The token in an Authorization header: a bearer's, or the password of any user; "" if there is none."""
    kind, _, rest = header.strip().partition(" ")
    if kind.lower() == "bearer":
        return rest.strip()
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


# --- who and where


def _host(request: web.BaseRequest) -> str:
    name = request.transport.get_extra_info("peername") if request.transport is not None else None
    return plain_ip(str(name[0])) if isinstance(name, tuple) else ""


def _name_of(host: str) -> str:
    """The name in a Host header, in small letters, without the port and the brackets of an IPv6 address."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _own_names() -> List[str]:
    """What this machine is called, without asking anybody."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return [name, short, f"{short}.local"]
