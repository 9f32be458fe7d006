"""The radar at a terminal: who comes and goes, in a wide one and in a narrow one, with and without colours."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pexpect
import pytest

from tests.hosts.conftest import make_hosts as make_hosts
from tests.support.hosts import Hosts
from tests.support.lan import TOKEN, Lan

CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def lan(make_hosts: Callable[..., Hosts], tmp_path: Path) -> Lan:
    """Two machines in one flat, of which one serves."""
    made = Lan(make_hosts(2, memory="1g"), tmp_path)
    made.serve(made.hosts.one, "--name", "attic")
    return made


@contextlib.contextmanager
def radar(lan: Lan, *, columns: int, **environment: str) -> Iterator[Any]:
    """`gpumesh radar` on the second machine, in a pseudo-terminal."""
    host = lan.hosts.two
    words = host._there([sys.executable, "-m", "gpumesh", "radar"])
    settings = {**lan.environment(host, GPUMESH_TOKEN=TOKEN, TERM="xterm"), **environment}
    del settings["COLUMNS"]
    process = pexpect.spawn(
        words[0], words[1:], env=settings, dimensions=(30, columns), timeout=30, encoding="utf-8", codec_errors="replace"
    )
    try:
        yield process
    finally:
        process.close(force=True)


def ends(process: Any) -> int:
    process.expect(pexpect.EOF)
    process.close()
    return int(process.exitstatus)


def test_it_follows_who_comes_and_goes_until_q(lan: Lan) -> None:
    with radar(lan, columns=140) as screen:
        screen.expect_exact("attic")
        screen.expect_exact("can be joined")
        worker = lan.command(lan.hosts.two, "join", "http://10.9.0.1:8000", "--score", "1", "--slots", "3", GPUMESH_TOKEN=TOKEN)
        screen.expect_exact("1 worker")
        screen.expect_exact("0/3")
        screen.expect_exact("alive")
        worker.interrupt()
        assert worker.wait() == 0
        screen.expect_exact("not alive: the worker leaves")
        screen.send("q")

        assert ends(screen) == 0


def test_a_narrow_terminal_without_colours_until_ctrl_c(lan: Lan) -> None:
    with radar(lan, columns=40, NO_COLOR="1") as screen:
        shown = ""
        for part in ("attic", " http://10.9.0.1:8000\r\n", "  can be joined"):  # Whole words, each line for itself.
            screen.expect_exact(part)
            shown += screen.before + screen.after
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)  # No colours.
        assert all(len(CONTROLS.sub("", line)) <= 40 for line in re.split(r"[\r\n]+", shown))
        screen.send("\x03")

        assert ends(screen) == 0


def test_a_terminal_that_cannot_be_written_over_gets_it_once(lan: Lan) -> None:
    with radar(lan, columns=100, TERM="dumb") as screen:
        screen.expect_exact("attic")

        assert ends(screen) == 0
        assert "\x1b" not in screen.before
