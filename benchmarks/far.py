"""Meshes on this machine of commands: `gpumesh serve` and `gpumesh join`, each a process of its own, as on several machines."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from typing import Any, Iterator, List, Mapping

NO_SHARED_MEMORY = "GPUMESH_NO_SHARED_MEMORY"
END_SECONDS = 10.0
_TOKEN = "GPUMESH_TOKEN"


class Commands:
    """A coordinator, and the workers that `join` adds; all end with the block."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(32)
        self._url = ""
        self._environment: Mapping[str, str] = {}
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Commands:
        with self._ends as ends:
            folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-"))  # For the connection that they save.
            folders = {"XDG_CONFIG_HOME": folder, "XDG_STATE_HOME": folder}
            self._environment = {**os.environ, _TOKEN: self._token, **folders, "PYTHONUNBUFFERED": "1"}
            options = ["--port", "0", "--no-self-worker", "--db", os.path.join(folder, "jobs.db")]
            said = ends.enter_context(_command(["serve", "--host", "127.0.0.1", *options], self._environment))
            self._url = said.split("serving at ")[1].split(",")[0]
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ends.close()

    @property
    def environment(self) -> Mapping[str, str]:
        """Of programs that are to use the mesh."""
        return {**self._environment, "GPUMESH_URL": self._url}

    def join(self, *options: str, environment: Mapping[str, str]) -> None:
        """Add a worker; it has joined when this returns."""
        self._ends.enter_context(_command(["join", self._url, *options], {**self._environment, **environment}))

    @contextlib.contextmanager
    def worker(self, url: str, *options: str) -> Iterator[None]:
        """A worker that joins by another address, and leaves with the block."""
        with _command(["join", url, *options], self._environment):
            yield

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A `GPUMesh` of this process."""
        from gpumesh import GPUMesh

        with GPUMesh(self._url, token=self._token, fallback=False) as mesh:
            yield mesh


class Far:
    """A mesh whose parts take each other for other machines: what they exchange goes over TCP, on loopback.

    The worker shares no memory with the coordinator; a client may.
    """

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._commands = Commands()

    def __enter__(self) -> Far:
        with contextlib.ExitStack() as ends:
            ends.enter_context(self._commands)
            self._commands.join("--slots", str(self._slots), environment={NO_SHARED_MEMORY: "1"})
            ends.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._commands.__exit__()

    @contextlib.contextmanager
    def client(self, *, is_far: bool) -> Iterator[Any]:
        """A `GPUMesh` of this process; far: it shares no memory with the coordinator either."""
        if is_far:
            os.environ[NO_SHARED_MEMORY] = "1"
        try:
            with self._commands.client() as mesh:
                yield mesh
        finally:
            os.environ.pop(NO_SHARED_MEMORY, None)


@contextlib.contextmanager
def _command(arguments: List[str], environment: Mapping[str, str]) -> Iterator[str]:
    """A gpumesh command, once it has said its first line, and that line; it is ended as by Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpumesh", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # So that Ctrl-C at the harness reaches only us.
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "gpumesh:" not in line:
            raise RuntimeError(f"gpumesh {arguments[0]} said {line!r}")
        yield line
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
