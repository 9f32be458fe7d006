"""Packages made on the spot, for tests that install some without a network."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Dict, Mapping, Optional


def make_wheel(folder: Path, name: str, version: str, files: Optional[Mapping[str, str]] = None) -> Path:
    """A wheel of a package that says its version as `VERSION`, or of these files."""
    content = dict(files or {f"{name}/__init__.py": f"VERSION = {version!r}\n"})
    info = f"{name}-{version}.dist-info"
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return wheel


def make_slow_project(folder: Path, name: str, *, started: Path, gate: Path) -> Path:
    """A source tree that writes its builder's process id to `started` and is then built only when `gate` exists."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'slow'\nbackend-path = ['.']\n"
        f"[project]\nname = {name!r}\nversion = '1.0'\n"
    )
    (folder / "slow.py").write_text(_SLOW_BACKEND.format(name=name, started=str(started), gate=str(gate)))
    return folder


def installed(folder: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """A folder of modules as an installer leaves it: these files, and the version beside them."""
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def offline(wheels: Path, environments: Path) -> Dict[str, str]:
    """Variables for a worker that installs from `wheels` alone and keeps environments there."""
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CACHE_DIR": str(environments / "pip-cache"),
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(wheels),
        "UV_OFFLINE": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "GPUMESH_ENVIRONMENTS": str(environments),
    }


_SLOW_BACKEND = """
import os, time, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with open({started!r} + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename({started!r} + ".part", {started!r})
    while not os.path.exists({gate!r}):
        time.sleep(0.02)
    name = "{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.writestr("{name}.py", "VERSION = '1.0'")
        wheel.writestr("{name}-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
        wheel.writestr("{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: tests\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("{name}-1.0.dist-info/RECORD", "")
    return name
"""
