"""`gpumesh setup`: asks what this machine is to be, and makes it so: the first of a new mesh, or one that is lent to a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

import typer

from gpumesh.cli import asking
from gpumesh.cli.console import TOKEN, TOKEN_FILE, check_token, given_token, hide_token
from gpumesh.config import CONNECT_SECONDS, DEFAULT_PORT, FIND_ALL_SECONDS, FIND_SECONDS

if TYPE_CHECKING:
    from gpumesh.network.address import Address
    from gpumesh.network.announcement import Mesh

COORDINATOR, WORKER = "coordinator", "worker"
NEAR = "127.0.0.1"
_OTHER = "another address"


def setup(
    role: Optional[str] = typer.Option(
        None,
        "--role",
        metavar="coordinator|worker",
        help="What this machine is to be: the first of a new mesh, or lent to one.",
    ),
    url: Optional[str] = typer.Option(None, "--url", help="Of a worker: the mesh's address; by default it is found."),
    token: Optional[str] = TOKEN,
    token_file: Optional[str] = TOKEN_FILE,
    name: Optional[str] = typer.Option(
        None, "--name", help="Of a coordinator: what the mesh is called on its networks; by default this machine's name."
    ),
    host: Optional[str] = typer.Option(
        None,
        "--host",
        metavar="ADDRESS",
        help="Of a coordinator: 127.0.0.1 for this machine alone; by default all its networks.",
    ),
    port: Optional[int] = typer.Option(None, "--port", min=1, max=65535, help=f"Of a coordinator; by default {DEFAULT_PORT}."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Ask nothing: what no option says is as it would be by default."),
    start: Optional[bool] = typer.Option(None, "--start/--no-start", help="Start it at once, or only save the connection."),
    show_token: bool = typer.Option(
        False, "--show-token", help="Show the token in the line for other machines also where that is not a terminal."
    ),
) -> None:
    """Set this machine up in a minute: shows what it has, asks whether it starts a mesh or is lent to one, and does that.

    The connection is saved for this user, so that GPUMesh() and the other commands find the mesh. For a new mesh the one line for the other
    machines is shown, with the token that lends a machine and can do nothing else. Then it starts, and the live radar shows who is there; q
    leaves the radar, Ctrl-C ends what was started.

    For scripts: --yes with --role, and --url and --token-file for a worker.
    """
    import logging

    from gpumesh.cli.console import log_to_stderr

    if role not in (None, COORDINATOR, WORKER):
        raise typer.BadParameter(f"--role is {COORDINATOR} or {WORKER}, not {role!r}")
    asks = not yes and asking.can_ask()
    if role is None and not asks:
        raise typer.BadParameter(f"nobody is here to be asked; give --role {COORDINATOR} or --role {WORKER}")
    supplied = given_token(token, token_file)
    hide_token()
    log_to_stderr(usual_level=logging.WARNING)
    for line in hardware():
        typer.echo(line)
    if role is None:
        role = asking.choose(
            "What is this machine to be?",
            [
                (COORDINATOR, "the first of a new mesh: other machines join it, and it works too"),
                (WORKER, "lent to a mesh that runs on another machine"),
            ],
        )
    if role == COORDINATOR:
        if url is not None:
            raise typer.BadParameter("--url names the mesh that a worker joins; leave it out for a coordinator")
        command = _coordinator(supplied, name, host, port, asks=asks, show_token=show_token)
    else:
        for value, option in ((name, "--name"), (host, "--host"), (port, "--port")):
            if value is not None:
                raise typer.BadParameter(f"{option} is for a coordinator; a worker has --url")
        command = _worker(supplied, url, asks=asks)
    if start is None:
        start = asking.confirm("Start it now?") if asks else True
    command.save()  # Whoever leaves before has changed nothing.
    if not start:
        typer.echo(f"gpumesh: saved; start it with: gpumesh {' '.join(command.arguments)}")
        return

    from gpumesh.cli.setup_run import run

    raise typer.Exit(run(command))


class Command:
    """What is to be started."""

    def __init__(self, arguments: List[str], *, url: str, token: str, is_generated: bool, has_radar: bool) -> None:
        self.arguments = arguments  # As a person would type them.
        self.url = url
        self.token = token
        self.is_generated = is_generated
        self.has_radar = has_radar

    def save(self) -> None:
        """Remember the connection.

        Raises:
            OSError: It cannot be; a token that was made up would be lost with it.
        """
        from gpumesh.runtime.settings import connection_file, save_connection

        if not save_connection(self.url, self.token, is_generated=self.is_generated):
            raise OSError(f"the connection is not saved in {connection_file()}; make that folder writable, and set up again")

    @property
    def finds_token(self) -> bool:
        """Whether what is started finds this very token in the saved connection."""
        from gpumesh.runtime.settings import generated_token, resolve_connection

        if self.arguments[0] == "serve":
            return generated_token(self.url) == self.token
        return resolve_connection(self.url)[1] == self.token


def hardware() -> List[str]:
    """What this machine has, one line each."""
    from gpumesh.cli.devices import of_this_machine
    from gpumesh.devices.detect import local_facts
    from gpumesh.errors import MeshError
    from gpumesh.model.resources import show_bytes

    facts = local_facts()
    cpu = next(device for device in facts.devices if device.kind == "cpu")
    said = [f"gpumesh: this is {facts.hostname}: {cpu.name}, {facts.cores} cores, {show_bytes(facts.memory)} of memory"]
    try:
        gpus = [row for row in of_this_machine() if row["kind"] != "cpu"]
    except MeshError as error:
        return [*said, f"gpumesh: {error}"]
    for row in gpus:
        why = row.get("problem") or ""
        said.append(f"gpumesh: {row['name']}{f' (not used: {why})' if why else ''}")
    if not gpus:
        said.append("gpumesh: no GPU that can be used; its processor works all the same")
    return said


# --- the first of a new mesh


def _coordinator(
    supplied: Optional[str], name: Optional[str], host: Optional[str], port: Optional[int], *, asks: bool, show_token: bool
) -> Command:
    import socket
    import sys

    from gpumesh.network.certificates import load_or_make_identity
    from gpumesh.runtime.serving import generate_token, own_address
    from gpumesh.runtime.settings import generated_token

    if asks:
        if host is None:
            host = asking.choose(
                "Who may join?",
                [("", "machines of every network that this one is on, if they know the token"), (NEAR, "this machine alone")],
            )
        if name is None and host != NEAR:
            name = asking.text("What is the mesh called there?", default=socket.gethostname(), check=_name_problem)
        if port is None:
            port = int(
                asking.text("Which port?", default=str(DEFAULT_PORT), check=lambda text: _port_problem(text, host or ""))
            )
    host, port = host or "", port or DEFAULT_PORT
    problem = _port_problem(str(port), host) or (_name_problem(name) if name else "")
    if problem:
        raise typer.BadParameter(problem)
    identity = load_or_make_identity()
    here = own_address(host, port, identity).url
    secret = supplied or generated_token(here) or generate_token()
    check_token(supplied)
    arguments = ["serve"]
    if host:
        arguments += ["--host", host]
    if port != DEFAULT_PORT:
        arguments += ["--port", str(port)]
    if name and name != socket.gethostname():
        arguments += ["--name", name]
    for line in _invitation(host, port, secret, is_shown=show_token or sys.stdout.isatty()):
        typer.echo(line)
    return Command(arguments, url=here, token=secret, is_generated=not supplied, has_radar=asks and not _is_alone(host))


def _is_alone(host: str) -> bool:
    from gpumesh.network.ranking import is_only_local

    return bool(host) and is_only_local(host)


def _invitation(host: str, port: int, secret: str, *, is_shown: bool) -> List[str]:
    """The one line for the other machines, and what its token can do."""
    from gpumesh.network.address import PORT
    from gpumesh.protocol.auth import worker_token
    from gpumesh.runtime.serving_addresses import join_addresses

    if _is_alone(host):
        return ["gpumesh: only this machine can connect; for others to join too, set it up without --host"]
    found = join_addresses(host, port, PORT, ())
    where = f" {found[0].url}" if found else ""
    if not is_shown:
        return [
            f"To lend another machine, type there: gpumesh quickjoin{where}   (`gpumesh token worker` here shows the token)"
        ]
    return [
        f"To lend another machine, type there: gpumesh quickjoin{where} --token {worker_token(secret)}",
        "That token lends a machine and can do nothing else; to submit work from there, use the one of `gpumesh token` here.",
    ]


def _name_problem(text: str) -> str:
    if not text or len(text) > 60 or not text.isprintable():
        return "a name has 1 to 60 characters that can be printed"
    return ""


def _port_problem(text: str, host: str) -> str:
    from gpumesh.network.tcp import listen

    if not (text.isdecimal() and 0 < int(text) < 65536):
        return f"{text!r} is not a port; ports are 1 to 65535"
    try:
        listen(host, int(text)).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


# --- lent to a mesh


def _worker(supplied: Optional[str], url: Optional[str], *, asks: bool) -> Command:
    from gpumesh.cli.finding import mesh_to_join
    from gpumesh.network.address import parse_address

    if asks:
        address = _asked_address() if url is None else parse_address(url)
        secret = supplied or ""
        problem = _problem_of(address, secret) if secret else ""
        if problem:
            typer.echo(f"{problem}.")
        if problem or not secret:
            secret = asking.secret(
                f"Token of the mesh at {address} (`gpumesh token worker` there shows it; it is not shown here):",
                check=lambda text: _problem_of(address, text) if text else "nothing was typed",
            )
        target = address.url
    else:
        target, secret = mesh_to_join(url, supplied, None, waits=False, tell=typer.echo)
        problem = _problem_of(parse_address(target), secret)
        if problem:
            raise typer.BadParameter(problem)
    check_token(secret)
    typer.echo(f"gpumesh: {target} accepts this machine")
    return Command(["join", target], url=target, token=secret, is_generated=False, has_radar=asks)


def _problem_of(address: Address, secret: str) -> str:
    """Why a machine with this token could not join there; "" if it could."""
    from gpumesh.errors import MeshError
    from gpumesh.network.probing import WEB, probe, prove, prove_through

    if probe(address, CONNECT_SECONDS).kind != WEB:
        return prove(address, secret, CONNECT_SECONDS)

    from gpumesh.runtime import piping

    try:
        return prove_through(piping.open_pipe(address, timeout=CONNECT_SECONDS), secret, CONNECT_SECONDS)
    except MeshError as error:
        return str(error)
    finally:
        piping.end()


def _asked_address() -> Address:
    """The mesh that the person means, among those on the networks or by its address."""
    from gpumesh.network.address import parse_address

    typer.echo("gpumesh: looking for meshes on this machine's networks ...")
    found = sorted((mesh for mesh in _meshes() if mesh.is_joinable), key=lambda mesh: mesh.name)
    if found:
        choices = [(mesh.id, f"{mesh.name} at {mesh.address.url}") for mesh in found if mesh.address is not None]
        chosen = asking.choose("Which mesh?", [*choices, (_OTHER, "one at another address")])
        for mesh in found:
            if mesh.id == chosen and mesh.address is not None:
                return mesh.address
    else:
        typer.echo("gpumesh: none that can be joined was found; its address stands where `gpumesh serve` runs")
    return parse_address(asking.text("Its address (such as 192.168.1.20:8000):", check=_address_problem))


def _meshes() -> List[Mesh]:
    from gpumesh.network.discovery import find

    return find(FIND_SECONDS, settle_seconds=FIND_ALL_SECONDS)


def _address_problem(text: str) -> str:
    from gpumesh.network.address import parse_address
    from gpumesh.network.probing import BUSY, MESH, WEB, probe

    try:
        found = probe(parse_address(text), CONNECT_SECONDS)
    except ValueError as error:
        return str(error)
    return "" if found.kind in (MESH, WEB, BUSY) else f"no mesh answers there: {found.text}"
