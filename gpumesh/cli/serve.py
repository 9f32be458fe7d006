"""`gpumesh serve`: the coordinator of a mesh, and this machine as its first worker."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, List, Optional

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
    given_token,
    hide_token,
    log_to_stderr,
    set_gpu_score,
    set_object_limits,
)
from gpumesh.config import DEFAULT_PORT, KEEP_JOBS_DAYS, WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from gpumesh.network.certificates import Identity

INSECURE_MEANS = (
    "without TLS, whoever is on the way between the machines of this mesh can read all code, arguments and results, and can take over "
    "a connection that is open and run code of theirs on every machine of the mesh; only the token itself is never sent"
)


def serve(
    host: str = typer.Option(
        "",
        "--host",
        metavar="ADDRESS",
        help="Address to listen on: 127.0.0.1 for this machine alone; by default every address of this machine.",
        show_default=False,
    ),
    port: int = typer.Option(DEFAULT_PORT, "--port", min=0, max=65535, help="Port to listen on; 0 picks a free one."),
    advertise: Optional[List[str]] = typer.Option(
        None,
        "--advertise",
        metavar="HOST[:PORT]",
        help="An address at which others reach this machine, for the line that they join with and for discovery; may be repeated.",
    ),
    discovery: bool = typer.Option(
        True, "--discovery/--no-discovery", help="Let machines in the same networks find this mesh by themselves."
    ),
    name: str = typer.Option("", "--name", help="What it is called there; by default this machine's name.", show_default=False),
    cert: Optional[str] = typer.Option(
        None, "--cert", metavar="FILE", help="A certificate of your own, PEM; by default one is made once and kept."
    ),
    key: Optional[str] = typer.Option(
        None, "--key", metavar="FILE", help="Its private key, PEM, if that is in a file of its own."
    ),
    insecure: bool = typer.Option(
        False, "--insecure", help="Encrypt nothing: others on the network can read and change what is sent. Asks first."
    ),
    yes: bool = typer.Option(False, "--yes", help="Do not ask whether --insecure is meant."),
    public: bool = typer.Option(
        False,
        "--public",
        help="Open a tunnel of ngrok, through which machines of any network can join; it closes with the mesh.",
    ),
    tailscale: bool = typer.Option(False, "--tailscale", help="Tell others the address that this machine has in its tailnet."),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    show_token: bool = typer.Option(
        False, "--show-token", help="Show a generated token in the line for other machines also where that is not a terminal."
    ),
    self_worker: bool = typer.Option(True, "--self-worker/--no-self-worker", help="Let this machine work too."),
    slots: Optional[int] = SLOTS,
    score: Optional[float] = SCORE,
    gpu_score: Optional[float] = GPU_SCORE,
    object_memory: Optional[str] = OBJECT_MEMORY,
    spill_dir: Optional[str] = SPILL_DIR,
    db: Optional[str] = typer.Option(
        None,
        "--db",
        metavar="FILE",
        help="Where script jobs are kept; by default in this user's folder for data, one for each port.",
    ),
    keep_days: float = typer.Option(
        KEEP_JOBS_DAYS, "--keep-days", min=0.0, metavar="DAYS", help="How long jobs are kept after they have ended."
    ),
    worker_ttl: float = typer.Option(
        WORKER_TTL_SECONDS, "--worker-ttl", min=0.0, metavar="SECONDS", help="How long a worker that was lost is still shown."
    ),
) -> None:
    """Start a mesh on this machine: others join it, and it works too.

    Whoever knows the secret can connect, from every network that this machine is on, and run code here as you; --host 127.0.0.1 keeps it to
    this machine. Machines in the same networks find it by themselves (--no-discovery). With other machines it speaks TLS; its certificate needs no handing round, as both sides prove the secret over it.

    The secret comes from --token, --token-file or GPUMESH_TOKEN; without any, one is generated, shown on a terminal and by `gpumesh token`,
    and used again when a mesh is started at the same address again. Address and secret are saved for this user, so that GPUMesh() and the other commands on this machine
    find the mesh by themselves.

    Script jobs are kept in a database, and go on when a mesh is started with the same one again, whatever has ended it.

    Ctrl-C lets running tasks finish first; a second Ctrl-C stops at once.
    """
    import logging

    from gpumesh.cli.serve_banner import Banner
    from gpumesh.cli.serve_ways import Ways
    from gpumesh.devices.scoring import check_score
    from gpumesh.network.address import is_loopback, parse_address
    from gpumesh.network.ranking import parse_advertised
    from gpumesh.runtime.announcing import announcing
    from gpumesh.runtime.serving import generate_token, own_address, run_coordinator
    from gpumesh.runtime.settings import generated_token, keep_generated, load_connection, save_connection

    named = [parse_advertised(each) for each in advertise or ()]
    supplied = given_token(token, token_file)
    hide_token()
    if score is not None:
        check_score(score)
    set_gpu_score(gpu_score)
    set_object_limits(object_memory, spill_dir)
    ways = Ways(host=host, public=public, tailscale=tailscale, named=named)
    is_near = (is_loopback(host) or host == "localhost") and not public
    identity = _identity(cert, key, insecure=insecure, yes=yes, is_near=is_near)
    secret = supplied or generated_token(own_address(host, port, identity).url) or generate_token()
    log_to_stderr(usual_level=logging.INFO)

    saved_as = [""]  # The address as this user's connection names it, once it is known.

    def keep_token(fresh: str) -> bool:
        """It was rotated. A token that somebody has chosen is chosen anew at the next start."""
        if not supplied:
            keep_generated(saved_as[0], fresh)
        elif load_connection() == (saved_as[0], supplied):
            save_connection(saved_as[0], fresh)
        return not supplied

    def announce(url: str) -> None:
        saved_as[0] = url
        check_token(supplied)
        fingerprint = identity.fingerprint if identity is not None else b""
        save_connection(url, secret, is_generated=not supplied, certificate=fingerprint.hex())
        is_shown = not supplied and (show_token or sys.stdout.isatty())  # What is no terminal is kept, and read by others.
        banner = Banner(host, parse_address(url), fingerprint, ways.named)
        for line in banner.lines(secret if is_shown else "", is_generated=not supplied):
            typer.echo(line)
        if ways.tunnels:
            typer.echo(
                "Through the tunnel the whole internet can knock, and needs the token like everybody; it closes with the mesh."
            )
        for obstacle in ways.obstacles:
            typer.echo(f"gpumesh: {obstacle}", err=True)

    raise typer.Exit(
        run_coordinator(
            host,
            port,
            secret,
            self_worker=self_worker,
            slots=slots,
            score=score,
            db=db,
            keep_days=keep_days,
            worker_ttl=worker_ttl,
            on_ready=announce,
            keep_token=keep_token,
            identity=identity,
            beside=[*ways.beside(), *([announcing(name, ways.known)] if discovery else [])],
        )
    )


def _identity(cert: Optional[str], key: Optional[str], *, insecure: bool, yes: bool, is_near: bool) -> Optional[Identity]:
    """The certificate to serve with; None: without TLS, which was confirmed.

    Args:
        is_near: Nobody but this machine can connect.

    Raises:
        typer.BadParameter: The options contradict each other, or --insecure was not confirmed.
        OSError: The certificate cannot be used.
    """
    from gpumesh.network.certificates import load_or_make_identity, read_identity

    if insecure and (cert or key):
        raise typer.BadParameter("give a certificate or --insecure, not both")
    if key and not cert:
        raise typer.BadParameter("--key belongs to a certificate; give that with --cert")
    if insecure:
        if not is_near and not yes:
            _confirm_insecure()
        return None
    if cert:
        return read_identity(cert, key or cert)
    try:
        return load_or_make_identity()
    except OSError as error:
        if not is_near:
            raise
        typer.echo(f"gpumesh: {error}; only what comes through a proxy or tunnel needs it", err=True)
        return None


def _confirm_insecure() -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"{INSECURE_MEANS}; leave --insecure out, or add --yes if that is what you want")
    typer.echo(f"gpumesh: {INSECURE_MEANS}.", err=True)
    if not typer.confirm("Serve without TLS all the same?", default=False, err=True):
        raise typer.Exit(1)
