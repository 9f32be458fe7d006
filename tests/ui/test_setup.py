"""The wizard at a terminal, answered key by key."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pexpect
import pytest

from gpumesh.runtime.embedded import start_coordinator
from tests.hosts.conftest import make_hosts as make_hosts
from tests.support.hosts import Host, Hosts
from tests.support.lan import TOKEN, Lan
from tests.support.processes import until

DOWN = "\x1b[B"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Wizard:
    """`gpumesh setup` in a pseudo-terminal with folders of its own."""

    def __init__(self, folder: Path, arguments: List[str], *, term: str, columns: int, host: Optional[Host]) -> None:
        self.config = folder / "config"
        environment: Dict[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GPUMESH_")},
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(self.config),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_DATA_HOME": str(folder / "data"),
            "TERM": term,
        }
        self.typed = ""
        self.log = ""
        environment.pop("COLUMNS", None)
        words = [sys.executable, "-m", "gpumesh", "setup", *arguments]
        if host is not None:
            words = list(host._there(words))
        self.process = pexpect.spawn(
            words[0],
            words[1:],
            env=environment,
            dimensions=(40, columns),
            timeout=20,
            encoding="utf-8",
        )
        self.process.logfile_read = self

    def write(self, text: str) -> None:
        self.log += text

    def flush(self) -> None:
        pass

    @property
    def screen(self) -> str:
        """Everything that was shown, without escape sequences."""
        return ESCAPES.sub("", self.log)

    def sees(self, text: str) -> None:
        """Wait until this has been shown."""
        self.process.expect_exact(text)

    def types(self, text: str) -> None:
        self.process.send(text)

    def ends(self) -> int:
        """Its exit code."""
        self.process.expect(pexpect.EOF)
        self.process.close()
        return int(self.process.exitstatus if self.process.exitstatus is not None else -self.process.signalstatus)

    def saved(self) -> Dict[str, Any]:
        path = self.config / "gpumesh" / "connection.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        found: Dict[str, Any] = json.loads(path.read_text())
        return found


@contextlib.contextmanager
def wizard(
    folder: Path, *arguments: str, term: str = "xterm", columns: int = 110, host: Optional[Host] = None
) -> Iterator[Wizard]:
    one = Wizard(folder, list(arguments), term=term, columns=columns, host=host)
    try:
        yield one
    finally:
        one.process.close(force=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_mesh_is_started_with_answers_given_by_keys(tmp_path: Path) -> None:
    port = free_port()
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, wizard(tmp_path) as one:
        one.sees("cores")
        one.sees("What is this machine to be?")
        one.types("\r")
        one.sees("Who may join?")
        one.types(DOWN + "\r")
        one.sees("Which port?")
        one.types("\x7f" * 4 + f"{taken.getsockname()[1]}\r")
        one.sees("is taken")
        one.sees("Which port?")
        one.types("\x7f" * 4 + "0\r")
        one.sees("ports are 1 to 65535")
        one.sees("Which port?")
        one.types("\x7f" * 4 + f"{port}\r")
        one.sees("only this machine can connect")
        one.sees("Start it now?")
        one.types("y")
        one.sees("serving at")
        assert one.saved()["url"] == f"http://127.0.0.1:{port}"
        assert one.saved()["generated"] is True
        one.types("\x03")

        assert one.ends() == 0


def test_a_machine_is_lent_and_its_token_is_never_shown(tmp_path: Path) -> None:
    with (
        start_coordinator(port=0, token="a-token-of-some-length") as server,
        wizard(tmp_path, "--url", server.url, "--no-start") as one,
    ):
        one.sees("What is this machine to be?")
        one.types(DOWN + "\r")
        one.sees("Token of the mesh")
        one.types("a-wrong-token-of-some-length\r")
        one.sees("token was refused")
        one.sees("Token of the mesh")
        one.types("a-token-of-some-length\r")
        one.sees("accepts this machine")

        assert one.ends() == 0
        assert one.saved() == {"url": server.url, "token": "a-token-of-some-length"}
        assert "of-some-length" not in one.screen


def test_one_of_several_meshes_is_chosen_on_a_narrow_terminal(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    lan = Lan(make_hosts(2, memory="1g"), tmp_path)
    lan.serve(lan.hosts.one, "--name", "attic")
    lan.serve(lan.hosts.two, "--name", "the cellar of the department, left")
    with wizard(tmp_path / "lent", "--no-start", columns=40, host=lan.hosts.two) as one:
        one.sees("machine to be?")
        one.types(DOWN + "\r")
        one.sees("Which mesh?")
        one.sees("attic at http://10.9.0.1:8000")
        one.sees("the cellar of the department, left")
        one.sees("at http://10.9.0.2:8000")
        one.sees("one at another address")
        one.types(DOWN + "\r")
        one.sees("department, left at http://10.9.0.2:8000")
        one.sees("Token of the mesh at 10.9.0.2")
        one.types(f"{TOKEN}\r")
        one.sees("accepts this machine")

        assert one.ends() == 0
        assert one.saved() == {"url": "http://10.9.0.2:8000", "token": TOKEN}


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_c_at_a_question_leaves_nothing_behind(tmp_path: Path, term: str) -> None:
    with wizard(tmp_path, term=term) as one:
        one.sees("What is this machine to be?")
        one.types("\x03")

        assert one.ends() == 130
        assert not (one.config / "gpumesh").exists()


def test_ctrl_c_at_the_last_question_keeps_what_was_saved(tmp_path: Path) -> None:
    with wizard(tmp_path, "--role", "coordinator", "--host", "127.0.0.1", "--port", str(free_port()), term="dumb") as one:
        saved = one.config / "gpumesh" / "connection.json"
        saved.parent.mkdir(parents=True)
        saved.write_text('{"url": "http://box:8000", "token": "of another mesh"}')
        saved.chmod(0o600)
        one.sees("Start it now?")
        one.types("\x03")

        assert one.ends() == 130
        assert one.saved() == {"url": "http://box:8000", "token": "of another mesh"}


def test_a_plain_terminal_gets_plain_questions(tmp_path: Path) -> None:
    port = free_port()
    with wizard(tmp_path, "--host", "127.0.0.1", "--port", str(port), "--no-start", term="dumb") as one:
        one.sees("Which one")
        one.types("7\r")
        one.sees("type a number from 1 to 2")
        one.types("1\r")
        one.sees(f"start it with: gpumesh serve --host 127.0.0.1 --port {port}")

        assert one.ends() == 0
        assert "\x1b[" not in one.log
        assert one.saved()["url"] == f"http://127.0.0.1:{port}"


def test_the_radar_follows_and_ctrl_c_ends_what_was_started(tmp_path: Path) -> None:
    port = free_port()
    with wizard(tmp_path, "--role", "coordinator", "--host", "", "--name", "attic", "--port", str(port)) as one:
        one.sees("type there: gpumesh quickjoin")
        one.sees("--token gmw-")
        one.sees("Start it now?")
        one.types("y")
        one.sees("starting; what it says goes to")
        one.sees("attic")
        one.sees("can be joined")
        one.types("q")
        one.sees("goes on; Ctrl-C ends it")
        with socket.create_connection(("127.0.0.1", port), 5):
            pass
        one.types("\x03")

        assert one.ends() == 0
        until(lambda: not _answers(port), what="the coordinator has ended")


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False
