"""Two connections without a socket: bytes carried by hand, in any pieces."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

from gpumesh.protocol import codec, frames
from gpumesh.protocol.connection import Connection, PeerFacts
from gpumesh.protocol.messages import FetchObject

TOKEN = "mysecret"
DIALER_NONCE = bytes(range(32))
LISTENER_NONCE = bytes(range(32, 64))
DIALER_FACTS = PeerFacts("0.1.0", "3.11", "linux")
LISTENER_FACTS = PeerFacts("0.1.0", "3.12", "darwin")
MESH = "9f8e7d6c"

Cut = Callable[[bytes], List[bytes]]


def whole(data: bytes) -> List[bytes]:
    return [data]


def bytewise(data: bytes) -> List[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def dial(*, token: str = TOKEN, role: str = "client", binding: bytes = b"", now: float = 0.0) -> Connection:
    return Connection.dial(role=role, token=token, nonce=DIALER_NONCE, now=now, facts=DIALER_FACTS, binding=binding)


def listen(*, token: str = TOKEN, binding: bytes = b"", now: float = 0.0) -> Connection:
    return Connection.listen(token=token, nonce=LISTENER_NONCE, mesh=MESH, now=now, facts=LISTENER_FACTS, binding=binding)


def listen_to(*tokens: Tuple[str, str], binding: bytes = b"") -> Connection:
    """A listener with these secrets, and what each grants."""
    return Connection.listen(tokens=tokens, nonce=LISTENER_NONCE, mesh=MESH, now=0.0, facts=LISTENER_FACTS, binding=binding)


def take(connection: Connection, *, bulk: bool = True) -> bytes:
    """All that one `data_to_send` hands out."""
    return b"".join(bytes(part) for part in connection.data_to_send(bulk=bulk))


def drain(connection: Connection) -> bytes:
    """All that waits, on both lanes."""
    parts: List[bytes] = []
    while connection.has_data:
        parts.append(take(connection))
    return b"".join(parts)


def pump(one: Connection, other: Connection, *, now: float = 0.0, cut: Cut = whole) -> Tuple[List[Any], List[Any]]:
    """Carry bytes both ways until both are silent; the events at `one` and at `other`."""
    events: Tuple[List[Any], List[Any]] = ([], [])
    while one.has_data or other.has_data:
        for piece in cut(take(one)):
            events[1].extend(other.receive_data(piece, now))
        for piece in cut(take(other)):
            events[0].extend(one.receive_data(piece, now))
    return events


def open_pair(*, now: float = 0.0, role: str = "client") -> Tuple[Connection, Connection]:
    """A dialer and a listener that have shaken hands."""
    dialer, listener = dial(role=role, now=now), listen(now=now)
    pump(dialer, listener, now=now)
    assert dialer.established
    assert listener.established
    return dialer, listener


def frame_of(message: Any) -> bytes:
    """A message as one frame, whatever its size."""
    tag, body, buffers = codec.Encoder().encode(message)
    return b"".join(bytes(part) for part in frames.encode_frame(tag, body, buffers))


def raw_frame(kind: int, body: bytes, *, flags: int = 0, buffers: int = 0) -> bytes:
    """A frame with any header."""
    return frames.HEADER.pack(len(body), kind, flags, buffers) + body


def chunk(transfer: int, index: int, offset: int, total: int, data: bytes) -> bytes:
    return b"".join(bytes(part) for part in frames.encode_chunk(transfer, index, offset, total, [memoryview(data)]))


class Fetch:
    """One object that `receiver` has asked `sender` for."""

    def __init__(self, receiver: Connection, sender: Connection, number: int, value: bytes, window: int = 1 << 40) -> None:
        self.number = number
        self.value = value
        self.window = window
        self.target = bytearray(len(value))
        self._sender = sender
        receiver.receive_into(number, self.target, window)
        receiver.send(FetchObject(number, 1, window))
        sender.receive_data(take(receiver), 0.0)

    def answer(self) -> None:
        """Start to send it, in two pieces."""
        middle = len(self.value) // 3
        self._sender.send_object(self.number, [self.value[:middle], self.value[middle:]], self.window)
