"""Dockerfile, compose.yaml and .dockerignore against the real command line and files; no container is started here."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import click
import pytest
import typer.main
import yaml

from gpumesh.cli.main import app
from gpumesh.config import DEFAULT_PORT, DRAIN_SECONDS
from tests.integration.programs import started_programs

ROOT = Path(__file__).resolve().parents[2]
SECRET = "/run/secrets/mesh_token"
TOKEN = "a token of some length"


def instructions() -> List[Tuple[str, str]]:
    """Of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def only(name: str) -> str:
    found = [rest for each, rest in instructions() if each == name]
    assert len(found) == 1, (name, found)
    return found[0]


def compose() -> Dict[str, Any]:
    found: Dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def understood(words: List[str]) -> Dict[str, Any]:
    """A command line's parameters, as the real command reads them.

    Raises:
        click.UsageError: It does not understand them.
    """
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group) or hasattr(command, "commands")
    parsed = command.commands[words[0]].make_context(words[0], list(words[1:]))  # type: ignore[attr-defined]
    parameters: Dict[str, Any] = parsed.params
    return parameters


def test_what_is_copied_exists_and_is_not_kept_from_the_builder() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignored[0] == "*"  # Nothing goes there but what is named.
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    copied = [word for name, rest in instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert copied
    for word in copied:
        assert (ROOT / word).exists(), word
        assert word.strip("./") in let_in, word
    assert not any(fnmatch.fnmatch(name, pattern) for name in ("mesh-token", ".git", "tests", ".env") for pattern in let_in)


def test_tasks_do_not_run_as_root_and_the_state_is_theirs() -> None:
    names = [name for name, _ in instructions()]
    user = only("USER")
    assert user not in ("root", "0")
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")
    volume = only("VOLUME")
    assert any(f"chown {user}:{user} {volume}" in rest for name, rest in instructions() if name == "RUN")
    folders = dict(pair.split("=", 1) for pair in only("ENV").split())
    assert all(folders[f"XDG_{name}_HOME"].startswith(volume) for name in ("STATE", "DATA", "CONFIG", "CACHE"))


def test_the_image_serves_with_a_token_from_a_file() -> None:
    assert json.loads(only("ENTRYPOINT")) == ["gpumesh"]
    served = understood(json.loads(only("CMD")))
    assert served["token_file"] == SECRET
    assert served["token"] is None
    assert served["port"] == DEFAULT_PORT == int(only("EXPOSE"))
    assert served["host"] == ""  # All addresses: the container's network decides who comes.


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_each_service_has_a_command_that_is_understood_and_its_token_from_a_secret(name: str) -> None:
    service = compose()["services"][name]
    parameters = understood(service["command"])

    assert parameters["token_file"] == SECRET
    assert service["secrets"] == ["mesh_token"]
    assert "environment" not in service
    assert service["command"][0] == {"coordinator": "serve", "worker": "join"}[name]
    assert int(service["stop_grace_period"].rstrip("s")) > DRAIN_SECONDS
    assert service["build"] == "."


def test_workers_join_the_coordinator_once_it_is_healthy_at_the_port_that_is_published() -> None:
    services = compose()["services"]

    assert understood(services["worker"]["command"])["url"] == f"http://coordinator:{DEFAULT_PORT}"
    assert services["coordinator"]["ports"] == [f"{DEFAULT_PORT}:{DEFAULT_PORT}"]
    assert services["worker"]["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
    assert services["worker"]["healthcheck"] == {"disable": True}
    assert compose()["secrets"] == {"mesh_token": {"file": "./mesh-token"}}
    volume, _, target = services["coordinator"]["volumes"][0].partition(":")
    assert volume in compose()["volumes"]
    assert target == only("VOLUME")


def test_the_health_check_knows_a_healthy_coordinator_from_none(tmp_path: Path) -> None:
    check = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    assert check[:2] == ["python", "-c"]
    with started_programs(tmp_path) as programs:
        server, url = programs.serve("--token", TOKEN, "--no-self-worker")
        code = check[2].replace(f"http://127.0.0.1:{DEFAULT_PORT}", url)
        assert code != check[2]
        assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
        server.interrupt()
        server.wait()
        assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 1
