"""A mesh on this machine whose parts take each other for other machines: what they exchange goes over TCP, on loopback."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from typing import Any, Dict, Iterator, List

NO_SHARED_MEMORY = "GPUMESH_NO_SHARED_MEMORY"
END_SECONDS = 10.0
_TOKEN = "GPUMESH_TOKEN"


class Far:
    """`gpumesh serve` and `gpumesh join`, each a command of its own. The worker shares no memory with the coordinator; a client may."""

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._token = secrets.token_hex(32)
        self._url = ""
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Far:
        with self._ends as ends:
            folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-"))  # For the connection that they save.
            environment = {**os.environ, _TOKEN: self._token, "XDG_CONFIG_HOME": folder, "PYTHONUNBUFFERED": "1"}
            said = ends.enter_context(_command(["serve", "--port", "0", "--no-self-worker"], environment))
            self._url = said.split("serving at ")[1].split(",")[0]
            far = {**environment, NO_SHARED_MEMORY: "1"}
            ends.enter_context(_command(["join", self._url, "--slots", str(self._slots)], far))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ends.close()

    @contextlib.contextmanager
    def client(self, *, is_far: bool) -> Iterator[Any]:
        """A `GPUMesh` of this process; far: it shares no memory with the coordinator either."""
        from gpumesh import GPUMesh

        if is_far:
            os.environ[NO_SHARED_MEMORY] = "1"
        try:
            with GPUMesh(self._url, token=self._token, fallback=False) as mesh:
                yield mesh
        finally:
            os.environ.pop(NO_SHARED_MEMORY, None)


@contextlib.contextmanager
def _command(arguments: List[str], environment: Dict[str, str]) -> Iterator[str]:
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
