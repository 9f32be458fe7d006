"""Wires between the chaos run's peers and its coordinator that can be stalled, reset and cut in halves: `python -m benchmarks.chaos_relay PORT COUNT`.

Says the ports of its wires in one line of JSON, then takes orders, one line of JSON each, until its standard input ends:
{"wire": 0, "do": "stall", "way": "both" | "up" | "down"}: nothing passes in that direction (up: to the coordinator), also on new connections;
{"wire": 0, "do": "flow"}: all passes again, and what was cut in halves is reset;
{"wire": 0, "do": "reset", "side": "both" | "peer" | "coordinator"}: one side is reset, the other hears nothing of it until the next "flow".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, List, Optional, Set

from gpumesh.runtime.loop import new_event_loop

HIGH_BYTES = 256 * 1024  # On their way inside the relay, per direction: little, as in a real wire.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing sends RST.


class Side(asyncio.Protocol):
    """One end of a connection through a wire."""

    def __init__(self, wire: Wire, way: str) -> None:
        self.wire = wire
        self.way = way  # Of what is read here.
        self.other: Optional[Side] = None
        self.transport: Any = None
        self.is_abandoned = False  # The other side was reset, and this one is not to know.
        self._is_full = False  # The other side does not take more.
        self._early: List[bytes] = []  # Read before there was another side: the loop may read once before it is told not to.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(high=HIGH_BYTES)
        self.wire.sides.add(self)
        if self.other is None:
            self.transport.pause_reading()  # Until there is somewhere for it to go.
        else:
            self.steer()
            self.other.steer()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        elif not self.other.is_over:
            self.other.transport.write(data)

    def meet(self, other: Side) -> None:
        """There is another side now."""
        self.other = other
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)
        self.steer()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.fill(is_full=True)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.fill(is_full=False)

    def fill(self, *, is_full: bool) -> None:
        """The other side has more to write than it can, or less again."""
        self._is_full = is_full
        self.steer()

    def steer(self) -> None:
        """Read, or do not."""
        if self.is_over:
            return
        is_held = self._is_full or self.is_abandoned or self.way in self.wire.stalled or self.other is None
        if is_held and self.transport.is_reading():
            self.transport.pause_reading()
        elif not is_held and not self.transport.is_reading():
            self.transport.resume_reading()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be written here any more."""
        return self.transport is None or self.transport.is_closing()

    def reset(self) -> None:
        """As a router does that has forgotten the connection."""
        if self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            if not self.is_over:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.transport.abort()

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.wire.sides.discard(self)
        if self.other is not None and not self.other.is_abandoned and self.other.transport is not None:
            if error is not None:
                self.other.reset()
            else:
                self.other.transport.close()


class Wire:
    """What one peer has instead of the coordinator's port."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self._loop = loop
        self._port = port
        self.stalled: Set[str] = set()
        self.sides: Set[Side] = set()
        self._dials: Set[asyncio.Task[None]] = set()

    def accept(self) -> Side:
        """A peer calls: so do we."""
        near = Side(self, "up")
        dial = self._loop.create_task(self._dial(near))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)
        return near

    async def _dial(self, near: Side) -> None:
        far = Side(self, "down")
        far.other = near
        try:
            await self._loop.create_connection(lambda: far, "127.0.0.1", self._port)
        except OSError:  # Nobody is there: neither are we.
            near.reset()
            return
        near.meet(far)
        if near.is_over:
            far.transport.close()

    def obey(self, order: Any) -> None:
        """Do what the chaos run wants."""
        if order["do"] == "stall":
            self.stalled = {"up", "down"} if order["way"] == "both" else {order["way"]}
            for side in list(self.sides):
                side.steer()
        elif order["do"] == "flow":
            self.stalled = set()
            for side in list(self.sides):
                if side.is_abandoned:
                    side.is_abandoned = False
                    side.reset()
                side.steer()
        else:
            for side in list(self.sides):
                if order["side"] == "both" or (side.way == "up") == (order["side"] == "peer"):
                    if order["side"] != "both" and side.other is not None:
                        side.other.is_abandoned = True
                        side.other.steer()
                    side.reset()


def main() -> None:
    """Relay until standard input ends."""
    port, count = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    wires = [Wire(loop, port) for _ in range(count)]
    ports: List[int] = []
    for wire in wires:
        server = loop.run_until_complete(loop.create_server(wire.accept, "127.0.0.1", 0))
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    orders = b""

    def listen() -> None:
        nonlocal orders
        data = os.read(0, 65536)
        if not data:
            loop.stop()
            return
        *whole, orders = (orders + data).split(b"\n")
        for line in whole:
            order = json.loads(line)
            wires[order["wire"]].obey(order)

    loop.add_reader(0, listen)
    loop.run_forever()
    os._exit(0)  # What is open is nobody's loss.


if __name__ == "__main__":
    main()
