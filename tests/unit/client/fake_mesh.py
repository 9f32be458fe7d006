"""A coordinator in miniature for the client's tests: real sockets, real protocol, answers chosen by the test."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import OutOfBand
from gpumesh.protocol.connection import OBJECT_TRANSFER, Connection, Established, PeerFacts
from gpumesh.protocol.messages import (
    Answer,
    CancelFetch,
    CancelTasks,
    CreateDetached,
    CreateSegment,
    DefineFunction,
    DefineSpec,
    DeleteObjects,
    FetchObject,
    HoldRefs,
    KillActor,
    LocateObject,
    ObjectAt,
    ObjectSent,
    ObjectStored,
    OpenStore,
    PutObject,
    Query,
    RegisterClient,
    ReleaseRefs,
    ResubmissionEnds,
    ResultsReceived,
    SegmentCreated,
    SessionResumed,
    StoreOffer,
    SubmitTasks,
    TaskResults,
    UnpinObjects,
)
from gpumesh.serialization.values import dumps
from gpumesh.store.container import container_bytes, container_views, open_container

FACTS = PeerFacts("0", "3.11", "test")
Result = Tuple[int, int, Any, float]
SECRET = bytes(range(32))
_RECORDED = (
    RegisterClient, ResubmissionEnds, ResultsReceived, DefineFunction, DefineSpec, Established, HoldRefs, ReleaseRefs, UnpinObjects,
    DeleteObjects,
)  # fmt: skip


class FakeMesh:
    """Listens on loopback. By default each task returns its own sequence number at once, on worker "w".

    Objects lie in `objects`. With a folder it is on the client's host, without one it is not.
    """

    def __init__(
        self,
        *,
        token: str = "secret",
        workers: int = 1,
        port: int = 0,
        answers: bool = True,
        folder: Optional[Path] = None,
    ) -> None:
        self.objects: Dict[int, Any] = {}  # Payloads by object.
        self.refs: Dict[int, List[int]] = {}  # What they refer to.
        self.full = ""  # Why there is no room.
        self.holds_fetches = False  # Fetches get no answer.
        self.keeps_sessions = False  # What clients had here is here when they are back.
        self.segments: List[str] = []  # Paths given out.
        self.freed: List[str] = []  # Given out again, the last first.
        self._folder = folder
        self._incoming: Dict[int, Tuple[int, bytearray]] = {}
        self._next_fetch = OBJECT_TRANSFER
        if folder is not None:
            (folder / "probe").write_bytes(SECRET)
        self.token = token
        self.workers = workers
        self.answers = answers  # False: the test sends the results itself.
        self.on_submit: Optional[Callable[[int, Any], Result]] = None
        self.on_query: Callable[[Query], Any] = lambda query: [] if query.what == "workers" else {"asked": query.what}
        self.on_order: Callable[[Any], Any] = lambda order: {"found": True}
        self.received: List[Any] = []
        self.tasks: Dict[int, Any] = {}  # id -> payload
        self.cancelled: List[int] = []
        self.connections: List[Tuple[socket.socket, Connection]] = []
        self._changed = threading.Condition()
        self._is_stopped = False
        self._lock = threading.RLock()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeMesh:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and drop everybody."""
        self._is_stopped = True
        self._thread.join(5)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Cut all connections, as a crash would."""
        with self._lock:
            for sock, _ in self.connections:
                sock.close()
            self.connections = []

    def send(self, *messages: Any) -> None:
        """To the last client."""
        with self._lock:
            sock, connection = self.connections[-1]
            for message in messages:
                connection.send(message)
            self._flush(sock, connection)

    def finish(
        self, task_id: int, value: Any = None, *, status: int = Status.OK, payload: Any = None, worker: str = "w"
    ) -> None:
        """Send one result."""
        body = dumps(value) if payload is None else payload
        self.send(TaskResults(worker, [(task_id, int(status), body, 0.5)]))

    def until(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        """Wait for what the mesh has received."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), f"did not come about; received {self.received[-5:]}"

    def _run(self) -> None:
        while not self._is_stopped:
            with self._lock:
                socks = [sock for sock, _ in self.connections]
            try:
                ready, _, _ = select.select([self._listener, *socks], [], [], 0.02)
            except (OSError, ValueError):
                continue  # `drop` closed one meanwhile.
            for sock in ready:
                if sock is self._listener:
                    self._accept()
                else:
                    self._receive(sock)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection.listen(token=self.token, nonce=os.urandom(32), mesh="m", now=time.monotonic(), facts=FACTS)
        connection.workers = self.workers
        with self._lock:
            self.connections.append((sock, connection))

    def _receive(self, sock: socket.socket) -> None:
        with self._lock:
            connection = dict(self.connections).get(sock)
            if connection is None:
                return
            try:
                count = sock.recv_into(connection.get_buffer())
            except OSError:
                count = 0
            now = time.monotonic()
            events = connection.buffer_updated(count, now) if count else connection.receive_eof(now)
            results: List[Result] = []
            with self._changed:
                for event in events:
                    self._on_event(connection, event, results)
                self._changed.notify_all()
            if results:
                connection.send(TaskResults("w", results))
            self._flush(sock, connection)
            if not count:
                sock.close()
                self.connections = [pair for pair in self.connections if pair[0] is not sock]

    def _on_event(self, connection: Connection, event: Any, results: List[Result]) -> None:
        kind = type(event)
        if kind in _RECORDED:
            self.received.append(event)
            if kind is RegisterClient and event.resumes:
                connection.send(SessionResumed(self.keeps_sessions))
        elif kind is SubmitTasks:
            self.received.append(event)
            for task_id, payload in zip(event.task_ids, event.payloads):
                self.tasks[task_id] = payload
                if self.on_submit is not None:
                    results.append(self.on_submit(task_id, payload))
                elif self.answers:
                    results.append((task_id, 0, dumps(task_id & 0xFFFFFFFF), 0.25))
        elif kind is CancelTasks:
            self.cancelled.extend(event.task_ids)
            if self.answers:
                results.extend((task_id, int(Status.CANCELLED), {"reason": ""}, 0.0) for task_id in event.task_ids)
        elif kind is Query or kind is KillActor or kind is CreateDetached:
            if kind is not Query:
                self.received.append(event)
            found = self.on_query(event) if kind is Query else self.on_order(event)
            connection.send(found._replace(number=event.number) if type(found) is Answer else Answer(event.number, found, ""))
        else:
            self._on_object(connection, event)

    def _on_object(self, connection: Connection, event: Any) -> None:
        kind = type(event)
        if kind is OpenStore:
            connection.send(StoreOffer(str((self._folder or Path("/nowhere")) / "probe"), SECRET))
        elif kind is CreateSegment:
            self.received.append(event)
            if self.full:
                connection.send(SegmentCreated(event.number, "", f"full: {self.full}"))
                return
            assert self._folder is not None
            path = self.freed.pop() if self.freed else str(self._folder / f"s{event.oid:x}")
            if path not in self.segments:
                Path(path).touch()
                self.segments.append(path)
            connection.send(SegmentCreated(event.number, path, ""))
        elif kind is PutObject:
            self._on_put(connection, event)
        elif kind is ObjectSent:
            oid, target = self._incoming.pop(event.number)
            self.objects[oid] = OutOfBand(open_container(memoryview(target)))
            connection.send(ObjectStored(oid, ""))
        elif kind is LocateObject:
            found = self.objects.get(event.oid)
            if self.holds_fetches:
                self.received.append(event)
            elif isinstance(found, Path):
                connection.send(ObjectAt(event.number, event.oid, str(found), found.stat().st_size, None, ""))
            else:
                error = "" if event.oid in self.objects else "lost: it was deleted"
                connection.send(ObjectAt(event.number, event.oid, "", 0, found, error))
        elif kind is FetchObject:
            found = self.objects.get(event.oid)
            if self.holds_fetches:
                self.received.append(event)
            elif isinstance(found, OutOfBand):
                connection.send_object(event.number, container_views(found.parts), event.window)
            else:
                error = "" if event.oid in self.objects else "lost: it was deleted"
                connection.send(ObjectAt(event.number, event.oid, "", 0, found, error))
        elif kind is CancelFetch or kind is ObjectAt:
            self.received.append(event)

    def _on_put(self, connection: Connection, event: PutObject) -> None:
        self.received.append(event._replace(data=None))
        self.refs[event.oid] = list(event.refs)
        if event.data is not None:
            self.objects[event.oid] = event.data
        elif event.segment:
            assert self._folder is not None
            self.objects[event.oid] = self._folder / event.segment
        elif self.full:
            connection.send(ObjectStored(event.oid, f"full: {self.full}"))
        else:
            number = self._next_fetch
            self._next_fetch += 1
            target = bytearray(event.nbytes)
            self._incoming[number] = (event.oid, target)
            connection.receive_into(number, target, 1 << 20)
            connection.send(FetchObject(number, event.oid, 1 << 20))

    def keep(self, oid: int, payload: Any) -> int:
        """Make an object of a payload as if a worker had; its size."""
        parts = [payload] if isinstance(payload, bytes) else payload.parts
        if self._folder is None:
            self.objects[oid] = OutOfBand(parts)
        else:
            path = self.objects[oid] = self._folder / f"w{oid:x}"
            path.write_bytes(b"".join(map(bytes, container_views(parts))))
        return container_bytes(parts)

    def parts_of(self, oid: int) -> List[bytes]:
        """The parts of an object as they are now."""
        found = self.objects[oid]
        if isinstance(found, Path):
            return [bytes(part) for part in open_container(memoryview(found.read_bytes()))]
        return [found] if isinstance(found, bytes) else [bytes(part) for part in found.parts]

    def _flush(self, sock: socket.socket, connection: Connection) -> None:
        while True:
            parts = connection.data_to_send()
            if not parts:
                return
            for part in parts:
                try:
                    sock.sendall(part)
                except OSError:
                    return


class Exported:
    """What serialization.functions would have made."""

    digest = b"d" * 16
    body = b"body"
    name = "work"
    python = ""
