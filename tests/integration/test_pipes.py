"""Pipes through WebSockets, both ends: everything arrives, neither side runs ahead of the other, and the end of one is the end of both."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Iterator, List

import pytest
from aiohttp import web

from gpumesh.network import websocket
from gpumesh.network.address import Address
from gpumesh.network.tcp import listen
from gpumesh.runtime import piping
from gpumesh.runtime.loop import LoopThread
from tests.support.processes import threads_idle, until

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20


class Far:
    """A server of WebSockets, whose pipes come out here."""

    def __init__(self) -> None:
        self.thread = LoopThread("test-far")
        self.pipes: queue.Queue[socket.socket] = queue.Queue()
        self.carrying = 0
        listener = listen("127.0.0.1", 0)
        self.address = Address("127.0.0.1", listener.getsockname()[1], "ws")

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            ws = web.WebSocketResponse(compress=False)
            await ws.prepare(request)
            mine, theirs = socket.socketpair()
            theirs.settimeout(20.0)
            self.pipes.put(theirs)
            assert request.transport is not None
            self.carrying += 1
            try:
                await websocket.carry(ws, mine, abort=request.transport.abort)
            finally:
                self.carrying -= 1
            return ws

        async def start() -> Any:
            self.server = web.Server(handle, access_log=None)
            return await self.thread.loop.create_server(self.server, sock=listener)

        self.listening = self.thread.call(start, timeout=5.0)

    def pipe(self) -> List[socket.socket]:
        """Both ends of one: ours, and the one out there."""
        ours = piping.open_pipe(self.address, timeout=5.0)
        ours.settimeout(20.0)
        return [ours, self.pipes.get(timeout=5.0)]

    def close(self) -> None:
        async def stop() -> None:
            self.listening.close()
            await self.server.shutdown(1.0)

        self.thread.call(stop, timeout=10.0)
        self.thread.stop()


@pytest.fixture(scope="module")
def far() -> Iterator[Far]:
    far = Far()
    yield far
    far.close()


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 18):
        parts.append(part)
    return b"".join(parts)


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, f"ended after {len(data)} of {count} bytes"
        data += part
    return bytes(data)


def pattern(count: int, seed: int) -> bytes:
    return (bytes(range(256)) * (count // 255 + 2))[seed : seed + count]


def test_both_directions_at_once_lose_and_mix_nothing(far: Far) -> None:
    ends = far.pipe()
    sent = [pattern(24 * MIB, 3), pattern(24 * MIB, 100)]
    threads = [threading.Thread(target=end.sendall, args=(data,)) for end, data in zip(ends, sent)]
    readers: List[bytes] = [b"", b""]

    def read(which: int) -> None:
        readers[which] = read_exactly(ends[which], 24 * MIB)

    threads += [threading.Thread(target=read, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert readers == [sent[1], sent[0]]
    for end in ends:
        end.close()


@pytest.mark.parametrize("who", [0, 1])
def test_what_was_sent_before_the_end_arrives_then_the_end(far: Far, who: int) -> None:
    ends = far.pipe()
    data = pattern(3 * MIB, 7)
    thread = threading.Thread(target=lambda: (ends[who].sendall(data), ends[who].close()))
    thread.start()
    assert read_all(ends[1 - who]) == data
    thread.join(20)
    ends[1 - who].close()


@pytest.mark.parametrize("who", [0, 1])
def test_whoever_is_not_read_from_stops(far: Far, who: int) -> None:
    """Neither the pumps nor what is between them take in more than a few buffers."""
    ends = far.pipe()
    ends[who].settimeout(1.0)
    taken = 0
    with pytest.raises(TimeoutError if sys.version_info >= (3, 10) else socket.timeout):
        while taken < 512 * MIB:
            taken += ends[who].send(bytes(MIB))
    assert taken < 24 * MIB
    assert len(read_exactly(ends[1 - who], taken)) == taken
    for end in ends:
        end.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_pipe_that_is_closed_while_the_other_side_does_not_read_ends(far: Far, who: int) -> None:
    ends = far.pipe()
    until(lambda: far.carrying == 1)
    ends[who].settimeout(0.3)
    with pytest.raises(TimeoutError if sys.version_info >= (3, 10) else socket.timeout):
        while True:
            ends[who].send(bytes(MIB))
    ends[who].close()
    is_over = [lambda: threads_idle("gpumesh-websocket"), lambda: far.carrying == 0]
    until(is_over[who], 8.0, what="the end of the pump of the side that has closed")
    ends[1 - who].close()
    until(is_over[1 - who], 8.0, what="the end of the other")


def test_a_program_that_ends_has_sent_all_once_it_has_drained(far: Far) -> None:
    code = (
        "import sys\nfrom gpumesh.network.address import Address\nfrom gpumesh.runtime import piping\n"
        f"sock = piping.open_pipe(Address('127.0.0.1', {far.address.port}, 'ws'), timeout=5.0)\n"
        "sock.sendall(bytes(2_000_000)); sock.close(); piping.drain(5.0)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    there = far.pipes.get(timeout=10.0)
    assert len(read_all(there)) == 2_000_000
    assert program.wait(10) == 0
    there.close()


def test_a_child_that_was_forked_keeps_no_pipe_open_and_may_have_its_own(far: Far) -> None:
    ends = far.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine = piping.open_pipe(far.address, timeout=5.0)
            mine.sendall(b"child")
            mine.close()
            piping.drain(5.0)
            code = 0
        finally:
            os._exit(code)
    theirs = far.pipes.get(timeout=10.0)
    assert read_all(theirs) == b"child"
    assert os.waitpid(pid, 0)[1] == 0
    theirs.close()
    ends[0].sendall(b"parent")
    ends[0].shutdown(socket.SHUT_RDWR)
    assert read_all(ends[1]) == b"parent"
    for end in ends:
        end.close()
