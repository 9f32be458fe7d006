"""Mutual proof of the shared token over fresh nonces; the token itself never travels.

The dialer proves first, so a stranger who merely connects learns nothing to test guesses on. Each proof is
HMAC-SHA-256 (RFC 2104) keyed with the token over a label and the whole handshake so far, each part with its length before it,
so that neither a replay, a reflection nor a different cut of the same bytes passes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

NONCE_BYTES = 32
DIALER_LABEL = b"gpumesh dialer 1"
LISTENER_LABEL = b"gpumesh listener 1"


def make_proof(label: bytes, token: str, hello: bytes, challenge: bytes, binding: bytes) -> bytes:
    """The 32-byte proof of one side.

    Args:
        label: Which side proves.
        token: The shared secret.
        hello: Encoded body of Hello, the dialer's nonce in it.
        challenge: Encoded body of Challenge, the listener's nonce in it.
        binding: What ties the proof to the channel (a hash of the TLS certificate), or nothing.
    """
    # A token from the environment may hold bytes that are not UTF-8; they stand in it as surrogates.
    mac = hmac.new(token.encode("utf-8", "surrogateescape"), digestmod=hashlib.sha256)
    for part in (label, hello, challenge, binding):
        mac.update(struct.pack("<I", len(part)))
        mac.update(part)
    return mac.digest()


def proofs_match(one: bytes, other: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(one, other)
