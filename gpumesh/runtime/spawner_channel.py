"""How requests reach a spawner: length-prefixed msgpack over a stream socket, descriptors attached."""

from __future__ import annotations

import socket
import struct
from typing import Any, Dict, List

import msgpack

LENGTH = struct.Struct("<I")
MAX_FDS = 16
MAX_REQUEST_BYTES = 1024 * 1024


def send_request(channel: socket.socket, request: Dict[str, Any], fds: List[int]) -> None:
    """Send one request; blocks while the spawner is behind by a socket buffer, which a handful of requests never fill."""
    body = msgpack.packb(dict(request, fds=len(fds)))
    data = LENGTH.pack(len(body)) + body
    sent = socket.send_fds(channel, [data], fds) if fds else channel.send(data)
    if sent < len(data):
        channel.sendall(data[sent:])


class MessageReader:
    """Splits a channel's bytes into messages and keeps the descriptors that came with them."""

    __slots__ = ("_data", "_fds")

    def __init__(self) -> None:
        self._data = b""
        self._fds: List[int] = []

    def feed(self, data: bytes, fds: List[int]) -> List[Dict[str, Any]]:
        """The messages that are complete now; each request's descriptors are under "fd_list"."""
        self._data += data
        self._fds += fds
        messages: List[Dict[str, Any]] = []
        while len(self._data) >= LENGTH.size:
            size = LENGTH.unpack_from(self._data)[0]
            if len(self._data) < LENGTH.size + size:
                break
            message: Dict[str, Any] = msgpack.unpackb(self._data[LENGTH.size : LENGTH.size + size], strict_map_key=False)
            self._data = self._data[LENGTH.size + size :]
            count = message.get("fds", 0)
            message["fd_list"], self._fds = self._fds[:count], self._fds[count:]
            messages.append(message)
        return messages
