"""A tunnel beside a coordinator: opened before anybody is told of the mesh, tried out, and closed with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
from typing import Any, AsyncIterator, Callable, Dict, Mapping

from gpumesh.config import TUNNEL_CHECK_SECONDS, TUNNEL_END_SECONDS, TUNNEL_START_SECONDS
from gpumesh.devices.children import environment
from gpumesh.errors import MeshUnavailableError
from gpumesh.network.address import INSECURE, PORT, Address, parse_address
from gpumesh.network.probing import WEB, ProbeResult, probe
from gpumesh.network.tcp import near
from gpumesh.runtime.doorway import FROM_TUNNEL
from gpumesh.runtime.serving import Beside, Served

logger = logging.getLogger("gpumesh")

MODULE = "gpumesh.network.tunnels.ngrok"
_AGAIN_SECONDS = 0.3  # Until a fresh tunnel that does not carry yet is tried again.


def public(on_open: Callable[[Address], object], variables: Mapping[str, str]) -> Beside:
    """A tunnel through which machines of any network reach the mesh.

    Args:
        on_open: Told its address, once the mesh has answered through it.
        variables: What its process has in its environment besides ours.
    """

    @contextlib.asynccontextmanager
    async def beside(served: Served) -> AsyncIterator[None]:
        with _Entry(served) as entry:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", MODULE, entry.address, str(Address(near(served.host), served.port)),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment(variables), start_new_session=True,  # Ctrl-C is not for it.
            )  # fmt: skip
            watching = None
            try:
                address = await _opened(process, served)
                served.coordinator.names.add(address.host)  # HTTP may ask for it by this name.
                await _check(address, served)
                on_open(address)
                watching = asyncio.ensure_future(_watch(process, address))
                yield
            finally:
                if watching is not None:
                    watching.cancel()
                await _close(process)

    return beside


class _Entry:
    """Where a TCP tunnel ends on this machine: a port of its own, so that who comes through it is known to come from elsewhere."""

    def __init__(self, served: Served) -> None:
        self._door = served.coordinator.door
        self._loop = asyncio.get_running_loop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> _Entry:
        self._loop.add_reader(self._listener.fileno(), self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, name = self._listener.accept()
        except OSError:  # It has left again, or there are no descriptors; the next one is tried anew.
            return
        self._door.admit(sock, f"{FROM_TUNNEL}:{name[1]}")


async def _opened(process: asyncio.subprocess.Process, served: Served) -> Address:
    try:
        told = await asyncio.wait_for(_told(process), TUNNEL_START_SECONDS)
    except asyncio.TimeoutError:
        raise MeshUnavailableError(
            f"no tunnel: ngrok has not opened one within {TUNNEL_START_SECONDS:g} s; see `ngrok diagnose`"
        ) from None
    if "url" not in told:
        raise MeshUnavailableError(str(told.get("error", "no tunnel: its process has ended; see the lines above")))
    address = parse_address(str(told["url"]))
    return address if served.fingerprint or address.way != PORT else address._replace(way=INSECURE)


async def _told(process: asyncio.subprocess.Process) -> Dict[str, Any]:
    """The next thing that the tunnel's process says; nothing when it has ended."""
    assert process.stdout is not None
    while True:
        line = await process.stdout.readline()
        if not line:
            return {}
        try:
            told = json.loads(line)
        except ValueError:  # pyngrok, while it fetches ngrok.
            continue
        if isinstance(told, dict):
            return told


async def _check(address: Address, served: Served) -> None:
    """Wait until the mesh answers through the tunnel: what is printed works.

    Raises:
        MeshUnavailableError: It does not.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + TUNNEL_CHECK_SECONDS
    while True:
        left = max(0.1, deadline - loop.time())
        result = await loop.run_in_executor(None, probe, address, left)
        if _is_ours(result, served):
            return
        if loop.time() + _AGAIN_SECONDS > deadline:
            what = result.text or f"another mesh answers there, {result.mesh}"
            raise MeshUnavailableError(
                f"the tunnel is open at {address.url}, and the mesh does not answer through it: {what}; try again, or see ngrok's dashboard"
            )
        await asyncio.sleep(_AGAIN_SECONDS)


def _is_ours(result: ProbeResult, served: Served) -> bool:
    if result.kind == WEB:  # The proof that it is this mesh comes with each who joins.
        return " 200" in result.text
    return result.is_mesh and result.mesh == served.coordinator.mesh


async def _watch(process: asyncio.subprocess.Process, address: Address) -> None:
    why = str((await _told(process)).get("ended", "its process has ended"))
    logger.error(
        "the tunnel at %s is gone (%s): nobody comes in through it any more; start `gpumesh serve --public` again for another",
        address.url,
        why,
    )


async def _close(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), TUNNEL_END_SECONDS)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
