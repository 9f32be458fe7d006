"""What a coordinator that has just opened its port finds out before it tells anybody its addresses: whether it answers there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import AsyncIterator, Callable, Collection, List, Sequence

from gpumesh.network import probing
from gpumesh.network.address import INSECURE, PORT, Address, is_loopback
from gpumesh.runtime.serving import Beside, Served


def reaching(named: Sequence[Address], on_checked: Callable[[List[str]], object]) -> Beside:
    """For `run_coordinator(beside=...)`: try every address that others will be told, and look for a firewall. Delays the start by
    OWN_ADDRESS_SECONDS at most, usually by some milliseconds.

    Args:
        named: Addresses that somebody has given by hand; a port of 0 is that of the mesh.
        on_checked: Told what may keep others out, one text each.
    """

    @contextlib.asynccontextmanager
    async def beside(served: Served) -> AsyncIterator[None]:
        on_checked(await asyncio.get_running_loop().run_in_executor(None, obstacles, served, named))
        yield

    return beside


def obstacles(served: Served, named: Sequence[Address]) -> List[str]:
    """What may keep others out; blocks."""
    from gpumesh.runtime.doctor_firewall import active_firewalls, hint
    from gpumesh.runtime.doctor_own import try_all
    from gpumesh.runtime.serving_addresses import join_addresses

    way = PORT if served.fingerprint else INSECURE
    addresses = [each for each in join_addresses(served.host, served.port, way, named) if not is_loopback(each.host)]
    if not addresses:
        return []
    by_hand = {each.host for each in named}
    answering, silent = try_all(addresses)
    said = []
    for result in silent:
        said.append(f"{result.address.url} does not answer when it is tried from here: {_why(result, by_hand)}")
    for result in answering:
        if result.mesh != served.coordinator.mesh:
            said.append(
                f"at {result.address.url} another mesh answers, {result.mesh}; others who use this address join that one"
            )
    firewalls = active_firewalls()
    if firewalls:
        finding = hint(firewalls, served.port)
        said.append(f"{finding.text}; if they cannot connect: {finding.advice}")
    return said


def _why(result: probing.ProbeResult, by_hand: Collection[str]) -> str:
    if result.address.host in by_hand:
        return f"{result.text.partition('; ')[0]}; a router in between may let in only who comes from outside"
    return result.text
