"""Under which addresses others find a coordinator of this machine."""

from __future__ import annotations

from typing import List, Sequence

from gpumesh.network.address import PORT, Address
from gpumesh.network.interfaces import host_addresses
from gpumesh.network.ranking import ANY, advertised, is_only_local


def reachable_hosts(host: str) -> List[str]:
    """Addresses of this machine for a coordinator that listens on `host`, the one to try first in front; none without a network."""
    if is_only_local(host):
        return [host]
    return [each.host for each in advertised(host, 1, host_addresses() if host in ANY else [])]


def join_addresses(host: str, port: int, way: str, named: Sequence[Address]) -> List[Address]:
    """What the line for other machines may show, the best first.

    Args:
        way: Of those that are this machine's own.
        named: Addresses that somebody has given by hand; they come first. A port of 0 is `port`.
    """
    by_hand = [each._replace(port=each.port or port, way=way if each.way == PORT else each.way) for each in named]
    if by_hand and is_only_local(host):
        return list(dict.fromkeys(by_hand))  # The other end of a tunnel: of no use to others is what it leads to.
    return list(dict.fromkeys([*by_hand, *(Address(each, port, way) for each in reachable_hosts(host))]))
