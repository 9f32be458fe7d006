"""A new token for the mesh, over the connection of a client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Tuple

from gpumesh.client.orders import give_order
from gpumesh.protocol.messages import RotateToken

if TYPE_CHECKING:
    from gpumesh.client.mesh import GPUMesh


def rotate_token(mesh: GPUMesh, grace: float) -> Tuple[str, bool]:
    """Let the coordinator draw a new token. What runs goes on, and so do connections; `mesh` itself knows the old one only.

    Args:
        grace: Seconds for which the old one still opens new connections.

    Returns:
        The new token, and whether the coordinator's next start uses it by itself: not when somebody chose the old one.

    Raises:
        MeshError: The coordinator did not: this connection is not encrypted, for example.
    """
    key = os.urandom(16)
    (channel,) = mesh._open_session().all_channels()
    token, is_kept = give_order(channel, lambda number: RotateToken(number, key, grace))
    return token, is_kept
