"""`gpumesh submit`: a script, once for each payload."""

from __future__ import annotations

import logging
import os
from typing import Any, Dict, List, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE
from gpumesh.cli.jobs import URL, connected_mesh
from gpumesh.config import DEFAULT_RETRIES, RECONNECT_SECONDS


def submit(
    script: str = typer.Argument(help="A Python file. Its folder travels with it."),
    payloads: Optional[str] = typer.Option(
        None, "--payloads", "-p", metavar="FILE", help="JSON (a list of objects), JSON lines or CSV; - reads standard input."
    ),
    name: Optional[str] = typer.Option(None, "--name", help="What the job is called; by default the script's name."),
    wait: bool = typer.Option(False, "--wait", help="Show progress until the job has ended."),
    gpu: Optional[str] = typer.Option(
        None, "--gpu", help='A kind ("cuda"), a model ("A100") or a number of GPUs for each task.'
    ),
    memory: Optional[str] = typer.Option(
        None, "--memory", metavar="SIZE", help="16GB, 512MiB: of the GPU where one is asked for, else of the machine."
    ),
    cores: Optional[int] = typer.Option(None, "--cores", min=1, help="CPU cores for each task."),
    tag: Optional[List[str]] = typer.Option(
        None, "--tag", "--tags", metavar="NAME=VALUE", help="What a worker must carry; may be repeated."
    ),
    retries: int = typer.Option(
        DEFAULT_RETRIES, "--retries", min=0, help="Lost processes and machines that a task survives; 0: it runs at most once."
    ),
    timeout: Optional[float] = typer.Option(
        None, "--timeout", metavar="SECONDS", help="Run time of each task; by default no limit."
    ),
    priority: int = typer.Option(0, "--priority", help="Higher goes first."),
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    reconnect_timeout: float = typer.Option(
        RECONNECT_SECONDS,
        "--reconnect-timeout",
        min=0.0,
        metavar="SECONDS",
        help="How long to look for a coordinator that is gone.",
    ),
) -> None:
    """Run a script once for each payload, on machines of the mesh.

    A task reads its payload as JSON on standard input, and the last line that it prints, as JSON, is its result. The job's id is printed; by then
    the job is on the coordinator's disk and goes on whatever becomes of this command, this machine, or the coordinator's process.

    With --wait the exit code is 0 when all went well, 1 when some task failed, and 130 after Ctrl-C, which ends the waiting, not the job.
    """
    from gpumesh.cli.payloads import read_payloads

    if not os.path.isfile(script):
        kind = "is a folder" if os.path.isdir(script) else "does not exist"
        raise ValueError(f"the script {script} {kind}; nothing was submitted")
    found = [{}] if payloads is None else read_payloads(payloads)
    options = submit_options(
        gpu=gpu, memory=memory, cores=cores, tag=tag, retries=retries, timeout=timeout, priority=priority, name=name
    )
    with connected_mesh(url, token, token_file, log_level=logging.WARNING, reconnect_timeout=reconnect_timeout) as mesh:
        try:
            job = mesh.submit(script=script, payloads=found, **options)
        except KeyboardInterrupt:
            typer.echo(
                "gpumesh: interrupted before the coordinator has confirmed the job; `gpumesh jobs` shows whether it is there",
                err=True,
            )
            raise typer.Exit(130) from None
        typer.echo(job)
        if wait:
            from gpumesh.cli.waiting import wait_for_job

            raise typer.Exit(wait_for_job(mesh, job))
    count = "1 task" if len(found) == 1 else f"{len(found)} tasks"
    typer.echo(
        f"gpumesh: {count} of {os.path.basename(script)} accepted; follow them with `gpumesh status {job} --wait`", err=True
    )


def submit_options(
    *,
    gpu: Optional[str],
    memory: Optional[str],
    cores: Optional[int],
    tag: Optional[List[str]],
    retries: int,
    timeout: Optional[float],
    priority: int,
    name: Optional[str],
) -> Dict[str, Any]:
    """Keyword arguments of `mesh.submit`: those that were said.

    Raises:
        typer.BadParameter: A tag is not NAME=VALUE.
    """
    from gpumesh.cli.join import parse_tags

    options: Dict[str, Any] = {"retries": retries, "priority": priority}
    if gpu is not None:
        options["gpu"] = _number_or_text(gpu)
    if tag:
        options["tags"] = parse_tags(tag)
    said = {"memory": memory, "cores": cores, "timeout": timeout, "name": name}
    options.update((key, value) for key, value in said.items() if value is not None)
    return options


def _number_or_text(gpu: str) -> Any:
    try:
        return int(gpu)
    except ValueError:
        pass
    try:
        return float(gpu)
    except ValueError:
        return gpu
