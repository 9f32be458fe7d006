"""A coordinator without a socket: its links on transports in memory, and peers of theirs that keep the rules or break them."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from typing import Any, Deque, List, Optional, Type

from gpumesh.model.resources import WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.connection import Connection, PeerFacts, State
from gpumesh.protocol.messages import (
    DefineFunction,
    DefineSpec,
    Query,
    RegisterClient,
    RegisterWorker,
    RunTasks,
    SubmitTasks,
    TaskResults,
    TasksFinished,
)
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.runtime.link import PeerLink

TOKEN = "a token that no mutation makes up"
FACTS = PeerFacts("0", "3.11", "test")
HONEST_CLIENT = 0x00BADA55
OBJECT_MEMORY = 64 * 2**20
TURNS = 40  # Of the loop, for what an honest peer waits for.


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be set forward: what is kept for minutes is gone at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0
        self.errors: List[str] = []
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return super().time() + self.ahead

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: Any) -> None:
        error = context.get("exception")
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__)) if error is not None else ""
        self.errors.append(f"{context.get('message')}\n{text}")

    async def jump(self, seconds: float, *, steps: int = 8) -> None:
        """Let so much time pass at once, and let what is due then be done."""
        for _ in range(steps):
            self.ahead += seconds / steps
            for _ in range(4):
                await asyncio.sleep(0)


class MemoryTransport:
    """What a link writes into."""

    def __init__(self) -> None:
        self.written: List[bytes] = []
        self.is_closed = False
        self.is_reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.7", 4242) if name == "peername" else default

    def set_write_buffer_limits(self, high: Optional[int] = None, low: Optional[int] = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        if not self.is_closed:
            self.written.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def take(self) -> bytes:
        """All that was written since the last look."""
        data, self.written = b"".join(self.written), []
        return data


class RawPeer:
    """A connection to a coordinator in this process on which the token was shown already; whatever is fed goes in as it is."""

    def __init__(self, coordinator: Coordinator, role: str) -> None:
        now = asyncio.get_running_loop().time()
        self.link: PeerLink = accept(coordinator)
        self.link.connection = Connection.relayed(role=role, mesh=coordinator.mesh, workers=0, now=now, facts=FACTS)
        self.link.connection.grant = "full"
        self.transport = MemoryTransport()
        self.link.connection_made(self.transport)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        """Raw bytes to the coordinator, as its event loop would hand them over."""
        feed(self.link, self.transport, data)

    def leave(self, goodbye: bytes) -> bool:
        """Say goodbye and cut the line; False if that is not how it ended."""
        was_open = not self.transport.is_closed
        self.feed(goodbye)
        is_heard = was_open and self.link.connection.state is State.CLOSED and self.link.connection.error is None
        self.transport.is_closed = True
        self.link.connection_lost(None)
        return is_heard


class MemoryPeer:
    """One connection to a coordinator in this process, from its dialer's end, which keeps all rules."""

    def __init__(self, coordinator: Coordinator, role: str) -> None:
        loop = asyncio.get_running_loop()
        self.link: PeerLink = accept(coordinator)
        self.transport = MemoryTransport()
        self.link.connection_made(self.transport)  # type: ignore[arg-type]
        self.connection = Connection.dial(role=role, token=TOKEN, nonce=bytes(32), now=loop.time(), facts=FACTS)
        self.seen: Deque[Any] = deque()
        self._loop = loop

    async def meet(self, *messages: Any) -> None:
        """Shake hands and say who this is."""
        for _ in range(3):
            await self.exchange()
        assert self.connection.established, self.seen
        await self.tell(*messages)

    async def tell(self, *messages: Any) -> None:
        """Send, and take in what follows."""
        for message in messages:
            self.connection.send(message)
        await self.exchange()

    async def exchange(self) -> None:
        """What waits on both sides goes over."""
        while True:
            parts = self.connection.data_to_send()
            if not parts:
                break
            feed(self.link, self.transport, b"".join(bytes(part) for part in parts))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.seen.extend(self.connection.receive_data(self.transport.take(), self._loop.time()))

    async def wait_for(self, kind: Type[Any]) -> Any:
        """The next message of this kind."""
        for _ in range(TURNS):
            for message in list(self.seen):
                if type(message) is kind:
                    self.seen.remove(message)
                    return message
            await self.exchange()
        raise AssertionError(f"no {kind.__name__} came; seen: {list(self.seen)[-5:]}")

    async def leave(self) -> None:
        """Goodbye, and the line is cut."""
        self.connection.close("done")
        await self.exchange()
        self.transport.is_closed = True
        self.link.connection_lost(None)


def feed(link: PeerLink, transport: MemoryTransport, data: bytes) -> None:
    """Raw bytes to a link, as its event loop would hand them over."""
    view = memoryview(data)
    while len(view) and not transport.is_closed:
        target = link.get_buffer(-1)
        count = min(len(target), len(view))
        target[:count] = view[:count]
        view = view[count:]
        link.buffer_updated(count)


def accept(coordinator: Coordinator) -> PeerLink:
    """A stranger's link, as the listening socket would make it."""
    link = coordinator._accept(b"")
    link.come_from("192.0.2.7:4242", is_piped=False)
    return link


def worker_facts(name: str = "honest") -> WorkerFacts:
    """A machine of two slots."""
    return WorkerFacts(hostname=name, slots=2, cores=2, memory=8 << 30, python="3.11", platform="linux", gpumesh="0", pid=1)


class Honest:
    """A client and a worker that keep the rules, and must be served whatever others do."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._sequence = 0

    async def check(self) -> None:
        """A worker joins, a client submits a task, and it has its result.

        Raises:
            AssertionError: They are not served.
        """
        worker = MemoryPeer(self._coordinator, "worker")
        await worker.meet(RegisterWorker("feedfacefeedface", tuple(worker_facts())))
        client = MemoryPeer(self._coordinator, "client")
        self._sequence += 1
        task = (HONEST_CLIENT << 32) | self._sequence
        digest = bytes(16)
        await client.meet(
            RegisterClient(HONEST_CLIENT, "honest"),
            DefineFunction(digest, b"body"),
            DefineSpec(1, tuple(TaskSpec(digest, "noop"))),
            SubmitTasks(1, [task], [b"arguments"]),
            Query(1, "workers", {}),
        )
        run = await worker.wait_for(RunTasks)
        assert run.tasks[0][::2] == (task, b"arguments"), run
        await worker.tell(TasksFinished([(task, run.tasks[0][1], 0, b"result", 0.1)]))
        results = await client.wait_for(TaskResults)
        assert results.results[0][:3] == (task, 0, b"result"), results
        await client.leave()
        await worker.leave()
