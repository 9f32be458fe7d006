"""`gpumesh serve` and `gpumesh join` as blocking calls: what the command line starts and what ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from typing import TYPE_CHECKING, Any, AsyncContextManager, Callable, Coroutine, Dict, Mapping, Optional, Sequence, Tuple

from gpumesh.config import KEEP_JOBS_DAYS, RUNNER_RESTART_DELAYS_SECONDS, WORKER_TTL_SECONDS
from gpumesh.errors import JournalError, MeshError
from gpumesh.model.records import NamedTuple
from gpumesh.network.address import INSECURE, PORT, Address, is_loopback, parse_address
from gpumesh.network.tcp import listen, near

if TYPE_CHECKING:
    from gpumesh.network.certificates import Identity
    from gpumesh.runtime.coordinator import Coordinator
    from gpumesh.runtime.embedded import WorkerHandle

logger = logging.getLogger("gpumesh")


class Served(NamedTuple):
    """A mesh whose port is open, for what stands beside it: announcements, tunnels."""

    coordinator: Coordinator
    host: str  # As it was asked for: "" for every address of this machine.
    port: int
    fingerprint: bytes  # SHA-256 of its certificate; b"" without TLS.


Beside = Callable[[Served], AsyncContextManager[object]]
"""Begins before anybody is told of the mesh, and ends before it does. What it raises ends the mesh."""


def own_address(host: str, port: int, identity: Optional[Identity]) -> Address:
    """How this machine reaches its coordinator that listens on `host` ("" for all addresses), with or without a certificate."""
    where = near(host)
    return Address(where, port, PORT if identity is not None or is_loopback(where) or where == "localhost" else INSECURE)


def run_coordinator(
    host: str,
    port: int,
    token: str,
    *,
    self_worker: bool,
    slots: Optional[int],
    score: Optional[float],
    on_ready: Callable[[str], None],
    db: Optional[str] = None,
    keep_days: Optional[float] = KEEP_JOBS_DAYS,
    worker_ttl: float = WORKER_TTL_SECONDS,
    keep_token: Optional[Callable[[str], bool]] = None,
    identity: Optional[Identity] = None,
    beside: Sequence[Beside] = (),
) -> int:
    """Serve a mesh until SIGINT or SIGTERM: the first drains, a second stops now.

    Args:
        host: An address of this machine, "" for all of them.
        self_worker: Lend this machine too, in a process of its own that ends with this one.
        db: Path of the database of script jobs; that of the user's folder for data, for this port, if not given.
        keep_days: Jobs that finished so long ago are deleted from it; None: never.
        worker_ttl: Seconds for which a lost worker is still shown.
        on_ready: Called once the port is open, with the URL by which this machine reaches it.
        keep_token: Given a new token, it sees to it that the next start uses it; False: it will not.
        identity: Its certificate; without one nothing is encrypted.
        beside: What goes on as long as the mesh is served.

    Returns:
        The exit code, 0.

    Raises:
        OSError: The port is taken or the address is not this machine's.
        JournalError: The database cannot be used.
    """
    from gpumesh.journal.sqlite import SqliteJournal, default_db_path
    from gpumesh.runtime.coordinator import Coordinator
    from gpumesh.runtime.embedded import add_worker
    from gpumesh.runtime.nodes import SignalStopper, run_loop

    listener = listen(host, port)
    bound = listener.getsockname()[1]

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        path = default_db_path(bound) if db is None else db
        try:
            journal = SqliteJournal(path, call_soon=loop.call_soon_threadsafe, keep_days=keep_days)
            try:
                coordinator = Coordinator(
                    token=token,
                    mesh=journal.mesh_id,
                    journal=journal,
                    worker_ttl=worker_ttl,
                    identity=identity,
                    is_insecure=identity is None,
                    has_web=True,
                )
            except JournalError:
                journal.close()
                raise
        except JournalError:
            listener.close()
            raise
        coordinator.tokens.keep = keep_token
        await coordinator.start(listener)
        over: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        async def drain() -> None:
            await coordinator.drain()
            end()

        drains = []
        stopper = SignalStopper(lambda: drains.append(loop.create_task(drain())), end)
        here = own_address(host, bound, identity).url
        helper: Optional[_OwnWorker] = None
        if self_worker:
            helper = _OwnWorker(
                lambda: add_worker(here, coordinator.tokens.own, slots=slots, score=score), coordinator.own_workers.add
            )
        served = Served(coordinator, host, bound, identity.fingerprint if identity is not None else b"")
        try:
            async with contextlib.AsyncExitStack() as others:
                if await _unless(over, _enter(others, beside, served)):
                    on_ready(here)
                await over
        finally:
            stopper.remove()
            if helper is not None:
                helper.leave_alone()
            for task in drains:
                task.cancel()
            await coordinator.stop()
            if helper is not None:
                helper.close()

    run_loop(serve())
    return 0


async def _enter(others: contextlib.AsyncExitStack, beside: Sequence[Beside], served: Served) -> None:
    for each in beside:
        await others.enter_async_context(each(served))


async def _unless(over: asyncio.Future[None], work: Coroutine[Any, Any, None]) -> bool:
    """Do it, unless the end comes first; whether it was done."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return not over.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


class _OwnWorker:
    """The machine of `gpumesh serve` as a worker of its mesh; started again, with growing pauses, when it ends by itself."""

    def __init__(self, start: Callable[[], WorkerHandle], on_started: Callable[[str], object]) -> None:
        self._start = start
        self._on_started = on_started
        self._loop = asyncio.get_running_loop()
        self._failures = 0
        self._started_at = 0.0
        self._timer: Optional[asyncio.TimerHandle] = None
        self._handle: Optional[WorkerHandle] = None
        self._begin()

    def _begin(self) -> None:
        self._timer = None
        self._started_at = self._loop.time()
        try:
            handle = self._handle = self._start()
            self._on_started(str(handle.info["id"]))
        except (MeshError, OSError) as error:
            self._again(str(error))
            return
        self._loop.add_reader(handle.fileno(), self._look, handle)

    def _look(self, handle: WorkerHandle) -> None:
        why = handle.why_ended()
        if not why:
            return
        self._loop.remove_reader(handle.fileno())
        handle.kill()
        self._handle = None
        self._again(why)

    def _again(self, why: str) -> None:
        delays = RUNNER_RESTART_DELAYS_SECONDS
        self._failures = 1 if self._loop.time() - self._started_at > delays[-1] else self._failures + 1
        delay = delays[min(self._failures, len(delays) - 1)]
        logger.error("this machine's own worker has ended (%s); starting it again in %g s", why, delay)
        self._timer = self._loop.call_later(delay, self._begin)

    def leave_alone(self) -> None:
        """From now on it is not started again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._handle is not None:
            self._loop.remove_reader(self._handle.fileno())

    def close(self) -> None:
        """End it now."""
        if self._handle is not None:
            self._handle.kill()


def run_worker(
    url: str,
    token: str,
    *,
    slots: Optional[int],
    score: Optional[float],
    tags: Optional[Mapping[str, str]],
    on_joined: Callable[[Dict[str, Any]], None],
) -> int:
    """Lend this machine, as its owner's rules allow, until SIGINT or SIGTERM: the first drains, a second stops now.

    Returns:
        The exit code, 0.

    Raises:
        MeshError: It can never join (refused token, other version, not a coordinator).
        ValueError: The address, slots or score make no sense.
    """
    from gpumesh.devices.detect import local_facts
    from gpumesh.runtime.launch import child_environment, launch_spawner
    from gpumesh.runtime.nodes import new_worker_id, run_loop, work
    from gpumesh.runtime.owner_file import rules_file

    address = parse_address(url)
    facts = local_facts(slots=slots, score=score, tags=tags)
    environment = child_environment()

    def launch(stderr: int) -> Tuple[int, socket.socket]:
        return launch_spawner(environment=environment, stderr=stderr)

    rules = rules_file()
    run_loop(work(address, token, facts, new_worker_id(), launch, on_joined=on_joined, measure=score is None, rules_file=rules))
    return 0


def generate_token() -> str:
    """256 random bits in hexadecimal."""
    return secrets.token_hex(32)


__all__ = ["MeshError", "generate_token", "run_coordinator", "run_worker"]
