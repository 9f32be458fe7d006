"""A client written from docs/protocol.md alone: struct, socket, hmac, ssl and msgpack, nothing of gpumesh.

python tests/wire/independent_client.py HOST PORT TOKEN [--tls]
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import struct
import sys
from typing import Any, List, Tuple

import msgpack

PREAMBLE = b"\x89mesh\n" + struct.pack("<H", 1)
HELLO, CHALLENGE, PROOF, WELCOME, REFUSED, PING, PONG, GOODBYE = 1, 2, 3, 4, 5, 6, 7, 8
REGISTER_CLIENT, DEFINE_FUNCTION, DEFINE_SPEC, SUBMIT_TASKS, TASK_RESULTS = 0x11, 0x20, 0x21, 0x22, 0x28
QUERY, ANSWER = 0x50, 0x51


class Refused(Exception):
    """The other side does not want us, or is not who it should be."""


class IndependentClient:
    """One connection."""

    def __init__(self, host: str, port: int, token: str, *, tls: bool) -> None:
        sock: Any = socket.create_connection((host, port), 10)
        self.binding = b""
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_alpn_protocols(["gpumesh/1"])
            sock = context.wrap_socket(sock)
            self.binding = hashlib.sha256(sock.getpeercert(binary_form=True)).digest()
        self.socket = sock
        self.number = int.from_bytes(os.urandom(4), "little") >> 1
        self.mesh = ""
        try:
            self._shake_hands(token.encode())
        except BaseException:
            sock.close()
            raise

    def _shake_hands(self, token: bytes) -> None:
        hello = msgpack.packb(["client", os.urandom(32), "0", f"{sys.version_info[0]}.{sys.version_info[1]}", sys.platform])
        self.socket.sendall(PREAMBLE)
        self._send_body(HELLO, hello)
        if self._exactly(8) != PREAMBLE:
            raise Refused("this is no mesh of version 1")
        challenge = self._handshake_body(CHALLENGE)
        self.mesh = msgpack.unpackb(challenge)[1]
        self._send_body(PROOF, msgpack.packb([self._proof(token, b"gpumesh dialer 1", hello, challenge)]))
        theirs = msgpack.unpackb(self._handshake_body(WELCOME))[0]
        if not hmac.compare_digest(theirs, self._proof(token, b"gpumesh listener 1", hello, challenge)):
            raise Refused("it does not know the token")

    def _proof(self, token: bytes, label: bytes, hello: bytes, challenge: bytes) -> bytes:
        mac = hmac.new(token, digestmod=hashlib.sha256)
        for part in (label, hello, challenge, self.binding):
            mac.update(struct.pack("<I", len(part)) + part)
        return mac.digest()

    def _handshake_body(self, wanted: int) -> bytes:
        kind, body = self._frame()
        if kind != wanted:
            raise Refused(msgpack.unpackb(body)[1] if kind == REFUSED else f"kind {kind} where {wanted} was expected")
        return body

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise Refused("it has closed the connection")
            data += more
        return data

    def _frame(self) -> Tuple[int, bytes]:
        length, kind, flags, buffers = struct.unpack("<IBBH", self._exactly(8))
        if flags or buffers:
            raise Refused("values with buffers are none of this client's business")
        return kind, self._exactly(length)

    def _send_body(self, kind: int, body: bytes) -> None:
        self.socket.sendall(struct.pack("<IBBH", len(body), kind, 0, 0) + body)

    def send(self, kind: int, *fields: Any) -> None:
        """One message."""
        self._send_body(kind, msgpack.packb(list(fields)))

    def wait_for(self, wanted: int) -> List[Any]:
        """The fields of the next message of this kind; pings are answered, all others are passed over."""
        while True:
            kind, body = self._frame()
            fields = msgpack.unpackb(body, strict_map_key=False)
            if kind == PING:
                self.send(PONG, fields[0])
            elif kind == REFUSED:
                raise Refused(fields[1])
            elif kind == wanted:
                return list(fields)

    def close(self) -> None:
        """Say goodbye."""
        self.send(GOODBYE, "done")
        self.socket.close()


def absolute_of_seven(client: IndependentClient) -> Tuple[List[Any], bytes]:
    """Register, ask which workers there are, and let one of them run abs(-7); (workers, pickle of the result)."""
    client.send(REGISTER_CLIENT, client.number, "independent")
    client.send(QUERY, 1, "workers", {})
    workers, error = client.wait_for(ANSWER)[1:3]
    if error:
        raise Refused(error)
    function = b"\x80\x02cbuiltins\nabs\n)\x86."  # Of (abs, ()).
    arguments = b"\x80\x02J\xf9\xff\xff\xff\x85}\x86."  # Of ((-7,), {}).
    digest = hashlib.sha256(function).digest()[:16]
    task = client.number << 32 | 1
    client.send(DEFINE_FUNCTION, digest, function)
    client.send(DEFINE_SPEC, 7, [digest, "abs"])
    client.send(SUBMIT_TASKS, 7, [task], [arguments])
    ident, status, value, _ = client.wait_for(TASK_RESULTS)[1][0]
    if ident != task or status != 0:
        raise Refused(f"task {ident:x} has ended as {status}: {value!r}")
    return workers, value


if __name__ == "__main__":
    dialed = IndependentClient(sys.argv[1], int(sys.argv[2]), sys.argv[3], tls="--tls" in sys.argv)
    print(absolute_of_seven(dialed))
    dialed.close()
