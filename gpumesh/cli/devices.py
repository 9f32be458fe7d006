"""`gpumesh devices`: what this machine, or the whole mesh, can compute with, and why not with the rest."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, log_to_stderr, resolve_mesh, screen


def devices(
    mesh: bool = typer.Option(False, "--mesh", help="Those of all machines of the mesh, not just of this one."),
    url: Optional[str] = typer.Option(
        None, "--url", help="The mesh's address (implies --mesh); by default the one saved here."
    ),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list instead of a table."),
) -> None:
    """Show processors and GPUs: both numberings, memory, score, and the reason where one is not used.

    Looks at this machine; with --mesh at what the workers have told. A score that nobody has measured yet is marked with ~.
    """
    import logging

    log_to_stderr(usual_level=logging.ERROR)
    if mesh or url is not None:
        address, secret = resolve_mesh(url, token, token_file, ask=True)
        found = of_mesh(address, secret)
    else:
        found = of_this_machine()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
    else:
        _print_table(found)


def of_this_machine() -> List[Dict[str, Any]]:
    """Rows for what this machine has; asks the drivers in a process of its own and waits for it.

    Raises:
        MeshError: There may be GPUs, but asking for them failed.
    """
    from gpumesh.devices.detect import gpus_may_exist, local_facts
    from gpumesh.devices.probing import detect
    from gpumesh.errors import MeshError
    from gpumesh.model.resources import facts_as_dict

    facts = local_facts()
    if gpus_may_exist():
        survey = detect()
        if survey.problem:
            raise MeshError(f"{survey.problem}; does `nvidia-smi` or `rocm-smi` work here?")
        cpu = tuple(device for device in facts.devices if device.kind == "cpu")
        facts = facts._replace(devices=(*cpu, *survey.devices))
    return _rows(facts_as_dict(facts))


def of_mesh(url: str, token: str) -> List[Dict[str, Any]]:
    """Rows for what the workers of a mesh have told.

    Raises:
        MeshError: The mesh does not answer, or refuses us.
    """
    from gpumesh import GPUMesh

    with GPUMesh(url, token=token, fallback=False) as mesh:
        workers = mesh.workers()
    return [row for worker in workers for row in _rows(worker)]


def _rows(worker: Mapping[str, Any]) -> List[Dict[str, Any]]:
    rows = []
    for device in worker["devices"]:
        rates = dict(device["rates"])
        rows.append(
            {
                "hostname": worker["hostname"],
                "worker": worker.get("id", ""),
                "free": max(0, device["memory"] - device["others"]),
                **device,  # Of a worker in a mesh with what is booked and measured now: `scheduler.snapshot.device_view`.
                "key": device["uuid"] or f"{device['kind']}:{device['index']}",
                "rates": rates,
                "is_measured": bool(rates),
                "problem": device["problem"] or worker.get("problem", ""),
            }
        )
    return rows


def name_of(row: Mapping[str, Any]) -> str:
    """`cuda:0`: as a program on that machine names the device."""
    return str(row["kind"]) if row["kind"] in ("cpu", "mps") else f"{row['kind']}:{row['index']}"


def _print_table(rows: List[Dict[str, Any]]) -> None:
    from rich.table import Table

    console = screen()
    if not rows:
        console.print("The mesh has no workers; join one with `gpumesh join`", highlight=False)
        return
    hosts = {(row["hostname"], row["worker"]) for row in rows}
    is_mesh = any(row["worker"] for row in rows)
    is_live = any(row.get(name) is not None for row in rows for name in ("utilisation", "temperature", "power"))
    columns = ["device", "nvidia-smi", "name", "memory", "free", "score", *(["now"] if is_live else []), "state"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in [*(["host"] if is_mesh else []), *columns]:
        right = column in ("nvidia-smi", "memory", "free", "score", "now")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        cells = _cells(row)
        table.add_row(*([str(row["hostname"])] if is_mesh else []), *(cells[column] for column in columns))
    console.print(table)
    gpus = sum(row["kind"] != "cpu" and not row["problem"] for row in rows)
    machines = f" on {len(hosts)} machines" if len(hosts) > 1 else ""
    console.print(f"{gpus} usable GPU{'' if gpus == 1 else 's'}{machines}", highlight=False)


def _cells(row: Mapping[str, Any]) -> Dict[str, str]:
    from gpumesh.model.resources import show_bytes

    is_gpu = row["kind"] != "cpu"
    figures = (("utilisation", "%"), ("temperature", "C"), ("power", "W"))
    return {
        "device": str(row["kind"]) if is_gpu and row["problem"] else name_of(row),  # Unused: no program has a number for it.
        "nvidia-smi": str(row["system_index"]) if row["system_index"] >= 0 else "",
        "name": str(row["name"]),
        "memory": show_bytes(row["memory"]) if row["memory"] else "?",
        "free": show_bytes(row["free"]) if is_gpu and row["memory"] else "",
        "score": f"{'' if row['is_measured'] else '~'}{row['score']:.3g}",
        "now": " ".join(f"{row[name]:.0f} {unit}" for name, unit in figures if row.get(name) is not None),
        "state": str(row["problem"] or "ready"),
    }
