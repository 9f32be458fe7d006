"""Coordinator and worker agent as whole processes: their loops, signals and orderly ends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Union

from gpumesh.config import DRAIN_SECONDS
from gpumesh.errors import MeshError
from gpumesh.model.resources import WorkerFacts, facts_from_wire
from gpumesh.network.address import Address
from gpumesh.runtime import system
from gpumesh.runtime.loop import new_event_loop

if TYPE_CHECKING:
    from gpumesh.runtime.measuring import Measuring
    from gpumesh.runtime.pool import Launch
    from gpumesh.runtime.worker import WorkerAgent

logger = logging.getLogger(__name__)


def new_worker_id() -> str:
    """16 hexadecimal digits, for one start of one agent."""
    return secrets.token_hex(8)


def run_coordinator_child(request: Dict[str, Any], fd: int) -> None:
    """Be the coordinator of an embedded mesh on a listening socket made by the driver. Ends by being killed."""
    from gpumesh.runtime.coordinator import Coordinator

    system.name_process("gpumesh-coord")
    _log_to_stderr(request.get("verbose", 0))
    listener = socket.socket(fileno=fd)

    async def serve() -> None:
        coordinator = Coordinator(token=request["token"])
        await coordinator.start(listener)
        await asyncio.get_running_loop().create_future()

    run_loop(serve())


def run_worker_child(request: Dict[str, Any], channel: socket.socket) -> None:
    """Be a worker agent; SIGINT or SIGTERM drains, a second one ends it."""
    system.name_process("gpumesh-worker")
    _log_to_stderr(request.get("verbose", 0))
    try:
        run_loop(
            work(
                Address(request["host"], request["port"], request.get("way", "")),
                request["token"],
                facts_from_wire(request["facts"])._replace(pid=os.getpid()),  # Gathered by whoever asked for this process.
                request["worker"],
                channel,
                path=request.get("path"),
                measure=bool(request.get("measure")),
                withheld=request.get("withheld", ""),
                rules_file=request.get("rules"),
            )
        )
    except MeshError as error:
        logger.error("%s", error)
        sys.exit(1)


async def work(
    address: Address,
    token: str,
    facts: WorkerFacts,
    worker_id: str,
    spawner: Union[socket.socket, Launch],
    *,
    path: Optional[List[str]] = None,
    on_joined: Optional[Callable[[Dict[str, Any]], None]] = None,
    measure: bool = False,
    withheld: str = "",
    rules_file: Optional[str] = None,
) -> None:
    """Run an agent until it has drained (first signal) or is stopped (second signal, or `DRAIN_SECONDS`).

    GPUs are looked for beside it where there may be some.

    Args:
        measure: Measure CPU and GPUs, as far as their figures are not known from earlier.
        withheld: Why this worker does not offer the GPUs that it finds; "": it does.
        rules_file: Where this machine's owner says what is lent (`owner.rules_file`); None: everything is.

    Raises:
        MeshError: It can never join.
    """
    from gpumesh.runtime.worker import WorkerAgent

    agent = WorkerAgent(
        address=address,
        token=token,
        facts=facts,
        worker_id=worker_id,
        spawner=spawner,
        path=path,
        on_joined=on_joined,
        rules_file=rules_file,
    )
    stopper = SignalStopper(lambda: agent.drain("its owner ended it"), agent.stop)
    measuring = _measuring(agent, measure=measure, withheld=withheld)
    try:
        await agent.run(on_ruled=measuring.start if measuring is not None else None)
    finally:
        stopper.remove()
        if measuring is not None:
            measuring.stop()


def _measuring(agent: WorkerAgent, *, measure: bool, withheld: str) -> Optional[Measuring]:
    from gpumesh.devices.detect import gpus_may_exist

    gpus = gpus_may_exist()
    if not (gpus or measure):
        return None
    from gpumesh.runtime.measuring import Measuring

    return Measuring(agent, cpu=measure, gpus=gpus, speeds=measure, withheld=withheld)


class SignalStopper:
    """First SIGINT or SIGTERM: drain; a second, or no end within `DRAIN_SECONDS`: stop now."""

    def __init__(self, drain: Callable[[], None], stop: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._drain = drain
        self._stop = stop
        self._count = 0
        self._timer: Optional[asyncio.TimerHandle] = None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._count += 1
        if self._count == 1:
            logger.info("draining: running tasks finish, queued ones go elsewhere; once more to stop now")
            self._timer = self._loop.call_later(DRAIN_SECONDS, self._stop)
            self._drain()
        else:
            self._stop()

    def remove(self) -> None:
        """Give the signals back."""
        if self._timer is not None:
            self._timer.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


def run_loop(main: Any) -> None:
    """`asyncio.run` on the fastest loop; callable once in a process, before any other loop."""
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _log_to_stderr(verbose: int) -> None:
    level = logging.WARNING if verbose <= 0 else logging.INFO if verbose == 1 else logging.DEBUG
    logging.basicConfig(level=level, stream=sys.stderr, format="%(name)s[%(process)d]: %(message)s")
    if os.environ.get("GPUMESH_VERBOSE", "") not in ("", "0"):
        logging.getLogger().setLevel(logging.INFO)
