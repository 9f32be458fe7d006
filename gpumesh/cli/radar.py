"""`gpumesh radar`: the meshes on this machine's networks and, of those that know this user's token, their workers, live."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

import typer

from gpumesh.cli.console import TOKEN, TOKEN_FILE, given_token, hide_token, log_to_stderr
from gpumesh.cli.radar_picture import OTHER, picture
from gpumesh.config import FIND_SECONDS

if TYPE_CHECKING:
    from gpumesh.network.announcement import Mesh
    from gpumesh.network.discovery import Watcher

_POLL_SECONDS = 1.0  # Between two questions for a mesh's workers.
_REFRESH_SECONDS = 0.25
_SETTLE_SECONDS = 0.5  # Of one look: after every address that is known has been looked at.
_MAX_PEEKS = 16  # Meshes whose workers are shown.


def radar(
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    once: bool = typer.Option(False, "--once", help="Look once, print what there is, and end."),
    seconds: float = typer.Option(
        FIND_SECONDS, "--seconds", min=0.1, max=3600.0, metavar="SECONDS", help="How long to look, with --once or --json."
    ),
    as_json: bool = typer.Option(False, "--json", help="The same as a JSON list."),
) -> None:
    """Show the meshes on this machine's networks: where each answers, or why it cannot be joined; q or Ctrl-C ends it.

    With the mesh's token (--token, --token-file, GPUMESH_TOKEN, or the saved one) also its workers: device, score, load.

    What does not write to a terminal prints once.
    """
    import logging

    from gpumesh.network.discovery import Watcher
    from gpumesh.runtime.settings import resolve_connection

    log_to_stderr(usual_level=logging.CRITICAL)
    secret = given_token(token, token_file) or resolve_connection(None, None)[1]
    hide_token()
    with Watcher() as watcher:
        view = View(watcher, secret)
        try:
            if as_json:
                _look_once(watcher, view, seconds)
                _print_json(view)
            else:
                show(watcher, view, once=once, seconds=seconds)
        finally:
            view.close()


def show(
    watcher: Watcher,
    view: View,
    *,
    once: bool = False,
    seconds: float = FIND_SECONDS,
    until: Optional[Callable[[], bool]] = None,
) -> bool:
    """The table: on a terminal live until q or Ctrl-C, elsewhere, or if asked, once.

    Args:
        seconds: How long to look where it is shown once.
        until: The live one ends as well when this is true.

    Returns:
        Whether Ctrl-C has ended it.
    """
    if once or not sys.stdout.isatty() or os.environ.get("TERM", "") == "dumb":  # That one cannot be written over.
        _look_once(watcher, view, seconds)
        _print(view)
        return False
    return _live(view, until)


class View:
    """What there is to show; keeps a client to each mesh whose token is known."""

    def __init__(self, watcher: Watcher, token: Optional[str]) -> None:
        self._watcher = watcher
        self._token = token
        self._peeks: Dict[str, _Peek] = {}

    @property
    def problem(self) -> str:
        """Why nothing can be seen."""
        return self._watcher.problem

    @property
    def left_out(self) -> int:
        """Announcements that are not shown."""
        return self._watcher.left_out

    def rows(self) -> List[Tuple[Mesh, Optional[List[Dict[str, Any]]], str]]:
        """Each mesh, its workers if they may be known, and what is to be said instead."""
        found: List[Tuple[Mesh, Optional[List[Dict[str, Any]]], str]] = []
        meshes = self._watcher.meshes()
        for mesh in meshes:
            if mesh.reason or mesh.address is None:
                found.append((mesh, None, mesh.reason or "looking ..."))
                continue
            peek = self._peeks.get(mesh.id)
            if peek is not None and peek.url != mesh.address.url and peek.has_failed:
                self._peeks.pop(mesh.id).close()
                peek = None
            if peek is None and self._token and len(self._peeks) < _MAX_PEEKS:
                peek = self._peeks[mesh.id] = _Peek(mesh.address.url, self._token)
            if peek is None:
                found.append((mesh, None, "" if self._token is None else "not asked: too many meshes"))
            else:
                found.append((mesh, peek.workers, peek.problem))
        here = {mesh.id for mesh in meshes}
        for ident in [ident for ident in self._peeks if ident not in here]:
            self._peeks.pop(ident).close()
        return found

    @property
    def is_settled(self) -> bool:
        """Whether everything that is known has been asked for."""
        return all(mesh.is_settled for mesh in self._watcher.meshes()) and all(peek.is_settled for peek in self._peeks.values())

    def close(self) -> None:
        """Hang up."""
        for peek in self._peeks.values():
            peek.close()


class _Peek:
    """Asks one mesh for its workers, again and again, on a thread of its own."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.workers: Optional[List[Dict[str, Any]]] = None
        self.problem = "asking for its workers ..."
        self.is_settled = False
        self.has_failed = False
        self._token = token
        self._end = threading.Event()
        threading.Thread(target=self._ask, name="gpumesh-peek", daemon=True).start()

    def _ask(self) -> None:
        from gpumesh import GPUMesh
        from gpumesh.errors import AuthenticationError, MeshError

        with GPUMesh(self.url, token=self._token, fallback=False) as mesh:
            while not self._end.is_set():
                try:
                    self.workers = mesh.workers()
                    self.problem = ""
                except AuthenticationError as error:
                    self.workers = None
                    self.problem = "joinable with this worker token" if "lends a machine" in str(error) else OTHER
                    self.has_failed = True
                    self.is_settled = True
                    return  # Asking again would change nothing.
                except MeshError as error:
                    self.workers = None
                    self.problem = str(error)
                    self.has_failed = True
                self.is_settled = True
                self._end.wait(_POLL_SECONDS)

    def close(self) -> None:
        """Ask no more."""
        self._end.set()


def _look_once(watcher: Watcher, view: View, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    quiet_since = time.monotonic()
    while time.monotonic() < deadline and not watcher.problem:
        has_any = bool(view.rows())
        if not has_any or not view.is_settled:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > _SETTLE_SECONDS:
            return
        watcher.wait(min(0.1, max(0.0, deadline - time.monotonic())))


# --- on paper


def as_records(view: View) -> List[Dict[str, Any]]:
    """What `--json` prints."""
    return [
        {
            "id": mesh.id,
            "name": mesh.name,
            "address": mesh.address.url if mesh.address is not None else None,
            "addresses": [address.url for address in mesh.addresses],
            "answering": [address.url for address in mesh.answering],
            "certificate": mesh.certificate,
            "gpumesh": mesh.gpumesh,
            "protocol": mesh.protocol,
            "joinable": mesh.is_joinable and said != OTHER,
            "reason": said,
            "warning": mesh.warning,
            "workers": workers,
        }
        for mesh, workers, said in view.rows()
    ]


def _print_json(view: View) -> None:
    import json

    typer.echo(json.dumps(as_records(view), indent=2, default=str))
    if view.problem:
        typer.echo(f"gpumesh: {view.problem}", err=True)


def _print(view: View) -> None:
    from rich.console import Console

    console = Console()
    console.print(picture(view, width=console.width))


# --- live


def _live(view: View, until: Optional[Callable[[], bool]]) -> bool:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    started = time.monotonic()

    def now() -> Any:
        if not view.rows() and not view.problem and time.monotonic() - started < FIND_SECONDS:
            return Text("Looking for meshes ... (q ends)")
        return Group(picture(view, width=console.width), Text("q ends", style="dim"))

    with _keys() as pressed, Live(now(), console=console, auto_refresh=False, transient=False) as live:
        try:
            while not pressed.wait(_REFRESH_SECONDS) and not (until is not None and until()):
                live.update(now(), refresh=True)
        except KeyboardInterrupt:
            return True
    return False


@contextlib.contextmanager
def _keys() -> Iterator[threading.Event]:
    """An event that is set once q has been typed; the terminal is as before afterwards."""
    pressed = threading.Event()
    try:
        import select
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError):  # Windows, or no terminal to type at (termios.error is an OSError's sibling).
        yield pressed
        return
    except termios.error:
        yield pressed
        return
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            ready, _, _ = select.select([descriptor], [], [], _REFRESH_SECONDS)
            if ready and os.read(descriptor, 1) in (b"q", b"Q", b"\x04", b""):
                pressed.set()
                return

    tty.setcbreak(descriptor)
    reader = threading.Thread(target=read, name="gpumesh-keys", daemon=True)
    reader.start()
    try:
        yield pressed
    finally:
        over.set()
        reader.join()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
