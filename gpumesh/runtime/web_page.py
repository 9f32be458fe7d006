"""The coordinator's page: self-contained HTML, without scripts and without anything of other hosts. Reads nothing by itself."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any, Dict, List, Optional

from gpumesh.model.shown import span
from gpumesh.scheduler.snapshot import worker_state

LOGIN = "login"  # The query by which a browser is made to ask for the token.

_NUMBERS = ("score", "slots", "running", "queued", "done")
_COLUMNS = ("worker", "device", *_NUMBERS, "state")
_NO_WORKER = (
    "<p>No worker is here yet. To lend a machine, type there: <code>gpumesh quickjoin</code> with the address of this page; "
    "<code>gpumesh token worker</code> where the mesh was started shows the token for it.</p>"
)

_STYLE = """
:root { color-scheme: light dark; --text: #1c2733; --back: #fff; --line: #d6dde4; --faint: #5c6873; --code: #eef2f5; --link: #0b5cad }
body { font: 15px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 60rem; padding: 0 1rem; color: var(--text);
  background: var(--back); overflow-wrap: anywhere }
h1 { font-size: 1.4rem } a { color: var(--link) } code { background: var(--code); padding: 0 .3rem } .away { color: var(--faint) }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th, td.n { overflow-wrap: normal } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
@media (prefers-color-scheme: dark) {
  :root { --text: #dde4ea; --back: #14191e; --line: #333d47; --faint: #98a4ae; --code: #242c34; --link: #7db7f5 }
}
@media (max-width: 44rem) {
  body { margin: 1.5rem auto } thead { display: none } table, tbody, tr, td { display: block }
  tr { border-bottom: 1px solid var(--line); padding: .6rem 0 } tr:first-child { border-top: 1px solid var(--line) }
  td, td.n { border: 0; padding: 0 0 0 5rem; position: relative; text-align: left; white-space: normal } td:first-child { padding: 0 }
  td::before { content: attr(data-name); position: absolute; left: 0; color: var(--faint) } td:first-child::before { content: none }
  td:first-child bdi { font-weight: 600 }
}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def render(figures: Optional[Dict[str, Any]]) -> str:
    """The page with `Coordinator.figures()`; None: for somebody who has not shown the token, without any of them."""
    if figures is None:
        return _page(
            "<p>A gpumesh coordinator answers here.</p>"
            "<p>To lend this machine or to use the mesh: <code>gpumesh join</code> with the address of this page, and the mesh's token.</p>"
            f'<p><a href="/?{LOGIN}">Status</a> (any user name; the password is the token)</p>',
            refresh="",
        )
    counts = [
        *(_counted(count, "worker", state) for state, count in figures["worker_states"].items() if count),
        *(_counted(count, "task", state) for state, count in figures["task_states"].items() if count),
        _counted(figures["ended"], "task", "ended"),
        _counted(figures["clients"], "client"),
        f"up {span(figures['uptime'])}",
    ]
    mesh = f"<p>mesh <code>{escape(figures['mesh'])}</code>, gpumesh {escape(figures['version'])}</p>"
    return _page(
        f"<p>{', '.join(counts)}</p>{_table(figures['workers']) if figures['workers'] else _NO_WORKER}{mesh}",
        refresh='<meta http-equiv="refresh" content="5">',
    )


def _table(workers: List[Dict[str, Any]]) -> str:
    head = "".join(f"<th scope=col{' class=n' if name in _NUMBERS else ''}>{name}</th>" for name in _COLUMNS)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, workers))}</tbody></table>"


def _row(row: Dict[str, Any]) -> str:
    state = worker_state(row)
    why = row["lost"] if state == "away" else row["problem"]
    score = row["score"]
    texts = {
        "worker": f"<bdi>{escape(row['hostname'])}</bdi> <code>{escape(row['id'])}</code>",
        "device": f"<bdi>{escape(_devices(row))}</bdi>",
        "score": f"{score:.3g}" if score < 1000 else f"{score:.0f}",
        **{name: str(row[name]) for name in ("slots", "running", "queued", "done")},
        "state": f"<bdi>{escape(f'{state}: {why}' if why else state)}</bdi>",
    }
    cells = "".join(f'<td{" class=n" if name in _NUMBERS else ""} data-name="{name}">{texts[name]}</td>' for name in _COLUMNS)
    return f"<tr{' class=away' if state == 'away' else ''}>{cells}</tr>"


def _devices(row: Dict[str, Any]) -> str:
    """Its best device, and how many of them there are."""
    name = str(row["device_name"])
    count = sum(device["name"] == name and not device["problem"] for device in row["devices"])
    name = name or str(row["device"])
    return f"{count} x {name}" if count > 1 else name


def _counted(count: int, what: str, state: str = "") -> str:
    return f"{count} {what}{'' if count == 1 else 's'} {escape(state)}".rstrip()


def _page(body: str, *, refresh: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">{refresh}'
        f"<title>gpumesh</title><style>{_STYLE}</style></head><body><h1>gpumesh</h1>{body}</body></html>\n"
    )
