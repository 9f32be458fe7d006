"""`gpumesh show-connection`, `gpumesh disconnect`: the mesh that this user's programs and commands use."""

from __future__ import annotations

from typing import Any, Dict, Optional

import typer

from gpumesh.cli import asking


def show_connection(
    show_token: bool = typer.Option(False, "--show-token", help="Show the secret too."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Show which mesh this user's programs and commands use, and where that is written.

    GPUMESH_URL and GPUMESH_TOKEN go before what is saved. The secret itself is shown with --show-token only.
    """
    found = _connection(show_token=show_token)
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
    elif found["url"] is None:
        typer.echo(f"no mesh is saved in {found['file']}; `gpumesh serve` and `gpumesh join` save one, `gpumesh setup` asks")
    else:
        typer.echo(f"address  {found['url']}   ({found['source']})")
        typer.echo(f"token    {found['token'] or found['kind']}")
        if found["certificate"]:
            shown = ":".join(found["certificate"][index : index + 2] for index in range(0, 32, 2))
            typer.echo(f"mesh     the SHA-256 of its certificate begins with {shown}; `gpumesh serve` shows the same there")
        typer.echo(f"file     {found['file']}")
    if found["url"] is None:
        raise typer.Exit(1)


def _connection(*, show_token: bool) -> Dict[str, Any]:
    from gpumesh.network.address import parse_address
    from gpumesh.protocol import auth
    from gpumesh.runtime.settings import (
        connection_file,
        generated_token,
        read_environment,
        resolve_connection,
        saved_certificate,
    )

    url, token = resolve_connection()
    address: Optional[str] = parse_address(url).url if url is not None else None
    if token is None:
        kind = "none is known"
    else:
        kind = {auth.WORKER: "lends a machine, nothing else", auth.METRICS: "reads metrics, nothing else"}.get(
            auth.kind_of(token), "full: runs anything on every machine of the mesh"
        )
    return {
        "url": address,
        "source": "GPUMESH_URL" if read_environment().url is not None else "saved",
        "kind": kind,
        "generated": bool(url and token and generated_token(url) == token),
        "token": token if show_token else None,
        "certificate": (url and saved_certificate(url)) or None,
        "file": connection_file(),
    }


def disconnect(yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask.")) -> None:
    """Forget the saved mesh: its address and its secret.

    What runs is not touched: a worker or a coordinator of this machine goes on until it is ended.
    """
    import os

    from gpumesh.runtime.settings import connection_file, forget_connection, generated_token, load_connection, other_served

    url, token = load_connection()
    if not os.path.exists(connection_file()):
        typer.echo(f"no mesh is saved in {connection_file()}")
        return
    if not yes:
        if not asking.can_ask():
            raise typer.BadParameter("nobody is here to be asked; give --yes to forget the saved mesh")
        if url and token and generated_token(url) == token:
            typer.echo("The token of this mesh was generated, and is written nowhere else on this machine.")
        others = other_served(url)
        if others:
            typer.echo(f"Nor are those of other meshes that you have served: {', '.join(others)}.")
        if not asking.confirm(f"Forget the mesh at {url or 'an address that cannot be read'}?", default=False):
            raise typer.Exit(1)
    forget_connection()
    typer.echo(f"gpumesh: forgot {url or 'what was saved'}; what runs goes on until it is ended")
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN"):
        if os.environ.get(name, "").strip():
            typer.echo(f"gpumesh: {name} is set here, and still names a mesh: unset {name}", err=True)
