"""The listening and dialing sides that `python -m benchmarks fuzz` feeds, each with the frames that it begins from."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any, Callable, Dict, List, Sequence

from benchmarks.fuzz_dialed import dialed
from benchmarks.fuzz_engine import Case
from benchmarks.fuzz_memory import FACTS, OBJECT_MEMORY, TOKEN, Honest, JumpingLoop, MemoryTransport, RawPeer, worker_facts
from benchmarks.fuzz_outside import outside
from gpumesh.model.tasks import TaskSpec
from gpumesh.network.address import Address
from gpumesh.protocol import codec, frames
from gpumesh.protocol.connection import Closed, Connection, Established
from gpumesh.protocol.messages import (
    MESSAGE_TYPES,
    PREAUTH_TAGS,
    Challenge,
    DefineFunction,
    DefineSpec,
    Goodbye,
    Hello,
    Proof,
    Refused,
    RegisterClient,
    RegisterWorker,
    SubmitTasks,
    Welcome,
)
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.runtime.relay import Relay, _Caller
from gpumesh.runtime.relay_greeting import ASKED

CLIENT = 0x1A2B3C4D  # As the samples of tests/wire/golden.py have it.
LATER_SECONDS = 24 * 3600.0  # What is kept for somebody who may come back is gone by then.
SCRATCH_BYTES = 16 * 1024  # Instead of 256 KiB, of which zeroing is most of what a new connection costs.
PREAUTH_BYTES = 64 * 1024  # What a stranger can make a connection hold, generously.


def as_frame(message: Any) -> bytes:
    """A message as a whole frame."""
    tag, body, buffers = codec.Encoder().encode(message)
    return b"".join(bytes(part) for part in frames.encode_frame(tag, body, buffers))


def samples() -> Dict[str, bytes]:
    """A frame of every kind."""
    from tests.wire.golden import SAMPLES

    return {name: as_frame(message) for name, message in SAMPLES.items()}


def _strangers_seeds() -> List[Case]:
    hello = as_frame(Hello("client", bytes(32), "0", "3.11", "linux"))
    worker = as_frame(Hello("worker", bytes(range(32)), "0", "3.11", "linux"))
    proof = as_frame(Proof(bytes(32)))
    seeds = [[frames.PREAMBLE, hello, proof], [frames.PREAMBLE + hello], [frames.PREAMBLE, worker, proof, proof], [hello]]
    seeds += [
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
        [frames.MAGIC, b"\x02\x00"],
    ]
    seeds += [[frames.PREAMBLE, frame] for frame in samples().values()]
    seeds += [[frames.PREAMBLE, hello, frame] for frame in samples().values()]
    return seeds


class Stranger:
    """The coordinator's connection, of somebody who has not shown the token."""

    name = "stranger"
    kinds: Sequence[int] = tuple(PREAUTH_TAGS) * 4 + tuple(MESSAGE_TYPES)

    def __init__(self, loop: JumpingLoop) -> None:
        self._loop = loop

    def seeds(self) -> List[Case]:
        return _strangers_seeds()

    def _connection(self) -> Connection:
        return Connection.listen(token=TOKEN, nonce=bytes(32), mesh="m", now=0.0, facts=FACTS, binding=b"b" * 32)

    async def run(self, case: Case) -> List[str]:
        connection = self._connection()
        problems: List[str] = []
        events: List[Any] = []
        for data in case:
            events += connection.receive_data(data, 0.1)
            connection.data_to_send()
        events += connection.on_time(100.0) or connection.receive_eof(100.0)
        if any(type(event) is Established for event in events) or connection.grant:
            problems.append("it was let in")
        if not events or type(events[-1]) is not Closed or sum(type(event) is Closed for event in events) != 1:
            problems.append(f"the last event is no Closed: {events[-3:]}")
        if len(connection.get_buffer()) > PREAUTH_BYTES:
            problems.append(f"it holds {len(connection.get_buffer())} bytes")
        return problems

    async def rest(self) -> str:
        return ""


class Dialer(Stranger):
    """The connection of a client or an agent, to somebody who does not know the token."""

    name = "dialer"

    def seeds(self) -> List[Case]:
        challenge = as_frame(Challenge(bytes(32), "m", "0", "3.11"))
        seeds: List[Case] = [
            [frames.PREAMBLE, challenge, as_frame(Welcome(bytes(32), 1))],
            [challenge],
            [b"HTTP/1.1 400 No\r\n\r\n"],
        ]
        seeds += [[frames.PREAMBLE, as_frame(Refused(reason, "why"))] for reason in ("authentication", "version", "tls", "x")]
        seeds += [[frames.PREAMBLE, frame] for frame in samples().values()]
        return seeds + [[frames.PREAMBLE, challenge, frame] for frame in samples().values()]

    def _connection(self) -> Connection:
        return Connection.dial(role="worker", token=TOKEN, nonce=bytes(32), now=0.0, facts=FACTS, binding=b"b" * 32)


OTHER = {"client": "worker", "worker": "client"}
BEGIN = {
    "client": as_frame(RegisterClient(CLIENT, "client")),
    "worker": as_frame(RegisterWorker("0123456789abcdef", tuple(worker_facts()))),
}
WORK = b"".join(
    as_frame(message)
    for message in (
        DefineFunction(bytes(range(16)), b"body"),
        DefineSpec(7, tuple(TaskSpec(bytes(range(16)), "f"))),
        SubmitTasks(7, [(CLIENT << 32) | 17, (CLIENT << 32) | 18], [b"one", b"two"]),
    )
)
GOODBYE = as_frame(Goodbye("done"))


class Known:
    """A coordinator, and somebody who has shown the token: a client or a worker."""

    def __init__(self, loop: JumpingLoop, role: str) -> None:
        self.name = role
        self.kinds = tuple(MESSAGE_TYPES)
        self._role = role
        self._loop = loop
        frames.SCRATCH_BYTES = SCRATCH_BYTES
        self._coordinator = Coordinator(token=TOKEN, object_memory=OBJECT_MEMORY)
        self._honest = Honest(self._coordinator)
        self._cut = random.Random(0)

    def seeds(self) -> List[Case]:
        every = samples()
        digest = as_frame(DefineFunction(bytes(range(16)), b"body"))
        code = every["DefineCode"]
        spec = as_frame(DefineSpec(7, tuple(TaskSpec(bytes(range(16)), "f"))))
        begin = [digest, spec] if self._role == "client" else []
        seeds = [[*begin, frame] for frame in every.values()]
        seeds += [[*begin, *(frame for name, frame in every.items() if word in name)][:12] for word in (
            "Object", "Stream", "Tasks", "Job", "Actor", "Segment", "Refs", "Query", "Worker", "Define",
        )]  # fmt: skip
        if self._role == "client":
            seeds += [[digest, code, every["DefineSpec"], frame] for frame in every.values()]
        return seeds

    async def run(self, case: Case) -> List[str]:
        peer, other = RawPeer(self._coordinator, self._role), RawPeer(self._coordinator, OTHER[self._role])
        for each, begin in sorted(
            ((peer, BEGIN[self._role]), (other, BEGIN[OTHER[self._role]])), key=lambda pair: pair[0] is other
        ):
            each.feed(begin)
        if self._role == "worker":
            other.feed(WORK)
        for data in case:
            cut = self._cut.randrange(len(data) + 1) if self._cut.random() < 0.1 else 0
            peer.feed(data[:cut])
            peer.feed(data[cut:])
        await asyncio.sleep(0)
        peer.transport.take()
        for each, role in ((peer, self._role), (other, OTHER[self._role])):
            if not each.leave(GOODBYE):
                again = RawPeer(self._coordinator, role)
                again.feed(BEGIN[role])
                again.leave(GOODBYE)
        await asyncio.sleep(0)
        problems, self._loop.errors = self._loop.errors, []
        return problems

    async def rest(self) -> str:
        await self._loop.jump(LATER_SECONDS)
        await self._honest.check()
        await self._loop.jump(LATER_SECONDS)
        problems, self._loop.errors = self._loop.errors, []
        left = [name for name in ("_links", "_workers", "_clients", "_payloads") if getattr(self._coordinator, name)]
        if left:
            problems.append(f"left behind: {', '.join(left)}")
        return "\n".join(problems)


class RelayGreeting:
    """The socket on which an agent awaits the processes of its own tasks."""

    name = "relay"
    kinds: Sequence[int] = tuple(range(8))

    def __init__(self, loop: JumpingLoop) -> None:
        self._loop = loop
        self.dialed = 0
        relay = Relay(loop, Address("127.0.0.1", 9), TOKEN, hands_over=False)
        relay.dial = self._dial  # type: ignore[method-assign]  # What follows is another connection's handshake.
        self._relay = relay

    def _dial(self, on_answer: Any) -> None:
        self.dialed += 1

    def seeds(self) -> List[Case]:
        asked = ASKED.pack(os.getpid(), CLIENT)
        return [[asked], [asked[:5], asked[5:]], [asked, b"more"], [asked + b"x"], [b""], [bytes(64)]]

    async def run(self, case: Case) -> List[str]:
        caller = _Caller(self._relay)
        transport = MemoryTransport()
        caller.connection_made(transport)  # type: ignore[arg-type]
        before, total = self.dialed, 0
        for data in case:
            total += len(data)
            if transport.is_closed:
                break
            if transport.is_reading:
                caller.data_received(data)
            else:
                total -= len(data)
        problems = []
        if self.dialed - before != (total == ASKED.size):
            problems.append(f"{total} bytes made it dial {self.dialed - before} times")
        caller.connection_lost(None)
        self._relay._clients.clear()
        return problems

    async def rest(self) -> str:
        return "" if not self._relay._sides else f"{len(self._relay._sides)} connections are left behind"


SIDES: Dict[str, Callable[[JumpingLoop], Any]] = {
    "stranger": Stranger,
    "dialer": Dialer,
    "client": lambda loop: Known(loop, "client"),
    "worker": lambda loop: Known(loop, "worker"),
    "relay": RelayGreeting,
    **outside(),
    **dialed(),
}
