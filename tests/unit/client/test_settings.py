"""Environment and saved connection."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Iterator

import pytest

from gpumesh.protocol.auth import metrics_token, worker_token
from gpumesh.runtime.settings import (
    Environment,
    connection_file,
    generated_token,
    keep_generated,
    load_connection,
    other_served,
    read_environment,
    resolve_connection,
    save_connection,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN", "GPUMESH_LOCAL", "GPUMESH_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return


def test_the_environment_is_read() -> None:
    assert read_environment({}) == Environment(None, None, False, 0)
    assert read_environment({"GPUMESH_URL": " h:1 ", "GPUMESH_TOKEN": "t", "GPUMESH_LOCAL": "1", "GPUMESH_VERBOSE": "1"}) == (
        "h:1", "t", True, 1,
    )  # fmt: skip


@pytest.mark.parametrize(("text", "local", "verbosity"), [("0", False, 0), ("", False, 0), ("no", False, 0), ("yes", True, 1)])
def test_words_for_yes_and_no(text: str, local: bool, verbosity: int) -> None:
    assert read_environment({"GPUMESH_LOCAL": text, "GPUMESH_VERBOSE": text})[2:] == (local, verbosity)


@pytest.mark.parametrize("text", ["2", "debug", "DEBUG"])
def test_words_for_everything(text: str) -> None:
    assert read_environment({"GPUMESH_VERBOSE": text}).verbosity == 2


def test_what_is_saved_is_loaded_and_readable_by_its_owner_alone() -> None:
    before = os.umask(0)
    try:
        save_connection("http://host:8000", "secret")
        save_connection("http://host:8001", "secret2")
    finally:
        os.umask(before)
    path = Path(connection_file())

    assert load_connection() == ("http://host:8001", "secret2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert json.loads(path.read_text()) == {"url": "http://host:8001", "token": "secret2"}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_saved_is_no_error() -> None:
    assert load_connection() == (None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": "h:1"}', '{"url": 1, "token": 2}', "\xff"])
def test_a_spoiled_file_is_reported_and_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(connection_file())
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")

    assert load_connection() == (None, None)
    assert str(path) in caplog.text


def test_a_folder_that_cannot_be_written_is_reported(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file, not a folder")

    save_connection("h:1", "t")

    assert "cannot save the connection" in caplog.text
    assert "t" not in caplog.records[0].args[1:]  # type: ignore[operator, index, union-attr]


@pytest.mark.parametrize(
    ("given", "environment", "saved", "expected"),
    [
        ((None, None), {}, None, (None, None)),
        ((None, "t"), {}, None, (None, "t")),
        (("h:1", "t"), {"GPUMESH_URL": "e:1", "GPUMESH_TOKEN": "e"}, ("s:1", "s"), ("h:1", "t")),
        (("h:1", None), {"GPUMESH_TOKEN": "e"}, ("h:1", "s"), ("h:1", "e")),
        (("h:1", None), {}, ("h:1", "s"), ("h:1", "s")),
        (("http://h:1/", None), {}, ("h:1", "s"), ("http://h:1/", "s")),
        (("h:1", None), {}, ("other:1", "s"), ("h:1", None)),
        ((None, None), {"GPUMESH_URL": "e:1", "GPUMESH_TOKEN": "e"}, ("s:1", "s"), ("e:1", "e")),
        ((None, None), {"GPUMESH_URL": "s:1"}, ("s:1", "s"), ("s:1", "s")),
        ((None, None), {"GPUMESH_TOKEN": "e"}, ("s:1", "s"), ("s:1", "e")),
        ((None, None), {}, ("s:1", "s"), ("s:1", "s")),
        ((None, None), {}, ("not an address", "s"), (None, None)),
    ],
)
def test_given_then_environment_then_saved(
    given: Any, environment: Any, saved: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if saved:
        save_connection(*saved)

    assert resolve_connection(*given) == expected


def test_an_address_without_meaning_says_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'ftp://x'"):
        resolve_connection("ftp://x")
    monkeypatch.setenv("GPUMESH_URL", "ftp://x")
    with pytest.raises(ValueError, match="GPUMESH_URL: 'ftp://x'"):
        resolve_connection()


def test_a_lesser_token_does_not_take_the_place_of_the_one_that_it_follows_from() -> None:
    """This machine lends itself with the worker token, and its user still has the whole mesh."""
    save_connection("http://host:8000", "full", is_generated=True)

    save_connection("http://host:8000", worker_token("full"))
    save_connection("http://other-name:8000", metrics_token("full"))

    assert load_connection() == ("http://host:8000", "full")
    assert generated_token("http://host:8000") == "full"


def test_the_secret_made_up_for_a_mesh_outlives_other_connections() -> None:
    """Who serves a mesh, joins a friend's and serves his own again has the workers that know its token."""
    save_connection("http://127.0.0.1:8000", "own", is_generated=True)
    save_connection("http://127.0.0.1:8001", "second", is_generated=True)
    save_connection("http://friend:8000", "the friend's")

    assert load_connection() == ("http://friend:8000", "the friend's")
    assert generated_token("http://127.0.0.1:8000") == "own"
    assert generated_token("http://127.0.0.1:8001") == "second"
    assert generated_token("http://friend:8000") is None
    assert other_served("http://friend:8000") == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]

    keep_generated("http://127.0.0.1:8000", "rotated")
    assert generated_token("http://127.0.0.1:8000") == "rotated"
    assert load_connection() == ("http://friend:8000", "the friend's")

    save_connection("http://127.0.0.1:8001", "chosen")
    assert generated_token("http://127.0.0.1:8001") is None
    assert stat.S_IMODE(os.stat(connection_file()).st_mode) == 0o600


def test_not_all_secrets_that_were_ever_made_up_are_kept() -> None:
    for port in range(8000, 8030):
        save_connection(f"http://127.0.0.1:{port}", f"token {port}", is_generated=True)

    assert generated_token("http://127.0.0.1:8000") is None
    assert generated_token("http://127.0.0.1:8025") == "token 8025"


@pytest.mark.parametrize("served", [5, ["x"], {"http://127.0.0.1:8000": 5}, "text"])
def test_what_is_kept_wrongly_is_left_out(served: Any) -> None:
    save_connection("http://host:8000", "secret")
    file = Path(connection_file())
    file.write_text(json.dumps({"url": "http://host:8000", "token": "secret", "served": served}))

    assert generated_token("http://127.0.0.1:8000") is None
    save_connection("http://host:8001", "secret")
    assert load_connection() == ("http://host:8001", "secret")


def test_a_lesser_token_of_another_mesh_is_saved() -> None:
    save_connection("http://host:8000", "full")

    save_connection("http://other:8000", worker_token("another"))

    assert load_connection() == ("http://other:8000", worker_token("another"))
