"""What `gpumesh submit` and the commands for jobs refuse before anybody is asked."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Callable, Iterator, List, Tuple

import pytest

from gpumesh.cli.main import main

Answer = Tuple[int, str, str]


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A port where somebody would notice being asked."""
    for name in ("GPUMESH_LOCAL", "GPUMESH_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("gpumesh")
    handlers, level = logger.handlers[:], logger.level
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("GPUMESH_URL", f"127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("GPUMESH_TOKEN", "t")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setenv("COLUMNS", "200")
        yield listener
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs one command line in this process: exit code, standard output, standard error."""

    def command(*words: str) -> Answer:
        with pytest.raises(SystemExit) as stopped:
            main(list(words))
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return command


def was_asked(listener: socket.socket) -> bool:
    listener.settimeout(0.0)
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize(
    ("script", "payloads", "words"),
    [
        ("nowhere.py", None, "the script {}/nowhere.py does not exist; nothing was submitted"),
        (".", None, "is a folder; nothing was submitted"),
        ("ok.py", "{}", "holds an object; payloads are a list of objects"),
        ("ok.py", "[1]", "payload 1 is a number; each must be an object"),
        ("ok.py", "[{]", "payloads.json, line 1, column 3: this is not JSON"),
        ("ok.py", "", "holds no payloads"),
    ],
)
def test_bad_input_is_one_line_and_nobody_is_asked(
    script: str, payloads: str, words: str, tmp_path: Path, nobody: socket.socket, run: Callable[..., Answer]
) -> None:
    (tmp_path / "ok.py").write_text("print(1)")
    command: List[str] = ["submit", str(tmp_path / script)]
    if payloads is not None:
        (tmp_path / "payloads.json").write_text(payloads)
        command += ["--payloads", str(tmp_path / "payloads.json")]

    code, out, err = run(*command)

    assert code == 1
    assert out == ""
    assert err.startswith("gpumesh: ")
    assert err.count("\n") == 1
    assert words.format(tmp_path) in err
    assert not was_asked(nobody)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (("results", "j-4k7mw2qx", "--format", "xml"), 1, "there is no format 'xml'"),
        (("results", "j-4k7mw2qx", "--format", "parquet"), 1, "--output FILE"),
        (("jobs", "--db", "{}/nowhere.db"), 1, "nowhere.db"),
        (("jobs", "--db", "{}/ok.py"), 1, "ok.py"),
        (("jobs", "--db", "{}"), 1, "database"),
        (("status", "j-4k7mw2qx", "--db", "{}/ok.py"), 1, "ok.py"),
        (("serve", "--host", "127.0.0.1", "--port", "0", "--db", "{}/ok.py"), 1, "ok.py is not a database of jobs"),
        (("serve", "--host", "127.0.0.1", "--port", "0", "--db", "{}"), 1, "is not a file"),
        (("status", "--wait"), 2, "name one"),
        (("status", "--db", "{}/ok.py"), 2, "name one"),
        (("status", "j-4k7mw2qx", "--db", "{}/ok.py", "--wait"), 2, "--wait goes neither with"),
        (("status", "j-4k7mw2qx", "--json", "--wait"), 2, "--wait goes neither with"),
        (("logs", "j-4k7mw2qx", "-1"), 2, "-1"),
        (("submit", "{}/ok.py", "--retries", "-1"), 2, "--retries"),
        (("submit", "{}/ok.py", "--tag", "lab"), 2, "lab"),
        (("submit",), 2, "script"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anybody_is_asked(
    command: Tuple[str, ...], code: int, words: str, tmp_path: Path, nobody: socket.socket, run: Callable[..., Answer]
) -> None:
    (tmp_path / "ok.py").write_text("print(1)")
    before = sorted(tmp_path.iterdir())

    found, out, err = run(*(word.format(tmp_path) for word in command))

    assert (found, out) == (code, "")
    assert words.lower() in err.lower()
    assert "Traceback" not in err
    assert code == 2 or err.count("\n") == 1
    assert (tmp_path / "ok.py").read_text() == "print(1)"
    assert [path for path in sorted(tmp_path.iterdir()) if path.name not in ("config", "ok.py.lock")] == before
    assert not was_asked(nobody)


def test_a_job_needs_a_coordinator_that_stays(
    tmp_path: Path, nobody: socket.socket, run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMESH_LOCAL", "1")
    (tmp_path / "ok.py").write_text("print(1)")

    code, _, err = run("submit", str(tmp_path / "ok.py"))

    assert code == 1
    assert "GPUMESH_LOCAL is set" in err
    assert not was_asked(nobody)
