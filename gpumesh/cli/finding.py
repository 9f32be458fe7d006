"""Which mesh a command without an address is about: the one that is saved and answers, else one that is found on the networks.

What is found there is said by anyone who likes; only a mesh that proves the token is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Callable, List, Optional, Tuple

import typer

from gpumesh.cli.console import ask_for_token, given_token, resolve_mesh
from gpumesh.config import (
    CONNECT_SECONDS,
    FIND_ALL_SECONDS,
    FIND_PROBE_SECONDS,
    FIND_SECONDS,
    FIND_SETTLE_SECONDS,
    MIN_TOKEN_CHARACTERS,
)
from gpumesh.errors import AuthenticationError, MeshUnavailableError

if TYPE_CHECKING:
    from gpumesh.network.address import Address
    from gpumesh.network.announcement import Mesh

Say = Callable[[str], None]
_SHOWN = 10  # Meshes in an error or a question.
_PROOFS_AT_ONCE = 8


def say(line: str) -> None:
    """To the person, and not into what a program reads."""
    typer.echo(line, err=True)


def mesh_to_join(
    url: Optional[str], token: Optional[str], token_file: Optional[str], *, tell: Say = say, waits: bool = True
) -> Tuple[str, str]:
    """Address and secret of the mesh to lend this machine to.

    In this order: the address given, `GPUMESH_URL`, the saved connection if a mesh answers there (which knows the secret, if one is given),
    and what is found on the networks. If none is found, the saved connection again: its coordinator may be about to come back.

    Args:
        waits: Whoever calls keeps trying until a coordinator is there; else it must be there now.

    Raises:
        MeshUnavailableError: None is known, and none was found; or it is not there now.
        AuthenticationError: There is no secret, or no mesh that was found accepts it.
        ValueError: An address makes no sense, or several meshes accept the secret and nobody can be asked which is meant.
    """
    from gpumesh.network.address import INSECURE
    from gpumesh.runtime.settings import read_environment, resolve_connection

    if url is not None or read_environment().url is not None:
        chosen = resolve_mesh(url, token, token_file, ask=True)
        if not waits:
            _must_answer(chosen[0])
        return chosen
    secret = given_token(token, token_file)
    saved_url, saved_secret = resolve_connection(None, secret)
    if saved_url is not None and saved_secret and _answers(saved_url, secret):
        return _saved(saved_url), saved_secret
    if secret is None and saved_secret and len(saved_secret) >= MIN_TOKEN_CHARACTERS:
        secret = saved_secret  # The mesh may have got another address. The proof tells nobody a secret that cannot be guessed.
    try:
        mesh, address, proved = discover(secret, tell=tell)
    except (MeshUnavailableError, AuthenticationError) as error:
        if not waits or saved_url is None or not saved_secret:
            raise
        tell(f"gpumesh: {error}")
        tell(f"gpumesh: nothing answers at the saved address {_saved(saved_url)} either; waiting for it")
        return _saved(saved_url), saved_secret
    tell(f'gpumesh: found the mesh "{mesh.name}" at {address.url}')
    if address.way == INSECURE:
        tell("gpumesh: note: it was started with --insecure, so others on the network can read and change what is sent")
    return address.url, proved


def discover(secret: Optional[str], *, tell: Say = say, seconds: float = FIND_SECONDS) -> Tuple[Mesh, Address, str]:
    """Find a mesh on this machine's networks that proves the secret; one that does not is skipped, which is told.

    Without a secret the person at the terminal is asked for it, and which mesh is meant if there are several.

    Raises:
        MeshUnavailableError: None that can be joined was found; the message says which were seen, and what keeps them.
        AuthenticationError: There is no secret, or none of them accepts it.
        ValueError: Several accept it, and nobody can be asked.
    """
    from gpumesh.network.discovery import Watcher

    tell("gpumesh: looking for a mesh on this machine's networks ...")
    with Watcher() as watcher:
        if watcher.problem:
            raise MeshUnavailableError(watcher.problem)
        watcher.wait(seconds, until=lambda found: any(mesh.is_joinable for mesh in found))
        found = watcher.wait(FIND_SETTLE_SECONDS if secret else FIND_ALL_SECONDS, until=lambda found: not found)
        joinable = [mesh for mesh in found if mesh.is_joinable]
        if not joinable:
            raise MeshUnavailableError(_none_of(found))
        for mesh in joinable:
            if mesh.warning:
                tell(f"gpumesh: note on the mesh {_shown(mesh)}: {mesh.warning}")
        if secret is None:
            if not sys.stdin.isatty():
                raise AuthenticationError(
                    f"no token for {_list(joinable)}; give --token-file FILE, or set GPUMESH_TOKEN (`gpumesh token` there shows it)"
                )
            chosen = _ask_which(joinable, tell)
            tell(f"gpumesh: {_shown(chosen)}")
            joinable, secret = [chosen], ask_for_token()
    return *_accepting(joinable, secret, tell), secret


def _accepting(joinable: List[Mesh], secret: str, tell: Say) -> Tuple[Mesh, Address]:
    """The one of them that proves the secret."""
    from concurrent.futures import ThreadPoolExecutor

    accepted: List[Tuple[Mesh, Address]] = []
    with ThreadPoolExecutor(min(_PROOFS_AT_ONCE, len(joinable))) as pool:
        for mesh, (address, why) in zip(joinable, pool.map(lambda mesh: _proving(mesh, secret), joinable)):
            if address is None and len(joinable) == 1:
                raise AuthenticationError(f"the mesh {_shown(mesh)}: {why}")
            if address is None:
                tell(f"gpumesh: skipped the mesh {_shown(mesh)}: {why}")
            else:
                accepted.append((mesh, address))
    if not accepted:
        raise AuthenticationError(
            f"none of the {len(joinable)} meshes found accepts this token; `gpumesh token` on the machine that serves shows the right one"
        )
    if len(accepted) == 1:
        return accepted[0]
    meshes = [mesh for mesh, _ in accepted]
    if not sys.stdin.isatty():
        raise ValueError(
            f"{len(accepted)} meshes accept this token: {_list(meshes)}; name the address of the one that you mean"
        )
    chosen = _ask_which(meshes, tell)
    return next(each for each in accepted if each[0] is chosen)


def _proving(mesh: Mesh, secret: str) -> Tuple[Optional[Address], str]:
    """Where a mesh proves the secret; else why not."""
    from gpumesh.network.probing import prove

    why = ""
    for address in mesh.answering[:3]:
        why = prove(address, secret, FIND_PROBE_SECONDS)
        if not why:
            return address, ""
    return None, why


def _ask_which(meshes: List[Mesh], tell: Say) -> Mesh:
    if len(meshes) == 1:
        return meshes[0]
    for number, mesh in enumerate(meshes[:_SHOWN], 1):
        tell(f"  {number}  {_shown(mesh)}")
    while True:
        number = int(typer.prompt("Which one", type=int, default=1, err=True))
        if 1 <= number <= min(_SHOWN, len(meshes)):
            return meshes[number - 1]


def _none_of(found: List[Mesh]) -> str:
    if not found:
        return (
            "no mesh was found on this machine's networks; start one with `gpumesh serve`, or name its address: "
            "networks of offices and guests often keep machines from seeing each other"
        )
    seen = "; ".join(f'"{mesh.name}": {mesh.reason or "it does not answer"}' for mesh in found[:_SHOWN])
    return f"no mesh that can be joined was found; seen: {seen}"


def _list(meshes: List[Mesh]) -> str:
    more = f" and {len(meshes) - _SHOWN} more" if len(meshes) > _SHOWN else ""
    return ", ".join(_shown(mesh) for mesh in meshes[:_SHOWN]) + more


def _shown(mesh: Mesh) -> str:
    address = mesh.address
    return f'"{mesh.name}" at {address.url}' if address is not None else f'"{mesh.name}"'


def _must_answer(url: str) -> None:
    from gpumesh.network.address import parse_address
    from gpumesh.network.probing import BUSY, MESH, WEB, probe

    found = probe(parse_address(url), CONNECT_SECONDS)
    if found.kind not in (MESH, WEB, BUSY):
        raise MeshUnavailableError(f"no mesh answers at {found.address.url}: {found.text}")


def _answers(url: str, secret: Optional[str]) -> bool:
    """Whether a mesh that knows the secret, if one is given, or a tunnel to one, is at the saved address."""
    from gpumesh.network.address import parse_address
    from gpumesh.network.probing import MESH, WEB, probe, prove

    try:
        address = parse_address(url)
    except ValueError:
        return False
    found = probe(address, FIND_PROBE_SECONDS)
    return found.kind == WEB or (found.kind == MESH and (secret is None or not prove(address, secret, FIND_PROBE_SECONDS)))


def _saved(url: str) -> str:
    from gpumesh.network.address import parse_address

    return parse_address(url).url
