"""Processes of actors, forked by a real spawner and driven through their sockets and pages as an agent drives them."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

from gpumesh.model.actors import ActorPlan
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand, Stored
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.connection import Connection
from gpumesh.protocol.messages import (
    ActorReady,
    CancelCalls,
    CreateSegment,
    DefineFunction,
    DefineSpec,
    EndActor,
    ObjectAt,
    PutObject,
    RunnerReady,
    RunTasks,
    SegmentCreated,
    StreamCredit,
    StreamItems,
    TasksFinished,
    UnpinObjects,
)
from gpumesh.runtime.launch import child_environment, launch_spawner
from gpumesh.runtime.page import INTERRUPT, ORDERS, Page, create_page_fd
from gpumesh.runtime.spawner_channel import MessageReader, send_request
from gpumesh.serialization import functions, values
from gpumesh.serialization.exceptions import load_exception
from gpumesh.store.container import container_bytes
from gpumesh.store.segments import Mapping, SegmentWriter

ACTOR = 1 << 32 | 1
PATIENCE_SECONDS = 20.0
NO_ARGUMENTS = values.dumps_call((), {})


class Nursery:
    """A spawner for any number of processes, one after the other or at once."""

    def __init__(self) -> None:
        self.pid, self._channel = launch_spawner(environment=child_environment())
        self._reader = MessageReader()
        self._keys = iter(range(1, 1_000_000))
        self._exits: Dict[int, int] = {}
        self._pids: Dict[int, int] = {}

    def close(self) -> None:
        self._channel.close()
        os.waitpid(self.pid, 0)

    def fork(self, fds: List[int]) -> int:
        key = next(self._keys)
        request = {"op": "fork", "role": "runner", "actor": True, "key": key, "environment": {}, "path": None, "folder": ""}
        send_request(self._channel, request, fds)
        return key

    def signal(self, key: int, number: int) -> None:
        send_request(self._channel, {"op": "signal", "key": key, "signal": number}, [])

    def exit_code(self, key: int) -> int:
        """Waits for the end of a process."""
        self._channel.settimeout(PATIENCE_SECONDS)
        while key not in self._exits:
            self._read()
        return self._exits[key]

    def pid_of(self, key: int) -> int:
        while key not in self._pids:
            self._read()
        return self._pids[key]

    def _read(self) -> None:
        data = self._channel.recv(65536)
        assert data, "the spawner has ended"
        for answer in self._reader.feed(data, []):
            self._pids[answer["key"]] = answer["pid"]
            if "exit" in answer:
                self._exits[answer["key"]] = answer["exit"]


class ActorSite:
    """One process, and this side of it."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self.objects: Dict[int, Tuple[str, int]] = {}  # Path and size.
        self.pins: Dict[int, int] = {}
        self.streams: Dict[int, List[Any]] = {}
        self._socket, theirs = socket.socketpair()
        page_fd = create_page_fd()
        self.out, out_write = os.pipe()
        self.err, err_write = os.pipe()
        self.page = Page(page_fd)
        fds = [theirs.fileno(), page_fd, out_write, err_write]
        self._key = nursery.fork(fds)
        theirs.close()
        for fd in fds[1:]:
            os.close(fd)
        self._connection = Connection.trusted()
        self._socket.settimeout(PATIENCE_SECONDS)
        self._results: Dict[int, Tuple[int, int, Any]] = {}
        self._specs: Dict[TaskSpec, int] = {}
        self._exporter = functions.Exporter()
        self._numbers = iter(range(10, 10_000_000))
        self.is_ready = False
        self.results_seen: List[int] = []  # Task ids, in the order of their results.

    # --- what is sent

    def create(self, class_: Any, *args: Any, max_concurrency: int = 1, **kwargs: Any) -> ActorSite:
        """Send the creation; does not wait."""
        return self.create_with(class_, values.dumps_call(args, kwargs), max_concurrency=max_concurrency)

    def create_with(self, class_: Any, payload: Any, *, max_concurrency: int = 1) -> ActorSite:
        """The same with a payload."""
        return self.create_from(self._exporter.export(class_).body, payload, max_concurrency=max_concurrency)

    def create_from(self, body: Any, payload: Any = NO_ARGUMENTS, *, max_concurrency: int = 1) -> ActorSite:
        """The same with the class as it travels."""
        spec = TaskSpec(functions._digest(body), "Actor", plan=ActorPlan(max_concurrency=max_concurrency), retries=0)
        self._run(spec, body, [(ACTOR, 1, payload)])
        return self

    def ready(self) -> ActorSite:
        """Wait for the constructor."""
        self.until(lambda: self.is_ready or ACTOR in self._results)
        assert self.is_ready, self._results[ACTOR]
        return self

    def call(
        self, method: str, *args: Any, timeout: float = 0.0, retry_on: Any = (), is_stream: bool = False, **kwargs: Any
    ) -> int:
        """Send a call; its task id."""
        (task_id,) = self.calls(method, [(args, kwargs)], timeout=timeout, retry_on=retry_on, is_stream=is_stream)
        return task_id

    def calls(
        self, method: str, arguments: Any, *, timeout: float = 0.0, retry_on: Any = (), is_stream: bool = False
    ) -> List[int]:
        """Send many in one message."""
        return self.calls_of(
            method, [values.dumps_call(*call) for call in arguments], timeout=timeout, retry_on=retry_on, is_stream=is_stream
        )

    def calls_of(
        self, method: str, payloads: Any, *, timeout: float = 0.0, retry_on: Any = (), is_stream: bool = False
    ) -> List[int]:
        """The same with payloads."""
        body = values.dumps(retry_on) if retry_on else b""
        digest = functions._digest(body)
        spec = TaskSpec(digest, method, actor=ACTOR, method=method, retries=0, timeout=timeout, is_stream=is_stream)
        tasks = [(next(self._numbers), 1, payload) for payload in payloads]
        self._run(spec, body, tasks)
        return [task[0] for task in tasks]

    def cancel(self, *task_ids: int, status: int = Status.CANCELLED) -> None:
        self.send(CancelCalls(list(task_ids), int(status)))
        self.page.words[ORDERS] += 1

    def end(self) -> None:
        self.send(EndActor())
        self.page.words[ORDERS] += 1

    def interrupt(self, number: int) -> None:
        """SIGINT, for this number on the page."""
        self.page.words[INTERRUPT] = number
        self._nursery.signal(self._key, signal.SIGINT)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._connection.send(message)
        for part in self._connection.data_to_send():
            view = memoryview(part).cast("B")
            while view:
                readable, writable, _ = select.select([self._socket], [self._socket], [], PATIENCE_SECONDS)
                assert readable or writable, "the process neither reads nor writes"
                if readable and not self.receive():
                    return  # It has ended; `until` says so to whoever waits for more of it.
                if writable:
                    try:
                        view = view[self._socket.send(view[:4096]) :]
                    except BrokenPipeError:
                        return  # The same.

    def _run(self, spec: TaskSpec, body: Any, tasks: List[Tuple[int, int, Any]]) -> None:
        number = self._specs.get(spec)
        if number is None:
            number = self._specs[spec] = len(self._specs)
            self.send(DefineFunction(spec.function, body), DefineSpec(number, tuple(spec)))
        self.send(RunTasks(number, tasks))

    # --- what comes

    def until(self, is_enough: Callable[[], bool]) -> None:
        """Receive until then."""
        while not is_enough():
            assert self.receive(), "the process closed its socket"

    def receive(self) -> bool:
        """Take in what comes; False at the end of the stream."""
        try:
            received = self._socket.recv_into(self._connection.get_buffer())
        except ConnectionResetError:  # It has ended and left something unread.
            received = 0
        if not received:
            return False
        for message in self._connection.buffer_updated(received, 0.0):
            if type(message) is TasksFinished:
                for task_id, attempt, status, payload, _ in message.results:
                    assert task_id not in self._results, "reported twice"
                    self._results[task_id] = attempt, status, payload
                    self.results_seen.append(task_id)
            elif type(message) is ActorReady:
                assert message == ActorReady(ACTOR, 1)
                self.is_ready = True
            elif type(message) is CreateSegment:
                self.send(SegmentCreated(message.number, self._segment(message.oid, message.nbytes), ""))
            elif type(message) is PutObject:
                assert message.segment == os.path.basename(self.objects[message.oid][0])
            elif type(message) is UnpinObjects:
                for oid, pins in message.objects:
                    self.pins[oid] -= pins
            elif type(message) is StreamItems:
                items = self.streams.setdefault(message.task_id, [])
                assert message.first == len(items)
                items.extend(map(values.loads, message.items))
            else:
                assert type(message) is RunnerReady, message
        return True

    # --- objects and streams

    def _segment(self, oid: int, nbytes: int) -> str:
        path = self._folder / f"segment-{oid:x}"
        with open(path, "wb") as file:
            file.truncate(nbytes)
        self.objects[oid] = str(path), nbytes
        return str(path)

    def stored(self, value: Any) -> Stored:
        """A value as an argument in the store; once for each call."""
        payload = values.dumps(value)
        parts = payload.parts if isinstance(payload, OutOfBand) else [payload]
        oid = next(self._numbers)
        nbytes = container_bytes(parts)
        SegmentWriter().write(self._segment(oid, nbytes), nbytes, parts)
        self.hand_over(oid)
        return Stored(oid, nbytes)

    def hand_over(self, oid: int) -> None:
        """A call that comes next has this object among its inputs."""
        self.pins[oid] = self.pins.get(oid, 0) + 1
        self.send(ObjectAt(0, oid, self.objects[oid][0], self.objects[oid][1], None, ""))

    def credit(self, task_id: int, limit: int) -> None:
        self.send(StreamCredit(task_id, limit))

    def outcome(self, task_id: int) -> Tuple[int, Any]:
        """Status and payload of a call."""
        self.until(lambda: task_id in self._results)
        return self._results[task_id][1:]

    def value(self, task_id: int) -> Any:
        """What a call has returned."""
        status, payload = self.outcome(task_id)
        if status in (Status.RAISED, Status.RETRYABLE):
            raise load_exception(payload)
        assert status == Status.OK, (status, payload)
        if type(payload) is Stored:
            return values.loads(OutOfBand(Mapping(*self.objects[payload.oid]).parts))
        return values.loads(payload)

    def error(self, task_id: int) -> BaseException:
        """What it has raised."""
        status, payload = self.outcome(task_id)
        assert status in (Status.RAISED, Status.RETRYABLE), (status, payload)
        return load_exception(payload)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call and wait."""
        return self.value(self.call(method, *args, **kwargs))

    def has_result(self, task_id: int) -> bool:
        """Whether one has come, without waiting."""
        while select.select([self._socket], [], [], 0)[0]:
            if not self.receive():
                break
        return task_id in self._results

    def ended(self) -> Tuple[int, Any]:
        """Wait for the end of the process; status and payload of the creation, which came last."""
        while self.receive():
            pass
        assert self.results_seen[-1] == ACTOR, "the last word is the creation's"
        assert self.exit_code() == 0
        return self._results[ACTOR][1:]

    def exit_code(self) -> int:
        """Wait for the end of the process."""
        return self._nursery.exit_code(self._key)

    def hang_up(self) -> None:
        """Close this side of its socket."""
        self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def pid(self) -> int:
        return self._nursery.pid_of(self._key)

    def out_line(self) -> bytes:
        """Wait until it has written something to its standard output."""
        return os.read(self.out, 65536)

    def said(self) -> str:
        """All that it has written to its standard output, after its end."""
        return _rest_of(self.out)

    def complained(self) -> str:
        """The same of its standard error."""
        return _rest_of(self.err)

    def close(self) -> None:
        """End it, however."""
        self._socket.close()
        self._nursery.signal(self._key, signal.SIGKILL)
        self._nursery.exit_code(self._key)
        os.close(self.out)
        os.close(self.err)
        self.page.close()


def _rest_of(fd: int) -> str:
    parts: List[bytes] = []
    while True:
        part = os.read(fd, 65536)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


def timed(act: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    begin = time.monotonic()
    act()
    return time.monotonic() - begin


def sites(folder: Path) -> Iterator[Callable[[], ActorSite]]:
    """For a fixture: makes processes, and ends them."""
    nursery = Nursery()
    made: List[ActorSite] = []

    def make() -> ActorSite:
        made.append(ActorSite(nursery, folder))
        return made[-1]

    try:
        yield make
    finally:
        for site in made:
            site.close()
        nursery.close()
