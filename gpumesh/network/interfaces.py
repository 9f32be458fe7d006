"""This machine's own addresses, as its system tells them: no name is looked up, and nobody outside is asked."""

from __future__ import annotations

import os
import socket
import sys
from typing import List

from gpumesh.network.ranking import BRIDGE, LAN, LOOPBACK, VPN, HostAddress, kind_of_interface

_TUNNEL_TYPES = (65534, 512, 768, 776, 778)  # Linux' ARPHRD_*: no link layer (tun, WireGuard), PPP, tunnels.


def host_addresses() -> List[HostAddress]:
    """Every address of every interface, IPv4 and IPv6, as the system lists them, also those that are down."""
    import psutil

    found: List[HostAddress] = []
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        flags = getattr(state, "flags", "")
        is_loopback = "loopback" in flags or any(each.address in ("127.0.0.1", "::1") for each in addresses)
        kind = _kind(name, is_loopback=is_loopback)
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.append(HostAddress(_with_zone(each.address, name), name, kind, state is None or bool(state.isup)))
    return found


def in_container() -> bool:
    """Whether this process is in a container: its addresses may then be known to its host alone."""
    if sys.platform != "linux":
        return False
    return (
        os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
    )


def _kind(name: str, *, is_loopback: bool) -> str:
    kind = kind_of_interface(name, is_loopback=is_loopback)
    if kind != LAN or sys.platform != "linux":
        return kind
    try:
        with open(f"/sys/class/net/{name}/type", encoding="ascii") as file:
            return VPN if int(file.read()) in _TUNNEL_TYPES else LAN
    except (OSError, ValueError):
        return LAN


def _with_zone(ip: str, interface: str) -> str:
    if ":" in ip and ip.lower().startswith("fe80:") and "%" not in ip:
        return f"{ip}%{interface}"
    return ip.partition("%")[0] if "%" in ip and not ip.lower().startswith("fe80:") else ip


__all__ = ["BRIDGE", "LAN", "LOOPBACK", "VPN", "HostAddress", "host_addresses", "in_container"]
