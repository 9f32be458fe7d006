"""Under which addresses others find a coordinator of this machine."""

from __future__ import annotations

import socket
from typing import List

from gpumesh.network.tcp import ALL, ANY

_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))  # Set aside for documentation: nobody is there.


def reachable_hosts(host: str) -> List[str]:
    """Addresses of this machine for a coordinator that listens on `host`, the one to try first in front."""
    if host not in ANY:
        return [host]
    found: List[str] = []
    for family, elsewhere in _ELSEWHERE:
        if host != ALL and (family == socket.AF_INET6) != (":" in host):
            continue
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(
                    (elsewhere, 9)
                )  # Sends nothing: it only asks the routing table which address of ours would be used.
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue  # No route there.
    return found or [socket.gethostname()]
