"""`gpumesh events`: what has happened to the mesh."""

from __future__ import annotations

import logging
import time
from typing import Any, Dict, List, Optional

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE
from gpumesh.cli.following import Patience
from gpumesh.cli.jobs import URL, connected_mesh
from gpumesh.config import EVENT_POLL_SECONDS, RECONNECT_SECONDS

SHOWN = 100  # Of those of before.


def events(
    url: Optional[str] = URL,
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    follow: bool = typer.Option(
        False, "--follow", "-f", help="Go on until Ctrl-C; a coordinator that goes away is looked for."
    ),
    everything: bool = typer.Option(False, "--all", help=f"All that the coordinator remembers, not only the last {SHOWN}."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object on each line instead of text."),
    reconnect_timeout: float = typer.Option(
        RECONNECT_SECONDS,
        "--reconnect-timeout",
        min=0.0,
        metavar="SECONDS",
        help="How long to look for a coordinator that is gone.",
    ),
) -> None:
    """Show who joined, left or died and why, what ran again, owners' pauses, jobs, refused strangers. Times are the coordinator's."""
    with connected_mesh(url, token, token_file, log_level=logging.ERROR, reconnect_timeout=reconnect_timeout) as mesh:
        patience = Patience(reconnect_timeout)
        found = patience.ask(mesh.events)
        shown = found if everything else found[-SHOWN:]
        _print(shown, as_json=as_json)
        if not follow:
            return
        newest = found[-1]["number"] if found else 0
        try:
            while True:
                time.sleep(EVENT_POLL_SECONDS)
                found = patience.ask(lambda: mesh.events(since=newest))  # noqa: B023  # Asked at once.
                if found:
                    newest = found[-1]["number"]
                    _print(found, as_json=as_json)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _print(found: List[Dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        import json

        for event in found:
            print(json.dumps(event, default=str), flush=True)
        return
    for event in found:
        print(f"{_clock(event['time'])}  {event['kind']:<9} {event['text']}", flush=True)


def _clock(iso: str) -> str:
    from datetime import datetime

    try:
        return datetime.fromisoformat(iso.replace("Z", "+00:00")).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return iso
