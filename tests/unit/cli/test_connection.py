"""`gpumesh show-connection` and `gpumesh disconnect`."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any, Tuple

import pytest
from typer.testing import CliRunner

from gpumesh.cli.main import app
from gpumesh.runtime.settings import connection_file, keep_generated, load_connection, save_connection


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*words: str) -> Tuple[int, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, found.output


def test_the_saved_mesh_is_shown_without_its_token() -> None:
    save_connection("http://box:8000", "s" * 32)

    code, said = run("show-connection")

    assert code == 0
    assert "http://box:8000" in said
    assert "full: runs anything" in said
    assert "sss" not in said


def test_the_token_is_shown_on_request() -> None:
    save_connection("https://box", "s" * 32, is_generated=True)

    code, said = run("show-connection", "--json", "--show-token")

    assert code == 0
    assert json.loads(said) == {
        "url": "https://box:443",
        "source": "saved",
        "kind": "full: runs anything on every machine of the mesh",
        "generated": True,
        "token": "s" * 32,
        "certificate": None,
        "file": connection_file(),
    }


def test_the_certificate_of_the_mesh_is_shown_as_it_is_where_it_serves() -> None:
    save_connection("http://box:8000", "s" * 32, certificate="ab" * 32)
    assert "ab:" * 15 + "ab;" in run("show-connection")[1]
    save_connection("http://box:8000", "t" * 32)  # The token was rotated.
    assert json.loads(run("show-connection", "--json")[1])["certificate"] == "ab" * 32
    keep_generated("http://127.0.0.1:8000", "u" * 32)  # That of another mesh.
    assert json.loads(run("show-connection", "--json")[1])["certificate"] == "ab" * 32

    save_connection("http://box:8000", "s" * 32, certificate="")

    assert "SHA-256" not in run("show-connection")[1]


@pytest.mark.parametrize("certificate", [None, 5, ["x"], "AB" * 32, "\x1b[2J", "ab" * 31])
def test_what_is_no_certificate_in_the_file_is_left_out(certificate: Any) -> None:
    save_connection("http://box:8000", "s" * 32)
    path = Path(connection_file())
    path.write_text(json.dumps({**json.loads(path.read_text()), "certificate": certificate}))

    assert load_connection() == ("http://box:8000", "s" * 32)
    assert json.loads(run("show-connection", "--json")[1])["certificate"] is None


def test_the_environment_goes_before_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    save_connection("http://box:8000", "s" * 32)
    monkeypatch.setenv("GPUMESH_URL", "other:9000")
    monkeypatch.setenv("GPUMESH_TOKEN", "gmw-" + "0" * 64)

    code, said = run("show-connection")

    assert code == 0
    assert "http://other:9000   (GPUMESH_URL)" in said
    assert "lends a machine, nothing else" in said


def test_without_a_mesh_it_says_so() -> None:
    code, said = run("show-connection")

    assert code == 1
    assert f"no mesh is saved in {connection_file()}" in said


def test_a_mesh_is_forgotten() -> None:
    save_connection("http://box:8000", "s" * 32)

    assert run("disconnect")[0] == 2  # Nobody is here to be asked.
    assert load_connection() == ("http://box:8000", "s" * 32)
    code, said = run("disconnect", "--yes")

    assert code == 0
    assert "forgot http://box:8000; what runs goes on" in said
    assert not os.path.exists(connection_file())
    assert run("disconnect", "--yes")[0] == 0


def test_a_file_that_others_can_read_is_closed_to_them(caplog: pytest.LogCaptureFixture) -> None:
    save_connection("http://box:8000", "s" * 32)
    os.chmod(connection_file(), 0o644)

    with caplog.at_level(logging.WARNING):
        assert load_connection() == ("http://box:8000", "s" * 32)

    assert stat.S_IMODE(os.stat(connection_file()).st_mode) == 0o600
    assert "others on this machine could read the token" in caplog.text


def test_what_is_no_connection_is_kept_when_another_is_saved(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(connection_file())
    path.parent.mkdir(parents=True)
    path.write_text('{"token": "the only copy", ')

    with caplog.at_level(logging.WARNING):
        assert save_connection("http://box:8000", "s" * 32)

    assert load_connection() == ("http://box:8000", "s" * 32)
    aside = path.with_name("connection.json.broken")
    assert aside.read_text() == '{"token": "the only copy", '
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    assert str(aside) in caplog.text


def test_setup_says_when_nothing_can_be_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "file"))

    found = CliRunner().invoke(
        app, ["setup", "--role", "coordinator", "--host", "127.0.0.1", "--port", "18999", "--yes", "--no-start"]
    )

    assert isinstance(found.exception, OSError)
    assert "the connection is not saved" in str(found.exception)
    assert "saved; start it" not in found.output
