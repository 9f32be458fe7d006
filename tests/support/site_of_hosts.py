"""A mesh of commands, `gpumesh serve` and `gpumesh join`, on hosts of their own (tests/support/hosts.py) or all on loopback.

They notice silence after two seconds instead of half a minute, unless told otherwise; tasks say where they run (tests/support/lent.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import MeshUnavailableError
from gpumesh.protocol import connection as protocol
from tests.integration.programs import Program
from tests.support import lent
from tests.support.hosts import REPOSITORY, Host, Hosts, thaw, why_not
from tests.support.processes import free_port, until

TOKEN = "between hosts"
PORT = 8000
SOON = 30.0  # Far beyond what is waited for, also on a busy machine.
QUICK = {
    "HEARTBEAT_SECONDS": 0.4,
    "SILENCE_SECONDS": 2.0,
    "HANDSHAKE_SECONDS": 2.5,
}  # The last: heartbeats begin when it is over.
USUAL: Mapping[str, float] = {}


class Site:
    """A coordinator, workers and clients; the coordinator is on the first host.

    Args:
        folder: For all that they write, and for the marks that tasks leave.
        hosts: None: everything is on loopback.
        times: What is other than in config.py, in the coordinator and the workers.
    """

    def __init__(self, folder: Path, hosts: Optional[Hosts] = None, *, times: Mapping[str, float] = QUICK) -> None:
        self.folder = folder
        self.hosts = hosts
        self.times = times
        self.marks = folder / "marks"
        self.marks.mkdir()
        address = hosts.one.address if hosts else "127.0.0.1"
        self.port = PORT if hosts else free_port()
        self.url = f"http://{address}:{self.port}"
        self.coordinators: List[Program] = []
        self.workers: Dict[str, Program] = {}
        self._local: List[Program] = []

    @property
    def coordinator(self) -> Program:
        """The one that was started last."""
        return self.coordinators[-1]

    def serve(self, *words: str) -> Program:
        """Start the coordinator, at the same address each time; it listens when this returns."""
        address = self.url.rpartition("/")[2].rpartition(":")[0]
        host = self.hosts.one if self.hosts else None
        serve = ["serve", "--host", address, "--port", str(self.port), "--no-self-worker", *words]
        program = self.command(host, serve, self.environment("coordinator"))
        self.coordinators.append(program)
        program.wait_for("serving at", SOON)
        return program

    def join(
        self,
        place: str,
        host: Optional[Host] = None,
        *,
        slots: int = 1,
        before: Sequence[str] = (),
        environment: Optional[Mapping[str, str]] = None,
    ) -> Program:
        """A worker, once it has joined; its tasks know it as `place`, and it has the tag place=... .

        Args:
            before: Words in front of the command: what runs it.
            environment: More of it, or other.
        """
        program = self._begin(place, host, slots, before, environment or {})
        program.wait_for("works for", SOON)
        return program

    def join_all(self, *on_loopback: str, slots: int = 1, **on_hosts: Host) -> None:
        """Workers, started at the same time."""
        places = {**dict.fromkeys(on_loopback), **on_hosts}
        for program in [self._begin(place, host, slots, (), {}) for place, host in places.items()]:
            program.wait_for("works for", SOON)

    def _begin(
        self, place: str, host: Optional[Host], slots: int, before: Sequence[str], environment: Mapping[str, str]
    ) -> Program:
        words = ["join", self.url, "--slots", str(slots), "--score", "1", "--tag", f"place={place}"]
        program = self.command(host, words, {**self.environment(place), **environment}, before=before)
        self.workers[place] = program
        return program

    def command(
        self, host: Optional[Host], words: Sequence[str], environment: Mapping[str, str], *, before: Sequence[str] = ()
    ) -> Program:
        """Any gpumesh command."""
        times = [f"{name}={value}" for name, value in self.times.items()]
        command = [*before, sys.executable, "-m", "tests.support.other_times", *times, "--", *words]
        if host is not None:
            return host.program(*command, environment=environment)
        program = Program(command, environment)
        self._local.append(program)
        return program

    def environment(self, place: str) -> Dict[str, str]:
        """Of a command there: nothing of this user's."""
        home = str(self.folder / f"home-{place}")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMESH_", "PYTEST_"))}
        return {
            **kept,
            "HOME": home,
            "XDG_CONFIG_HOME": f"{home}/config",
            "XDG_CACHE_HOME": f"{home}/cache",
            "XDG_DATA_HOME": f"{home}/data",
            "XDG_STATE_HOME": f"{home}/state",
            "GPUMESH_TOKEN": TOKEN,
            "GPUMESH_URL": self.url,
            "GPUMESH_PROBE": "0",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            "NO_COLOR": "1",
            lent.PLACE: place,
        }

    @contextlib.contextmanager
    def client(self, host: Optional[Host] = None, **options: Any) -> Iterator[GPUMesh]:
        """A client of this process and thread, which is on that host for so long."""
        options.setdefault("fallback", False)
        with host.inside() if host is not None else contextlib.nullcontext():
            with GPUMesh(self.url, token=TOKEN, **options) as mesh:
                yield mesh

    # --- tasks: lent.hold, which wait for a word

    def hold(self, mesh: GPUMesh, *names: str, **options: Any) -> List[Any]:
        """A task of each name; each runs until `go`."""
        function = accelerate(mesh, **options)(lent.hold)
        return [function.remote(str(self.marks), name) for name in names]

    def go(self, *names: str) -> None:
        """Let these end; without names, all that ever come."""
        for name in names or ("all",):
            (self.marks / f"{name}.go").touch()

    def starts(self) -> List[Tuple[str, str]]:
        """(task, place) of each start, in their order."""
        marks = [mark.name.split(".") for mark in self.marks.glob("*.started")]
        return [(mark[0], mark[1]) for mark in sorted(marks, key=lambda mark: int(mark[2]))]

    def until_started(self, name: str, *, times: int = 1) -> str:
        """Wait for the start of a task; the place of the last one."""

        def places() -> List[str]:
            found = [place for one, place in self.starts() if one == name]
            return found if len(found) >= times else []

        return until(places, SOON, what=f"{name} started {times} times; {self.starts()}")[-1]

    # --- workers, as the coordinator sees them

    def views(self, mesh: GPUMesh, place: str) -> List[Dict[str, Any]]:
        """Records of this worker, dead ones included; none while the client has no connection."""
        try:
            return [view for view in mesh.workers() if view["tags"].get("place") == place]
        except MeshUnavailableError:
            return []

    def alive(self, mesh: GPUMesh, place: str) -> List[str]:
        """Ids under which it is alive."""
        return [str(view["id"]) for view in self.views(mesh, place) if view["alive"]]

    def ident(self, mesh: GPUMesh, place: str) -> str:
        """The id of this worker, which is alive or about to be."""
        (found,) = until(lambda: self.alive(mesh, place), SOON, what=f"{place} joined")
        return found

    def until_alive(self, mesh: GPUMesh, place: str, *, is_it: bool = True, timeout: float = SOON) -> float:
        """Wait until it is (or is not) taken to be alive; the seconds that took."""
        started = time.monotonic()
        until(lambda: bool(self.alive(mesh, place)) == is_it, timeout, what=f"{place} alive={is_it}: {self.views(mesh, place)}")
        return time.monotonic() - started

    def complaints(self) -> List[str]:
        """What the programs said of lost peers, errors and tracebacks."""
        words = re.compile(r"lost|left:|no sign of life|Traceback|Error|error")
        programs = [*self.coordinators, *self.workers.values()]
        return [line for program in programs for _, line in program.lines if words.search(line)]

    def tracebacks(self) -> List[str]:
        """Errors of gpumesh's own that it did not expect."""
        words = re.compile(r"Traceback|AssertionError|Exception in|never retrieved")
        programs = [*self.coordinators, *self.workers.values()]
        return [program.output for program in programs if words.search(program.output)]

    def story(self) -> str:
        """All that the programs said, and where tasks have started."""
        parts = [f"--- coordinator {number}\n{program.output}" for number, program in enumerate(self.coordinators, 1)]
        parts += [f"--- worker {place}\n{program.output}" for place, program in self.workers.items()]
        return "\n".join([*parts, f"--- starts\n{self.starts()}"])

    def close(self) -> None:
        """End all that was started on loopback; hosts end theirs."""
        self.go()
        for program in reversed(self._local):
            thaw(program)
            program.kill()


def notice_silence_quickly(patch: pytest.MonkeyPatch) -> None:
    """Clients of this process notice silence as quickly as the commands."""
    for name, value in QUICK.items():
        patch.setattr(protocol, name, value)


@contextlib.contextmanager
def site_of_hosts(folder: Path, hosts: Optional[Hosts] = None, *, times: Mapping[str, float] = QUICK) -> Iterator[Site]:
    """A mesh with a coordinator, as yet without workers; it ends with the block."""
    made = Site(folder, hosts, times=times)
    try:
        made.serve()
        yield made
    finally:
        made.close()
        print(made.story())  # Shown when the test has failed.


@contextlib.contextmanager
def temporary_site(count: int) -> Iterator[Tuple[Site, Hosts]]:
    """The same for a benchmark: so many hosts, the usual times, nothing started as yet; nothing is left of it.

    Raises:
        RuntimeError: There are no such hosts on this machine.
    """
    if why_not():
        raise RuntimeError(why_not())
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        hosts = Hosts(count, memory="2g")
        made = Site(Path(folder), hosts, times=USUAL)
        try:
            yield made, hosts
        finally:
            made.close()
            hosts.close()
