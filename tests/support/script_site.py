"""A worker's pool that runs scripts, without a mesh: the test is the coordinator."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from gpumesh.client.scripts import pack_script
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.resources import DeviceFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import DefineCode
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.runtime.loop import LoopThread
from gpumesh.runtime.pool import PoolOwner, RunnerPool
from gpumesh.serialization import functions, values


class ScriptSite(PoolOwner):
    """The pool's owner; scripts are written into `folder`."""

    def __init__(self, folder: Path, *, slots: int = 1, devices: Sequence[DeviceFacts] = ()) -> None:
        self.folder = folder
        self.pids: List[int] = []
        self.is_congested = False
        self._reports: Dict[int, Tuple[int, Any, float]] = {}
        self._output: Dict[int, List[bytes]] = {}
        self._news = threading.Condition()
        self._exporter = functions.Exporter()
        self._thread = LoopThread("test-pool")
        self._next = 1

        def launch(stderr: int) -> Tuple[int, socket.socket]:
            pid, channel = launch_spawner(environment=child_environment(), stderr=stderr)
            self.pids.append(pid)
            return pid, channel

        async def start() -> RunnerPool:
            pool = RunnerPool(self._thread.loop, launch, self, slots=slots, cores=4, label="here", devices=devices)
            pool.start()
            return pool

        self.pool = self._thread.call(start, timeout=10)

    def close(self) -> None:
        """End it, and all that it has started."""
        self.on_loop(self.pool.close)
        self._thread.stop()

    def on_loop(self, act: Callable[[], Any]) -> Any:
        """Do something where the pool lives."""

        async def call() -> Any:
            return act()

        return self._thread.call(call, timeout=10)

    # --- tasks

    def write(self, source: str, name: str = "script.py") -> Path:
        """A script in the test's folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    def submit(self, path: Path, payload: Any = None, *, cards: Tuple[str, ...] = (), **options: Any) -> int:
        """Send one attempt at a script; its number."""
        packed = pack_script(path)
        options.setdefault("script", packed.script)
        spec = TaskSpec(packed.function, packed.name, code=packed.code, place=False, **options)
        data: Any = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return self._send(spec, OutOfBand([data]) if len(data) > 65536 else data, packed.cargo.parts(), cards)

    def start(self, source: str, payload: Any = None, **options: Any) -> int:
        """The same for a script that is this text."""
        return self.submit(self.write(source), payload, **options)

    def call(self, function: Any, *args: Any, **options: Any) -> Any:
        """Run a function and wait for its value: what is no script runs in the same processes."""
        exported = self._exporter.export(function)
        self.on_loop(lambda: self.pool.define_function(exported.digest, exported.body))
        task = self._send(
            TaskSpec(exported.digest, exported.name, **options), values.dumps_call(args, {}, what="arguments"), ()
        )
        status, payload, _ = self._report(task, 20)
        assert status == Status.OK, payload
        return values.loads(payload)

    def _send(self, spec: TaskSpec, payload: Any, parts: Any, cards: Tuple[str, ...] = ()) -> int:
        task, self._next = self._next, self._next + 1

        def send() -> None:
            for digest, data, needs in parts:
                self.pool.define_code(DefineCode(digest, data, needs))
            if spec.script:
                self.pool.define_function(spec.function, b"")
            number = self.pool.define_spec(tuple(spec), cores=0, timeout=spec.timeout)
            self.pool.run(number, [(task, 1, payload)], cards=cards)

        self.on_loop(send)
        return task

    def cancel(self, task: int) -> None:
        """Interrupt it."""
        self.on_loop(lambda: self.pool.recall([(task, 1)], kill=True))

    def _report(self, task: int, timeout: float) -> Tuple[int, Any, float]:
        with self._news:
            assert self._news.wait_for(lambda: task in self._reports, timeout), f"task {task} has not ended"
        return self._reports[task]

    def ended(self, task: int, timeout: float = 30.0) -> Tuple[Status, Any]:
        """How it ended: status, and value or details."""
        status, payload, _ = self._report(task, timeout)
        if status == Status.OK:
            data = payload.parts[0] if isinstance(payload, OutOfBand) else payload
            return Status(status), json.loads(bytes(data))
        return Status(status), payload

    def result(self, source: str, payload: Any = None, **options: Any) -> Any:
        """What a script that ends well has printed last."""
        status, value = self.ended(self.start(source, payload, **options))
        assert status == Status.OK, value
        return value

    def failure(self, source: str, payload: Any = None, **options: Any) -> Dict[str, Any]:
        """What is told of a script that fails."""
        status, details = self.ended(self.start(source, payload, **options))
        assert status == Status.RAISED, (status, details)
        found: Dict[str, Any] = details
        return found

    def output(self, task: int, stream: int = 1) -> bytes:
        """What it has written so far."""
        with self._news:
            return b"".join(data for number, data in self._output.get(task, []) if number == stream)

    # --- the pool's owner

    def on_results(self, results: Any) -> None:
        with self._news:
            for task, _, status, payload, seconds in results:
                assert task not in self._reports, "reported twice"
                self._reports[task] = (status, payload, seconds)
            self._news.notify_all()

    @property
    def takes_output(self) -> bool:
        return not self.is_congested

    def on_output(self, task_id: int, stream: int, data: bytes) -> None:
        with self._news:
            self._output.setdefault(task_id, []).append((stream, data))

    def on_health(self, problem: str) -> None:
        assert not problem, problem

    def on_installing(self, packages: Any) -> None:
        """None of our business."""

    def on_pool_lost(self, reason: str) -> None:
        """Some tests kill the spawner."""

    def on_results_heard(self, results: Any) -> None:
        """Nothing here is in a store."""

    def on_runner_gone(self, runner: int) -> None:
        """The same."""

    def on_feeding(self, runner: int, task_id: int, payload: Any) -> None:
        """The same."""

    def on_inputs_free(self, task_id: int) -> None:
        """The same."""


def here(name: str) -> str:
    """A process's variable."""
    return os.environ.get(name, "")


def set_here(name: str, value: str) -> None:
    """Change it."""
    os.environ[name] = value


def ignore_here(*numbers: int) -> None:
    """Have this process ignore signals, as some libraries do."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
