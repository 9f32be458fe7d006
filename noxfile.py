"""Sessions for `nox`: the tests under each Python, and the checks that need only one."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.sessions = ["tests-3.11", "lint"]


@nox.session(python=["3.9", "3.10", "3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """Run the test suite; further arguments go to pytest."""
    session.install("-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session(python=["3.9", "3.10", "3.11", "3.12", "3.13"])
def smoke(session: nox.Session) -> None:
    """Install the package alone and map a small function over an embedded mesh."""
    session.install(".")
    session.run("python", "tests/smoke_map.py")


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Style, types and import contracts."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Build the distributions and check their metadata."""
    session.install("build", "twine")
    out = session.create_tmp()
    session.run("python", "-m", "build", "--outdir", out)
    session.run("twine", "check", "--strict", *(str(file) for file in Path(out).iterdir()))
