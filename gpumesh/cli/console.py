"""How much the commands say, where log lines go, and where a token comes from."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Optional, Tuple

import typer

from gpumesh.config import MIN_TOKEN_CHARACTERS

_verbosity = 0
_given = ""  # The secret that this process was started with, as an argument or in its environment.

STDIN = "-"

# Defaults of parameters that several commands share, each to be annotated with the type in the comment.
TOKEN: Any = typer.Option(  # Optional[str]
    None,
    "--token",
    help="The mesh's secret. Others on this machine can see it in the list of processes: prefer --token-file or GPUMESH_TOKEN.",
)
TOKEN_FILE: Any = typer.Option(  # Optional[str]
    None, "--token-file", metavar="FILE", help="A file with the secret in it; - for standard input."
)
SLOTS: Any = typer.Option(  # Optional[int]
    None, "--slots", min=1, max=4096, help="Tasks at a time on this machine; by default one per core."
)
SCORE: Any = typer.Option(  # Optional[float]
    None, "--score", help="The speed of this machine's CPU instead of the measured one; 100 is an RTX 4090."
)
GPU_SCORE: Any = typer.Option(  # Optional[float]
    None, "--gpu-score", help="The speed of each of its GPUs instead of the measured ones."
)
OBJECT_MEMORY: Any = typer.Option(  # Optional[str]
    None,
    "--object-memory",
    metavar="SIZE",
    help="Memory for objects on this machine, such as 8GB; by default 30 % of its RAM. What is above goes to disk.",
)
SPILL_DIR: Any = typer.Option(  # Optional[str]
    None, "--spill-dir", metavar="FOLDER", help="Where objects above that go; by default the system's temporary folder."
)


def set_verbosity(level: int) -> None:
    """Remember how often `-v` was given; processes started from here learn it from their environment."""
    global _verbosity
    _verbosity = level
    if level:
        os.environ["GPUMESH_VERBOSE"] = str(level)


def verbosity() -> int:
    """How often `-v` was given."""
    return _verbosity


def set_object_limits(object_memory: Optional[str], spill_dir: Optional[str]) -> None:
    """What `--object-memory` and `--spill-dir` say; processes started from here learn it from their environment.

    Raises:
        typer.BadParameter: Not a size, or not a folder that can be written to.
    """
    from gpumesh.model.resources import parse_bytes

    if object_memory is not None:
        try:
            if parse_bytes(object_memory, what="--object-memory") <= 0:
                raise ValueError("--object-memory must be more than 0 bytes")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        os.environ["GPUMESH_OBJECT_MEMORY"] = object_memory
    if spill_dir is not None:
        folder = os.path.abspath(spill_dir)
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"--spill-dir {folder} is not a folder that this user can write to; create it first")
        os.environ["GPUMESH_SPILL_DIR"] = folder


def set_gpu_score(score: Optional[float]) -> None:
    """What `--gpu-score` says; processes started from here learn it from their environment.

    Raises:
        ValueError: It cannot serve as a score.
    """
    if score is not None:
        from gpumesh.devices.scoring import GPU_SCORE_VARIABLE, check_score

        os.environ[GPU_SCORE_VARIABLE] = repr(check_score(score))


def screen() -> Any:
    """Where tables are printed: what stands in brackets or between colons in a name is no markup there, whoever has chosen it."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def log_to_stderr(*, usual_level: int) -> None:
    """Send the runtime's log lines to standard error: from `usual_level` on, with `-v` from INFO on, with `-vv` all."""
    level = {0: usual_level, 1: min(usual_level, logging.INFO)}.get(_verbosity, logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("gpumesh")
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)


def given_token(token: Optional[str], token_file: Optional[str]) -> Optional[str]:
    """The secret from the flag, the file or `GPUMESH_TOKEN`, in this order; None if it is in none of them.

    Raises:
        typer.BadParameter: Both flags were given, or the one given holds nothing.
        OSError: The file cannot be read.
    """
    global _given
    if token is not None and token_file is not None:
        raise typer.BadParameter("give --token or --token-file, not both")
    if token_file is not None:
        found = _token_from(token_file)
        if not found:
            raise typer.BadParameter(f"the file {token_file} holds no token" if token_file != STDIN else "no token came in")
        return found
    if token is not None:
        if not token.strip():
            raise typer.BadParameter("the token is empty; leave --token out to have one generated by `gpumesh serve`")
        _given = token
        return token.strip()
    _given = os.environ.get("GPUMESH_TOKEN", "")
    return _given.strip() or None


def _token_from(file: str) -> str:
    if file != STDIN:
        try:
            with open(file, encoding="utf-8") as opened:
                return opened.read().strip()
        except OSError as error:
            raise OSError(error.errno, f"cannot read the token file {file}: {error.strerror}; check --token-file") from None
        except UnicodeDecodeError:
            raise typer.BadParameter(f"the file {file} holds no text, and so no token") from None
    return ask_for_token() if sys.stdin.isatty() else sys.stdin.readline().strip()


def ask_for_token() -> str:
    """What the person at the terminal types, which is not shown. Ctrl-C ends the program, as everywhere."""
    try:
        return str(typer.prompt("Token of the mesh", hide_input=True, err=True)).strip()
    except typer.Abort:
        typer.echo("", err=True)
        raise typer.Exit(130) from None


def check_token(token: Optional[str]) -> None:
    """Warn of one that somebody has chosen and that others can find."""
    if token is not None and len(token) < MIN_TOKEN_CHARACTERS:
        typer.echo(
            f"gpumesh: the token has {len(token)} characters, and whoever reaches the mesh may try such short ones until one fits, "
            f"and then run code here; choose {MIN_TOKEN_CHARACTERS} or more, or let `gpumesh serve` generate it",
            err=True,
        )


def hide_token() -> None:
    """Take the secret out of what others on this machine, and tasks, can read of this process: its arguments and its environment."""
    os.environ.pop("GPUMESH_TOKEN", None)
    if _given:
        from gpumesh.runtime.system import overwrite_start

        overwrite_start(_given)


def resolve_mesh(url: Optional[str], token: Optional[str], token_file: Optional[str], *, ask: bool) -> Tuple[str, str]:
    """Address and secret of the mesh a command is about: from its arguments, the environment, what was saved, or the person.

    Args:
        ask: Ask for a secret that is nowhere to be found, if there is a terminal to ask at.

    Raises:
        MeshUnavailableError: There is no address anywhere.
        AuthenticationError: There is no secret anywhere.
        ValueError: The address makes no sense.
    """
    from gpumesh.errors import AuthenticationError, MeshUnavailableError
    from gpumesh.network.address import parse_address
    from gpumesh.runtime.settings import resolve_connection

    found, secret = resolve_connection(url, given_token(token, token_file))
    if not found:
        raise MeshUnavailableError("no mesh is known on this machine; name its address, or start one with `gpumesh serve`")
    address = parse_address(found)
    if secret is None and ask and sys.stdin.isatty():
        secret = ask_for_token()
    if not secret:
        raise AuthenticationError(f"no token for the mesh at {address}; give --token-file FILE, or set GPUMESH_TOKEN")
    return address.url, secret
