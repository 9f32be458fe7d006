"""A served mesh is announced on the local networks by a process beside the coordinator (`network.announcer`)."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
from typing import AsyncIterator, Sequence

from gpumesh.network.address import Address
from gpumesh.network.announcement import CERTIFICATE_DIGITS, MAX_NAME, clean
from gpumesh.network.ranking import is_only_local
from gpumesh.runtime.launch import child_environment
from gpumesh.runtime.serving import Beside, Served

logger = logging.getLogger("gpumesh")


def mesh_name(given: str = "") -> str:
    """What a mesh of this machine is called: as given, else by the machine's name, which need not mean anything to anybody."""
    return clean(given or socket.gethostname(), MAX_NAME).strip() or "gpumesh"


def announcing(name: str, named: Sequence[Address] = ()) -> Beside:
    """For `run_coordinator(beside=...)`: announce the mesh while it is served, unless only this machine could join.

    Nothing here delays or ends the mesh; what fails is logged.

    Args:
        named: Addresses that somebody has given by hand; a port of 0 is that of the mesh.
    """

    @contextlib.asynccontextmanager
    async def announce(served: Served) -> AsyncIterator[None]:
        if is_only_local(served.host) and not named:
            yield
            return
        told = {
            "mesh": served.coordinator.mesh,
            "name": mesh_name(name),
            "certificate": served.fingerprint.hex()[:CERTIFICATE_DIGITS],
            "host": served.host,
            "port": served.port,
            "named": [(each if each.port else each._replace(port=served.port)).url for each in named],
        }
        try:
            process = _start()
        except OSError as error:
            logger.warning("others cannot find this mesh by themselves: %s", error)
            yield
            return
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(told).encode() + b"\n")
                process.stdin.flush()
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # It says goodbye and ends, which need not be waited for.
            process.poll()

    return announce


def known_as(named: Sequence[Address]) -> Beside:
    """For `run_coordinator(beside=...)`: browsers may call it by these names, too."""

    @contextlib.asynccontextmanager
    async def know(served: Served) -> AsyncIterator[None]:
        served.coordinator.names.update(address.host for address in named)
        yield

    return know


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "gpumesh.network.announcer"], stdin=subprocess.PIPE, env=child_environment())
