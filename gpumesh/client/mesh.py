"""GPUMesh: the mesh as one object. It resolves which mesh is meant and starts what belongs to it; tasks are the session's matter."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Union, overload

from gpumesh.config import CONNECT_SECONDS, DEFAULT_PORT, DISTRIBUTE_TIMEOUT_SECONDS, RECONNECT_SECONDS
from gpumesh.errors import MeshClosedError
from gpumesh.network.address import parse_address
from gpumesh.runtime import nesting
from gpumesh.runtime.settings import read_environment, resolve_connection

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Type

    from typing_extensions import Unpack

    from gpumesh.client.actor_groups import ActorGroup
    from gpumesh.client.actor_handle import ActorHandle
    from gpumesh.client.actor_options import ActorOptionsGiven
    from gpumesh.client.actors import ActorClass
    from gpumesh.client.jobs import JobClient
    from gpumesh.client.session import Session
    from gpumesh.client.streams import ResultStream
    from gpumesh.runtime.embedded import CoordinatorHandle, EmbeddedMesh, WorkerHandle
    from gpumesh.serialization.refs import ObjectRef

logger = logging.getLogger("gpumesh")

QUERY_SECONDS = 5.0
GONE = frozenset({"unused", "leaving", "lost"})  # Of devices: no task will run on them.


class GPUMesh:
    """A mesh of machines to run functions on.

    Building one neither connects nor blocks: that happens at the first use. It may be used from any number of threads, and from
    asyncio. It ends with `close()`, its `with` block, or the interpreter.

    Args:
        url: The coordinator's address and the way there: `http://host:8000`, `host:port`, `https://...`, `insecure://...`.
            Without one: GPUMESH_URL, then the connection saved by `gpumesh serve` or `gpumesh join`; if there is none, tasks run on this
            machine.
        token: Its secret; without one: GPUMESH_TOKEN, then the one saved for this address.
        connect_timeout: Seconds for the first use to connect.
        reconnect_timeout: Seconds to look for a coordinator that was lost, before what is pending fails.
        fallback: Run on this machine, after one warning, when nobody answers or the mesh has no workers; False: raise
            MeshUnavailableError.
        name: How the coordinator's other users see this client.
        ship: Folders and files that travel along with every function; see `ship`.

    Raises:
        ValueError: The address makes no sense, or a timeout is not positive.
    """

    url: Optional[str]
    """The coordinator's address; None as long as there is none."""
    _session: Optional[Session]  # None: see `_start`.
    _embedded: Optional[EmbeddedMesh]  # Its processes are ours to end.
    _local_reason: str  # Why an embedded mesh is started at the first use; empty: none is.
    _finalizer: Optional[Any]
    _shipped: List[Any]  # Paths given when it was made.

    def __init__(
        self,
        url: Optional[str] = None,
        token: Optional[str] = None,
        *,
        connect_timeout: float = CONNECT_SECONDS,
        reconnect_timeout: float = RECONNECT_SECONDS,
        fallback: bool = True,
        name: Optional[str] = None,
        ship: Iterable[Union[str, os.PathLike[str]]] = (),
    ) -> None:
        if not connect_timeout > 0:
            raise ValueError(f"connect_timeout={connect_timeout!r} must be more than 0 seconds")
        if not reconnect_timeout >= 0:
            raise ValueError(f"reconnect_timeout={reconnect_timeout!r} must be 0 or more seconds")
        environment = read_environment()
        self._set_up(environment.verbosity, name or "")
        self._connect_timeout = connect_timeout
        self._shipped = [ship] if isinstance(ship, (str, os.PathLike)) else list(ship)
        if nesting.mesh is not None and (url is None or parse_address(url).is_at(parse_address(nesting.mesh[0]))):
            self._join_task(nesting.mesh[0])
            return
        if environment.is_local:
            if url is not None:
                parse_address(url)
            self._local_reason = "GPUMESH_LOCAL is set"
            return
        found, secret = resolve_connection(url, token)
        if found is not None:
            self.url = parse_address(found).url
        from gpumesh.client.session import Session

        self._session = Session(
            url=found,
            token=secret,
            connect_timeout=connect_timeout,
            reconnect_timeout=reconnect_timeout,
            fallback=fallback,
            start_local=_start_stand_in,
            name=self._name,
        )
        self._end_with_me(self._session, None)
        for path in self._shipped:
            self._session.ship(path)

    def _join_task(self, url: str) -> None:
        """Inside a task: its mesh, by the connection that its process has for all of these."""
        from gpumesh.client.nested import task_session

        self.url = url
        self._session = task_session()
        for path in self._shipped:
            self._session.ship(path)

    def _set_up(self, verbosity: int, name: str) -> None:
        self.url = None
        self._name = name
        self._connect_timeout = CONNECT_SECONDS
        self._session = None
        self._embedded = None
        self._local_reason = ""
        self._shipped = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._verbosity = verbosity
        self._finalizer = None
        if verbosity:
            show_log(verbosity)

    @classmethod
    def local(cls, workers: int = 2, slots: int = 1) -> GPUMesh:
        """An embedded mesh: coordinator and workers in processes of its own on this machine, ended with the object.

        Returns when the coordinator's port exists; workers join right after.

        Args:
            workers: Worker agents.
            slots: Tasks that each runs at the same time.
        """
        mesh = cls.__new__(cls)
        mesh._set_up(read_environment().verbosity, "")
        mesh._embed(workers, slots)
        return mesh

    @staticmethod
    def start_coordinator(
        port: int = DEFAULT_PORT, token: Optional[str] = None, *, host: str = "127.0.0.1"
    ) -> CoordinatorHandle:
        """Start a coordinator in a background thread of this process; it listens when this returns.

        Args:
            port: 0 picks a free one.
            token: Made up, 256 bits, if not given.
            host: The address to listen on; "" for every address of this machine, so that others can join. With them it speaks TLS.

        Returns:
            A handle with `url`, `token` and `stop()`.

        Raises:
            OSError: The port is taken, the address is not this machine's, or there is no place for a certificate.
        """
        from gpumesh.runtime import embedded

        return embedded.start_coordinator(port, token, host=host)

    @staticmethod
    def add_worker(
        url: Optional[str] = None, token: Optional[str] = None, slots: Optional[int] = None, **options: Any
    ) -> WorkerHandle:
        """Lend this machine to a mesh as a worker, in a process of its own; returns at once.

        Args:
            url: The coordinator's address; as for `GPUMesh` if not given, and so is `token`.
            slots: Tasks at the same time; one per core if not given.
            options: `tags={"room": "lab"}`, `score=...`.

        Returns:
            A handle with `info`, a dict, and `stop()`.

        Raises:
            ValueError: The address makes no sense, or none is known.
        """
        from gpumesh.runtime import embedded

        found, secret = resolve_connection(url, token)
        if found is None:
            raise ValueError("no mesh is known to join; give add_worker its address and token")
        return embedded.add_worker(found, secret or "", slots=slots, **options)

    def _embed(self, workers: int, slots: int) -> Session:
        embedded = self._embedded = _start_embedded(workers, slots)
        self.url = embedded.url
        import gpumesh.client.streams  # noqa: F401  # Now, while the mesh's processes start: `.map` needs it.
        from gpumesh.client.session import Session

        session = Session(
            url=embedded.url,
            token=embedded.token,
            connect_timeout=self._connect_timeout,
            reconnect_timeout=0.0,  # A coordinator of ours that is gone does not come back.
            fallback=False,
            start_local=_start_stand_in,
            name=self._name,
            is_own_mesh=True,
            own_mesh=embedded,
        )
        for path in self._shipped:
            session.ship(path)
        self._session = session
        self._end_with_me(session, embedded)
        return session

    def _end_with_me(self, session: Session, embedded: Optional[EmbeddedMesh]) -> None:
        finalizer = self._finalizer = weakref.finalize(self, _end_when_idle, session, embedded, os.getpid())
        finalizer.atexit = False  # The session and the embedded mesh see to that themselves.

    def _start(self) -> Session:
        """The session, where there is none yet: an embedded mesh is started, or this object was closed."""
        with self._lock:
            if self._is_closed:
                raise MeshClosedError("the mesh was closed; make a new one")
            if self._session is None:
                logger.warning("%s; running on this machine", self._local_reason)
                return self._embed(1, _usable_cores())
            return self._session

    def _open_session(self) -> Session:
        session = self._session
        return session if session is not None else self._start()

    # --- running

    def distribute(
        self,
        function: Callable[..., Any],
        params: Iterable[Any],
        *,
        timeout: Optional[float] = DISTRIBUTE_TIMEOUT_SECONDS,
        progress: bool = False,
        return_exceptions: bool = False,
        window: Optional[int] = None,
        **options: Any,
    ) -> ResultStream:
        """Run a function once for each item of `params`: the same as `accelerate(mesh, ...)(function).map(params)`.

        Args:
            function: Accelerated or not.
            params: A dict is keyword arguments, a tuple positional arguments, anything else the one argument.
            timeout: Seconds of run time for each, unless the function has been given its own; None for no limit.
            progress: Show a live bar.
            return_exceptions: Give a failed item's exception as its value.
            window: Items that `params` may be read ahead of the results.
            options: As for `accelerate`.
        """
        from gpumesh.client.accelerate import AcceleratedFunction, accelerated

        given: Dict[str, Any] = dict(options)
        has_own = isinstance(function, AcceleratedFunction) and function.task_options.timeout is not None
        if not (has_own and timeout == DISTRIBUTE_TIMEOUT_SECONDS):
            given["timeout"] = timeout
        return accelerated(function, mesh=self, options=given).map(
            params, progress=progress, return_exceptions=return_exceptions, window=window
        )

    # --- actors

    @overload
    def actor(self, class_: type, /, **options: Unpack[ActorOptionsGiven]) -> ActorClass: ...

    @overload
    def actor(self, /, **options: Unpack[ActorOptionsGiven]) -> Callable[[type], ActorClass]: ...

    def actor(self, class_: Optional[type] = None, /, **options: Any) -> Any:
        """Make a class whose objects can live in processes of their own on the mesh; also as a decorator, bare or with options.

        `Counter = mesh.actor(Counter, gpu=1)`; then `Counter.remote(10)` creates an actor and returns its handle, and
        `handle.increment.remote(by=2)` calls a method of it. Calls of one program run one after the other, in order; methods that
        are `async def` interleave, and `max_concurrency` lets the others run side by side in threads.

        Args:
            class_: The class. Its `close` method, or else `__exit__`, is run when an actor ends.
            options: gpu, cores, memory, tags, device: what its worker must have; GPUs, and `cores` slots, are its own as long as it lives.
                name: by which `get_actor` finds it. lifetime: "detached" for one that outlives this program, and ends when it is killed.
                max_restarts (0): how often it is started again after its process or machine has died, with a fresh state, within
                restart_seconds if given. max_concurrency (1). mailbox (10,000): calls that one program may have pending, and
                call_timeout (60): seconds that a further one waits for room. priority, packages, place, placement_timeout (60): as for
                `accelerate`.

        Raises:
            TypeError: There is no such option, or this is no class.
            ValueError: An option makes no sense.
        """
        from gpumesh.client.actors import actor_class

        if class_ is None:
            from gpumesh.client.actor_options import make_actor_options

            make_actor_options(options)  # What is wrong is said here, not where the class comes.
            return lambda found: actor_class(found, mesh=self, options=options)
        return actor_class(class_, mesh=self, options=options)

    def actors_group(
        self,
        class_: Any,
        n: int,
        *args: Any,
        members: Optional[Sequence[Any]] = None,
        placement: Optional[str] = "spread",
        **options: Any,
    ) -> ActorGroup:
        """Create `n` actors of a class, as one group: `group.method.remote(...)` calls them all, and its result is the list of their results.

        If one of them dies, the pending calls of the group fail with an ActorDiedError that names it.

        Args:
            class_: The class, or what `actor` has returned for it.
            n: How many.
            args: For the constructor of each.
            members: Arguments for each instead: a dict is keyword arguments, a tuple positional arguments, anything else the one argument.
            placement: "spread" them over as many machines, "pack" them onto as few, or None: each where there is most room.
            options: As for `actor`. With a `name` they are called name-0, name-1, ...

        Raises:
            TypeError, ValueError: As `actor`, or `members` are not `n`.
            SerializationError, MeshUnavailableError, ...: As for the `remote` of an actor class.
        """
        from gpumesh.client.actor_groups import create_group

        return create_group(self, class_, n, args, members, placement, options)

    def get_actor(self, name: str) -> ActorHandle:
        """The actor with this name, or this id: `a-1a2b3c4d-17`.

        Raises:
            UnknownActorError: There is none.
            MeshUnavailableError: Nobody answers.
        """
        from gpumesh.client.actors import find_actor

        return find_actor(self, name)

    def actors(self) -> List[Dict[str, Any]]:
        """The actors alive, one dict each.

        `id`, `name` ("" for none), `class_name`, `state` ("waiting", "starting", "alive", "restarting", "ending"), `worker` and
        `hostname` ("" if it has none), `cards` (keys of the GPUs that it has), `restarts`, `max_restarts`, `calls` (pending), `detached`,
        `group`, `owner` (who has created it), and `number` (the id as a number).

        Raises:
            MeshUnavailableError: Nobody answers.
        """
        from gpumesh.client.actors import list_actors

        return list_actors(self)

    # --- jobs

    def submit(
        self,
        *,
        script: Union[str, os.PathLike[str]],
        payloads: Sequence[Mapping[str, Any]],
        name: Optional[str] = None,
        **options: Any,
    ) -> str:
        """Run a script once for each payload, as a job that survives this program and the coordinator; returns its id: `j-4k7mw2qx`.

        Returns when the job is on the coordinator's disk, also when that was lost and started again meanwhile. A task gets its payload
        as JSON on standard input; its result is the last line of its standard output, as JSON. The script's folder travels with it.

        Args:
            script: A Python file.
            payloads: One dict for each task, of what JSON can say. The keys `cost`, `gpu`, `gpu_memory_mb` and `cpu_cores`
                are also options of that task.
            name: For people; the script's by default.
            options: `gpu`, `cores`, `memory`, `tags`, `timeout`, `retries`, `priority`, `cost`, `placement_timeout` (None, for ever, by
                default) and `packages`, as for `accelerate`.

        Raises:
            ValueError: There is no such script, a payload cannot be JSON, or an option makes no sense.
            TypeError: `payloads` is no list, or one is no dict.
            JournalError: The coordinator cannot keep the job.
            MeshUnavailableError: Nobody answers. AuthenticationError, MeshClosedError: The mesh does not take it.
        """
        return self._open_jobs().submit(script, payloads, name, options)

    def status(self, job_id: str, *, tasks: bool = True) -> Dict[str, Any]:
        """How far a job is.

        Args:
            job_id: As `submit` has returned it; a beginning that no other has will do.
            tasks: Tell of each task; without them the answer is small, however many there are.

        Returns:
            `id`, `name`, `script`, `client`, `state` ("queued", "running", "done", "failed", "cancelled"), `finished`, `counts` (of
            "pending", "running", "done", "failed" and "cancelled" tasks), `total`, `submitted` and `ended` (ISO 8601, UTC; "" if it has
            not), `notices` (why tasks wait), and `tasks`: `id` (place in the payloads), `status`, `payload`, `result`, `error`, `worker`,
            `hostname`, `seconds`, and `attempts`, a dict each.

        Raises:
            UnknownJobError: There is none. MeshUnavailableError, JournalError: as `submit`.
        """
        return self._open_jobs().status(job_id, tasks=tasks)

    def wait(
        self,
        job_id: str,
        timeout: Optional[float] = None,
        *,
        on_progress: Optional[Callable[[Dict[str, Any]], None]] = None,
        tasks: bool = True,
    ) -> Dict[str, Any]:
        """Wait until a job has finished, however that went; returns its `status`. Survives a restart of the coordinator.

        Args:
            timeout: Seconds.
            on_progress: Called with the status without tasks, at once and whenever it has changed.
            tasks: Tell of each task in the end; a million of them take a minute.

        Raises:
            TimeoutError: It has not finished in time.
            UnknownJobError: There is none. MeshUnavailableError: The coordinator was lost for good.
        """
        return self._open_jobs().wait(job_id, timeout, on_progress, tasks=tasks)

    def cancel(self, job_id: str, *, force: bool = False) -> int:
        """End a job: nothing more of it starts, and what runs is interrupted, then killed. Returns how many tasks that concerns.

        Args:
            force: Kill what runs at once.

        Raises:
            UnknownJobError: There is none.
        """
        return self._open_jobs().change(job_id, "kill" if force else "cancel")

    def retry(self, job_id: str) -> int:
        """Run a job's failed and cancelled tasks again; what is done stays. Returns how many those are.

        Raises:
            UnknownJobError: There is none.
        """
        return self._open_jobs().change(job_id, "retry")

    def jobs(self) -> List[Dict[str, Any]]:
        """The coordinator's jobs, newest first: of each what `status(..., tasks=False)` tells."""
        return self._open_jobs().jobs()

    def logs(self, job_id: str, task: Optional[int] = None, *, since: int = 0) -> List[Dict[str, Any]]:
        """What a job's tasks, or one of them, have written: the last of it, where it is much.

        Args:
            task: Place in the payloads.
            since: Only what came after the part with this `number`.

        Returns:
            Parts in the order in which they were written, `number`, `task`, `attempt`, `stream` ("out" or "err") and `text` of each.

        Raises:
            UnknownJobError: There is none. ValueError: It has no such task.
        """
        return self._open_jobs().logs(job_id, task, since)

    def _open_jobs(self) -> JobClient:
        from gpumesh.client.jobs import JobClient

        session = self._open_session()
        return JobClient(session.job_channel, self._name)

    # --- objects

    def put(self, value: Any) -> ObjectRef:
        """Store a value on the mesh; returns when it may be changed again. Connects on first use.

        Pass the reference to as many tasks as you like: the value is copied once to each machine that needs it, and given to the
        task as an argument. It lives until the last reference to it, here or elsewhere, is gone.

        Args:
            value: Anything that can travel. Arrays, frames and CPU tensors are copied once, straight into shared memory where
                the coordinator runs on this machine.

        Raises:
            SerializationError: Some part cannot travel; the message names the path to it.
            ObjectStoreFullError: There is no room.
            TypeError: It is a reference or a future already: pass that itself.
            AuthenticationError, MeshUnavailableError, MeshClosedError: The mesh does not take it.
        """
        from gpumesh.client.context import check_put

        check_put(value)
        return self._open_session().space().put(value)

    def get(self, refs: Any, *, timeout: Optional[float] = None) -> Any:
        """The value of a reference; of a list or tuple of them, the list of their values, fetched side by side.

        Arrays are private and writable, and yet not copied where the coordinator runs on this machine: what is written to goes
        to pages of this process alone. A future stands for its result.

        Args:
            refs: An ObjectRef, or several.
            timeout: Seconds to wait.

        Raises:
            ObjectLostError: It was deleted, or every copy is gone.
            TimeoutError: Not all are here in time.
            MemoryError: This machine has no room for it.
            TypeError: It is no reference.
        """
        from gpumesh.client.context import get_from

        return get_from(lambda: self._open_session().space(), refs, timeout)

    def ship(self, path: Union[str, os.PathLike[str]]) -> None:
        """Send a folder's content, or a file, along with every function from now on.

        What the folder holds can be imported in tasks as if the folder were on `sys.path`, and read beside what was imported; a
        folder with `__init__.py` can be imported under its own name, too. Modules that a function imports travel anyway, without
        this. Left out are caches, `.git`, virtual environments and what `.gitignore` names. A later change of a file is seen by the
        next call.

        Raises:
            ValueError: There is no such folder or file.
            SerializationError: It is over 50 MB; the message names the biggest files.
        """
        self._open_session().ship(path)

    # --- the pool

    def workers(self) -> List[Dict[str, Any]]:
        """The workers alive: `id`, `hostname`, `device`, `device_name`, `score`, `alive`, `slots`, `running`, `devices`, ... of each.

        `running` tasks execute, `waiting` ones have begun and wait for tasks of their own, `queued` ones have not begun.

        `device` ("cuda:1", "cpu"), `device_name` and `score` are those of its best usable device, `cpu_score` is of what tasks
        without a GPU run on, `problem` says why it takes no tasks, `trust` with which token it joined ("full", or "worker": one that
        only lends); `done` and `crashed` count the tasks that it has ended and the attempts that have ended their process there. Without a mesh it is this machine.

        Raises:
            MeshUnavailableError: Nobody answers.
        """
        session = self._open_session()
        if self._embedded is not None:
            session.await_workers(self._embedded.workers, QUERY_SECONDS)  # They were started with the mesh; here they are.
        else:
            session.await_stand_in(QUERY_SECONDS)
        found = session.query("workers", timeout=QUERY_SECONDS)
        return [dict(worker, devices=list(worker["devices"])) for worker in found]

    def devices(self) -> List[Dict[str, Any]]:
        """All devices of all workers: first those that tasks may use, the fastest first, then the others.

        Each has `index` (in this list), `hostname`, `device` ("cuda:1", as user code on that worker numbers it; "cuda", "cpu"),
        `system_index` (as nvidia-smi numbers it there; None where there is no such number), `device_name`, `score` (100 is an RTX
        4090), `status` ("idle", "busy", "leaving", "lost", "unused"), `reason` (why it is unused), `worker` (id), `uuid`,
        `capability`, and in bytes `memory`, `others` (held by other programs or the driver), `reserved` (booked for tasks) and `free`.
        `used` (bytes, by anyone), `utilisation` (percent), `temperature` (degrees Celsius) and `power` (watts) are None where
        its instruments do not tell.

        Raises:
            MeshUnavailableError: Nobody answers.
        """
        from gpumesh.client.pool_views import device_rows

        return device_rows(self.workers())

    def waiting(self) -> List[Dict[str, Any]]:
        """The tasks that wait at the coordinator, one dict for each client and requirement.

        Each has `functions` (names), `needs`, `count`, `client`, `state` and `reason`: the state is "infeasible" where no worker
        that is connected can ever run them, and then the reason says what each lacks; "delayed" for those that have failed and
        are tried again after their `backoff`, and then the reason says when; else it is "queued".

        Raises:
            MeshUnavailableError: Nobody answers.
        """
        return [
            dict(each, functions=list(each["functions"]))
            for each in self._open_session().query("waiting", timeout=QUERY_SECONDS)
        ]

    def objects(self) -> Dict[str, Any]:
        """What lies in the object store: `objects`, one dict each, and of the coordinator's host `limit`, `memory` and `disk` (bytes).

        Each object has `id`, `bytes`, `owner`, `state`, `where`, `copies`, `references` and `pins`.

        Raises:
            MeshUnavailableError: Nobody answers.
        """
        found = self._open_session().query("objects", timeout=QUERY_SECONDS)
        return {**found, "objects": [dict(each, copies=list(each["copies"])) for each in found["objects"]]}

    def events(self, since: int = 0) -> List[Dict[str, Any]]:
        """What has happened to the mesh, oldest first: the last 1000 events, those before a restart of its coordinator included.

        Each has `number` (growing), `time` (the coordinator's wall clock in UTC, ISO 8601), `kind` ("started", "joined", "returned",
        "away", "left", "died", "retry", "paused", "unwell", "resumed", "spilled", "refused", "accepted", "finished", "cancelled"), `text` for
        people, and where they are known `worker`, `task`, `client` and `job`. Of a flood of one kind only some are told.

        Args:
            since: Only those with a larger number.

        Raises:
            MeshUnavailableError: Nobody answers.
        """
        found = self._open_session().query("events", {"since": since}, timeout=QUERY_SECONDS)
        return [dict(each) for each in found]

    def device_count(self) -> int:
        """How many devices tasks may use, of all workers together; CPUs count, what is unused does not."""
        return sum(device["status"] not in GONE for device in self.devices())

    def total_score(self) -> float:
        """The sum of the scores of all devices that tasks may use; 100 is one RTX 4090."""
        return float(sum(device["score"] for device in self.devices() if device["status"] not in GONE))

    def auto_device(self) -> str:
        """The best device of this machine as torch calls it: "cuda:0", "mps" or "cpu". Does not import torch, asks no mesh.

        Where there may be a GPU, the first call on a machine may take the seconds of a probe.
        """
        from gpumesh.client.local_device import best_device

        return best_device()

    def results_to_dataframe(self, results: Iterable[Any]) -> Any:
        """Results as a pandas DataFrame, one row each; see `client.frames`. Blocks until they are there.

        Raises:
            ImportError: pandas is not installed.
        """
        from gpumesh.client.frames import results_to_dataframe

        return results_to_dataframe(results)

    # --- the end

    def close(self) -> None:
        """End it: what is pending fails with MeshClosedError, processes of an embedded mesh end. Idempotent."""
        with self._lock:
            self._is_closed = True
            session, embedded = self._session, self._embedded
            self._session = None
        if self._finalizer is not None:
            self._finalizer.detach()
        if session is not None and not session.is_nested:  # That is of the process, and ends with it.
            session.close(MeshClosedError("the mesh was closed"))
        if embedded is not None:
            embedded.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def __enter__(self) -> GPUMesh:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        # Captured by a task's function. Neither address nor token travels: inside the task it is the mesh of that machine's user.
        return default_mesh, ()

    def __repr__(self) -> str:
        if self._is_closed:
            state = "closed"
        elif self._session is not None and self._session.is_nested:
            state = f"{self.url}, inside a task"
        elif self._embedded is not None:
            state = "on this machine"
        elif self._session is not None and self._session.is_local_fallback:
            state = "not available, running on this machine"
        elif self.url is None:
            state = "on this machine, at the first use"
        else:
            state = self.url
        return f"<GPUMesh {state}>"


_default: Optional[GPUMesh] = None
_default_lock = threading.Lock()


def default_mesh() -> GPUMesh:
    """The mesh of functions that were given none: `GPUMesh()`, made once."""
    global _default
    with _default_lock:
        if _default is None or _default.is_closed:
            _default = GPUMesh()
        return _default


def _renew_default_lock() -> None:
    global _default_lock
    _default_lock = threading.Lock()  # In a forked child: another thread of the parent may have held it.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_default_lock)


_shown: Optional[logging.Handler] = None


def show_log(verbosity: int) -> None:
    """GPUMESH_VERBOSE: what the runtime does goes to stderr, unless the application has arranged for the log itself."""
    global _shown
    level = logging.DEBUG if verbosity > 1 else logging.INFO
    if logger.level == logging.NOTSET or logger.level > level:
        logger.setLevel(level)
    if _shown is not None or logger.hasHandlers():
        return
    _shown = logging.StreamHandler(sys.stderr)
    _shown.setFormatter(logging.Formatter("gpumesh %(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(_shown)


def _usable_cores() -> int:
    from gpumesh.devices.detect import usable_cores

    return usable_cores()


def _start_stand_in() -> Any:
    """The mesh that stands in for one that cannot be used: this machine, one slot per core."""
    return _start_embedded(1, _usable_cores())


def _start_embedded(workers: int, slots: int) -> EmbeddedMesh:
    global _ends_in_order
    from gpumesh.runtime import embedded

    mesh = embedded.EmbeddedMesh(workers=workers, slots=slots)
    if not _ends_in_order:
        _ends_in_order = True
        from gpumesh.client.session import _close_all

        atexit.register(_close_all)  # Again: it must run before what `embedded` has registered, and the last comes first.
    return mesh


_ends_in_order = False


def _end_when_idle(session: Session, embedded: Optional[EmbeddedMesh], owner: int) -> None:
    """The mesh object is gone. What its futures still wait for goes on until the interpreter ends."""
    if os.getpid() != owner or sys.is_finalizing() or any(channel.pending_tasks for channel in session._channels()):
        return

    def end() -> None:
        session.close(MeshClosedError("the mesh object is gone; keep it as long as it is used"))
        if embedded is not None:
            embedded.close()

    try:
        threading.Thread(target=end, name="gpumesh-close", daemon=True).start()  # The collector may run under any lock.
    except RuntimeError:
        pass  # The interpreter is ending and closes both.
