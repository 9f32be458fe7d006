"""`gpumesh join`: this machine as a worker of a mesh."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import typer

from gpumesh.cli.console import (
    GPU_SCORE,
    OBJECT_MEMORY,
    SCORE,
    SLOTS,
    SPILL_DIR,
    TOKEN,
    TOKEN_FILE,
    check_token,
    hide_token,
    log_to_stderr,
    resolve_mesh,
    set_gpu_score,
    set_object_limits,
)
from gpumesh.cli.finding import mesh_to_join
from gpumesh.cli.owner import EXCLUSIVE, HOURS, ONLY_WHEN_IDLE, set_times


def join(
    url: Optional[str] = typer.Argument(
        None,
        help="The mesh's address, as `gpumesh serve` shows it; by default the one saved on this machine if it answers, else one that is "
        "found on its networks.",
    ),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    slots: Optional[int] = SLOTS,
    score: Optional[float] = SCORE,
    gpu_score: Optional[float] = GPU_SCORE,
    tag: Optional[List[str]] = typer.Option(
        None, "--tag", metavar="NAME=VALUE", help="Something for tasks to ask for; may be repeated."
    ),
    discovery: bool = typer.Option(
        True, "--discovery/--no-discovery", help="Without an address, look for a mesh on this machine's networks."
    ),
    object_memory: Optional[str] = OBJECT_MEMORY,
    spill_dir: Optional[str] = SPILL_DIR,
    only_when_idle: Optional[float] = ONLY_WHEN_IDLE,
    hours: Optional[str] = HOURS,
    exclusive: Optional[str] = EXCLUSIVE,
) -> None:
    """Lend this machine to a mesh until Ctrl-C.

    Without an address: the saved one if a mesh answers there, else a mesh that is found on this machine's networks and knows the secret.

    The secret comes from --token, --token-file, GPUMESH_TOKEN or what was saved for this address; without any, you are asked. The one that
    `gpumesh token worker` shows is enough: it lends this machine and can do nothing else.

    Ctrl-C lets running tasks finish first; a second Ctrl-C ends them, and they start again elsewhere. A coordinator that goes away is looked
    for until it is back.

    When and how much it is lent can be changed at any time, and holds until changed again: `gpumesh limit`, `pause`, `resume`. So do --hours,
    --only-when-idle and --exclusive.
    """
    import logging

    from gpumesh.devices.scoring import check_score

    tags = parse_tags(tag or [])
    if score is not None:
        check_score(score)
    set_gpu_score(gpu_score)
    set_object_limits(object_memory, spill_dir)
    address, secret = mesh_to_join(url, token, token_file) if discovery else resolve_mesh(url, token, token_file, ask=True)
    hide_token()
    log_to_stderr(usual_level=logging.INFO)
    set_times(hours, only_when_idle, exclusive)
    check_token(secret)

    raise typer.Exit(lend(address, secret, slots=slots, score=score, tags=tags))


def lend(address: str, secret: str, *, slots: Optional[int], score: Optional[float], tags: Dict[str, str]) -> int:
    """Work for the mesh there until Ctrl-C, and save it once it has taken this machine; the exit code.

    Raises:
        MeshError: It can never join; the message says where, and whether the secret was a saved one.
    """
    from gpumesh.errors import AuthenticationError
    from gpumesh.network.address import parse_address
    from gpumesh.runtime.serving import run_worker
    from gpumesh.runtime.settings import load_connection, save_connection

    def announce(worker: Dict[str, Any]) -> None:
        save_connection(address, secret, certificate=worker["certificate"])
        typer.echo(f"gpumesh: {worker['hostname']} works for {address} with {worker['slots']} slots, Ctrl-C to stop")

    try:
        return run_worker(address, secret, slots=slots, score=score, tags=tags, on_joined=announce)
    except AuthenticationError as error:
        saved = "; this one is saved, and `gpumesh disconnect` forgets it" if load_connection() == (address, secret) else ""
        where = "" if str(parse_address(address)) in str(error) else f"{address}: "
        raise AuthenticationError(f"{where}{error}{saved}") from None


def parse_tags(pairs: List[str]) -> Dict[str, str]:
    """Tags from `NAME=VALUE` arguments.

    Raises:
        typer.BadParameter: One is not of this form.
    """
    tags: Dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (equals and name.strip()):
            raise typer.BadParameter(f"{pair!r} is not of the form NAME=VALUE, such as --tag room=lab")
        tags[name.strip()] = value.strip()
    return tags
