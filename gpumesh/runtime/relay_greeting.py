"""What the process of a task and the relay of its agent say to one another before the bytes of a connection follow."""

from __future__ import annotations

import struct
from typing import Any, Tuple

from gpumesh.errors import AuthenticationError, MeshUnavailableError, ProtocolError, VersionMismatchError

ASKED = struct.Struct("<IQ")
"""What a task's process says: its process id, its client number."""

ANSWERED = struct.Struct("<BIHI")
"""What it is told: 0 or a place in REFUSALS, how many workers there are, the length of the text that follows (the mesh's id, or why), and the
number of bytes that follow that and have come from the coordinator already. With it comes the connected socket itself, if it can be
handed over; else all further bytes go through this one."""

REFUSALS: Tuple[Any, ...] = (None, MeshUnavailableError, AuthenticationError, VersionMismatchError, ProtocolError)
