"""Projects of users: folders with packages that no worker has, and programs that run in them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional

from tests.integration.programs import ROOT

RUN_SECONDS = 50.0


class Project:
    """A folder with a program of a user's in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, text: str = "") -> Path:
        """A file in it."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def run(self, *words: str, url: str, token: str, stdin: Optional[str] = None, check: bool = True) -> str:
        """Run Python in the folder, connected to a mesh; what it prints.

        The repository itself is importable, as an installed gpumesh is.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment.update(
            GPUMESH_URL=url, GPUMESH_TOKEN=token, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="", PYTHONIOENCODING="utf-8"
        )
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=RUN_SECONDS,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout
        return done.stdout.strip()


def touch_later(path: Path) -> None:
    """Date a file after everything that has been seen of it, as if a person had taken a moment to edit it."""
    later = time.time_ns() + 1_000_000_000
    os.utime(path, ns=(later, later))
