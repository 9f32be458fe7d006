"""What the process of a task and the relay of its agent say to one another before the bytes of a connection follow."""

from __future__ import annotations

import struct
from typing import Any, Tuple

from gpumesh.errors import AuthenticationError, MeshUnavailableError, ProtocolError, VersionMismatchError

ASKED = struct.Struct("<IQ")
"""What a task's process says: its process id, its client number."""

ANSWERED = struct.Struct("<BIH")
"""What it is told: 0 or a place in REFUSALS, how many workers there are, and the length of the text that follows: the mesh's id, or why."""

REFUSALS: Tuple[Any, ...] = (None, MeshUnavailableError, AuthenticationError, VersionMismatchError, ProtocolError)
