"""The sides that have dialed somebody who knows the token and does not keep the rules: a worker's agent, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Dict, List, Sequence

from benchmarks.fuzz_engine import Case
from benchmarks.fuzz_memory import FACTS, TOKEN, JumpingLoop, MemoryTransport, feed, worker_facts
from gpumesh.model.tasks import TaskSpec
from gpumesh.network.address import Address
from gpumesh.protocol.connection import Connection
from gpumesh.protocol.messages import MESSAGE_TYPES, DefineFunction, DefineSpec, RunTasks
from gpumesh.runtime.link import PeerLink
from gpumesh.runtime.worker import WorkerAgent

CLIENT = 0x1A2B3C4D  # As the samples have it.
TASK = (CLIENT << 32) | 17
CASES_OF_ONE_AGENT = 16


class Agent:
    """A worker's agent, whose runners are never started, and its coordinator."""

    name = "agent"
    share = 0.5
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


def dialed() -> Dict[str, Any]:
    """These sides by their names."""
    return {Agent.name: Agent}
