"""The coordinator's page: self-contained HTML, without scripts and without anything of other hosts. Reads nothing by itself."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any, Dict, List, Optional

from gpumesh.scheduler.snapshot import worker_state

LOGIN = "login"  # The query by which a browser is made to ask for the token.

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2733; background: #fff }
h1 { font-size: 1.4rem } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #d6dde4; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } .away { color: #8a939c } code { background: #eef2f5; padding: 0 .3rem }
@media (prefers-color-scheme: dark) { body { color: #dde4ea; background: #14191e } th, td { border-color: #333d47 } code { background: #242c34 } }
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
        *(f"{count} workers {escape(state)}" for state, count in figures["worker_states"].items() if count),
        *(f"{count} tasks {escape(state)}" for state, count in figures["task_states"].items() if count),
        f"{figures['ended']} tasks ended",
        f"{figures['clients']} clients",
        f"up {_duration(figures['uptime'])}",
    ]
    head = "".join(
        f"<th{' class=n' if is_number else ''}>{name}</th>"
        for name, is_number in (
            ("worker", False),
            ("device", False),
            ("score", True),
            ("slots", True),
            ("running", True),
            ("queued", True),
            ("done", True),
            ("state", False),
        )
    )
    rows = "".join(_row(row) for row in figures["workers"])
    return _page(
        f"<p>{', '.join(counts)}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p>mesh <code>{escape(figures['mesh'])}</code>, gpumesh {escape(figures['version'])}</p>",
        refresh='<meta http-equiv="refresh" content="5">',
    )


def _row(row: Dict[str, Any]) -> str:
    numbers: List[str] = [f"{row['score']:.3g}", *(str(row[name]) for name in ("slots", "running", "queued", "done"))]
    cells = "".join(f"<td class=n>{each}</td>" for each in numbers)
    state = worker_state(row)
    why = row["lost"] if state == "away" else row["problem"]
    return (
        f"<tr{' class=away' if state == 'away' else ''}><td>{escape(row['hostname'])} <code>{escape(row['id'])}</code></td>"
        f"<td>{escape(str(row['device_name']))}</td>{cells}<td>{escape(f'{state}: {why}' if why else state)}</td></tr>"
    )


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{int(seconds)} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h"


def _page(body: str, *, refresh: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">{refresh}'
        f"<title>gpumesh</title><style>{_STYLE}</style></head><body><h1>gpumesh</h1>{body}</body></html>\n"
    )
