"""F25: the loop holds its tasks weakly; a collector that runs all the time must not make a frame, a task or a connection vanish."""

from __future__ import annotations

import ast
import asyncio
import gc
import logging
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List

import pytest

import gpumesh
from gpumesh.devices.detect import local_facts
from gpumesh.network.address import parse_address
from gpumesh.protocol.messages import Query, RegisterClient
from gpumesh.runtime.embedded import start_coordinator
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.runtime.loop import LoopThread
from gpumesh.runtime.worker import WorkerAgent
from tests.support import tasks
from tests.support.client import Client
from tests.support.peers import encoded, handshake

CONNECTIONS = 150


@contextmanager
def collecting() -> Iterator[None]:
    """Collect after every allocation of a container, and in a thread of its own without pause."""
    threshold = gc.get_threshold()
    is_over = threading.Event()

    def collect() -> None:
        while not is_over.wait(0.005):
            gc.collect(1)
            gc.collect()

    thread = threading.Thread(target=collect)
    gc.set_threshold(50, 2, 2)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        gc.set_threshold(*threshold)


class AgentHere:
    """A worker agent on a loop thread of this process, so that it lives under the same collector."""

    def __init__(self, url: str, token: str, slots: int) -> None:
        self._thread = LoopThread("agent")
        self._run: Any = None
        self.agent: Any = None
        self._thread.call(lambda: self._start(url, token, slots), timeout=10)

    async def _start(self, url: str, token: str, slots: int) -> None:
        def launch(stderr: int) -> Any:
            return launch_spawner(environment=child_environment(), stderr=stderr)

        self.agent = WorkerAgent(
            address=parse_address(url), token=token, facts=local_facts(slots=slots, score=1.0), worker_id="here", spawner=launch
        )
        self._run = asyncio.ensure_future(self.agent.run())

    def close(self) -> None:
        async def stop() -> None:
            self.agent.stop()
            await self._run

        self._thread.call(stop, timeout=10)
        self._thread.stop()


def test_nothing_vanishes_while_the_collector_runs_all_the_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with start_coordinator(port=0, token="secret") as coordinator:
        port = parse_address(coordinator.url).port
        agent = AgentHere(coordinator.url, "secret", 2)
        with collecting(), Client(coordinator.url, "secret") as client:
            assert client.remote(tasks.noop).result(30) is None
            futures = [client.remote(tasks.noop, number) for number in range(300)]
            crashing = [client.remote(os._exit, 1, retries=0) for _ in range(10)]
            socks = []
            for number in range(CONNECTIONS):
                sock, connection = handshake(port, "secret")
                sock.sendall(encoded(RegisterClient(5000 + number, "one of many")) + encoded(Query(number, "workers", {})))
                socks.append((sock, connection, number))
            futures += [client.remote(tasks.noop, number) for number in range(300, 600)]

            for sock, connection, number in socks:
                answer = wait_for_answer(sock, connection)
                assert answer.number == number
                assert len(answer.value) == 1
                sock.close()
            assert [future.result(60) for future in futures] == list(range(600))
            assert all(future.exception(30) is not None for future in crashing)
        agent.close()
        del agent
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    assert "destroyed" not in caplog.text


def wait_for_answer(sock: Any, connection: Any) -> Any:
    sock.settimeout(30)
    while True:
        for event in connection.receive_data(sock.recv(65536), time.monotonic()):
            if type(event).__name__ == "Answer":
                return event


def test_every_background_task_has_an_owner() -> None:
    """A call that makes a task, as a statement of its own, leaves it to the collector."""
    loose: List[str] = []
    for path in sorted(Path(gpumesh.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                continue
            function = node.value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in ("create_task", "ensure_future", "run_coroutine_threadsafe", "run_in_executor"):
                loose.append(f"{path}:{node.lineno}")
    assert loose == []


def test_what_goes_wrong_in_the_background_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    from gpumesh.runtime import runner_processes

    async def fail() -> None:
        raise ValueError("nobody waits for me")

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(fail())
        runner_processes._keep(task)
        await asyncio.wait([task])
        await asyncio.sleep(0)  # One turn of the loop, for the callback.

    asyncio.run(main())

    assert "background work failed" in caplog.text
    assert "nobody waits for me" in caplog.text
