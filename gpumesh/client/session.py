"""Which coordinator a client's tasks go to: the mesh it was given, or this machine when there is none. No futures, no functions.

first use ── connects ──> remote ── has no workers ──> local (until it has some)
    │                        └── lost for good ──> the next use starts over
    └── nobody answers, no address ──> local for good, after one warning
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Protocol, Sequence, Set, Tuple, Union

from gpumesh.client.channel import AnyCondition, Channel, Dialer, Sink, SpecHandle
from gpumesh.client.output import OutputHook
from gpumesh.config import CONNECT_SECONDS, RECONNECT_SECONDS
from gpumesh.errors import MeshClosedError, MeshError, MeshUnavailableError
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.network.address import parse_address

if TYPE_CHECKING:
    from gpumesh.client.inputs import Call
    from gpumesh.client.objects import ObjectSpace
    from gpumesh.serialization.refs import Space

__all__ = ["LocalMesh", "Session", "Sink", "SpecHandle"]

logger = logging.getLogger("gpumesh")

JOINING_WORKER_SECONDS = (
    3.0  # A mesh without workers is given this long: one that was just started joins in 0.3 s, on a busy machine later.
)
_ASK_SECONDS = 2.0
LOCAL_RECONNECT_SECONDS = 2.0  # A coordinator on this machine that is gone does not come back.


class LocalMesh(Protocol):
    """A coordinator and workers on this machine, as runtime.embedded starts them."""

    @property
    def url(self) -> str:
        """Where it listens."""

    @property
    def token(self) -> str:
        """Its secret."""

    def close(self) -> None:
        """End its processes."""


class Session:
    """One client's connection to a mesh, made on first use.

    Args:
        url: The coordinator's address; None: there is none, so tasks run on this machine.
        token: The mesh's secret.
        connect_timeout: Seconds for name look-up, connection and handshake together.
        reconnect_timeout: Seconds to look for a lost coordinator before what was pending fails.
        fallback: Whether tasks run on this machine when the mesh cannot be reached or has no workers.
        start_local: Starts the mesh for that.
        name: For people who look at the coordinator; made up if empty.
        own_mesh: That mesh, if it can tell why it is gone.
        is_own_mesh: The mesh at `url` was started by this process for itself: its workers join in a moment, never fall back.

    Raises:
        ValueError: `url` is not an address.
    """

    slot: Any = None  # Of the task that this process runs, where it does.
    is_nested = False
    """Whether it is inside a task, and what it submits belongs to that."""

    def __init__(
        self,
        *,
        url: Optional[str],
        token: Optional[str],
        connect_timeout: float = CONNECT_SECONDS,
        reconnect_timeout: float = RECONNECT_SECONDS,
        fallback: bool = True,
        start_local: Callable[[], LocalMesh],
        name: str = "",
        is_own_mesh: bool = False,
        own_mesh: Optional[LocalMesh] = None,
    ) -> None:
        self.address = parse_address(url) if url is not None else None
        self._token = token or ""
        self._connect_timeout = connect_timeout
        self._reconnect_timeout = reconnect_timeout
        self._fallback = fallback
        self._start_local = start_local
        self._name = name
        self._is_own_mesh = is_own_mesh
        self._own_mesh = own_mesh
        self._channel: Optional[Channel] = None  # Where tasks go now; None: decide again.
        self._remote: Optional[Channel] = None
        self._local: Optional[Channel] = None
        self._local_mesh: Optional[LocalMesh] = None
        self._is_given_up = False  # Nobody answered at the address: this machine from now on.
        self._closed: Optional[BaseException] = None
        self._handles: Dict[Tuple[TaskSpec, str], SpecHandle] = {}
        self._shipper: Any = None  # serialization.shipping.Shipper, once something is defined.
        self._on_output: Optional[OutputHook] = None
        self._dialer: Optional[Dialer] = None  # Reaches the mesh in another way than by its address.
        self._first_words: Sequence[Any] = ()  # Said on each connection.
        self._inherited: List[Tuple[int, Sink]] = []  # Pending in the process that was forked.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        _sessions.add(self)

    # --- what the rest of the client calls

    def travel(self, exported: Any, packages: Sequence[str] = ()) -> Any:
        """Which modules travel with a function; see `serialization.shipping.Travel`.

        Raises:
            SerializationError: A module that it needs cannot travel, or all together are too large.
        """
        return self._open_shipper().travel(exported.name, exported.modules, packages=packages)

    def ship(self, path: Any) -> None:
        """Send a folder's content, or a file, along with every function. Raises as `Shipper.add`."""
        self._open_shipper().add(path)

    def ship_modules(self, names: Set[str]) -> bool:
        """Send these modules along with every function, as far as there is room; whether that is new."""
        return bool(self._open_shipper().add_modules(names))

    def _open_shipper(self) -> Any:
        if self._shipper is None:
            from gpumesh.serialization.shipping import Shipper

            with self._lock:
                self._shipper = self._shipper or Shipper()
        return self._shipper

    def define(self, exported: Any, spec: TaskSpec, cargo: Any = None) -> SpecHandle:
        """The handle for one function with one set of options; sent to the coordinator with its first task."""
        key = (spec, exported.name)
        handle = self._handles.get(key)
        if handle is None:
            with self._lock:
                handle = self._handles.get(key)
                if handle is None:
                    handle = self._handles[key] = SpecHandle(len(self._handles) + 1, spec, exported, self, cargo)
        return handle

    def submit(self, handle: SpecHandle, payload: Union[bytes, Call], sink: Sink) -> int:
        """Send a task; connects on first use. Returns its id.

        Raises:
            ObjectStoreFullError: There is no room for its arguments.
            MeshUnavailableError: Nobody answers (or no worker is there) and there is no fallback.
            AuthenticationError, VersionMismatchError, ProtocolError: Somebody else answers.
            MeshClosedError: The session is closed.
        """
        if handle.others is not None:
            handle = handle.others(handle, [payload])
        channel = self._channel
        if channel is None:
            channel = self._choose()
        try:
            return channel.submit(handle, payload, sink)
        except MeshError:
            if channel.end is None or self._closed is not None:
                raise
        return self._choose().submit(handle, payload, sink)

    def submit_many(self, handle: SpecHandle, payloads: List[Any], sink: Sink) -> int:
        """Send tasks that share one sink; returns the first id, the others follow it. Raises as `submit`.

        The list belongs to the session from now on.
        """
        if handle.others is not None:
            handle = handle.others(handle, payloads)
        channel = self._channel
        if channel is None:
            channel = self._choose()
        try:
            return channel.submit_many(handle, payloads, sink)
        except MeshError:
            if channel.end is None or self._closed is not None:
                raise
        return self._choose().submit_many(handle, payloads, sink)

    @property
    def depth(self) -> int:
        """Tasks that what it submits now is inside of."""
        return 0

    def space(self) -> Space:
        """Where the user's values are put; connects on first use. Raises as `submit`."""
        return self.objects()

    def adopt(self, payload: Any) -> None:
        """Get ready what else the process knows of the mesh, before this payload mentions it. Nothing where that is nothing."""

    def objects(self) -> ObjectSpace:
        """The object store of the mesh that tasks go to now; connects on first use. Raises as `submit`."""
        channel = self._channel
        if channel is None or channel.end is not None:
            channel = self._choose()
        return channel.objects

    def flush(self) -> None:
        """Send what is queued, from the calling thread."""
        for channel in self._channels():
            channel.flush()

    def drive_until(self, done: Callable[[], bool], condition: AnyCondition, timeout: Optional[float] = None) -> bool:
        """Wait until `done()`, which a sink makes true and then notifies `condition`; True when it is.

        The calling thread does the socket's work meanwhile if no other thread does. Safe from a callback.
        """
        if self._inherited:
            self._end_inherited()
        busy = self._channel
        if busy is None or (self._remote is not None and self._local is not None):
            channels = [channel for channel in self._channels() if channel.pending_tasks]
            if len(channels) != 1:
                return _wait(done, condition, timeout, channels)
            busy = channels[0]
        return busy.drive_until(done, condition, timeout)

    def cancel(self, task_ids: Sequence[int]) -> None:
        """Ask for the end of these tasks, running or not. Each still ends at its sink."""
        ids = list(task_ids)
        for channel in self._channels():
            channel.cancel(ids)

    def query(self, what: str, arguments: Optional[Dict[str, Any]] = None, timeout: float = 5.0) -> Any:
        """Ask the coordinator about `what` ("workers", ...); connects on first use. Raises as `submit`."""
        with self._lock:
            channel = self._reach_remote() or self._choose()
        return channel.ask(what, arguments or {}, timeout)

    def job_channel(self) -> Channel:
        """The connection to the mesh that keeps jobs; connects on first use. Never this machine where a mesh was named: it forgets them.

        Raises:
            MeshUnavailableError: Nobody answers.
            AuthenticationError, VersionMismatchError, ProtocolError: Somebody else answers.
            MeshClosedError: The session is closed.
        """
        with self._lock:
            if self.address is None:
                return self._choose()
            if self._closed is not None:
                raise MeshClosedError("the mesh was closed; make a new one")
            if self._remote is None or self._remote.end is not None:
                self._remote = self._open(self.address.url, self._token, self._reconnect_timeout, self._own_mesh)
            return self._remote

    def all_channels(self) -> List[Channel]:
        """The connection to the mesh, and to this machine where that stands in for it; connects on first use. Raises as `submit`."""
        with self._lock:
            first = self._reach_remote() or self._choose()
            return [first, *(channel for channel in self._channels() if channel is not first and channel.end is None)]

    def await_workers(self, count: int, timeout: float) -> bool:
        """Wait until the coordinator has `count` healthy workers; whether it has them. Raises as `submit`."""
        with self._lock:
            channel = self._reach_remote() or self._choose()
        return channel.wait_for_workers(timeout, count=count)

    def await_stand_in(self, timeout: float) -> None:
        """Where this machine stands in for the mesh, wait until its worker is there. Raises as `submit`."""
        with self._lock:
            channel = self._reach_remote() or self._choose()
        if channel is self._local:
            channel.wait_for_workers(timeout, count=1)

    def close(self, error: Optional[BaseException] = None) -> None:
        """End the session; what is pending ends with `error`, or MeshClosedError. Idempotent."""
        with self._lock:
            if self._closed is not None:
                return
            reason = self._closed = error or MeshClosedError("the mesh was closed")
            self._channel = None
            channels = self._channels()
            local, self._local_mesh = self._local_mesh, None
        _sessions.discard(self)
        for channel in channels:
            channel.close(reason)
        if local is not None:
            local.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed is not None

    @property
    def is_local_fallback(self) -> bool:
        """Whether tasks run on this machine because the mesh cannot take them."""
        return self._channel is not None and self._channel is self._local

    @property
    def on_output(self) -> Optional[OutputHook]:
        """Called with (task name, worker, stream, line) instead of printing what tasks print."""
        return self._on_output

    @on_output.setter
    def on_output(self, hook: Optional[OutputHook]) -> None:
        self._on_output = hook
        for channel in self._channels():
            channel.output.hook = hook

    # --- the choice

    def _channels(self) -> List[Channel]:
        return [channel for channel in (self._remote, self._local) if channel is not None]

    def _choose(self) -> Channel:
        """Where tasks go from now on."""
        with self._lock:
            channel = self._channel
            if channel is not None and channel.end is None:
                return channel
            remote = self._reach_remote()
            if remote is None:
                return self._use_local("")
            if remote.workers or self._is_own_mesh:
                self._channel = remote
                return remote
            ailing = self._ailing_workers(remote)
            if not ailing and remote.wait_for_workers(JOINING_WORKER_SECONDS):
                self._channel = remote
                return remote
            if self._fallback:
                return self._use_local(f"the mesh at {self.address} has no workers{ailing and f' that take tasks ({ailing})'}")
            if not ailing:
                raise MeshUnavailableError(f"the mesh at {self.address} has no workers; add one with `gpumesh join`")
            self._channel = remote  # They may recover; the coordinator tells when tasks wait for that in vain.
            return remote

    @staticmethod
    def _ailing_workers(remote: Channel) -> str:
        """Why the workers that a mesh has take no tasks; "" when it has none."""
        try:
            views = remote.ask("workers", {}, _ASK_SECONDS)
        except MeshError:
            return ""
        return "; ".join(f"{view['hostname']}: {view['problem']}" for view in views if view.get("problem"))

    def _reach_remote(self) -> Optional[Channel]:
        """The connection to the mesh; None when this machine stands in for it. Under the lock."""
        if self._closed is not None:
            raise MeshClosedError("the mesh was closed; make a new one")
        if self._remote is not None and self._remote.end is None:
            return self._remote
        self._remote = None
        if self._is_given_up:
            return None
        try:
            if self.address is None:
                raise MeshUnavailableError(
                    "no mesh is configured: no address given, none in GPUMESH_URL, none saved by `gpumesh join`"
                )
            self._remote = self._open(self.address.url, self._token, self._reconnect_timeout, self._own_mesh)
        except MeshUnavailableError as error:
            if not self._fallback:
                raise
            self._is_given_up = True
            self._warn_local(str(error))
        return self._remote

    def _use_local(self, problem: str) -> Channel:
        """Tasks go to a mesh on this machine. Under the lock."""
        if problem:
            self._warn_local(problem)
        local = self._local
        if local is None or local.end is not None:
            if self._local_mesh is not None:
                self._local_mesh.close()
            mesh = self._local_mesh = self._start_local()
            local = self._local = self._open(mesh.url, mesh.token, LOCAL_RECONNECT_SECONDS, mesh)
        self._channel = local
        return local

    def _warn_local(self, problem: str) -> None:
        logger.warning("%s; running on this machine instead", problem)

    def _open(self, url: str, token: str, reconnect_timeout: float, own: Optional[LocalMesh]) -> Channel:
        channel = Channel(
            parse_address(url),
            token,
            name=self._name or client_name(),
            connect_timeout=self._connect_timeout if own is None else max(self._connect_timeout, CONNECT_SECONDS),
            reconnect_timeout=reconnect_timeout,
            on_workers=self._workers_changed,
            dialer=self._dialer,
            first_words=self._first_words,
        )
        channel.output.hook = self._on_output
        channel.session = self
        try:
            channel.connect()
        except BaseException as error:
            channel.close(error)
            problem = getattr(own, "problem", "") if isinstance(error, MeshError) else ""
            if problem:
                raise MeshUnavailableError(problem) from error
            raise
        return channel

    def _workers_changed(self, channel: Channel, workers: int) -> None:
        """The mesh lost its last worker or got its first: the next task decides anew. Under a receive lock, so no lock here."""
        if channel is self._remote and not self._is_own_mesh and (workers > 0) != (self._channel is channel):
            self._channel = None

    # --- a forked child

    def _after_fork(self) -> None:
        """Nothing of the parent's connection works here: its socket and its I/O thread are the parent's."""
        self._lock = threading.RLock()
        self._pid = os.getpid()
        inherited: List[Tuple[int, Sink]] = []
        for channel in self._channels():
            inherited.extend(channel.abandon())
        self._inherited = inherited
        self._channel = self._remote = None
        local, self._local, self._local_mesh = self._local_mesh, None, None
        if local is not None:
            mesh = local  # The parent's to close; used by this process as any other mesh.
            self._start_local = lambda: _Borrowed(mesh.url, mesh.token)
        for handle in self._handles.values():
            handle.lane = None

    def _end_inherited(self) -> None:
        """What was pending when the process forked ends in the child: its results go to the parent."""
        inherited, self._inherited = self._inherited, []
        for task_id, sink in inherited:
            error = MeshClosedError(
                "this task was submitted by the parent of this process, which gets its result; submit it again here"
            )
            sink.task_ended(task_id, Status.LOST, error, 0.0, "")


class _Borrowed:
    """A local mesh that belongs to the parent process."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token

    def close(self) -> None:
        """The parent ends it."""


def _wait(done: Callable[[], bool], condition: AnyCondition, timeout: Optional[float], channels: List[Channel]) -> bool:
    """Wait while the I/O threads do the work: two meshes are busy, or none."""
    for channel in channels:
        channel.flush()
    if not isinstance(condition, threading.Condition):
        condition = condition()
    with condition:
        return condition.wait_for(done, timeout)


def client_name() -> str:
    """Who this is, for people at the coordinator."""
    user = os.environ.get("USER") or os.environ.get("USERNAME") or "client"
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_all() -> None:
    """At interpreter exit: no process of a local mesh is left, and the coordinator hears a goodbye."""
    for session in list(_sessions):
        session.close(MeshClosedError("the interpreter is exiting"))
    piping = sys.modules.get("gpumesh.runtime.piping")
    if piping is not None:
        piping.drain()
        piping.end()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session._after_fork()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
