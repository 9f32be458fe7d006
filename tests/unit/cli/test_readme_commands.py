"""The README's table of commands beside what `gpumesh --help` lists."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from gpumesh.cli.main import app
from tests.support.hosts import REPOSITORY


def test_the_table_names_each_command_once() -> None:
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = page.partition("\n## Commands\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]

    listed = CliRunner().invoke(app, ["--help"]).output.partition("Commands:")[2]

    assert sorted(named) == sorted(re.findall(r"^  ([a-z-]+) ", listed, re.MULTILINE))
    assert "quickjoin" in named
