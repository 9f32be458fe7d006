"""The README's table of commands beside what `gpumesh --help` lists, and that list."""

from __future__ import annotations

import re
from typing import Dict, List

from typer.testing import CliRunner

from gpumesh.cli.main import app
from tests.support.hosts import REPOSITORY


def listed() -> Dict[str, List[str]]:
    """Each heading of the help, and the commands below it."""
    said = CliRunner().invoke(app, ["--help"], terminal_width=80).output.partition("Options:")[2]
    sections = re.findall(r"^(\S.*):\n((?:  .*\n)+)", said, re.MULTILINE)
    return {heading: re.findall(r"^  ([a-z-]+) ", lines, re.MULTILINE) for heading, lines in sections}


def test_the_table_names_each_command_once_and_goes_by_the_headings_of_the_help() -> None:
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = page.partition("\n## Commands\n")[2].partition("\n## ")[0]
    rows = [re.findall(r"`([^`]+)`", cell) for cell in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)]
    headings = listed()

    assert "quickjoin" in headings["Start a mesh, find one, lend this machine"]
    assert sorted(name for row in rows for name in row) == sorted(name for names in headings.values() for name in names)
    assert [row for row in rows if not any(set(row) <= set(names) for names in headings.values())] == []


def test_the_help_begins_with_what_a_newcomer_needs_and_each_command_has_one_whole_line() -> None:
    said = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    lines = said.partition("Begin:\n")[2].splitlines()

    assert next(iter(listed().items())) == ("Begin", ["demo", "setup", "doctor"])
    assert [line for line in lines if line.startswith("  ") and not re.fullmatch(r"  [a-z-]+ +[A-Z].*\.", line)] == []
    assert max(map(len, said.splitlines())) <= 80
