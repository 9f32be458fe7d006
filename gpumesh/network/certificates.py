"""The certificate of a coordinator: made once, kept in the user's folder for state, or brought by its owner.

Nobody is asked to trust it, and nobody verifies it: both sides of a connection put its hash into their proofs of the token instead
(`protocol.auth`), and who stands between them with another certificate fails there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from typing import Optional

from gpumesh.model.records import NamedTuple

logger = logging.getLogger("gpumesh")

_FILE = "identity.pem"  # Key and certificate in one: they cannot be mixed up by two that write at once.
VALID_DAYS = 20 * 365  # Nothing relies on its end; some TLS libraries refuse one that has expired.


class Identity(NamedTuple):
    """A certificate and its private key."""

    certificate: str  # Path of a PEM file; further certificates of a chain may follow the first.
    key: str  # Path of a PEM file.
    fingerprint: bytes  # SHA-256 of the first certificate's DER form: what the proofs are bound to.


def state_folder() -> str:
    """The user's folder for state; what is in it belongs to this machine."""
    if sys.platform == "linux":  # What platformdirs says too, without the 5 ms that importing it takes.
        folder = os.environ.get("XDG_STATE_HOME", "").strip() or os.path.join(os.path.expanduser("~"), ".local", "state")
        return os.path.join(folder, "gpumesh")
    import platformdirs

    return platformdirs.user_state_dir("gpumesh", appauthor=False)


def load_or_make_identity(folder: Optional[str] = None) -> Identity:
    """The certificate that is kept in `folder` (the user's folder for state, if not given); made at the first call.

    Two that start at the same time agree on the one that was there first.

    Raises:
        OSError: It cannot be read or written; the message says which file, and what to do.
    """
    folder = folder or state_folder()
    path = os.path.join(folder, _FILE)
    if not os.path.exists(path):
        part = f"{path}.{os.getpid()}"
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            _write(part, _make())
            try:
                os.link(part, path)
            except FileExistsError:
                pass
            finally:
                os.unlink(part)
        except OSError as error:
            why = error.strerror or error
            raise OSError(
                error.errno, f"cannot keep a certificate in {folder}: {why}; make the folder writable, or give --cert and --key"
            ) from error
    _close_to_others(path)
    return read_identity(path, path)


def _close_to_others(path: str) -> None:
    """Whoever has read the key can stand between the machines of the mesh unseen, if he knows the token as well."""
    with contextlib.suppress(OSError):  # `read_identity` says what is wrong with the file.
        if os.name == "posix" and os.stat(path).st_mode & 0o077:
            os.chmod(path, 0o600)
            logger.warning(
                "others on this machine could read the key in %s; it is yours alone now: delete it to have a new one", path
            )


def read_identity(certificate: str, key: str) -> Identity:
    """A certificate and its key from PEM files.

    Raises:
        OSError: One of them cannot be read, is not PEM, or they do not belong together; the message says what to do.
    """
    import ssl

    for path, what in ((certificate, "certificate"), (key, "key")):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise OSError(error.errno, f"cannot read the {what} {path}: {error.strerror}; check --cert and --key") from error
    try:
        with open(certificate, encoding="ascii", errors="strict") as file:
            pem = file.read()
        begin = pem.index("-----BEGIN CERTIFICATE-----")
        end = pem.index("-----END CERTIFICATE-----", begin) + len("-----END CERTIFICATE-----")
        der = ssl.PEM_cert_to_DER_cert(pem[begin:end])
    except ValueError:
        raise OSError(f"{certificate} holds no certificate in PEM form; give the file that begins with -----BEGIN") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise OSError(
            f"the key {key} cannot be used with the certificate {certificate} ({getattr(error, 'reason', None) or error}); "
            "give the unencrypted PEM key that belongs to it, or delete both to have new ones made"
        ) from None
    return Identity(certificate, key, hashlib.sha256(der).digest())


def _make() -> bytes:
    """A new key and its self-signed certificate, as PEM."""
    from datetime import datetime, timedelta, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpumesh")])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # The other side's clock may be behind.
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("gpumesh")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    secret = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret + made.public_bytes(serialization.Encoding.PEM)


def _write(path: str, data: bytes) -> None:
    """Never readable by others, not even for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        os.chmod(path, 0o600)  # Whatever an older file of this name was.
        file.write(data)
