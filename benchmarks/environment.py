"""What a figure means nothing without: machine, versions, load, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any, Dict, Optional

from benchmarks.running import ROOT
from benchmarks.systems import PROFILES

_LIBRARIES = ("cloudpickle", "msgpack", "uvloop", "numpy")


def describe() -> Dict[str, Any]:
    """A JSON-ready description, taken before the first run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "is_modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _line_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "versions": versions(),
    }


def versions() -> Dict[str, str]:
    """Versions of what is measured and of what it leans on, where installed."""
    found = {}
    for distribution in [*(profile.distribution for profile in PROFILES.values()), *_LIBRARIES]:
        version = _version(distribution) if distribution else None
        if distribution and version:
            found[distribution] = version
    return found


def _version(distribution: str) -> Optional[str]:
    if distribution == "gpumesh":  # Run from a checkout it need not be installed.
        from gpumesh.version import __version__

        return __version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line_value(path: str, key: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(key):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def _git(*arguments: str) -> Optional[str]:
    try:
        asked = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None
