"""What this process says of itself in a handshake."""

from __future__ import annotations

import sys
from secrets import token_bytes

from gpumesh.protocol.auth import NONCE_BYTES
from gpumesh.protocol.connection import PeerFacts
from gpumesh.version import __version__


def peer_facts() -> PeerFacts:
    """Versions and platform."""
    return PeerFacts(__version__, f"{sys.version_info[0]}.{sys.version_info[1]}", sys.platform)


def fresh_nonce() -> bytes:
    """32 random bytes for one handshake."""
    return token_bytes(NONCE_BYTES)
