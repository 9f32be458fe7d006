"""Watching a job until it ends: a bar at a terminal, lines elsewhere; what to say at the end, and the exit code."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional

import typer

from gpumesh.cli.job_views import describe_counts, error_line

if TYPE_CHECKING:
    from gpumesh import GPUMesh

LINE_SECONDS = 2.0  # Between two lines where there is no terminal.
FAILURES_SHOWN = 5

_ENDED = ("done", "failed", "cancelled")


def wait_for_job(mesh: GPUMesh, job: str) -> int:
    """Show how far it is until it has ended.

    A coordinator that goes away is looked for as long as the mesh's `reconnect_timeout` says.

    Returns:
        The exit code: 0 all went well, 1 some task failed or was cancelled, 130 interrupted: the job goes on, and how to follow or
        cancel it was said.

    Raises:
        MeshUnavailableError: The coordinator did not come back.
    """
    from gpumesh.errors import MeshUnavailableError

    paint = _RichPaint(job) if sys.stderr.isatty() else _LinePaint()
    was_there = False

    def draw(status: Mapping[str, Any]) -> None:
        nonlocal was_there
        was_there = True
        paint.draw(status)

    try:
        try:
            ended = mesh.wait(job, on_progress=draw, tasks=False)
            paint.draw(ended)
        finally:
            paint.close()
        if ended["counts"]["failed"]:
            ended = mesh.status(job)
    except KeyboardInterrupt:
        say_how_to_follow(job)
        return 130
    except MeshUnavailableError as error:
        if not was_there:
            raise
        raise MeshUnavailableError(
            f"lost the coordinator at {mesh.url}, and it did not come back; job {job} is in its database and goes on when it is started "
            f"again: `gpumesh status {job} --wait` follows it then"
        ) from error
    return say_how_it_ended(ended)


def say_how_to_follow(job: str) -> None:
    """After Ctrl-C: the job goes on."""
    typer.echo(
        f"gpumesh: job {job} goes on; follow it with `gpumesh status {job} --wait`, or end it with `gpumesh cancel {job}`",
        err=True,
    )


def say_how_it_ended(job: Mapping[str, Any]) -> int:
    """The last lines, and the exit code.

    Args:
        job: Its status; with its tasks if some have failed.
    """
    failed = [task for task in job.get("tasks", ()) if task["status"] == "failed"]
    for task in failed[:FAILURES_SHOWN]:
        typer.echo(f"task {task['id']} failed: {error_line(task)}", err=True)
    if len(failed) > FAILURES_SHOWN:
        typer.echo(f"and {len(failed) - FAILURES_SHOWN} more", err=True)
    went_well = job["counts"]["done"] == job["total"]
    ident = job["id"]
    hint = (
        f"`gpumesh results {ident}` shows what they returned" if went_well else f"`gpumesh retry {ident}` runs the others again"
    )
    typer.echo(f"gpumesh: job {ident} has ended: {describe_counts(job['counts'])}; {hint}", err=True)
    return 0 if went_well else 1


def ended_count(counts: Mapping[str, int]) -> int:
    """How many tasks have ended, one way or another."""
    return sum(counts.get(key, 0) for key in _ENDED)


class _LinePaint:
    """A line whenever something has changed, but not too many: for files and pipes.

    What comes too soon after a line is said when its time has come, unless something newer is by then: the last line is how things are,
    for there may be nothing new for hours.
    """

    def __init__(self, *, pause: float = LINE_SECONDS) -> None:
        self._pause = pause
        self._lock = threading.Lock()  # Guards the rest.
        self._newest = ""
        self._said = ""
        self._next_at = 0.0
        self._timer: Optional[threading.Timer] = None  # Until what came too soon may be said.

    def draw(self, status: Mapping[str, Any]) -> None:
        counts: Dict[str, int] = status["counts"]
        with self._lock:
            self._newest = f"{ended_count(counts)}/{sum(counts.values())} {describe_counts(counts)}"
            left = self._next_at - time.monotonic()
            if status["finished"] or left <= 0:
                self._say()
            elif self._timer is None and self._newest != self._said:
                self._timer = threading.Timer(left, self._on_time)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """What has not been said yet is."""
        with self._lock:
            self._say()

    def _on_time(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # Nobody reads any more: the next line shows it.
            self._say()

    def _say(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._newest != self._said:
            self._said = self._newest
            self._next_at = time.monotonic() + self._pause
            typer.echo(self._newest, err=True)


class _RichPaint:
    """rich's bar, which also keeps what others print above it."""

    def __init__(self, job: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(job, total=None, told="")
        self._progress.start()

    def draw(self, status: Mapping[str, Any]) -> None:
        counts: Dict[str, int] = status["counts"]
        told = describe_counts({key: count for key, count in counts.items() if key != "done"}) if sum(counts.values()) else ""
        self._progress.update(
            self._task, completed=ended_count(counts), total=sum(counts.values()), told="" if told == "nothing" else told
        )

    def close(self) -> None:
        self._progress.stop()
