"""The sides that have dialed somebody who knows the token and does not keep the rules: a worker's agent, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
import time
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from benchmarks.fuzz_engine import DEADLINE_SECONDS, Case
from benchmarks.fuzz_memory import FACTS, TOKEN, JumpingLoop, MemoryTransport, feed, worker_facts
from gpumesh.client.channel import Channel
from gpumesh.client.lanes import SpecHandle
from gpumesh.client.link import MeshLink
from gpumesh.model.tasks import TaskSpec
from gpumesh.network.address import Address
from gpumesh.protocol.connection import Connection, Established
from gpumesh.protocol.messages import MESSAGE_TYPES, DefineFunction, DefineSpec, RunTasks, TaskResults
from gpumesh.runtime.link import PeerLink
from gpumesh.runtime.worker import WorkerAgent
from gpumesh.scheduler import local

CLIENT = 0x1A2B3C4D  # As the samples have it.
TASK = (CLIENT << 32) | 17
CASES_OF_ONE_AGENT = 16


class Agent:
    """A worker's agent, whose runners are never started, and its coordinator."""

    name = "agent"
    kinds: Sequence[int] = tuple(MESSAGE_TYPES)

    def __init__(self, loop: JumpingLoop) -> None:
        self._loop = loop
        self._agent: Any = None
        self._theirs: Any = None
        self._cases = 0

    def seeds(self) -> List[Case]:
        from benchmarks.fuzz_sides import as_frame, samples

        every = samples()
        begin = [
            as_frame(DefineFunction(bytes(range(16)), b"body")),
            as_frame(DefineSpec(7, tuple(TaskSpec(bytes(range(16)), "f")))),
        ]
        run = as_frame(RunTasks(7, [(TASK, 1, b"arguments")]))
        seeds = [[*begin, frame] for frame in every.values()] + [[*begin, run, frame] for frame in every.values()]
        return seeds + [[*begin, run, every["RecallTasks"], every["ForgetResults"]]]

    def _open(self) -> None:
        ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._agent = WorkerAgent(
            address=Address("127.0.0.1", 9), token=TOKEN, facts=worker_facts(), worker_id="0123456789abcdef", spawner=ours
        )
        # Specs name packages: an environment would be built for each, with the real installer.
        self._agent._pool._define_environment = lambda spec, packages: local.OWN_ENVIRONMENT
        self._agent._pool.start()

    async def _shut(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        agent._pool.close()
        await agent._relay.close()
        if agent._objects is not None:
            agent._objects.close()
        self._theirs.close()
        for _ in range(4):
            await asyncio.sleep(0)

    async def run(self, case: Case) -> List[str]:
        if self._agent is None or self._cases % CASES_OF_ONE_AGENT == 0:
            await self._shut()
            self._open()
        self._cases += 1
        agent = self._agent
        agent._lost = self._loop.create_future()
        agent._specs = {}
        facts = FACTS
        connection = Connection.relayed(role="worker", mesh="m", workers=1, now=self._loop.time(), facts=facts)
        link = agent._link = PeerLink(self._loop, connection, agent._on_events, agent._pool.turn)
        transport = MemoryTransport()
        link.connection_made(transport)  # type: ignore[arg-type]
        agent._join(link)
        for data in case:
            feed(link, transport, data)
        await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            self._theirs.recv(1 << 20)  # What it asks of its spawner, which does nothing.
        transport.is_closed = True
        link.connection_lost(None)
        if agent._objects is not None:
            agent._lose_objects(agent._objects)
        agent._link = None
        await asyncio.sleep(0)
        problems, self._loop.errors = self._loop.errors, []
        if not agent._lost.done():
            problems.append("it does not know that its coordinator is gone")
        return problems

    async def rest(self) -> str:
        await self._shut()
        await self._loop.jump(3600.0)
        problems, self._loop.errors = self._loop.errors, []
        return "\n".join(problems)

    async def close(self) -> None:
        """End it."""
        await self._shut()


class Exported(NamedTuple):
    """A function as an exporter makes it."""

    digest: bytes
    body: bytes
    python: str = ""
    modules: Tuple[str, ...] = ()
    refs: Tuple[Any, ...] = ()


class Asking:
    """A client with tasks that it waits for, and its coordinator; on a real socket pair, with the thread that reads it."""

    name = "asking"
    kinds: Sequence[int] = tuple(MESSAGE_TYPES)

    def __init__(self, loop: JumpingLoop) -> None:
        self._handles: List[SpecHandle] = []

    def seeds(self) -> List[Case]:
        from benchmarks.fuzz_sides import as_frame, samples

        every = samples()
        done = as_frame(TaskResults("box", [(TASK, 0, b"\x80\x05N.", 0.25)]))
        return [[frame] for frame in every.values()] + [[done, frame] for frame in every.values()]

    async def run(self, case: Case) -> List[str]:
        ours, theirs = socket.socketpair()
        link = MeshLink(ours, Connection.relayed(role="client", mesh="m", workers=1, now=time.monotonic(), facts=FACTS))
        channel = Channel(
            Address("127.0.0.1", 9),
            TOKEN,
            name="asking",
            connect_timeout=1.0,
            reconnect_timeout=0.0,
            on_workers=lambda channel, count: None,
            dialer=lambda client, timeout: (link, Established("client", "m", 1, FACTS), []),
        )
        channel.client = CLIENT
        channel._next_id = TASK
        sinks = [_Ended(), _Ended()]
        nowhere = io.StringIO()  # What tasks print.
        with theirs, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            channel.connect()
            handle = SpecHandle(7, TaskSpec(bytes(range(16)), "f"), Exported(bytes(range(16)), b"body"), None)
            for sink in sinks:
                channel.submit(handle, b"arguments", sink)
            theirs.setblocking(False)
            with contextlib.suppress(OSError):  # It may have hung up, or be read too slowly: then it has less of the case.
                for data in case:
                    theirs.sendall(data)
            with contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_WR)
            thread = channel._thread
            assert thread is not None
            thread.join(DEADLINE_SECONDS / 2)
            problems = ["its thread goes on without a coordinator"] if thread.is_alive() else []
        if "the client's own I/O failed" in str(channel.end):
            problems.append(str(channel.end))
        waiting = [place for place, sink in enumerate(sinks) if not sink.count]
        if waiting and not problems:
            problems.append(f"nobody has told what became of tasks {waiting}")
        channel.close()
        return problems

    async def rest(self) -> str:
        left = [thread.name for thread in threading.enumerate() if thread.name == "gpumesh-io"]
        return f"{len(left)} threads are left" if left else ""


class _Ended:
    """Who waits for a task."""

    def __init__(self) -> None:
        self.count = 0

    def task_ended(self, task_id: int, status: int, payload: Any, seconds: float, worker: str) -> None:
        self.count += 1

    def stream_items(self, channel: Any, message: Any, items: Any) -> None:
        """Its task is no generator."""


def dialed() -> Dict[str, Any]:
    """These sides by their names."""
    return {Agent.name: Agent, Asking.name: Asking}
