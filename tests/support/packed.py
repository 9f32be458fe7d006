"""Functions that tests send into environments; cheap to import, as each new process there does."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Dict, List


def version() -> str:
    import tinypkg  # type: ignore[import-not-found]

    return str(tinypkg.VERSION)


def look_around() -> Dict[str, Any]:
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    import tinypkg

    import gpumesh

    return {
        "tinypkg": tinypkg.VERSION,
        "prefix": sys.prefix,
        "python": sys.executable,
        "pid": os.getpid(),
        "gpumesh": gpumesh.__file__,
        "cloudpickle": cloudpickle.__file__,
    }


def in_a_child() -> List[str]:
    import subprocess

    program = "import tinypkg, cloudpickle, gpumesh; print(tinypkg.VERSION, gpumesh.__file__)"
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()


def plain(value: int) -> int:
    return value


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def parent() -> int:
    return os.getppid()


def where() -> Any:
    time.sleep(0.2)
    return os.stat(sys.prefix).st_ino, os.getppid()
