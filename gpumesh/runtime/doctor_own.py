"""Whether others can reach a coordinator of this machine: every address that it may tell them is tried from here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import List, Sequence, Tuple

from gpumesh.config import OWN_ADDRESS_SECONDS
from gpumesh.network import probing
from gpumesh.network.address import Address
from gpumesh.network.interfaces import host_addresses
from gpumesh.network.probing import ProbeResult, probe
from gpumesh.network.ranking import rank
from gpumesh.runtime.findings import Finding, note, ok, warning

_AT_ONCE = 16  # Addresses; machines with more have them from a script, and wait a little longer.


def check_others(port: int, way: str = "") -> List[Finding]:
    """For a coordinator that listens on `port` here: which of this machine's addresses it answers at.

    Only that an address does not work can be known from here; whether a firewall or a router lets others in cannot.
    """
    here = probe(Address("127.0.0.1", port), OWN_ADDRESS_SECONDS)
    addresses = [Address(each.ip, port, way) for each in rank(host_addresses())]
    if not addresses:
        return [note("reach", "this machine is in no network; only programs on it can connect")]
    answering, silent = try_all(addresses)
    mesh = here.mesh or (answering[0].mesh if answering else "")
    found = []
    mine = [each for each in answering if each.mesh == mesh]
    if mine:
        urls = ", ".join(each.address.url for each in mine)
        found.append(ok("reach", f"the coordinator answers at {urls}, tried from this machine"))
        found.append(
            note(
                "reach",
                "whether firewalls and routers let others in cannot be known from here",
                f"run this on another machine: gpumesh doctor {mine[0].address.url}",
            )
        )
    for each in answering:
        if each.mesh != mesh:
            found.append(warning("reach", f"at {each.address} another mesh answers, {each.mesh}", "end one of the two"))
    if silent and not mine and all(each.kind == probing.REFUSED for each in silent):
        found.append(note("reach", "the coordinator listens for this machine alone", "leave --host out for others to join"))
    else:
        for each in silent:
            clause, _, advice = each.text.partition("; ")
            found.append(warning("reach", f"the coordinator does not answer at {each.address}: {clause}", advice))
    return found


def try_all(addresses: Sequence[Address]) -> Tuple[List[ProbeResult], List[ProbeResult]]:
    """What answers, and what does not, in their order; takes at most OWN_ADDRESS_SECONDS for each 16 of them."""
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(addresses)))) as pool:
        results = list(pool.map(lambda address: probe(address, OWN_ADDRESS_SECONDS), addresses))
    return [each for each in results if each.is_mesh], [each for each in results if not each.is_mesh]
