"""`gpumesh actors` and `gpumesh kill-actor`: which objects live on the mesh, and the end of one."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, log_to_stderr, resolve_mesh, screen

URL: Any = typer.Option(None, "--url", help="The mesh's address; by default the one saved on this machine.")


def actors(
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list instead of a table."),
) -> None:
    """Show the actors of the mesh: where they live, how they are, and how many calls wait for them."""
    log_to_stderr(usual_level=logging.ERROR)
    address, secret = resolve_mesh(url, token, token_file, ask=True)
    from gpumesh import GPUMesh

    with GPUMesh(address, token=secret, fallback=False) as mesh:
        found = mesh.actors()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2, default=str))
    else:
        _print_table(found, address)


def kill_actor(
    actor: str = typer.Argument(..., metavar="NAME|ID", help="Its name, or its id as `gpumesh actors` shows it."),
    force: bool = typer.Option(False, "--force", help="End its process at once, without its close method."),
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
) -> None:
    """End an actor, whoever has created it; its calls that have not ended fail."""
    log_to_stderr(usual_level=logging.ERROR)
    address, secret = resolve_mesh(url, token, token_file, ask=True)
    from gpumesh import GPUMesh
    from gpumesh.errors import UnknownActorError

    with GPUMesh(address, token=secret, fallback=False) as mesh:
        handle = mesh.get_actor(actor)
        if not handle.kill(force=force):
            raise UnknownActorError(f"the actor {actor} has just ended")
    typer.echo(f"{actor} ends")


def _print_table(found: List[Dict[str, Any]], address: str) -> None:
    from rich.table import Table

    console = screen()
    if not found:
        console.print(f"The mesh at {address} has no actors", highlight=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("id", "name", "class", "state", "host", "cards", "calls", "restarts", "owner"):
        table.add_column(column, justify="right" if column in ("calls", "restarts") else "left", overflow="fold")
    for each in found:
        table.add_row(
            str(each["id"]),
            str(each["name"]),
            str(each["class_name"]),
            str(each["state"]),
            str(each["hostname"]),
            " ".join(map(str, each["cards"])),
            str(each["calls"]),
            f"{each['restarts']}/{each['max_restarts']}",
            "nobody (detached)" if each["detached"] else str(each["owner"]),
        )
    console.print(table)
