"""Other versions of Python on this machine, and what gpumesh needs to run under them without an installer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

MINORS = ("3.9", "3.10", "3.11", "3.12", "3.13")
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHERS = tuple(minor for minor in MINORS if minor != OWN)
_PURE = ("cloudpickle", "msgpack", "platformdirs")  # They work without their compiled parts.
_ROOT = Path(__file__).resolve().parent.parent.parent
_NEEDS = "import cloudpickle, msgpack, platformdirs; from gpumesh.runtime import runner, worker; from gpumesh.serialization import pickling"


def interpreter(minor: str) -> Optional[str]:
    """An interpreter of this minor version: from the PATH, if what is there starts and is that version, else from pyenv."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates: List[Optional[str]] = [shutil.which(f"python{minor}")]
    candidates += [str(path) for path in sorted(root.glob(f"versions/{minor}.*/bin/python"))]
    for candidate in filter(None, candidates):
        program = "import sys; print('%d.%d %s' % (sys.version_info[:2] + (sys.executable,)))"
        ended = subprocess.run([str(candidate), "-c", program], capture_output=True, text=True, check=False)
        version, _, path = ended.stdout.strip().partition(" ")
        if ended.returncode == 0 and version == minor:
            return path
    return None


def borrowed_dependencies(folder: Path) -> Dict[str, str]:
    """Variables with which another interpreter finds gpumesh and, by links in `folder`, what that needs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _PURE:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        link = folder / name
        if not link.exists():
            link.symlink_to(Path(found.origin).parent, target_is_directory=True)
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(_ROOT))), "PYTHONDONTWRITEBYTECODE": "1"}


def why_not(python: str, variables: Dict[str, str]) -> str:
    """Why gpumesh does not run under this interpreter; "" when it does."""
    ended = subprocess.run([python, "-c", _NEEDS], capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    return "" if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]
