"""What `gpumesh setup` starts: `gpumesh serve` or `gpumesh join` in a process of its own, with the radar before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from gpumesh.cli.setup import Command


def run(command: Command) -> int:
    """Start it and stay until it has ended: the radar first, if there is a terminal, until q.

    The first Ctrl-C lets its running tasks finish, a second ends it at once, as if it had been started by hand.

    Returns:
        Its exit code.
    """
    environment = dict(os.environ)
    if not command.finds_token:
        environment["GPUMESH_TOKEN"] = command.token  # It takes it out of its environment at once.
    if command.has_radar:
        log = _log_file()
        typer.echo(f"gpumesh: starting; what it says goes to {log.name}")
        with log:
            process = _start(command, environment, output=log)
    else:
        process = _start(command, environment, output=None)
    is_interrupted = False
    try:
        if command.has_radar:
            is_interrupted = _radar(command, process)
            if is_interrupted:
                process.send_signal(signal.SIGINT)
            elif process.poll() is None:
                typer.echo(f"gpumesh: `gpumesh {command.arguments[0]}` goes on; Ctrl-C ends it")
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)  # It is in a session of its own: the terminal tells only us.
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code and command.has_radar and not is_interrupted:
        typer.echo(
            f"gpumesh: `gpumesh {' '.join(command.arguments)}` has ended with code {code}: {_last_line(log.name)}", err=True
        )
    return code


def _start(command: Command, environment: Any, *, output: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpumesh", *command.arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
    )


def _log_file() -> Any:
    """In the user's folder for state; only they can read it."""
    from gpumesh.network.certificates import state_folder

    folder = state_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return open(os.open(os.path.join(folder, "setup.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", closefd=True)


def _last_line(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _radar(command: Command, process: subprocess.Popen[bytes]) -> bool:
    """The radar, until q, Ctrl-C or the end of what was started; whether it was Ctrl-C."""
    from gpumesh.cli import radar
    from gpumesh.network.discovery import Watcher

    with Watcher() as watcher:
        view = radar.View(watcher, command.token)
        try:
            return radar.show(watcher, view, until=lambda: process.poll() is not None)
        finally:
            view.close()
