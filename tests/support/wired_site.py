"""A mesh of commands on loopback whose peers reach the coordinator through wires that can be stalled and reset (benchmarks/chaos_relay.py)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

from gpumesh import GPUMesh
from tests.integration.programs import Program
from tests.support.hosts import REPOSITORY, Host, kill
from tests.support.processes import until
from tests.support.site_of_hosts import TOKEN, USUAL, Site

WIRES = 4  # The client's, then the workers'.
CLIENT = 0


class WiredSite(Site):
    """Wire 0 is the client's, 1 the first worker's, and so on."""

    def __init__(self, folder: Path, *, times: Mapping[str, float] = USUAL) -> None:
        super().__init__(folder, times=times)
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos_relay", str(self.port), str(WIRES)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._relay.stdout is not None
        self._ports: List[int] = json.loads(self._relay.stdout.readline())

    def _begin(
        self, place: str, host: Optional[Host], slots: int, before: Sequence[str], environment: Mapping[str, str]
    ) -> Program:
        direct, self.url = self.url, f"http://127.0.0.1:{self._ports[len(self.workers) + 1]}"
        try:
            return super()._begin(place, host, slots, before, environment)
        finally:
            self.url = direct

    @contextlib.contextmanager
    def client(self, host: Optional[Host] = None, **options: Any) -> Iterator[GPUMesh]:
        options.setdefault("fallback", False)
        with GPUMesh(f"http://127.0.0.1:{self._ports[CLIENT]}", token=TOKEN, **options) as mesh:
            yield mesh

    # --- wires

    def stall(self, wire: int, way: str = "both") -> None:
        """Nothing passes: to the coordinator ("up"), from it ("down"), or at all."""
        self._order(wire, do="stall", way=way)

    def flow(self, wire: int) -> None:
        """All passes again."""
        self._order(wire, do="flow")

    def reset(self, wire: int) -> None:
        """What is connected there is not any more."""
        self._order(wire, do="reset", side="both")

    def _order(self, wire: int, **order: Any) -> None:
        assert self._relay.stdin is not None
        self._relay.stdin.write(json.dumps({"wire": wire, **order}).encode() + b"\n")
        self._relay.stdin.flush()

    # --- the coordinator

    def kill_coordinator(self) -> None:
        """`kill -9`."""
        kill(self.coordinator)

    # --- what is there

    def objects(self, mesh: GPUMesh) -> List[Dict[str, Any]]:
        """All that the coordinator knows."""
        found: List[Dict[str, Any]] = mesh.objects()["objects"]
        return found

    def until_no_objects(self, mesh: GPUMesh) -> None:
        """Nobody refers to anything any more."""
        until(lambda: not self.objects(mesh), 20, what=f"no objects: {self.objects(mesh)}")

    def descriptors(self, place: str) -> int:
        """How many files a worker's agent has open."""
        return len(list(Path(f"/proc/{self.workers[place].process.pid}/fd").iterdir()))

    def own_segments(self, place: str) -> List[Path]:
        """Files in the store that a worker has of its own."""
        folders = Path("/dev/shm", f"gpumesh-{os.getuid()}").glob(f"*-{self.workers[place].process.pid}")
        return [path for folder in folders for path in folder.iterdir() if path.name.startswith("s")]

    def close(self) -> None:
        super().close()
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.close()
        self._relay.wait(10)
        self._relay.stdout.close()


@contextlib.contextmanager
def wired_site(folder: Path, *, times: Mapping[str, float] = USUAL) -> Iterator[WiredSite]:
    """With a coordinator; no workers as yet."""
    made = WiredSite(folder, times=times)
    try:
        made.serve()
        yield made
    finally:
        made.close()
