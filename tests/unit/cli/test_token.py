"""`gpumesh token`, and where tokens come from."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, Tuple

import pytest

from gpumesh.cli.console import check_token, given_token, hide_token
from gpumesh.cli.main import main
from gpumesh.protocol.auth import metrics_token, worker_token

FULL = "f" * 32


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())


def run(capsys: Any, *words: str) -> Tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["token", *words])
    return (ended.value.code, *capsys.readouterr())


WHERE = ("--url", "host:8000", "--token")


@pytest.mark.parametrize(
    ("words", "given", "shown"),
    [
        (["show"], FULL, FULL),
        ([], FULL, FULL),
        (["worker"], FULL, worker_token(FULL)),
        (["metrics"], FULL, metrics_token(FULL)),
        (["worker"], worker_token(FULL), worker_token(FULL)),
        (["metrics"], metrics_token(FULL), metrics_token(FULL)),
    ],
)
def test_a_token_is_one_line(capsys: pytest.CaptureFixture[str], words: Any, given: str, shown: str) -> None:
    assert run(capsys, *words, *WHERE, given) == (0, f"{shown}\n", "")


@pytest.mark.parametrize(
    ("words", "given", "problem"),
    [
        (["worker"], metrics_token(FULL), "only a token for metrics is known here"),
        (["metrics"], worker_token(FULL), "only a worker-only token is known here"),
        (["rotate"], worker_token(FULL), "a worker-only token cannot change the mesh's token"),
    ],
)
def test_what_does_not_follow_from_a_lesser_token_is_said(
    capsys: pytest.CaptureFixture[str], words: Any, given: str, problem: str
) -> None:
    code, out, err = run(capsys, *words, *WHERE, given)

    assert (code, out) == (1, "")
    assert problem in err
    assert given not in err


def test_a_lesser_token_is_shown_as_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", *WHERE, worker_token(FULL))

    assert (code, out) == (0, f"{worker_token(FULL)}\n")
    assert "this is a worker-only token, and not the full token" in err


@pytest.mark.parametrize(
    "words",
    [
        ("rotate", "--now", "--grace", "1h"),
        ("rotate", "--grace", "soon"),
        ("rotate", "--grace", "0s"),
        ("--url", "host:8000", "worker"),
        ("worker", "--token", "a", "--token-file", "b"),
        ("nonsense",),
    ],
)
def test_what_is_not_understood_is_a_usage_error(capsys: pytest.CaptureFixture[str], words: Any) -> None:
    assert run(capsys, *words)[0] == 2


def test_a_token_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"  {FULL}\nmore\n"))

    assert given_token(None, "-") == FULL


def test_what_this_process_was_given_is_not_in_its_environment_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_TOKEN", FULL)
    assert given_token(None, None) == FULL

    hide_token()

    assert "GPUMESH_TOKEN" not in os.environ


@pytest.mark.parametrize(("length", "is_warned"), [(1, True), (15, True), (16, False), (64, False)])
def test_a_short_token_is_warned_of_without_being_shown(
    capsys: pytest.CaptureFixture[str], length: int, is_warned: bool
) -> None:
    check_token("ü" * length)

    out, err = capsys.readouterr()
    assert out == ""
    assert bool(err) is is_warned
    assert "ü" not in err
    if is_warned:
        assert f"the token has {length} characters" in err
        assert "run code" in err


def test_no_token_is_no_short_one(capsys: pytest.CaptureFixture[str]) -> None:
    check_token(None)

    assert capsys.readouterr() == ("", "")
