"""`gpumesh status`, `jobs`, `logs`, `cancel`, `retry`, `kill`, `results`: script jobs, after they were submitted."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, log_to_stderr, resolve_mesh
from gpumesh.cli.following import Patience
from gpumesh.config import EVENT_POLL_SECONDS, RECONNECT_SECONDS

if TYPE_CHECKING:
    from gpumesh import GPUMesh

# Defaults of parameters that these commands share, each to be annotated with the type in the comment.
URL: Any = typer.Option(None, "--url", help="The mesh's address; by default the one saved on this machine.")  # Optional[str]
JOB: Any = typer.Argument(help="A job's id, or an unmistakable beginning of it.")  # str
AS_JSON: Any = typer.Option(False, "--json", help="Print JSON instead of a table.")  # bool
DATABASE: Any = typer.Option(  # Optional[str]
    None, "--db", metavar="FILE", help="Read a coordinator's database instead of asking a coordinator; none needs to run."
)


@contextlib.contextmanager
def connected_mesh(
    url: Optional[str],
    token: Optional[str],
    token_file: Optional[str],
    *,
    log_level: int = logging.ERROR,
    reconnect_timeout: Optional[float] = None,
) -> Iterator[GPUMesh]:
    """The mesh that a command is about; this machine alone does not stand in for it.

    Raises:
        MeshUnavailableError, AuthenticationError, ValueError: See `resolve_mesh`. Connecting comes later, at the first use.
    """
    from gpumesh.runtime.settings import read_environment

    log_to_stderr(usual_level=log_level)
    if read_environment().is_local:
        raise ValueError(
            "GPUMESH_LOCAL is set, and jobs need a coordinator that stays; unset it, and start one: `gpumesh serve`"
        )
    address, secret = resolve_mesh(url, token, token_file, ask=True)
    from gpumesh import GPUMesh

    patience = RECONNECT_SECONDS if reconnect_timeout is None else reconnect_timeout
    with GPUMesh(address, token=secret, fallback=False, reconnect_timeout=patience, name="gpumesh command") as mesh:
        yield mesh


# --- looking


def status(
    job: Optional[str] = typer.Argument(None, help="A job's id, or an unmistakable beginning of it."),
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    wait: bool = typer.Option(False, "--wait", help="Show progress until the job has ended, as `submit --wait` does."),
    everything: bool = typer.Option(False, "--all", help="Show every task, not only those that run or have failed."),
    database: Optional[str] = DATABASE,
    as_json: bool = AS_JSON,
) -> None:
    """Show how far a job is; without one, the mesh: its workers, and jobs that have not ended."""
    from gpumesh.cli import job_views

    if job is None:
        if wait or everything or database is not None:
            raise typer.BadParameter("--wait, --all and --db are about a job; name one")
        _mesh_status(url, token, token_file, as_json=as_json)
        return
    if wait:
        if database is not None or as_json:
            raise typer.BadParameter("--wait goes neither with --db, for a database alone does not go on, nor with --json")
        from gpumesh.cli.waiting import wait_for_job

        with connected_mesh(url, token, token_file, log_level=logging.WARNING) as mesh:
            raise typer.Exit(wait_for_job(mesh, job))
    if database is None and not (everything or as_json):
        with connected_mesh(url, token, token_file) as mesh:
            found = mesh.status(job, tasks=False)  # Of a job of a million tasks this is all that is quick.
            if found["counts"]["running"] or found["counts"]["failed"]:
                found = mesh.status(job)
    else:
        found = _job(job, url, token, token_file, database)
    if as_json:
        print_json(found)
    else:
        job_views.print_job(found, everything=everything)


def _mesh_status(url: Optional[str], token: Optional[str], token_file: Optional[str], *, as_json: bool) -> None:
    from gpumesh.cli import job_views

    with connected_mesh(url, token, token_file) as mesh:
        found: Dict[str, Any] = {
            "url": mesh.url,
            "workers": mesh.workers(),
            "waiting": mesh.waiting(),
            "jobs": [job for job in mesh.jobs() if not job["finished"]],
        }
    if as_json:
        print_json(found)
    else:
        job_views.print_mesh(found)


def jobs(
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    database: Optional[str] = DATABASE,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list instead of a table."),
) -> None:
    """List the jobs, the newest first."""
    from gpumesh.cli import job_views

    if database is not None:
        from gpumesh.cli.database import read_jobs

        found = read_jobs(database)
    else:
        with connected_mesh(url, token, token_file) as mesh:
            found = mesh.jobs()
    if as_json:
        print_json(found)
    else:
        job_views.print_jobs(found)


def logs(
    job: str = JOB,
    task: Optional[int] = typer.Argument(None, min=0, help="One task's number, as `gpumesh status JOB` shows it."),
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the job has ended, or Ctrl-C."),
) -> None:
    """Show what a job's tasks have printed: the last part of it, for each task.

    What went to a task's standard error comes on standard error here. Without a task's number each line begins with it.
    """
    printer = _LinePrinter(is_numbered=task is None)
    with connected_mesh(url, token, token_file, log_level=logging.WARNING if follow else logging.ERROR) as mesh:
        patience = Patience(RECONNECT_SECONDS)
        newest = 0
        try:
            while True:
                is_over = (
                    not follow or patience.ask(lambda: mesh.status(job, tasks=False))["finished"]
                )  # Before its last words.
                while True:
                    parts = patience.ask(lambda: mesh.logs(job, task, since=newest))  # noqa: B023  # Asked at once.
                    if not parts:
                        break
                    for part in parts:
                        printer.take(part["task"], part["stream"], part["text"])
                    newest = parts[-1]["number"]
                if is_over:
                    return
                time.sleep(EVENT_POLL_SECONDS)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            printer.end()


class _LinePrinter:
    """Prints text of several tasks that comes in pieces, in whole lines."""

    def __init__(self, *, is_numbered: bool) -> None:
        self._is_numbered = is_numbered
        self._rests: Dict[Any, str] = {}

    def take(self, task: int, stream: str, text: str) -> None:
        whole, newline, rest = (self._rests.pop((task, stream), "") + text).rpartition("\n")
        if rest:
            self._rests[task, stream] = rest
        if newline:
            self._print(task, stream, whole)

    def end(self) -> None:
        """Print the lines that have not ended."""
        for (task, stream), rest in self._rests.items():
            self._print(task, stream, rest)
        self._rests.clear()

    def _print(self, task: int, stream: str, text: str) -> None:
        if self._is_numbered:
            text = "\n".join(f"[{task}] {line}" for line in text.split("\n"))
        print(text, file=sys.stderr if stream == "err" else sys.stdout, flush=True)


def results(
    job: str = JOB,
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    format_name: Optional[str] = typer.Option(
        None, "--format", metavar="json|csv|parquet", help="By default what the output's name ends in, else json."
    ),
    database: Optional[str] = DATABASE,
    output: Optional[str] = typer.Option(None, "--output", "-o", metavar="FILE", help="Write there, not to standard output."),
) -> None:
    """Show or save what a job's tasks have returned, each with its payload; of those that have not ended, only that.

    CSV and Parquet have a row for each task: `payload.KEY` and `result.KEY` for each key, lists and objects in them as JSON. Parquet needs
    pandas with pyarrow or fastparquet, and --output.
    """
    from gpumesh.cli import results as forms

    wanted = forms.format_of(format_name, output)
    if wanted == "parquet" and output is None:
        raise ValueError("Parquet is not for a terminal; name a file with --output FILE")
    found = _job(job, url, token, token_file, database)
    tasks: List[Dict[str, Any]] = found["tasks"]
    if output is not None:
        forms.write_results(tasks, wanted, output)
    else:
        sys.stdout.write(forms.as_csv(tasks) if wanted == "csv" else forms.as_json(tasks))
    missing = sum(task["status"] in ("pending", "running") for task in tasks)
    if missing:
        typer.echo(f"gpumesh: {missing} of {len(tasks)} tasks have not ended yet", err=True)
    elif output is not None:
        typer.echo(f"gpumesh: {output}: {len(tasks)} tasks", err=True)


def _job(
    job: str, url: Optional[str], token: Optional[str], token_file: Optional[str], database: Optional[str]
) -> Dict[str, Any]:
    """A job with its tasks, from the coordinator or from a database."""
    if database is not None:
        from gpumesh.cli.database import read_job

        return read_job(database, job)
    with connected_mesh(url, token, token_file) as mesh:
        return mesh.status(job)


# --- changing


def cancel(
    job: str = JOB, url: Optional[str] = URL, token: Optional[str] = TOKEN, token_file: Optional[str] = TOKEN_FILE
) -> None:
    """End a job: what waits never starts, what runs is interrupted, and killed where it does not end then. Results stay."""
    with connected_mesh(url, token, token_file) as mesh:
        count = mesh.cancel(job)
    _print_ended(job, count)


def kill(
    job: str = JOB,
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    force: bool = typer.Option(False, "--force", help="Do not ask."),
) -> None:
    """End a job at once: as `cancel`, but what runs is killed without a chance to tidy up. Asks first at a terminal."""
    with connected_mesh(url, token, token_file) as mesh:
        if not force and sys.stdin.isatty():
            running = mesh.status(job, tasks=False)["counts"]["running"]
            typer.confirm(f"Kill job {job} ({running} tasks run)?", abort=True, err=True)
        count = mesh.cancel(job, force=True)
    _print_ended(job, count)


def _print_ended(job: str, count: int) -> None:
    if count:
        tasks = "1 task" if count == 1 else f"{count} tasks"
        typer.echo(f"gpumesh: {tasks} of job {job} ended without a result; `gpumesh retry {job}` takes them up again")
    else:
        typer.echo(f"gpumesh: job {job} had ended before")


def retry(
    job: str = JOB, url: Optional[str] = URL, token: Optional[str] = TOKEN, token_file: Optional[str] = TOKEN_FILE
) -> None:
    """Run the tasks of a job again that have failed or were cancelled."""
    with connected_mesh(url, token, token_file) as mesh:
        count = mesh.retry(job)
    if count:
        tasks = "1 task" if count == 1 else f"{count} tasks"
        typer.echo(f"gpumesh: {tasks} of job {job} to run again; follow it with `gpumesh status {job} --wait`")
    else:
        typer.echo(f"gpumesh: no task of job {job} has failed or was cancelled")


# --- shared


def print_json(value: Any) -> None:
    """For programs."""
    import json

    typer.echo(json.dumps(value, indent=2, default=str))
