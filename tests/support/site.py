"""A coordinator of this process, a client of it, and machines with made-up cards that join, each a worker of real processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, List

import pytest

from gpumesh import GPUMesh
from tests.support.hardware import Machine
from tests.support.processes import until

NOTICE_SECONDS = 5.0  # What the contract grants until a caller knows that nobody can run its task.


class Site:
    """A coordinator, a client, and the machines that join."""

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        self._folder = folder
        self._ends = ends
        self._joined = 0
        coordinator = GPUMesh.start_coordinator(port=0)
        ends.callback(coordinator.stop)
        self.url, self.token = coordinator.url, coordinator.token
        self.mesh = ends.enter_context(GPUMesh(self.url, self.token, fallback=False))

    def join(self, cards: Any = (), **tags: str) -> str:
        """Add a worker with these cards; its id, once it has told of them."""
        self._joined += 1
        folder = self._folder / f"machine{self._joined}"
        (folder / "modules").mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in Machine(folder, cards).environment.items():
                patch.setenv(name, value)
            worker = GPUMesh.add_worker(self.url, self.token, slots=1, tags=tags)
        self._ends.callback(worker.kill)
        ident = str(worker.info["id"])

        def has_told() -> bool:
            devices = [len(known["devices"]) for known in self.mesh.workers() if known["id"] == ident]
            return devices == [1 + len(cards)]

        until(has_told, 40, what=f"worker {ident} with {len(cards)} cards")
        return ident

    def notice(self, caplog: pytest.LogCaptureFixture, part: str) -> str:
        """The one warning with these words, which must come in time."""

        def found() -> List[str]:
            return [text for text in caplog.messages if part in text]

        until(lambda: bool(found()), NOTICE_SECONDS, what=f"a notice with {part!r}")
        (text,) = found()
        return text
