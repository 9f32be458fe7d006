"""What a script writes: its last line, the end of it for messages, and how much of it goes on. Bounded, whatever it writes."""

from __future__ import annotations

from typing import List, Tuple

from gpumesh.config import (
    SCRIPT_OUTPUT_BURST_BYTES,
    SCRIPT_OUTPUT_RATE_BYTES,
    SCRIPT_OUTPUT_TAIL_BYTES,
    SCRIPT_RESULT_BYTES,
    STDERR_TAIL_BYTES,
    STDERR_TAIL_LINES,
)

SHOWN_CHARS = 200  # Of a line that is not JSON, in a message.


class LastLine:
    """The last line that is not blank, as far as it is no longer than a result may be. Lines end with a line feed or a carriage return."""

    __slots__ = ("_line", "_length", "_open", "_open_length")

    def __init__(self) -> None:
        self._line = bytearray()  # The last one that has ended, or its beginning.
        self._length = 0  # Its length.
        self._open = bytearray()  # What has come since.
        self._open_length = 0

    def feed(self, data: bytes) -> None:
        """More of it."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if end < 0:
            self._extend(data)
            return
        ended = data[:end].rstrip()
        begin = max(ended.rfind(b"\n"), ended.rfind(b"\r")) + 1
        if begin:
            self._line, self._length = bytearray(), 0
            self._open, self._open_length = bytearray(), 0
        self._extend(ended[begin:])
        self._end_line()
        self._extend(data[end + 1 :])

    @property
    def value(self) -> Tuple[bytes, int]:
        """The line, without white space around it, and its length, which is larger than the line when that is only its beginning."""
        if self._open.strip():
            line, length = self._open, self._open_length
        else:
            line, length = self._line, self._length
        return bytes(line.strip()), length if length > len(line) else len(line.strip())

    def _extend(self, data: bytes) -> None:
        self._open_length += len(data)
        room = SCRIPT_RESULT_BYTES - len(self._open)
        self._open += data[:room] if room < len(data) else data

    def _end_line(self) -> None:
        if self._open.strip():
            self._line, self._length = self._open, self._open_length
        self._open, self._open_length = bytearray(), 0


class Tail:
    """The last lines, for messages."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> None:
        """More of it."""
        self._data = (self._data + data[-STDERR_TAIL_BYTES:])[-STDERR_TAIL_BYTES:]

    @property
    def text(self) -> str:
        """They, without an empty end."""
        lines = self._data.decode("utf-8", "replace").rstrip().splitlines()
        return "\n".join(lines[-STDERR_TAIL_LINES:])


class Forwarding:
    """What of one stream goes on: all of it while it is slow; of a flood the beginning, a share, and the end.

    Args:
        now: Seconds, on any clock that does not go back.
    """

    __slots__ = ("_allowed", "_at", "_waiting", "_left_out")

    def __init__(self, now: float) -> None:
        self._allowed = float(SCRIPT_OUTPUT_BURST_BYTES)
        self._at = now
        self._waiting = b""  # The end of what has come and is not allowed yet.
        self._left_out = 0  # Bytes before it.

    def feed(self, data: bytes, now: float) -> List[bytes]:
        """More of it; what goes on now."""
        allowed = self._allowed + (now - self._at) * SCRIPT_OUTPUT_RATE_BYTES
        self._allowed = min(float(SCRIPT_OUTPUT_BURST_BYTES), allowed)
        self._at = now
        if not self._waiting and len(data) <= self._allowed:
            self._allowed -= len(data)
            return [data] if data else []
        now_on: List[bytes] = []
        if not self._waiting:
            count = int(self._allowed)
            self._allowed -= count
            now_on.append(data[:count])
            data = data[count:]
        self._wait(data)
        if self._waiting and len(self._waiting) <= self._allowed:
            self._allowed -= len(self._waiting)
            now_on += self.end()
        return [part for part in now_on if part]

    def due(self) -> float:
        """When what waits may go on: feed it nothing then. Infinity when nothing waits."""
        if not self._waiting:
            return float("inf")
        return self._at + max(0.0, len(self._waiting) - self._allowed) / SCRIPT_OUTPUT_RATE_BYTES + 0.001

    def end(self) -> List[bytes]:
        """What waits, whether it is allowed or not."""
        waiting, self._waiting = self._waiting, b""
        left_out, self._left_out = self._left_out, 0
        if left_out:
            return [f"\n[gpumesh: {left_out} bytes of output left out]\n".encode(), waiting]
        return [waiting] if waiting else []

    def _wait(self, data: bytes) -> None:
        if len(data) >= SCRIPT_OUTPUT_TAIL_BYTES:
            self._left_out += len(self._waiting)
            self._waiting = b""
        whole = self._waiting + data
        if len(whole) > SCRIPT_OUTPUT_TAIL_BYTES:
            begin = len(whole) - SCRIPT_OUTPUT_TAIL_BYTES
            begin = whole.find(b"\n", begin, begin + SCRIPT_OUTPUT_TAIL_BYTES // 2) + 1 or begin
            self._left_out += begin
            whole = whole[begin:]
        self._waiting = whole


def why_no_result(script: str, line: bytes, length: int) -> str:
    """What is wrong with the last line of a script's output; "" when it is a result."""
    how = "print it as one line at the end: print(json.dumps(result))"
    if not length:
        return f"{script} printed nothing, and its result is the last line of its standard output, as JSON; {how}"
    if length > len(line) or length > SCRIPT_RESULT_BYTES:
        return (
            f"the last line that {script} printed has {length / 1e6:.1f} MB, over the limit of {SCRIPT_RESULT_BYTES / 1e6:.1f} MB for a "
            "result; write what is large to a file or a shared folder and print its name"
        )
    import json

    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        said = error.reason if isinstance(error, UnicodeDecodeError) else str(error).partition(": line 1 ")[0]
        return f"the last line that {script} printed is not JSON ({said}): {_shown(line)}; {how}"
    return ""


def _shown(line: bytes) -> str:
    text = repr(line[: 4 * SHOWN_CHARS].decode("utf-8", "backslashreplace"))[1:-1]
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + " ..."
