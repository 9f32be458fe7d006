"""TLS for both sides of a mesh connection; what makes it safe is in `protocol.auth`, not here."""

from __future__ import annotations

import hashlib
import ssl
from typing import Any, Sequence

from gpumesh.network.certificates import Identity

MESH_PROTOCOL = "gpumesh/1"  # ALPN: what the bytes inside are.
HTTP_PROTOCOL = "http/1.1"


def server_context(identity: Identity) -> ssl.SSLContext:
    """For the listening side: TLS 1.2 or newer, no resumption (each connection is proved anew), mesh or HTTP inside."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(identity.certificate, identity.key)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    context.set_alpn_protocols([MESH_PROTOCOL, HTTP_PROTOCOL])
    return context


def client_context(protocols: Sequence[str] = (MESH_PROTOCOL,)) -> ssl.SSLContext:
    """For the dialing side; verifies no certificate.

    Certificates of meshes are signed by nobody. The proof of the token covers the hash of the one that was seen (`binding_of`):
    whoever stands between with another one cannot make the other side accept it.

    Args:
        protocols: ALPN names to offer, the preferred first.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(list(protocols))
    return context


def binding_of(tls: Any) -> bytes:
    """What ties a proof to this connection: SHA-256 of the peer's certificate in DER form.

    Args:
        tls: An `ssl.SSLSocket` or `ssl.SSLObject` after its handshake.
    """
    der = tls.getpeercert(binary_form=True)
    if not der:
        raise ssl.SSLError("the peer has shown no certificate")
    return hashlib.sha256(der).digest()
