"""What the radar shows, for rich: a table, or on a narrow terminal a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional

if TYPE_CHECKING:
    from gpumesh.cli.radar import View
    from gpumesh.network.announcement import Mesh

OTHER = "another token"

_MAX_WORKERS = 200
_COLUMNS = ("mesh", "worker", "device", "score", "load", "status")
_TABLE_COLUMNS = 72  # Of a terminal: in fewer the columns of the table break words.


def picture(view: View, *, width: int) -> Any:
    """The meshes, their workers, and lines below them.

    Args:
        width: Columns of the terminal.
    """
    from rich.console import Group
    from rich.text import Text

    rows = view.rows()
    lines: List[Any] = []
    if rows and width >= _TABLE_COLUMNS:
        lines.append(_table(rows))
    elif rows:
        for mesh, workers, said in rows:
            lines += _listed(mesh, workers, said)
    elif view.problem:
        lines.append(Text(view.problem))
    else:
        lines.append(Text("No mesh on this machine's networks; start one with `gpumesh serve`."))
    lines += [Text(f"{mesh.name}: {mesh.warning}", style="yellow") for mesh, _, _ in rows if mesh.warning]
    if view.left_out:
        lines.append(Text(f"{view.left_out} more announcements are left out: there are too many."))
    return Group(*lines)


def _table(rows: Any) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in ("score", "load") else "left", overflow="fold")
    for mesh, workers, said in rows:
        table.add_row(_title(mesh), "", "", "", "", Text(_status(mesh, workers, said)))
        for worker in (workers or [])[:_MAX_WORKERS]:
            table.add_row(
                "",
                Text(str(worker.get("hostname", ""))),
                Text(str(worker.get("device_name", ""))),
                f"{worker.get('score', 0):.3g}",
                _load(worker),
                Text(_state(worker)),
            )
    return table


def _listed(mesh: Mesh, workers: Optional[List[Dict[str, Any]]], said: str) -> List[Any]:
    """A mesh without columns: what belongs to it is indented."""
    from rich.padding import Padding
    from rich.text import Text

    lines: List[Any] = [_title(mesh), Padding(Text(_status(mesh, workers, said)), (0, 0, 0, 2))]
    for worker in (workers or [])[:_MAX_WORKERS]:
        name = ": ".join(str(worker[key]) for key in ("hostname", "device_name") if worker.get(key))
        words = f"{name}, score {worker.get('score', 0):.3g}, load {_load(worker)}, {_state(worker)}"
        lines.append(Padding(Text(words), (0, 0, 0, 2)))
    return lines


def _title(mesh: Mesh) -> Any:
    from rich.text import Text

    where = mesh.address if mesh.address is not None else (mesh.addresses[0] if mesh.addresses else None)
    title = Text(mesh.name, style="bold", overflow="fold")
    if where is not None:
        title.append(f" {where.url}", style="not bold")
    return title


def _status(mesh: Mesh, workers: Optional[List[Dict[str, Any]]], said: str) -> str:
    if mesh.reason:
        return f"cannot be joined: {mesh.reason}"
    if said == OTHER:
        return "cannot be joined with this token: the mesh has another one"
    if said or mesh.address is None:
        return said
    if not workers:
        return "can be joined"
    alive = sum(1 for worker in workers if worker.get("alive", True))
    return f"can be joined; {alive} worker{'' if alive == 1 else 's'}"


def _state(worker: Dict[str, Any]) -> str:
    if not worker.get("alive", True):
        return f"not alive: {worker.get('lost') or 'lost'}"
    return str(worker.get("problem") or "alive")


def _load(worker: Dict[str, Any]) -> str:
    load = f"{worker.get('running', 0)}/{worker.get('slots', 0)}"
    return f"{load} +{worker['queued']}" if worker.get("queued") else load
