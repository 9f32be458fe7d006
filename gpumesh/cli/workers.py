"""`gpumesh workers`: who works for the mesh."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, log_to_stderr, resolve_mesh, screen


def workers(
    url: Optional[str] = typer.Option(None, "--url", help="The mesh's address; by default the one saved on this machine."),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list instead of a table."),
) -> None:
    """Show the machines of the mesh."""
    import logging

    log_to_stderr(usual_level=logging.ERROR)
    address, secret = resolve_mesh(url, token, token_file, ask=True)
    from gpumesh import GPUMesh

    with GPUMesh(address, token=secret, fallback=False) as mesh:
        found = mesh.workers()
        waiting = [] if as_json else mesh.waiting()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2, default=str))
    else:
        _print_table(found, address)
        _print_waiting(waiting)


def _print_waiting(waiting: List[Dict[str, Any]]) -> None:
    for each in waiting:
        tasks = "1 task waits" if each["count"] == 1 else f"{each['count']} tasks wait"
        reason = f": {each['reason']}" if each["reason"] else f" for {each['needs']}"
        typer.echo(f"{tasks} ({', '.join(each['functions'])}), {each['state']}{reason}")


def _print_table(found: List[Dict[str, Any]], address: str) -> None:
    from rich.table import Table

    console = screen()
    if not found:
        console.print(f"The mesh at {address} has no workers; join one with `gpumesh join {address}`", highlight=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("id", "host", "device", "score", "slots", "memory", "python", "tags", "state"):
        table.add_column(column, justify="right" if column in ("score", "slots", "memory") else "left", overflow="fold")
    for worker in found:
        if not worker.get("alive", True):
            state = f"not alive: {worker['lost']}" if worker.get("lost") else "not alive"
            _add_row(table, worker, state)
            continue
        state = worker.get("problem") or "alive"
        if worker.get("trust") == "worker":
            state += ", worker token"
        for packages in worker.get("installing") or ():
            state += f", installing {' '.join(packages)}"
        for device in worker.get("devices") or ():
            if device["kind"] != "cpu" and device["problem"]:
                state += f", {device['kind']}:{device['index']} {device['problem']}"
        _add_row(table, worker, state)
    console.print(table)


def _add_row(table: Any, worker: Dict[str, Any], state: str) -> None:
    from gpumesh.model.resources import show_bytes

    table.add_row(
        str(worker.get("id", "")),
        str(worker.get("hostname", "")),
        str(worker.get("device_name", "")),
        f"{worker.get('score', 0):.3g}",
        str(worker.get("slots", "")),
        show_bytes(worker.get("memory", 0)),
        str(worker.get("python", "")),
        " ".join(f"{name}={value}" for name, value in dict(worker.get("tags") or {}).items()),
        state,
    )
