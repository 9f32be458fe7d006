"""Who is there in place of the mesh, by the first bytes that they say; pure. The only list of them, and the only words for them."""

from __future__ import annotations

from gpumesh.errors import ProtocolError, VersionMismatchError

HTTP, HTTP_CLIENT = "an HTTP server", "an HTTP client"
SSH, SSH_CLIENT = "an SSH server", "an SSH client"
TLS, TLS_CLIENT = "an HTTPS or other TLS server", "a TLS client"

HTTP_VERBS = (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC", b"CONN", b"PRI ")
_SSH = b"SSH-"
_TLS = (b"\x16\x03", b"\x15\x03")  # Its handshake, and its alerts.
_KNOWN = (*HTTP_VERBS, b"HTTP", _SSH, *_TLS)
ENOUGH_BYTES = 4  # To tell all of them apart.

_METHOD_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ-_")
_METHOD_BYTES = 32  # No method of HTTP is half as long.

HUNG_UP = "the peer closed the connection during the handshake; is it a gpumesh coordinator?"
SAYS_NOTHING = "takes the connection and says nothing"
NO_COORDINATOR = "not a gpumesh coordinator; check host and port"


def who(data: bytes, *, is_calling: bool = False) -> str:
    """A few words for whoever begins with these bytes.

    Args:
        is_calling: They have connected to this side, and not this side to them.
    """
    if data[:ENOUGH_BYTES] in HTTP_VERBS:
        return HTTP_CLIENT
    if data.startswith((b"HTTP", b"<")):  # Some answer what they do not understand with a bare page.
        return HTTP
    if data.startswith(_SSH):
        return SSH_CLIENT if is_calling else SSH
    if data.startswith(_TLS):
        return TLS_CLIENT if is_calling else TLS
    return f"something that starts with {data[:16]!r}"


def not_a_mesh(data: bytes, *, is_calling: bool = False) -> ProtocolError:
    """The error that says so."""
    name = who(data, is_calling=is_calling)
    error = ProtocolError(
        f"the other side is {name}, no member of a mesh" if is_calling else f"the other side is {name}, {NO_COORDINATOR}"
    )
    error.stranger = name
    return error


def other_version(theirs: int, own: int, gpumesh: str, *, peer: str = "") -> VersionMismatchError:
    """It is a mesh, of another version of the protocol.

    Args:
        gpumesh: The version of this side.
        peer: The version of the other one, where it is known.
    """
    told = f" (gpumesh {peer})" if peer else ""
    return VersionMismatchError(
        f"the peer speaks mesh protocol {theirs}{told}, this side (gpumesh {gpumesh}) speaks {own}; "
        "install the same gpumesh version on both machines"
    )


def may_become_known(data: bytes) -> bool:
    """Whether more bytes could still tell who it is."""
    return any(known.startswith(data) for known in _KNOWN)


def may_be_http(head: bytes) -> bool:
    """Whether this can be the beginning of an HTTP request: a method in capitals, then a blank."""
    if head.startswith(_SSH):
        return False
    line = head[: _METHOD_BYTES + 1].partition(b"\n")[0].rstrip(b"\r")
    method = line.partition(b" ")[0]
    return 0 < len(method) <= _METHOD_BYTES and _METHOD_LETTERS.issuperset(method)


def is_broken_http(head: bytes) -> bool:
    """Whether its first line is there and names no version of HTTP, so that nothing can follow that makes it a request."""
    line, end, _ = head.partition(b"\n")
    return bool(end) and b" HTTP/" not in line
