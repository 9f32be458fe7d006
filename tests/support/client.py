"""A client without the decorator: one session, and `remote` with the options of a TaskSpec."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from gpumesh.client.futures import MeshFuture
from gpumesh.client.session import Session
from gpumesh.model.resources import Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.serialization import functions, values


def _no_local() -> Any:
    raise AssertionError("this client must not fall back to its own machine")


class Client:
    """One client of one mesh; by default it fails rather than run anything on its own machine."""

    def __init__(self, url: Optional[str], token: Optional[str], **session: Any) -> None:
        session.setdefault("start_local", _no_local)
        session.setdefault("fallback", False)
        session.setdefault("is_own_mesh", True)  # Workers are waited for.
        self.session = Session(url=url, token=token, **session)
        self._exporter = functions.Exporter()

    def remote(self, function: Callable[..., Any], *args: Any, cores: int = 0, **options: Any) -> MeshFuture:
        """Submit one task."""
        exported = self._exporter.export(function)
        spec = TaskSpec(exported.digest, exported.name, Requirement(cores=cores), **options)
        handle = self.session.define(exported, spec)
        future = MeshFuture(handle)
        future.task_id = self.session.submit(handle, values.dumps_call(args, {}, what="arguments"), future)
        return future

    def workers(self) -> List[Any]:
        """As `mesh.workers()`."""
        return list(self.session.query("workers"))

    def close(self) -> None:
        """End the session."""
        self.session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
