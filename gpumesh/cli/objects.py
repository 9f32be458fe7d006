"""`gpumesh objects`: what lies in the object store, and who refers to it."""

from __future__ import annotations

from typing import Any, Dict, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, log_to_stderr, resolve_mesh, screen


def objects(
    url: Optional[str] = typer.Option(None, "--url", help="The mesh's address; by default the one saved on this machine."),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Show the objects of the mesh, the largest first: size, owner, where they are, and how many refer to them."""
    import logging

    log_to_stderr(usual_level=logging.ERROR)
    address, secret = resolve_mesh(url, token, token_file, ask=True)
    from gpumesh import GPUMesh

    with GPUMesh(address, token=secret, fallback=False) as mesh:
        found = mesh.objects()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2, default=str))
    else:
        _print_table(found)


def _print_table(found: Dict[str, Any]) -> None:
    from rich.table import Table

    from gpumesh.model.resources import show_bytes

    console = screen()
    rows = sorted(found["objects"], key=lambda row: -int(row["bytes"]))
    if rows:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("id", "size", "owner", "where", "copies", "references", "pins"):
            justify: Any = "right" if column in ("size", "references", "pins") else "left"
            table.add_column(column, justify=justify, overflow="fold")
        for row in rows:
            table.add_row(
                str(row["id"]),
                show_bytes(row["bytes"]),
                str(row["owner"]),
                str(row["problem"] or row["where"] or row["state"]),
                " ".join(row["copies"]),
                str(row["references"]),
                str(row["pins"]),
            )
        console.print(table)
    total = sum(int(row["bytes"]) for row in rows)
    limit = show_bytes(found["limit"])
    console.print(
        f"{len(rows)} objects of {show_bytes(total)}; {show_bytes(found.get('memory', 0))} of {limit} memory in use, "
        f"{show_bytes(found.get('disk', 0))} on disk",
        highlight=False,
    )
