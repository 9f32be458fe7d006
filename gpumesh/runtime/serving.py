"""`gpumesh serve` and `gpumesh join` as blocking calls: what the command line starts and what ends with it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from gpumesh.errors import MeshError
from gpumesh.network.address import Address, parse_address
from gpumesh.network.tcp import listen

logger = logging.getLogger("gpumesh")


def run_coordinator(
    host: str,
    port: int,
    token: str,
    *,
    self_worker: bool,
    slots: Optional[int],
    score: Optional[float],
    on_ready: Callable[[str], None],
) -> int:
    """Serve a mesh until SIGINT or SIGTERM: the first drains, a second stops now.

    Args:
        self_worker: Lend this machine too, in a process of its own that ends with this one.
        on_ready: Called with the URL once the port is open.

    Returns:
        The exit code, 0.

    Raises:
        OSError: The port is taken or the address is not this machine's.
    """
    from gpumesh.runtime.coordinator import Coordinator
    from gpumesh.runtime.embedded import WorkerHandle, add_worker
    from gpumesh.runtime.nodes import SignalStopper, run_loop

    listener = listen(host, port)
    bound = listener.getsockname()[1]

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        coordinator = Coordinator(token=token)
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
        worker: Optional[WorkerHandle] = None
        if self_worker:
            reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            worker = add_worker(Address(reachable, bound).url, token, slots=slots, score=score)
        try:
            on_ready(Address(host, bound).url)
            await over
        finally:
            stopper.remove()
            for task in drains:
                task.cancel()
            await coordinator.stop()
            if worker is not None:
                worker.kill()

    run_loop(serve())
    return 0


def run_worker(
    url: str,
    token: str,
    *,
    slots: Optional[int],
    score: Optional[float],
    tags: Optional[Mapping[str, str]],
    on_joined: Callable[[Dict[str, Any]], None],
) -> int:
    """Lend this machine until SIGINT or SIGTERM: the first drains, a second stops now.

    Returns:
        The exit code, 0.

    Raises:
        MeshError: It can never join (refused token, other version, not a coordinator).
        ValueError: The address, slots or score make no sense.
    """
    from gpumesh.devices.detect import local_facts
    from gpumesh.runtime.launch import child_environment, launch_spawner
    from gpumesh.runtime.nodes import new_worker_id, run_loop, work

    address = parse_address(url)
    facts = local_facts(slots=slots, score=score, tags=tags)
    environment = child_environment()

    def launch(stderr: int) -> Tuple[int, socket.socket]:
        return launch_spawner(nodes=False, environment=environment, stderr=stderr)

    run_loop(work(address, token, facts, new_worker_id(), launch, on_joined=on_joined, measure=score is None))
    return 0


def generate_token() -> str:
    """256 random bits in hexadecimal."""
    return secrets.token_hex(32)


__all__ = ["MeshError", "generate_token", "run_coordinator", "run_worker"]
