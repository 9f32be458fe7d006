"""What the environment and the saved connection say; nothing here connects.

The connection file is JSON with `url`, `token` and, where they are known, `certificate`, `generated` (nobody chose the token), and `served`:
the tokens that were made up for other coordinators of this user's, by address. Only its owner can read it. `gpumesh serve` and `gpumesh join`
save it, `GPUMesh()` and the commands read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from typing import Any, Dict, List, Mapping, Optional, Tuple

from gpumesh.config import OBJECT_MEMORY_FRACTION
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import parse_bytes

logger = logging.getLogger("gpumesh")

_NO = ("", "0", "false", "no", "off")
_FILE = "connection.json"
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_SERVED_KEPT = 8  # Generated tokens of meshes served before; one port after the other is tried by hand.
LESSER_PREFIXES = ("gmw-", "gmm-")  # Beginnings of tokens that lend or measure only; see protocol.auth.


class Environment(NamedTuple):
    """The variables that gpumesh reads."""

    url: Optional[str]  # GPUMESH_URL
    token: Optional[str]  # GPUMESH_TOKEN
    is_local: bool  # GPUMESH_LOCAL: run on this machine, whatever mesh is named.
    verbosity: int  # GPUMESH_VERBOSE: 0, 1 (what ran where), 2 (everything).

    def __repr__(self) -> str:
        token = None if self.token is None else "..."
        return f"Environment(url={self.url!r}, token={token}, is_local={self.is_local}, verbosity={self.verbosity})"


def read_environment(variables: Optional[Mapping[str, str]] = None) -> Environment:
    """The variables as they are at this moment; `variables` stands in for `os.environ`."""
    found = os.environ if variables is None else variables

    def text(name: str) -> str:
        return found.get(name, "").strip()

    verbose = text("GPUMESH_VERBOSE").lower()
    return Environment(
        text("GPUMESH_URL") or None,
        text("GPUMESH_TOKEN") or None,
        text("GPUMESH_LOCAL").lower() not in _NO,
        0 if verbose in _NO else 2 if verbose in ("2", "3", "debug") else 1,
    )


def object_memory() -> int:
    """Bytes of objects that one host keeps in memory: GPUMESH_OBJECT_MEMORY ("4GB"), else a part of its RAM.

    Raises:
        ValueError: The variable is not a size.
    """
    text = os.environ.get("GPUMESH_OBJECT_MEMORY", "").strip()
    if text:
        return parse_bytes(text, what="GPUMESH_OBJECT_MEMORY")
    try:
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # Not on Windows.
        import psutil

        ram = int(psutil.virtual_memory().total)
    return int(ram * OBJECT_MEMORY_FRACTION)


def spill_dir() -> Optional[str]:
    """Where objects above that go: GPUMESH_SPILL_DIR; None: the system's temporary folder."""
    return os.environ.get("GPUMESH_SPILL_DIR", "").strip() or None


def connection_file() -> str:
    """Where the saved connection is kept: the user's folder for configuration."""
    if sys.platform == "linux":  # What platformdirs says too, without the 5 ms that importing it takes.
        folder = os.environ.get("XDG_CONFIG_HOME", "").strip()
        if not folder:
            folder = os.path.join(os.path.expanduser("~"), ".config")
        return os.path.join(folder, "gpumesh", _FILE)
    try:
        import platformdirs
    except ImportError:
        return os.path.join(os.path.expanduser("~"), ".config", "gpumesh", _FILE)
    return os.path.join(platformdirs.user_config_dir("gpumesh", appauthor=False), _FILE)


def save_connection(url: str, token: str, *, is_generated: bool = False, certificate: Optional[str] = None) -> bool:
    """Remember a mesh for this user's next `GPUMesh()` or command; the file is never readable by others, not even for a moment.

    Failing to do so is logged and nothing more: whoever saves has a mesh that works. A lesser token does not take the place of the full one
    that it follows from, and secrets that were made up for coordinators of this user's are kept whatever is saved beside them. A file that
    cannot be read as a connection may still hold a token: it is kept beside the new one.

    Args:
        is_generated: Nobody chose the secret: see `generated_token`. It stays so when the same connection is saved again.

        certificate: SHA-256 of the one that the mesh has shown, in hexadecimal, "" if it has none; None: what is saved of that address.

    Returns:
        Whether a connection with this token, or the full one that it follows from, is saved now.
    """
    path = connection_file()
    if token.startswith(LESSER_PREFIXES) and _follows_from_saved(token):
        return True
    is_generated = is_generated or generated_token(url) == token
    if certificate is None:
        certificate = saved_certificate(url)
    part = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.chmod(part, 0o600)  # Whatever an older file of this name was.
            record: Dict[str, Any] = {"url": url, "token": token, **({"generated": True} if is_generated else {})}
            served = {each: secret for each, secret in _generated().items() if each != url}
            if certificate:
                record["certificate"] = certificate
            if served:
                record["served"] = dict(list(served.items())[-_SERVED_KEPT:])
            json.dump(record, file)
        _keep_broken(path)
        os.replace(part, path)
    except OSError as error:
        logger.warning(
            "cannot save the connection in %s: %s; name the mesh with GPUMESH_URL and GPUMESH_TOKEN instead", path, error
        )
        return False
    return True


def _keep_broken(path: str) -> None:
    """What stands there and is no connection is moved aside, readable by its owner alone."""
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
        if isinstance(saved["url"], str) and isinstance(saved["token"], str):
            return
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    aside = f"{path}.broken"
    os.replace(path, aside)
    os.chmod(aside, 0o600)
    logger.warning("what was saved in %s was no connection; it is kept in %s, in case its token is needed", path, aside)


def _follows_from_saved(token: str) -> bool:
    from gpumesh.protocol.auth import metrics_token, worker_token

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with open(connection_file(), encoding="utf-8") as file:
            saved = json.load(file)["token"]
        return token in (worker_token(saved), metrics_token(saved))
    return False


def generated_token(url: str) -> Optional[str]:
    """The secret that was made up for a coordinator of this user's at that address; None: there is none.

    One that is started there again uses it again: those who work for it, and wait for it, know no other.
    """
    return _generated().get(url) or None


def other_served(url: Optional[str]) -> List[str]:
    """Addresses of other coordinators of this user's whose generated secrets are kept beside the saved connection."""
    return [each for each in _generated() if each != url]


def keep_generated(url: str, token: str) -> None:
    """The coordinator there has a new secret that nobody chose; which mesh this user's programs use stays as it is."""
    saved_url, saved = load_connection()
    certificate = saved_certificate(saved_url) if saved_url is not None else ""
    save_connection(url, token, is_generated=True)
    if saved_url is not None and saved is not None and saved_url != url:
        save_connection(saved_url, saved, certificate=certificate)


def saved_certificate(url: str) -> str:
    """SHA-256 of the certificate that the saved mesh has shown, in hexadecimal; "" where none is known, or another address is saved."""
    try:
        with open(connection_file(), encoding="utf-8") as file:
            saved = json.load(file)
        found = saved.get("certificate", "") if saved["url"] == url else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""  # `load_connection` says what is wrong with it.
    return found if isinstance(found, str) and _FINGERPRINT.fullmatch(found) else ""


def _generated() -> Dict[str, str]:
    """The generated secrets that are kept, by address: those of before, and the saved connection's."""
    try:
        with open(connection_file(), encoding="utf-8") as file:
            saved = json.load(file)
        found = saved.get("served", {})
        if saved.get("generated") is True:
            found = {**found, saved["url"]: saved["token"]}
        return {url: token for url, token in found.items() if isinstance(url, str) and isinstance(token, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # `load_connection` says what is wrong with it.


def load_connection() -> Tuple[Optional[str], Optional[str]]:
    """(url, token) as saved, (None, None) when nothing usable is. A file that others can read is closed to them, with a warning."""
    path = connection_file()
    try:
        with open(path, encoding="utf-8") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
                _close_to_others(path)
            saved = json.load(file)
        url, token = saved["url"], saved["token"]
        if not (isinstance(url, str) and isinstance(token, str)):
            raise ValueError("url and token are not both text")
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning(
            "cannot use the saved connection in %s (%s: %s); delete the file, or join again", path, type(error).__name__, error
        )
        return None, None
    return url or None, token or None


def _close_to_others(path: str) -> None:
    logger.warning(
        "others on this machine could read the token in %s; it is yours alone now: `gpumesh token rotate` draws a new one", path
    )
    with contextlib.suppress(OSError):
        os.chmod(path, 0o600)


def forget_connection() -> bool:
    """Delete the saved connection; whether there was one.

    Raises:
        OSError: It cannot be deleted.
    """
    try:
        os.unlink(connection_file())
    except FileNotFoundError:
        return False
    return True


def resolve_connection(url: Optional[str] = None, token: Optional[str] = None) -> Tuple[Optional[str], Optional[str]]:
    """Address and secret of the mesh to use: those given, else from the environment, else as saved.

    The saved secret is used only for the address that it was saved with.

    Returns:
        (None, None) or (None, token) when no mesh is named anywhere.

    Raises:
        ValueError: An address makes no sense; the message says where it came from.
    """
    from gpumesh.network.address import parse_address

    environment = read_environment()
    found = url if url is not None else environment.url
    secret = token if token is not None else environment.token
    if found is not None:
        try:
            address = parse_address(found)
        except ValueError as error:
            if url is None:
                raise ValueError(f"GPUMESH_URL: {error}") from None
            raise
        if secret is not None:
            return found, secret
    saved_url, saved_token = load_connection()
    if saved_url is None:
        return found, secret
    try:
        saved_address = parse_address(saved_url)
    except ValueError as error:
        logger.warning("the saved connection in %s is of no use: %s", connection_file(), error)
        return found, secret
    if found is None:
        return saved_url, secret if secret is not None else saved_token
    return found, saved_token if saved_address.is_at(address) else None
