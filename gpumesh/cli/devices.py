"""`gpumesh devices`: what this machine, or the whole mesh, can compute with, and why not with the rest."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, log_to_stderr, resolve_mesh


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
        address, secret = resolve_mesh(url, token, token_file, ask=False)
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
    readings = worker.get("readings") or {}
    rows = []
    for device in worker["devices"]:
        key = device["uuid"] or f"{device['kind']}:{device['index']}"
        reading = readings.get(key) if isinstance(readings, dict) else None
        rates = dict(device["rates"])
        rows.append(
            {
                "hostname": worker["hostname"],
                "worker": worker.get("id", ""),
                **device,
                "key": key,
                "rates": rates,
                "is_measured": bool(rates),
                "problem": device["problem"] or worker.get("problem", ""),
                "reading": dict(reading) if reading else None,
            }
        )
    return rows


def name_of(row: Mapping[str, Any]) -> str:
    """`cuda:0`: as a program on that machine names the device."""
    return str(row["kind"]) if row["kind"] in ("cpu", "mps") else f"{row['kind']}:{row['index']}"


def _print_table(rows: List[Dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gpumesh.model.resources import show_bytes

    console = Console()
    hosts = {(row["hostname"], row["worker"]) for row in rows}
    is_mesh = any(row["worker"] for row in rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (*(["host"] if is_mesh else []), "device", "nvidia-smi", "name", "memory", "free", "score", "state"):
        right = column in ("nvidia-smi", "memory", "free", "score")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        is_gpu = row["kind"] != "cpu"
        table.add_row(
            *([str(row["hostname"])] if is_mesh else []),
            name_of(row) if not row["problem"] or not is_gpu else str(row["kind"]),  # No number: no program sees it.
            str(row["system_index"]) if row["system_index"] >= 0 else "",
            str(row["name"]),
            show_bytes(row["memory"]) if row["memory"] else "?",
            show_bytes(max(0, row["memory"] - row["others"])) if is_gpu and row["memory"] else "",
            f"{'' if row['is_measured'] else '~'}{row['score']:.3g}",
            str(row["problem"] or "ready"),
        )
    if not rows:
        console.print("The mesh has no workers; join one with `gpumesh join`", highlight=False)
        return
    console.print(table)
    gpus = sum(row["kind"] != "cpu" and not row["problem"] for row in rows)
    machines = f" on {len(hosts)} machines" if is_mesh and len(hosts) > 1 else ""
    console.print(f"{gpus} usable GPU{'' if gpus == 1 else 's'}{machines}", highlight=False)
