"""Who has a port of this machine: asks what answers there, and the system which process and user it is, as far as it tells."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import List, Optional, Tuple

from gpumesh.config import OCCUPANT_SECONDS
from gpumesh.model.records import NamedTuple
from gpumesh.network.address import Address
from gpumesh.network.probing import BUSY, MESH, OTHER, SILENT, VERSION, ProbeResult, clean, probe
from gpumesh.protocol import strangers

_LISTENS = "0A"  # As the kernel writes a socket's state.
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


class Occupant(NamedTuple):
    """What is known of who listens on a port; "" and 0 stand for unknown."""

    port: int
    kind: str = ""  # As `probing` calls what answers.
    stranger: str = ""  # Who it is where it is no mesh, as `probing` calls them.
    mesh: str = ""  # The id of the mesh, if it is one.
    gpumesh: str = ""  # Its version.
    pid: int = 0
    program: str = ""
    user: str = ""
    is_own: bool = False  # The user's who asks.
    since: str = ""  # In local time, for people.

    @property
    def is_there(self) -> bool:
        """Whether anybody has the port."""
        return bool(self.kind or self.pid or self.user)

    @property
    def is_mesh(self) -> bool:
        """Whether a coordinator has it, of whatever version."""
        return self.kind in (MESH, VERSION, BUSY)

    @property
    def text(self) -> str:
        """One clause: who it is."""
        if self.is_mesh:
            who = "a gpumesh coordinator"
            if self.mesh:
                who += f" of mesh {self.mesh}"
            if self.gpumesh:
                who += f" (gpumesh {self.gpumesh})"
        elif self.stranger in (strangers.HTTP, strangers.SSH, strangers.TLS):
            who = f"{self.stranger} that is no gpumesh coordinator"
        else:
            who = "another program"
        details = [f"process {self.pid} ({self.program})" if self.pid else "", f"since {self.since}" if self.since else ""]
        if self.user:
            details.insert(0, f"of user {self.user}" + (", as you are" if self.is_own else ""))
        told = ", ".join(each for each in details if each)
        return f"{who}, {told}" if told else who

    def advice(self, *, free: int) -> str:
        """What somebody may do who wants the port.

        Args:
            free: Another one that is not taken; 0: none is known.
        """
        other = f"choose another port with --port{f' {free}' if free else ''}"
        end = f"end it with `kill {self.pid}`" if self.pid else "end it"
        if self.is_mesh and (self.is_own or not self.user):
            return f"use that mesh, {end}, or {other}"
        if self.is_mesh:
            return f"that is somebody else's mesh; {other}"
        return f"{end}, or {other}" if self.is_own or not self.user else other


def occupant(host: str, port: int) -> Occupant:
    """Look; takes at most OCCUPANT_SECONDS.

    Args:
        host: Where this machine would reach what listens there.
    """
    pid, addresses = _listener(port)
    result = _first_answer([host, *addresses], port)
    found = Occupant(port)
    if result is not None:
        found = found._replace(kind=result.kind, stranger=result.stranger, mesh=result.mesh, gpumesh=result.gpumesh)
    uid = _uid_of(port)
    if uid is not None:
        found = found._replace(user=_user_name(uid), is_own=hasattr(os, "getuid") and uid == os.getuid())
    return _with_process(found, pid) if pid else found


def free_port_after(port: int, count: int = 20) -> int:
    """The next port that nobody has; 0 if there is none among the next few."""
    for each in range(port + 1, min(port + 1 + count, 65536)):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", each))
            return each
    return 0


def _first_answer(hosts: List[str], port: int) -> Optional[ProbeResult]:
    """What answers at the first of these where anything does."""
    deadline = time.monotonic() + OCCUPANT_SECONDS
    for host in dict.fromkeys(hosts):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        result = probe(Address(host, port), left)
        if result.kind in (MESH, VERSION, BUSY, OTHER, SILENT):
            return result
    return None


def _listener(port: int) -> Tuple[int, List[str]]:
    """Process (0: the system does not tell) and addresses of what listens there."""
    import psutil

    try:
        rows = psutil.net_connections("tcp")
    except (psutil.Error, OSError):  # macOS tells only the superuser.
        return 0, []
    found = [row for row in rows if row.status == psutil.CONN_LISTEN and row.laddr and row.laddr.port == port]
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    pids = [int(row.pid) for row in found if row.pid]
    return (pids[0] if pids else 0), [near.get(row.laddr.ip, row.laddr.ip) for row in found]


def _uid_of(port: int) -> Optional[int]:
    """The user of a listening port, which Linux tells everybody."""
    if sys.platform != "linux":
        return None
    for table in _TABLES:
        with contextlib.suppress(OSError, ValueError, IndexError), open(table, encoding="ascii") as file:
            next(file)
            for line in file:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    return int(fields[7])
    return None


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _with_process(found: Occupant, pid: int) -> Occupant:
    import psutil

    try:
        process = psutil.Process(pid)
        started = time.localtime(process.create_time())
        since = time.strftime("%H:%M" if started[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", started)
        user = found.user or process.username()
        own = found.is_own or (not found.user and user == psutil.Process().username())
        return found._replace(pid=pid, program=clean(process.name(), 40), user=user, is_own=own, since=since)
    except psutil.Error:
        return found._replace(pid=pid)
