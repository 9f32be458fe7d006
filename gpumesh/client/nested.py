"""The mesh inside a task: a session whose bytes the worker's agent passes on, and whose tasks belong to the task that submits them.

    user code ── .remote, .map, actors ──> NestedSession ── socket of runtime.relay ──> agent ──> coordinator
                 put, get ───────────────> the process's own space (runtime.runner_objects) ──> agent ──> coordinator

Promises:

1. One session for a process, connected at its first use, whatever number of tasks it runs; without an address and without a token.
2. What a task, or a call of an actor, has submitted and has not ended is cancelled when that is over, however it ended.
3. The two ways to the coordinator do not overtake one another where that matters: what is sent on one is not sent before the
   coordinator has what it mentions of the other.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, List, Optional, Set, Tuple, Union, cast

from gpumesh.client.channel import Channel
from gpumesh.client.link import MeshLink, local_facts
from gpumesh.client.session import LocalMesh, Session, Sink, SpecHandle
from gpumesh.config import (
    CONNECT_SECONDS,
    MAX_NESTING_DEPTH,
    NESTED_ASK_SECONDS,
    NESTED_OBJECTS_SECONDS,
    RECONNECT_FIRST_DELAY_SECONDS,
    RECONNECT_MAX_DELAY_SECONDS,
    RECONNECT_SECONDS,
)
from gpumesh.errors import MeshError, MeshUnavailableError, NestingTooDeepError, ProtocolError
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.connection import Connection, Established
from gpumesh.protocol.messages import Query
from gpumesh.runtime import nesting, runner_slots
from gpumesh.runtime.nesting import Running
from gpumesh.runtime.relay_greeting import ANSWERED, ASKED, REFUSALS
from gpumesh.serialization import refs
from gpumesh.serialization.refs import ObjectRef

if TYPE_CHECKING:
    from gpumesh.client.inputs import Call

UNANSWERED = -1  # Number of a question whose answer nobody waits for.
KNOWN_OBJECTS = 10_000  # Objects of which it is remembered that the coordinator has them.
PINNED_VALUES = 1000  # Values whose references are kept here, where the coordinator could not do it, ...
PIN_SECONDS = 60.0  # ... for so long: they are on their way, as long as it takes to find a coordinator that was lost.
_FIRST_WAIT_SECONDS = 0.0005  # For what leaves this host on another connection, a moment before.


class NestedSession(Session):
    """See the module's promises.

    Args:
        url: The coordinator's, for people.
        path: Of the relay's socket.
        worker: The id of the worker that runs this process.
    """

    is_nested = True

    def __init__(self, url: str, path: str, worker: str = "") -> None:
        super().__init__(
            url=url,
            token="",
            connect_timeout=2 * CONNECT_SECONDS,  # The agent itself may take so long, and then says why.
            fallback=False,
            start_local=_no_stand_in,
            is_own_mesh=True,
        )
        self._dialer = functools.partial(dial_relay, path)
        if worker:
            self._first_words = [Query(UNANSWERED, "inside", {"worker": worker})]
        self._known: Set[int] = set()  # Objects made by this process that the coordinator has heard of.
        self._pinned: Deque[Tuple[float, List[ObjectRef]]] = deque(maxlen=PINNED_VALUES)
        self._noting = threading.Lock()
        nesting.on_ended = self._on_ended
        nesting.on_mentioned = self._on_mentioned

    @property
    def slot(self) -> Any:
        """That of the task which this process runs; None in an actor's."""
        return runner_slots.current

    # --- what is submitted

    @property
    def depth(self) -> int:
        """Tasks that what is submitted now is inside of."""
        owner = nesting.owner()
        return 1 if owner is None else owner.depth + 1

    def define(self, exported: Any, spec: TaskSpec, cargo: Any = None) -> SpecHandle:
        """As any session, for the depth of the moment.

        Raises:
            NestingTooDeepError: One task more inside the others than may be.
        """
        depth = self.depth
        if depth > MAX_NESTING_DEPTH:
            owner = nesting.owner()
            name = owner.name if owner is not None else "a task"
            raise NestingTooDeepError(
                f"{name} is {depth - 1} tasks inside one another, and cannot submit {spec.name}: {MAX_NESTING_DEPTH} are allowed; "
                f"let the recursion end earlier, or do the rest in the task itself: {spec.name}(...) instead of {spec.name}.remote(...)"
            )
        return super().define(exported, spec._replace(depth=depth), cargo)

    def submit(self, handle: SpecHandle, payload: Union[bytes, Call], sink: Sink) -> int:
        """Send a task, which belongs to the one at hand; see `Session.submit`."""
        owner = nesting.owner()
        if handle.others is not None or handle.spec.depth != (1 if owner is None else owner.depth + 1):
            handle = self._fitting(handle, [payload])
        if type(payload) is not bytes:
            self.adopt(payload)
        channel = self._open_channel()
        if owner is None:
            return channel.submit(handle, payload, sink)
        if not owner.children or self._pinned:
            self._begin(owner, channel)
        task_id = channel.submit(handle, payload, sink)
        self._note(owner, task_id, 1)
        return task_id

    def submit_many(self, handle: SpecHandle, payloads: List[Any], sink: Sink) -> int:
        """Send tasks that share one sink, and belong to the task at hand; see `Session.submit_many`."""
        handle = self._fitting(handle, payloads)
        for payload in payloads:
            if type(payload) is not bytes:
                self.adopt(payload)
        count = len(payloads)
        owner = nesting.owner()
        channel = self._open_channel()
        if owner is None:
            return channel.submit_many(handle, payloads, sink)
        self._begin(owner, channel)
        first = channel.submit_many(handle, payloads, sink)
        self._note(owner, first, count)
        return first

    def _fitting(self, handle: SpecHandle, payloads: List[Any]) -> SpecHandle:
        """The handle that takes along what these payloads are made of, at the depth of the moment."""
        if handle.others is not None:
            handle = handle.others(handle, payloads)
        if handle.spec.depth != self.depth:
            handle = self.define(handle.exported, handle.spec, handle.cargo)
        return handle

    def _open_channel(self) -> Channel:
        channel = self._channel
        if channel is None or channel.end is not None:
            channel = self._choose()
        return channel

    # --- whose it is

    def _begin(self, owner: Running, channel: Channel) -> None:
        """Something is about to be submitted: should that be interrupted, it is known where it began."""
        self._unpin()
        if not owner.children:
            owner.children.append([channel.next_id, channel.next_id])

    def _note(self, owner: Running, first: int, count: int) -> None:
        with self._noting:
            last = owner.children[-1] if owner.children else None
            if last is not None and last[1] == first:
                last[1] = first + count
            else:
                owner.children.append([first, first + count])
        if owner.is_over:  # Since a moment ago, in another thread.
            self._on_ended(owner)

    def feeder(self, feed: Any, read_on: Callable[[], None]) -> Callable[[], None]:
        """What the thread of a stream is to run, for whom the stream belongs to."""
        owner = nesting.owner()
        if owner is None:
            return read_on
        owner.feeds = [*(other for other in owner.feeds if other() is not None), weakref.ref(feed)]
        task = owner

        def read_on_for_it() -> None:
            nesting.call.set(task)
            read_on()

        return read_on_for_it

    def _on_ended(self, task: Running) -> None:
        """A task is over: nobody waits for what it has submitted and has not ended."""
        for feed in (each() for each in task.feeds):
            if feed is not None:
                feed.cancel()
        channel = self._remote
        with self._noting:
            children, task.children = task.children, []
        if not children:
            return
        if channel is None or channel.end is not None:
            return
        if task is nesting.running and nesting.call.get() is None:  # It was alone.
            children = [[children[0][0], channel.next_id]]
        left = channel.pending_of(children)
        if left:
            channel.cancel(left)

    # --- what the two ways have in common

    def space(self) -> refs.Space:
        """Where values are put: the process's own space, near this machine's store."""
        space = refs.process_space()
        return space if space is not None else self.objects()

    def adopt(self, payload: Any) -> None:
        """Wait until the coordinator knows what the process itself has put and this payload mentions."""
        space: Any = cast(Any, refs.process_space())
        if space is None:
            return
        oids = [ref.oid for ref in _mentioned(payload) if ref.space is space]
        made = [oid for oid in oids if oid not in self._known and space.is_made_here(oid)]
        if made:
            self._await_known([*dict.fromkeys([*made, *(oid for oid in space.made_here() if oid not in self._known)])])

    def _await_known(self, oids: List[int]) -> None:
        until = time.monotonic() + NESTED_OBJECTS_SECONDS
        pause = _FIRST_WAIT_SECONDS
        while True:
            unknown = list(self.query("unknown-objects", {"oids": oids}, NESTED_ASK_SECONDS))
            if len(self._known) > KNOWN_OBJECTS:
                self._known.clear()
            self._known.update(set(oids).difference(unknown))
            if not unknown or time.monotonic() > until:  # Deleted, or its task will say what is wrong with it.
                return
            oids = unknown
            threading.Event().wait(pause)
            pause = min(2 * pause, RECONNECT_FIRST_DELAY_SECONDS)

    def _on_mentioned(self, mentioned: List[ObjectRef]) -> None:
        """These are in a result, or in a value that is put on the process's own way: they are to live until the task has ended there."""
        channel = self._remote
        if channel is None or channel.end is not None:
            return
        mine = [ref for ref in mentioned if ref.space is channel.objects]
        if not mine:
            return
        owner = nesting.owner()
        is_held = False
        if owner is not None and (
            owner is not nesting.running or nesting.find is not None
        ):  # Not for all the life of an actor.
            oids = [ref.oid for ref in mine]
            try:
                is_held = bool(self.query("hold-for-task", {"task": owner.task_id, "oids": oids}, NESTED_ASK_SECONDS))
            except MeshUnavailableError:
                pass  # The coordinator is lost; the one that comes next is told what lives here.
        if not is_held:
            self._unpin()
            self._pinned.append((time.monotonic(), mine))

    def _unpin(self) -> None:
        oldest = time.monotonic() - PIN_SECONDS
        while self._pinned and self._pinned[0][0] < oldest:
            self._pinned.popleft()

    # --- the connection

    def _open(self, url: str, token: str, reconnect_timeout: float, own: Optional[LocalMesh]) -> Channel:
        """As any session, but patient: the agent may have lost its coordinator a moment ago."""
        if os.getpid() != self._pid:
            raise MeshError(
                "a process that a task has forked cannot use the mesh; submit in the task, and give the other the values"
            )
        owner = nesting.owner()
        self._name = f"task {owner.name if owner is not None else ''} on {socket.gethostname()}:{os.getpid()}"
        until = time.monotonic() + RECONNECT_SECONDS
        pause = RECONNECT_FIRST_DELAY_SECONDS
        while True:
            try:
                channel = super()._open(url, token, reconnect_timeout, own)
                channel.slot = runner_slots.current
                return channel
            except MeshUnavailableError:
                if time.monotonic() + pause > until:
                    raise
            threading.Event().wait(pause)
            pause = min(2 * pause, RECONNECT_MAX_DELAY_SECONDS)

    def _after_fork(self) -> None:
        """The session is the parent's."""
        pid = self._pid
        super()._after_fork()
        self._pid = pid


def dial_relay(path: str, client: int, timeout: float) -> Tuple[MeshLink, Established, List[Any]]:
    """Connect through the agent's socket; as `link.dial`.

    Args:
        client: This client's number.

    Raises:
        MeshUnavailableError: The agent does not reach the coordinator.
        AuthenticationError, VersionMismatchError, ProtocolError: It does, and is refused.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
        sock.sendall(ASKED.pack(os.getpid(), client))
        answer, descriptors, _, _ = socket.recv_fds(sock, ANSWERED.size, 1)
        if descriptors:  # The coordinator's own.
            way, sock = sock, socket.socket(fileno=descriptors[0])
            sock.set_inheritable(False)
        else:
            way = sock
        try:
            status, workers, size, rest_size = ANSWERED.unpack(answer + _receive(way, ANSWERED.size - len(answer)))
            text = _receive(way, size).decode("utf-8", "replace")
            rest = _receive(way, rest_size)
        finally:
            if way is not sock:
                way.close()
        if status:
            raise REFUSALS[status](f"this worker has no coordinator at the moment: {text}" if status == 1 else text)
        sock.setblocking(False)
        facts = local_facts()
        connection = Connection.relayed(role="client", mesh=text, workers=workers, now=time.monotonic(), facts=facts)
        events = connection.receive_data(rest, time.monotonic())
        return MeshLink(sock, connection), Established("client", text, workers, facts), events
    except BaseException as error:
        sock.close()
        if isinstance(error, MeshError):
            raise
        if isinstance(error, OSError):
            raise MeshUnavailableError(f"the agent of this worker does not answer: {error}") from error
        if isinstance(error, (struct.error, IndexError)):
            raise ProtocolError(f"the agent of this worker answers in another language: {error}") from error
        raise


def _receive(sock: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = sock.recv(size - len(received))
        if not part:
            raise ConnectionResetError("it hung up")
        received += part
    return received


def _mentioned(payload: Any) -> List[ObjectRef]:
    """The references in a call."""
    return [*payload.refs, *(source for _, source in payload.inputs if type(source) is ObjectRef)]


def _no_stand_in() -> Any:
    raise AssertionError("a task has a mesh")


_session: Optional[NestedSession] = None
_making = threading.Lock()


def task_session() -> NestedSession:
    """The session of this process; made at the first call, and not connected by that."""
    global _session
    session = _session
    if session is None or session.is_closed:
        with _making:
            session = _session
            if session is None or session.is_closed:
                assert nesting.mesh is not None, "this process runs no tasks"
                session = _session = NestedSession(*nesting.mesh)
    return session
