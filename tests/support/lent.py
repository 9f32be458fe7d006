"""Machines of several owners on one host: each with rules of its own, by a folder of its own; and tasks that wait for a word."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gpumesh.client.futures import MeshFuture
from gpumesh.model.resources import make_requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.serialization import values
from tests.integration.programs import Program, Programs
from tests.support.client import Client
from tests.support.processes import until

PLACE = "MACHINE_PLACE"  # In the environment of a worker; no part of the mesh reads it.
SOON = 30.0  # Far beyond what is waited for, also on a loaded machine.
TOKEN = "secret"


def hold(folder: str, name: str) -> Tuple[str, str]:
    """Leave a mark at the start, wait until the test says go; (name, place)."""
    Path(folder, f"{name}.{os.environ.get(PLACE, '')}.{time.monotonic_ns()}.started").touch()
    end = time.monotonic() + 2 * SOON
    while time.monotonic() < end:
        if Path(folder, f"{name}.go").exists() or Path(folder, "all.go").exists():
            return name, os.environ.get(PLACE, "")
        time.sleep(0.01)
    raise TimeoutError(f"{name} was never told to go")


def hold_deaf(folder: str, name: str) -> Tuple[str, str]:
    """The same, swallowing interrupts."""
    while True:
        try:
            return hold(folder, name)
        except KeyboardInterrupt:
            continue


def hold_partly(folder: str, name: str) -> str:
    """The same, but an interrupt ends it with half of a value, as training loops do."""
    try:
        hold(folder, name)
    except KeyboardInterrupt:
        return "half"
    return "whole"


def run_program(program: str, folder: str, name: str) -> Tuple[str, str]:
    """Run a program of one's own until the test says go."""
    child = subprocess.Popen([program, "600"])
    try:
        return hold(folder, name)
    finally:
        child.kill()
        child.wait()


class Site:
    """A coordinator, owners who join with their machines, and a client."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self.folder = folder
        self.programs = programs
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.server, self.url = programs.serve("--no-self-worker", "--token", TOKEN)
        self.client = Client(self.url, TOKEN)

    def close(self) -> None:
        """End the client."""
        self.client.close()

    # --- owners

    def owner(self, place: str, **more: str) -> Dict[str, str]:
        """The environment of one owner's commands and workers."""
        return {"XDG_CONFIG_HOME": str(self.folder / f"config-{place}"), PLACE: place, "GPUMESH_PROBE": "0", **more}

    def join(self, place: str, *words: str, slots: int = 1, environment: Optional[Dict[str, str]] = None) -> Program:
        """This owner's machine as a worker, once it has joined."""
        tag = ("--tag", f"place={place}", "--score", "1", "--slots", str(slots))
        program = self.programs.gpumesh("join", self.url, "--token", TOKEN, *tag, *words, **(environment or self.owner(place)))
        program.wait_for("works for")
        until(lambda: self.view(place), SOON, what=f"{place} joined: {program.output}")
        return program

    def rule(self, place: str, *words: str, environment: Optional[Dict[str, str]] = None) -> str:
        """A command of this owner about their machine; what it says."""
        command = self.programs.gpumesh(*words, **(environment or self.owner(place)))
        assert command.wait() == 0, command.output
        return command.output

    def rules_file(self, place: str) -> Path:
        """The file of this owner's rules."""
        (file,) = (self.folder / f"config-{place}" / "gpumesh").glob("owner-*.json")
        return file

    # --- the mesh

    def view(self, place: str) -> Dict[str, Any]:
        """What others see of this machine; empty while it is not there."""
        found = [view for view in self.client.workers() if view["alive"] and view["tags"].get("place") == place]
        assert len(found) <= 1, found
        return found[0] if found else {}

    def problem(self, place: str) -> str:
        """Why others get nothing there."""
        return str(self.view(place)["problem"])

    def until_lent(self, place: str) -> None:
        """Wait until others see no problem."""
        until(lambda: self.view(place) and not self.problem(place), SOON, what=f"{place} lent")

    def until_problem(self, place: str, words: str) -> str:
        """Wait until others see a problem with these words in it; all of it."""
        until(lambda: self.view(place) and words in self.problem(place), SOON, what=f"{place}: {words}")
        return self.problem(place)

    def submit(self, *names: str, function: Any = hold, **options: Any) -> List[MeshFuture]:
        """One task for each name."""
        futures = [self.client.remote(function, str(self.marks), name, **options) for name in names]
        self.client.session.flush()
        return futures

    def submit_to_gpu(self, *names: str, gpu: Any, **options: Any) -> List[MeshFuture]:
        """The same for tasks that need a GPU."""
        exported = self.client._exporter.export(hold)
        spec = TaskSpec(exported.digest, exported.name, make_requirement(gpu=gpu), **options)
        handle = self.client.session.define(exported, spec)
        futures = []
        for name in names:
            future = MeshFuture(handle)
            call = values.dumps_call((str(self.marks), name), {}, what="arguments")
            future.task_id = self.client.session.submit(handle, call, future)
            futures.append(future)
        self.client.session.flush()
        return futures

    def go(self, *names: str) -> None:
        """Let these tasks end; without names, all that ever come."""
        for name in names or ("all",):
            (self.marks / f"{name}.go").touch()

    def starts(self, name: str = "") -> List[Tuple[str, str]]:
        """(task, place) of each start, in their order."""
        marks = [mark.name.split(".") for mark in self.marks.glob(f"{name}*.started")]
        return [(mark[0], mark[1]) for mark in sorted(marks, key=lambda mark: int(mark[2])) if not name or mark[0] == name]

    def until_started(self, name: str, place: str) -> None:
        """Wait until a task has started there last."""
        until(lambda: self.starts(name)[-1:] == [(name, place)], SOON, what=f"{name} started on {place}, not {self.starts()}")


@contextlib.contextmanager
def site(programs: Programs, folder: Path) -> Iterator[Site]:
    """A site that ends with the block."""
    made = Site(programs, folder)
    try:
        yield made
    finally:
        made.close()


def read_rules(file: Path) -> Any:
    """What a file of rules says."""
    return json.loads(file.read_text(encoding="utf-8"))
