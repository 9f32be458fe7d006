"""What both sides have of a package that a value could not be rebuilt for: this machine's part of the sentence, and a worker's."""

from __future__ import annotations

from typing import Any, Dict

from gpumesh.errors import MeshError, SerializationError
from gpumesh.serialization.versions import host_name, show_version

ASK_SECONDS = 2.0


def tell_of_task(error: SerializationError, worker: str) -> None:
    """A function or its arguments could not be rebuilt on a worker: add this machine's version.

    Args:
        error: As it came from there; its message becomes longer.
        worker: The worker's id.
    """
    there = f"on worker {error.machine} ({worker})" if worker else f"on {error.machine}"
    _add(error, error.package, f"{error.version} {there}", f"{show_version(error.package)} on this machine, {host_name()}")


def tell_of_value(failure: MeshError, cause: SerializationError, session: Any, worker: str) -> None:
    """A task's value could not be rebuilt on this machine: add the worker's version.

    Args:
        failure: What the caller gets; its message becomes longer.
        cause: What says which package it is about.
        session: Knows the workers.
        worker: The id of the one that made the value.
    """
    facts = _facts_of(worker, session)
    where = f"worker {facts['hostname']} ({worker})" if facts else f"worker {worker}"
    versions: Dict[str, str] = dict(facts.get("versions") or {})
    version = versions.get(cause.package)
    told = f"{version} on {where}" if version else f"of a version that {where} does not tell"
    _add(failure, cause.package, f"{cause.version} on this machine, {cause.machine}", told)


def _facts_of(worker: str, session: Any) -> Dict[str, Any]:
    try:
        for facts in session.query("workers", timeout=ASK_SECONDS):
            if facts["id"] == worker:
                return dict(facts)
    except MeshError:
        pass  # Then the error says less.
    return {}


def _add(error: MeshError, package: str, here: str, there: str) -> None:
    words = f"{package} is {here}, and {there}"
    error.args = (f"{error.args[0] if error.args else ''}; {words}", *error.args[1:])
