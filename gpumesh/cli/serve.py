"""`gpumesh serve`: the coordinator of a mesh, and this machine as its first worker."""

from __future__ import annotations

import sys
from typing import Optional

import typer

from gpumesh.cli.console import (
    GPU_SCORE,
    OBJECT_MEMORY,
    SCORE,
    SLOTS,
    SPILL_DIR,
    TOKEN,
    TOKEN_FILE,
    check_token,
    given_token,
    hide_token,
    log_to_stderr,
    set_gpu_score,
    set_object_limits,
)
from gpumesh.config import DEFAULT_PORT, KEEP_JOBS_DAYS, WORKER_TTL_SECONDS

ANY_IPV4, ANY_IPV6 = "0.0.0.0", "::"


def serve(
    host: str = typer.Option(
        "127.0.0.1", "--host", help="Address to listen on: 127.0.0.1 for this machine alone, 0.0.0.0 for others too."
    ),
    port: int = typer.Option(DEFAULT_PORT, "--port", min=0, max=65535, help="Port to listen on; 0 picks a free one."),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    show_token: bool = typer.Option(
        False, "--show-token", help="Show a generated token in the line for other machines also where that is not a terminal."
    ),
    self_worker: bool = typer.Option(True, "--self-worker/--no-self-worker", help="Let this machine work too."),
    slots: Optional[int] = SLOTS,
    score: Optional[float] = SCORE,
    gpu_score: Optional[float] = GPU_SCORE,
    object_memory: Optional[str] = OBJECT_MEMORY,
    spill_dir: Optional[str] = SPILL_DIR,
    db: Optional[str] = typer.Option(
        None,
        "--db",
        metavar="FILE",
        help="Where script jobs are kept; by default in this user's folder for data, one for each port.",
    ),
    keep_days: float = typer.Option(
        KEEP_JOBS_DAYS, "--keep-days", min=0.0, metavar="DAYS", help="How long jobs are kept after they have ended."
    ),
    worker_ttl: float = typer.Option(
        WORKER_TTL_SECONDS, "--worker-ttl", min=0.0, metavar="SECONDS", help="How long a worker that was lost is still shown."
    ),
) -> None:
    """Start a mesh on this machine: others join it, and it works too.

    The secret comes from --token, --token-file or GPUMESH_TOKEN; without any, one is generated, shown on a terminal and by `gpumesh token`,
    and used again when a mesh is started at the same address again. Address and secret are saved for this user, so that GPUMesh() and the other commands on this machine
    find the mesh by themselves.

    Script jobs are kept in a database, and go on when a mesh is started with the same one again, whatever has ended it.

    Ctrl-C lets running tasks finish first; a second Ctrl-C stops at once.
    """
    import logging

    from gpumesh.devices.scoring import check_score
    from gpumesh.network.address import Address
    from gpumesh.runtime.serving import generate_token, run_coordinator
    from gpumesh.runtime.settings import generated_token, load_connection, save_connection

    supplied = given_token(token, token_file)
    hide_token()
    near = {ANY_IPV4: "127.0.0.1", ANY_IPV6: "::1"}.get(host, host)  # How this machine reaches it.
    secret = supplied or generated_token(Address(near, port).url) or generate_token()
    if score is not None:
        check_score(score)
    set_gpu_score(gpu_score)
    set_object_limits(object_memory, spill_dir)
    check_token(supplied)
    log_to_stderr(usual_level=logging.INFO)

    saved_as = [""]  # The address as this user's connection names it, once it is known.

    def keep_token(fresh: str) -> bool:
        """It was rotated. A token that somebody has chosen is chosen anew at the next start."""
        if not supplied or load_connection() == (saved_as[0], supplied):
            save_connection(saved_as[0], fresh, is_generated=not supplied)
        return not supplied

    def announce(url: str) -> None:
        bound = int(url.rpartition(":")[2])
        saved_as[0] = Address(near, bound).url
        save_connection(saved_as[0], secret, is_generated=not supplied)
        typer.echo(f"gpumesh: serving at {url}, Ctrl-C to stop")
        join = f"gpumesh join {Address(_reachable(host), bound).url}"
        if supplied:
            typer.echo(f"To join with another machine: {join}   (with the same token)")
        elif show_token or sys.stdout.isatty():
            typer.echo(f"To join with another machine: {join} --token {secret}")
        else:  # What is not a terminal is kept, and read by others.
            typer.echo(f"To join with another machine: {join}   (`gpumesh token` on this one shows the token)")
        if host in ("127.0.0.1", "::1", "localhost"):
            typer.echo(f"Only this machine can reach {host}; to let others join, serve with --host 0.0.0.0")

    raise typer.Exit(
        run_coordinator(
            host,
            port,
            secret,
            self_worker=self_worker,
            slots=slots,
            score=score,
            db=db,
            keep_days=keep_days,
            worker_ttl=worker_ttl,
            on_ready=announce,
            keep_token=keep_token,
        )
    )


def _reachable(host: str) -> str:
    """The address under which others find a server that listens on `host`."""
    import socket

    if host not in (ANY_IPV4, ANY_IPV6):
        return host
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if host == ANY_IPV6 else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))  # Sends nothing: it only asks the routing table which address of ours would be used.
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
