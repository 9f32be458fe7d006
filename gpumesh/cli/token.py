"""`gpumesh token`: the secret of a mesh, the lesser ones that follow from it, and a new one instead."""

from __future__ import annotations

import time
from typing import Optional, Tuple

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, resolve_mesh
from gpumesh.cli.jobs import URL, connected_mesh
from gpumesh.config import TOKEN_GRACE_SECONDS

app = typer.Typer(help="Show the mesh's token, make one that can do less, or change it.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def token(
    context: typer.Context,
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
) -> None:
    """Show the mesh's token, make one that can do less, or change it.

    Without a command it shows the token: whoever has it can run anything on every machine of the mesh.
    """
    if context.invoked_subcommand is None:
        show(url, token, token_file)
    elif (url, token, token_file) != (None, None, None):
        raise typer.BadParameter(f"give options behind the command: gpumesh token {context.invoked_subcommand} --url ...")


@app.command(name="show")
def show(url: Optional[str] = URL, token: Optional[str] = TOKEN, token_file: Optional[str] = TOKEN_FILE) -> None:
    """Print the mesh's full token, as it is saved on this machine.

    Whoever has it can run anything on every machine of the mesh. To lend a machine, the one of `gpumesh token worker` is enough.
    """
    from gpumesh.protocol import auth

    _, secret = resolve_mesh(url, token, token_file, ask=True)
    typer.echo(secret)
    kind = auth.kind_of(secret)
    if kind != auth.FULL:
        typer.echo(f"gpumesh: this is {_NAMES[kind]}, and not the full token of the mesh", err=True)


@app.command(name="worker")
def worker(url: Optional[str] = URL, token: Optional[str] = TOKEN, token_file: Optional[str] = TOKEN_FILE) -> None:
    """Print the token with which a machine can join, and nothing else.

    It cannot submit work, read others' results, list clients or change anything; tasks that run there cannot submit tasks of their own. It
    follows from the full token, and changes with it.
    """
    from gpumesh.protocol import auth

    typer.echo(_derived(auth.WORKER, url, token, token_file))


@app.command(name="metrics")
def metrics(url: Optional[str] = URL, token: Optional[str] = TOKEN, token_file: Optional[str] = TOKEN_FILE) -> None:
    """Print the token that reads the mesh's /metrics, and nothing else."""
    from gpumesh.protocol import auth

    typer.echo(_derived(auth.METRICS, url, token, token_file))


@app.command(name="rotate")
def rotate(
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    grace: Optional[str] = typer.Option(
        None, "--grace", metavar="TIME", help="How long the token of before still opens connections: 30m; by default 1h."
    ),
    now: bool = typer.Option(False, "--now", help="Not at all: it has become known to somebody."),
) -> None:
    """Let the mesh draw a new token, and print it.

    What runs goes on, and connections that are open stay open. Who loses the connection comes back with the token of before as long as that
    is good, and is refused after it.
    """
    from gpumesh.client.rotation import rotate_token
    from gpumesh.errors import AuthenticationError
    from gpumesh.protocol import auth
    from gpumesh.runtime.settings import read_environment

    if now and grace is not None:
        raise typer.BadParameter("give --grace or --now, not both")
    seconds = 0.0 if now else TOKEN_GRACE_SECONDS if grace is None else _seconds(grace)
    address, old = resolve_mesh(url, token, token_file, ask=True)
    if auth.kind_of(old) != auth.FULL:
        raise AuthenticationError(f"{_NAMES[auth.kind_of(old)]} cannot change the mesh's token; use its full token")
    with connected_mesh(address, old, None, reconnect_timeout=0.0) as mesh:
        fresh, is_kept = rotate_token(mesh, seconds)
    is_saved = _save(address, old, fresh)
    typer.echo(fresh)
    for line in _advice(address, seconds, is_kept=is_kept, is_saved=is_saved, in_environment=bool(read_environment().token)):
        typer.echo(f"gpumesh: {line}", err=True)


_NAMES = {"worker": "a worker-only token", "metrics": "a token for metrics"}


def _derived(kind: str, url: Optional[str], token: Optional[str], token_file: Optional[str]) -> str:
    from gpumesh.errors import AuthenticationError
    from gpumesh.protocol import auth

    _, secret = resolve_mesh(url, token, token_file, ask=True)
    known = auth.kind_of(secret)
    if known == kind:
        return secret
    if known != auth.FULL:
        raise AuthenticationError(
            f"{_NAMES[kind]} follows from the mesh's full token, and only {_NAMES[known]} is known here; ask for it where the mesh is served"
        )
    return auth.worker_token(secret) if kind == auth.WORKER else auth.metrics_token(secret)


def _seconds(grace: str) -> float:
    from gpumesh.scheduler.ownership_forms import parse_span

    try:
        return parse_span(grace)
    except ValueError as error:
        raise typer.BadParameter(f"--grace: {error}") from None


def _save(address: str, old: str, fresh: str) -> bool:
    """Whether this user's saved connection has the new token; one to another mesh, or with a token that was never good, stays."""
    from gpumesh.network.address import parse_address
    from gpumesh.runtime.settings import load_connection, save_connection

    saved_url, saved = load_connection()
    try:
        is_of_it = saved_url is not None and parse_address(saved_url)[:2] == parse_address(address)[:2]
    except ValueError:
        return False
    if is_of_it and saved == old and saved_url is not None:
        save_connection(saved_url, fresh)
        saved = load_connection()[1]
    return is_of_it and saved == fresh


def _for_others(address: str) -> str:
    """What stands in a command for other machines: this one's own loopback address is of no use there."""
    from gpumesh.network.address import is_loopback, parse_address

    host = parse_address(address).host
    return "ADDRESS" if is_loopback(host) or host == "localhost" else address


def _advice(address: str, seconds: float, *, is_kept: bool, is_saved: bool, in_environment: bool) -> Tuple[str, ...]:
    there = _for_others(address)
    until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
    lines = [
        f"the mesh at {address} has the new token above; what runs goes on, and connections that are open stay open",
        f"the token of before opens new connections until {until} and none after it"
        if seconds
        else "the token of before opens no connection any more: who loses the connection must join again with the new one",
        f"on every other machine of the mesh: gpumesh join {there} --token-file -   (it asks; `gpumesh token worker` is enough to lend)",
    ]
    if is_saved:
        lines.append("the connection that is saved for you on this machine has it already")
    if in_environment:
        lines.append("GPUMESH_TOKEN still is the token of before here; set it anew")
    if not is_kept:
        lines.append(
            "the coordinator was started with a token of somebody's choice (--token, --token-file, GPUMESH_TOKEN): start it with the new one "
            "next time, or the one of before is good again"
        )
    return tuple(lines)
