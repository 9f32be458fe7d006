"""Jobs and their tasks as tables for people. Asks nobody."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from gpumesh.cli.console import screen
from gpumesh.model.shown import clean_lines

TASKS_SHOWN = 20  # Of those that run or have failed, unless all are asked for.
_WORDS = (("done", "done"), ("running", "running"), ("pending", "waiting"), ("failed", "failed"), ("cancelled", "cancelled"))


def describe_counts(counts: Mapping[str, int]) -> str:
    """`12 done, 2 running, 6 waiting`: only what there is."""
    parts = [f"{counts[key]} {word}" for key, word in _WORDS if counts.get(key)]
    return ", ".join(parts) or "nothing"


def print_jobs(found: Sequence[Mapping[str, Any]]) -> None:
    """A line for each job."""
    from rich.table import Table

    console = screen()
    if not found:
        console.print("There are no jobs; submit one with `gpumesh submit SCRIPT`", highlight=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("id", "name", "state", "tasks", "submitted"):
        table.add_column(column, overflow="fold")
    for job in found:
        table.add_row(
            str(job["id"]), str(job["name"]), str(job["state"]), describe_counts(job["counts"]), _moment(job.get("submitted"))
        )
    console.print(table)


def print_job(found: Mapping[str, Any], *, everything: bool) -> None:
    """A job and its tasks, if they are told: those that run or have failed, or all."""
    from rich.table import Table

    console = screen()
    tasks: List[Dict[str, Any]] = list(found.get("tasks", ()))
    console.print(
        f"{found['id']} {found['name']}: {found['state']}, {describe_counts(found['counts'])}, submitted "
        f"{_moment(found.get('submitted'))}",
        highlight=False,
        markup=False,
    )
    for notice in found.get("notices") or ():
        console.print(f"  {notice}", highlight=False, markup=False)
    shown = tasks if everything else [task for task in tasks if task["status"] in ("running", "failed")]
    more = 0 if everything else max(0, len(shown) - TASKS_SHOWN)
    if not everything:
        shown = shown[:TASKS_SHOWN]
    if shown:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("task", "status", "attempts", "seconds", "worker", "payload", "result or error"):
            table.add_column(column, justify="right" if column in ("task", "attempts", "seconds") else "left", overflow="fold")
        for task in shown:
            table.add_row(*map(_plain, _cells(task)))
        console.print(table)
    if more:
        console.print(f"and {more} more; --all shows every task", highlight=False)


def print_mesh(found: Mapping[str, Any]) -> None:
    """The mesh in a few lines, and its jobs."""

    console = screen()
    workers = found["workers"]
    alive = [worker for worker in workers if worker.get("alive", True)]
    away = f" ({len(workers) - len(alive)} more away or lost)" if len(alive) < len(workers) else ""
    running = sum(int(worker.get("running") or 0) for worker in alive)
    slots = sum(int(worker.get("slots") or 0) for worker in alive)
    waiting = sum(int(each["count"]) for each in found["waiting"])
    console.print(
        f"The mesh at {found['url']}: {_count(len(alive), 'worker')}{away} with {_count(slots, 'slot')}; "
        f"{_count(running, 'running task')}, {waiting} waiting",
        highlight=False,
        markup=False,
    )
    if found["jobs"]:
        print_jobs(found["jobs"])
    else:
        console.print("No job is under way; `gpumesh jobs` lists those that have ended", highlight=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def error_line(task: Mapping[str, Any]) -> str:
    """Why a task has failed, in one line."""
    lines = [line for line in str(task.get("error") or "").strip().splitlines() if line.strip()]
    return lines[0].strip() if lines else str(task["status"])


def attempts_of(task: Mapping[str, Any]) -> int:
    """How often it was tried."""
    attempts = task.get("attempts")
    return attempts if isinstance(attempts, int) else len(attempts or ())


def _cells(task: Mapping[str, Any]) -> List[str]:
    import json

    seconds = task.get("seconds") or 0.0
    outcome = json.dumps(task["result"]) if task["status"] == "done" else str(task.get("error") or "")
    return [
        str(task["id"]),
        str(task["status"]),
        str(attempts_of(task)),
        f"{seconds:.3g}" if seconds else "",
        str(task.get("hostname") or task.get("worker") or ""),
        _short(json.dumps(task.get("payload"))) if "payload" in task else "",
        _short(outcome, 600),
    ]


def _short(text: str, characters: int = 60) -> str:
    return text if len(text) <= characters else f"{text[: characters - 3]}..."


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(clean_lines(text))  # A machine that was only lent can have written an error.


def _moment(iso: Any) -> str:
    """A time in UTC as this machine's wall clock shows it."""
    from datetime import datetime

    text = str(iso or "")
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text
