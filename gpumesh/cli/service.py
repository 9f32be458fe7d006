"""`gpumesh service`: this machine as a worker that its system starts when you log in, and again when it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import Dict, List, Mapping, Optional, Tuple

import typer

from gpumesh.cli.console import TOKEN_FILE, check_token, resolve_mesh
from gpumesh.runtime.service_units import LABEL, UNIT, launchd_agent, systemd_unit, worker_command

app = typer.Typer(
    help="Let this machine join a mesh by itself, whenever you log in.", no_args_is_help=True, rich_markup_mode=None
)

_ASK_SECONDS = 30.0  # For the service manager; stopping lets tasks finish, which may take longer and goes on by itself.
_KEPT = ("GPUMESH_OBJECT_MEMORY", "GPUMESH_SPILL_DIR", "GPUMESH_GPU_SCORE", "GPUMESH_ENVIRONMENTS", "CUDA_VISIBLE_DEVICES")


@app.command(name="install")
def install(
    url: Optional[str] = typer.Argument(None, help="The mesh's address; by default the one saved on this machine."),
    token_file: Optional[str] = TOKEN_FILE,
    slots: Optional[int] = typer.Option(None, "--slots", min=1, max=4096, help="Tasks at a time; by default one per core."),
    tag: Optional[List[str]] = typer.Option(None, "--tag", metavar="NAME=VALUE", help="For tasks to ask for; may be repeated."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be written, and change nothing."),
) -> None:
    """Write a systemd user unit or a launchd agent that joins the mesh, and start it.

    The token comes from --token-file, GPUMESH_TOKEN or what was saved for this address, and is kept in a file that only you can read; it is
    in no unit and on no command line. The one that `gpumesh token worker` shows is enough.

    How much of the machine is lent, and when, stays your decision: `gpumesh limit`, `pause`, `resume`.
    """
    from gpumesh.cli.join import parse_tags
    from gpumesh.network.forward_proxy import without_login

    manager = _manager()
    parse_tags(tag or [])
    address, secret = resolve_mesh(url, None, token_file, ask=True)
    options = [*(["--slots", str(slots)] if slots else []), *(word for each in tag or [] for word in ("--tag", each))]
    command = worker_command(sys.executable, address, _token_path(), options)
    proxies = _proxies(address)
    if dry_run:
        typer.echo(f"# {_unit_path(manager)}", err=True)
        typer.echo(_text(manager, command, {name: without_login(value) for name, value in proxies.items()}), nl=False)
        return
    text = _text(manager, command, proxies)
    has_login = any(value != without_login(value) for value in proxies.values())
    check_token(secret)
    _write(_token_path(), f"{secret}\n", 0o600)
    _write(_unit_path(manager), text, 0o600 if has_login else 0o644)
    typer.echo(f"gpumesh: {_unit_path(manager)} is written; its token is in {_token_path()}")
    for line in _start(manager):
        typer.echo(f"gpumesh: {line}")


@app.command(name="status")
def status() -> None:
    """Say whether the service is there, and whether it runs; exits with 1 if it does not run."""
    manager = _manager()
    path = _unit_path(manager)
    if not os.path.exists(path):
        typer.echo("gpumesh: no service is installed for this user; do so with `gpumesh service install`")
        raise typer.Exit(1)
    state = _state(manager)
    typer.echo(f"gpumesh: {path} is installed and {state}")
    if manager == "systemd":
        typer.echo(f"What it says: journalctl --user -u {UNIT}")
    else:
        typer.echo(f"What it says: {_log_path()}")
    raise typer.Exit(0 if state == "runs" else 1)


@app.command(name="remove")
def remove() -> None:
    """Stop the service, and delete its unit and its token; running tasks finish first."""
    manager = _manager()
    path = _unit_path(manager)
    if not os.path.exists(path):
        typer.echo("gpumesh: no service is installed for this user; there is nothing to remove")
        return
    problem = _stop(manager)
    for file in (path, _token_path()):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
    if manager == "systemd":
        _run("systemctl", "--user", "daemon-reload")
    typer.echo("gpumesh: the service is removed" + (f"; it may still run: {problem}" if problem else ""))


# --- the two managers


def _manager() -> str:
    if sys.platform == "darwin":
        return "launchd"
    if sys.platform == "linux":
        return "systemd"
    raise OSError(
        "there are services for systemd and launchd only; on Windows let the Task Scheduler run `gpumesh join` at log-on"
    )


def _proxies(url: str) -> Dict[str, str]:
    """What the environment says of the HTTP proxy of this network, where the mesh is reached through one."""
    from gpumesh.network.address import HTTPS, parse_address
    from gpumesh.network.connecting import PROXY_VARIABLES

    if parse_address(url).way != HTTPS:
        return {}
    named = (*PROXY_VARIABLES, "no_proxy", "NO_PROXY")
    values = {name: os.environ.get(name, "").strip() for name in named}
    return {name: value for name, value in values.items() if value and value.isprintable()}


def _text(manager: str, command: List[str], proxies: Mapping[str, str]) -> str:
    environment = {**{name: os.environ[name] for name in _KEPT if os.environ.get(name)}, **proxies}
    environment["PYTHONUNBUFFERED"] = "1"
    if manager == "systemd":
        return systemd_unit(command, environment)
    return launchd_agent(command, {**environment, "PATH": os.environ.get("PATH", os.defpath)}, _log_path())


def _unit_path(manager: str) -> str:
    home = os.path.expanduser("~")
    if manager == "launchd":
        return os.path.join(home, "Library", "LaunchAgents", f"{LABEL}.plist")
    folder = os.environ.get("XDG_CONFIG_HOME", "").strip() or os.path.join(home, ".config")
    return os.path.join(folder, "systemd", "user", UNIT)


def _token_path() -> str:
    from gpumesh.runtime.settings import connection_file

    return os.path.join(os.path.dirname(connection_file()), "service-token")


def _log_path() -> str:
    from gpumesh.network.certificates import state_folder

    return os.path.join(state_folder(), "worker.log")


def _start(manager: str) -> List[str]:
    """What has come of it, for people."""
    if manager == "systemd":
        steps: Tuple[Tuple[str, ...], ...] = (
            ("systemctl", "--user", "daemon-reload"),
            ("systemctl", "--user", "enable", UNIT),
            ("systemctl", "--user", "restart", UNIT),
        )
        linger = f"to start it without anybody logging in: loginctl enable-linger {_user()}"
        by_hand = f"systemctl --user daemon-reload && systemctl --user enable --now {UNIT}"
    else:
        os.makedirs(os.path.dirname(_log_path()), mode=0o700, exist_ok=True)
        _run("launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}")  # An older one.
        steps = (("launchctl", "bootstrap", f"gui/{os.getuid()}", _unit_path(manager)),)
        linger, by_hand = "", f"launchctl bootstrap gui/{os.getuid()} {_unit_path(manager)}"
    for step in steps:
        problem = _run(*step)
        if problem:
            return [f"it could not be started from here ({problem}); when you are logged in: {by_hand}"]
    return ["this machine lends itself from now on, whenever you are logged in", *([linger] if linger else [])]


def _stop(manager: str) -> str:
    if manager == "systemd":
        return _run("systemctl", "--user", "disable", "--now", "--no-block", UNIT)
    return _run("launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}")


def _state(manager: str) -> str:
    if manager == "systemd":
        problem = _run("systemctl", "--user", "is-active", "--quiet", UNIT)
    else:
        problem = _run("launchctl", "print", f"gui/{os.getuid()}/{LABEL}")
    return "runs" if not problem else "does not run"


def _run(*command: str) -> str:
    """Why a command of the system failed; "" if it did not."""
    if shutil.which(command[0]) is None:
        return f"there is no {command[0]} here"
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return " ".join(done.stderr.split())[:200] or f"`{' '.join(command)}` ended with exit code {done.returncode}"


def _write(path: str, text: str, mode: int) -> None:
    """Never readable by more than `mode` says, not even for a moment."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    part = f"{path}.{os.getpid()}"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.chmod(part, mode)
        file.write(text)
    os.replace(part, path)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
