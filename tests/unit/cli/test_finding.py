"""Which mesh `gpumesh join` without an address is about; what is found on networks is tested in tests/hosts/test_discovery.py."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import pytest

from gpumesh import GPUMesh
from gpumesh.cli import finding
from gpumesh.cli.finding import mesh_to_join
from gpumesh.errors import AuthenticationError, MeshUnavailableError
from gpumesh.network import discovery
from gpumesh.network.address import Address, parse_address
from gpumesh.network.announcement import Mesh
from gpumesh.protocol.connection import NOT_KNOWN
from gpumesh.runtime.settings import save_connection

TOKEN = "a token of some length"


class Network:
    """Stands in for what multicast brings: these meshes, at once."""

    meshes: Tuple[Mesh, ...] = ()
    problem = ""
    looked = 0

    def __enter__(self) -> Network:
        Network.looked += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def wait(self, timeout: float, until: Any = None) -> List[Mesh]:
        return list(self.meshes)


def announced(name: str, *answering: Address, reason: str = "") -> Mesh:
    return Mesh(f"id-{name}", name, answering, answering, "", "0.1.0", 1, reason, "", True)


@pytest.fixture(autouse=True)
def _nothing_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(discovery, "Watcher", Network)
    monkeypatch.setattr(Network, "meshes", ())
    monkeypatch.setattr(Network, "looked", 0)
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A real coordinator on loopback."""
    handle = GPUMesh.start_coordinator(port=0, token=TOKEN)
    yield handle
    handle.stop()


@pytest.fixture
def nobody() -> Address:
    """Nothing listens there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address("127.0.0.1", listener.getsockname()[1])


def choose(url: Optional[str] = None, token: Optional[str] = TOKEN) -> Tuple[Tuple[str, str], List[str]]:
    said: List[str] = []
    return mesh_to_join(url, token, None, tell=said.append), said


def test_an_address_that_is_given_is_used_whatever_else_there_is(
    mesh: Any, nobody: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_connection(mesh.url, TOKEN)

    assert choose(nobody.url) == ((nobody.url, TOKEN), [])
    monkeypatch.setenv("GPUMESH_URL", "elsewhere:9000")
    assert choose() == (("http://elsewhere:9000", TOKEN), [])
    assert Network.looked == 0


def test_the_saved_mesh_is_used_if_it_answers(mesh: Any) -> None:
    save_connection(mesh.url, TOKEN)

    assert choose(token=None) == ((mesh.url, TOKEN), [])
    assert Network.looked == 0


def test_a_token_of_another_mesh_looks_for_that_one(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    friends = GPUMesh.start_coordinator(port=0, token="the token of a friend")
    save_connection(mesh.url, TOKEN)
    monkeypatch.setattr(
        Network, "meshes", (announced("mine", parse_address(mesh.url)), announced("theirs", parse_address(friends.url)))
    )
    try:
        found, said = choose(token="the token of a friend")
    finally:
        friends.stop()

    assert found == (friends.url, "the token of a friend")
    assert said[1].startswith('gpumesh: skipped the mesh "mine"')


def test_a_saved_mesh_that_has_moved_is_found_with_its_saved_token(
    mesh: Any, nobody: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_connection(nobody.url, TOKEN)
    monkeypatch.setattr(Network, "meshes", (announced("den", parse_address(mesh.url)),))

    found, said = choose(token=None)

    assert found == (mesh.url, TOKEN)
    assert said[-1] == f'gpumesh: found the mesh "den" at {mesh.url}'


def test_a_saved_mesh_that_is_nowhere_to_be_found_is_waited_for(nobody: Address) -> None:
    save_connection(nobody.url, TOKEN)

    found, said = choose(token=None)

    assert found == (nobody.url, TOKEN)
    assert said[-1] == f"gpumesh: nothing answers at the saved address {nobody.url} either; waiting for it"


def test_who_does_not_wait_is_told_that_nobody_is_there(mesh: Any, nobody: Address) -> None:
    with pytest.raises(
        MeshUnavailableError, match=f"no mesh answers at {nobody.url}: the machine is there, but nothing listens"
    ):
        mesh_to_join(nobody.url, TOKEN, None, waits=False)
    assert mesh_to_join(mesh.url, TOKEN, None, waits=False) == (mesh.url, TOKEN)

    save_connection(nobody.url, TOKEN)
    with pytest.raises(MeshUnavailableError, match="no mesh was found"):
        mesh_to_join(None, TOKEN, None, waits=False)


def test_a_mesh_that_does_not_prove_the_token_is_skipped(mesh: Any, nobody: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    at = parse_address(mesh.url)
    monkeypatch.setattr(Network, "meshes", (announced("gone", nobody), announced("den", at)))

    found, said = choose()

    assert found == (mesh.url, TOKEN)
    assert said[1].startswith(f'gpumesh: skipped the mesh "gone" at {nobody.url}: the machine is there, but nothing listens')
    with pytest.raises(AuthenticationError, match="none of the 2 meshes found accepts this token; `gpumesh token`"):
        choose(token="another token of some length")


def test_the_only_mesh_says_itself_why_it_cannot_be_joined(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "meshes", (announced("den", parse_address(mesh.url)),))
    said: List[str] = []

    with pytest.raises(AuthenticationError) as caught:
        mesh_to_join(None, "another token of some length", None, tell=said.append)

    assert str(caught.value) == f'the mesh "den" at {mesh.url}: {NOT_KNOWN}'
    assert said == ["gpumesh: looking for a mesh on this machine's networks ..."], "nothing is told twice"


def test_of_a_mesh_with_a_pose_the_address_that_proves_the_token_is_taken(
    mesh: Any, nobody: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "meshes", (announced("den", nobody, parse_address(mesh.url)),))

    assert choose()[0] == (mesh.url, TOKEN)


def test_several_that_know_the_token_are_listed_for_scripts_and_asked_about_at_a_terminal(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = parse_address(mesh.url)
    monkeypatch.setattr(Network, "meshes", (announced("den", at), announced("attic", at)))

    with pytest.raises(ValueError, match='2 meshes accept this token: "den" at .*, "attic" at .*; name the address'):
        choose()

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter([7, 2])
    monkeypatch.setattr(finding.typer, "prompt", lambda *_words, **_options: next(answers))
    found, said = choose()
    assert found == (mesh.url, TOKEN)
    assert said[-1] == f'gpumesh: found the mesh "attic" at {mesh.url}'


def test_without_a_token_it_says_what_was_found(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "meshes", (announced("den", parse_address(mesh.url)),))

    with pytest.raises(AuthenticationError, match='no token for "den" at .*; give --token-file FILE'):
        choose(token=None)


def test_what_was_seen_and_cannot_be_joined_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "meshes", (announced("den", reason="10.0.0.1:8000 (refused): nothing listens"),))

    with pytest.raises(MeshUnavailableError, match=r'seen: "den": 10.0.0.1:8000 \(refused\): nothing listens'):
        choose()
    monkeypatch.setattr(Network, "meshes", ())
    with pytest.raises(
        MeshUnavailableError, match="no mesh was found on this machine's networks; start one with `gpumesh serve`"
    ):
        choose()
