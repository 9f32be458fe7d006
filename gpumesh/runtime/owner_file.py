"""The file of an owner's rules for this machine: found, read, written. Watches nothing and loads no event loop."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Iterator

from gpumesh.runtime.settings import connection_file

if TYPE_CHECKING:
    from gpumesh.scheduler.ownership import Rules

MAX_RULES_BYTES = 64 * 1024  # Of a file that a person may have edited.


def rules_file() -> str:
    """Where this user's rules for this machine are: beside the saved connection, and by host, for a home may be shared by many."""
    from gpumesh.devices.detect import host_name

    host = re.sub(r"[^A-Za-z0-9.-]", "_", host_name()) or "localhost"
    return os.path.join(os.path.dirname(connection_file()), f"owner-{host}.json")


def load_rules(path: str) -> Rules:
    """What the file says; no rules if there is none, and rules with `trouble` if it cannot be understood."""
    import json

    from gpumesh.scheduler.ownership import Rules
    from gpumesh.scheduler.ownership_forms import rules_from_plain

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_RULES_BYTES + 1)
        if len(text) > MAX_RULES_BYTES:
            raise ValueError(f"it has more than {MAX_RULES_BYTES} characters")
        return rules_from_plain(json.loads(text))
    except FileNotFoundError:
        return Rules()
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Rules(trouble=f"{path}: {why}")


def save_rules(path: str, rules: Rules) -> None:
    """Write the file in one step: whoever reads it sees the rules before or those after, and nobody else reads it at all.

    Raises:
        OSError: It cannot be written; the rules are as before.
    """
    import json

    from gpumesh.scheduler.ownership_forms import rules_to_plain

    part = f"{path}.{os.getpid()}"
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.chmod(part, 0o600)  # Whatever an older file of this name was.
            json.dump(rules_to_plain(rules), file, indent=1)
            file.flush()
            os.fsync(file.fileno())  # A pause outlives a crash of the machine.
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


@contextlib.contextmanager
def rules_locked(path: str) -> Iterator[None]:
    """Between reading the rules and writing them again: two commands at the same time must not undo each other.

    Raises:
        OSError: The folder cannot be written to.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(ImportError):  # Not on Windows.
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
