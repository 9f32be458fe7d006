"""Mutual proof of the shared token over fresh nonces; the token itself never travels.

The dialer proves first, so a stranger who merely connects learns nothing to test guesses on. Each proof is
HMAC-SHA-256 (RFC 2104) keyed with the token over a label and the whole handshake so far, each part with its length before it,
so that neither a replay, a reflection nor a different cut of the same bytes passes.

Two lesser tokens follow from the full one, and nothing leads back: whoever has one of them has what it grants and no more.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import List, Tuple

NONCE_BYTES = 32
DIALER_LABEL = b"gpumesh dialer 1"
LISTENER_LABEL = b"gpumesh listener 1"

FULL = "full"  # What a token grants: everything.
WORKER = "worker"  # Lending a machine.
METRICS = "metrics"  # Reading /metrics; nothing on the mesh itself.

_WORKER_PREFIX = "gmw-"
_METRICS_PREFIX = "gmm-"


def make_proof(label: bytes, token: str, hello: bytes, challenge: bytes, binding: bytes) -> bytes:
    """The 32-byte proof of one side.

    Args:
        label: Which side proves.
        token: The shared secret.
        hello: Encoded body of Hello, the dialer's nonce in it.
        challenge: Encoded body of Challenge, the listener's nonce in it.
        binding: What ties the proof to the channel (a hash of the TLS certificate), or nothing.
    """
    mac = hmac.new(_key(token), digestmod=hashlib.sha256)
    for part in (label, hello, challenge, binding):
        mac.update(struct.pack("<I", len(part)))
        mac.update(part)
    return mac.digest()


def proofs_match(one: bytes, other: bytes) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(one, other)


def worker_token(token: str) -> str:
    """The token that lends a machine to the mesh of this full token and can do nothing else there."""
    return _WORKER_PREFIX + _derived(token, b"gpumesh worker token 1")


def metrics_token(token: str) -> str:
    """The token that reads the metrics of the mesh of this full token and can do nothing else there."""
    return _METRICS_PREFIX + _derived(token, b"gpumesh metrics token 1")


def mesh_grants(token: str) -> List[Tuple[str, str]]:
    """The secrets that a mesh with this full token lets in, each with what it grants: for `Connection.listen(tokens=...)`."""
    return [(token, FULL), (worker_token(token), WORKER)]


def kind_of(token: str) -> str:
    """What a token says of itself: `WORKER`, `METRICS`, or `FULL` for any other. Only the mesh knows whether it is one of its own."""
    for prefix, kind in ((_WORKER_PREFIX, WORKER), (_METRICS_PREFIX, METRICS)):
        rest = token[len(prefix) :]
        if token.startswith(prefix) and len(rest) == 64 and all(letter in "0123456789abcdef" for letter in rest):
            return kind
    return FULL


def _derived(token: str, label: bytes) -> str:
    return hmac.new(_key(token), label, hashlib.sha256).hexdigest()


def _key(token: str) -> bytes:
    # A token from the environment may hold bytes that are not UTF-8; they stand in it as surrogates.
    return token.encode("utf-8", "surrogateescape")
