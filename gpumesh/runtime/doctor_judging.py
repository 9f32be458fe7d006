"""What facts about machines mean; pure: nothing here looks at anything."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from gpumesh.config import CLOCK_NOTE_SECONDS
from gpumesh.model.shown import span
from gpumesh.runtime.findings import MESH, Finding, fault, note, ok, warning

OLDEST_PYTHON = (3, 9)

# What each package is for, as far as people install it by themselves; the command that brings it.
OPTIONAL: Tuple[Tuple[str, str, str], ...] = (
    ("torch", "tasks on GPUs, and measuring them", "gpumesh[gpu]"),
    ("numpy", "measuring this machine's speed", "gpumesh[sysinfo]"),
    ("pandas", "data frames out of results", "gpumesh[notebook]"),
    ("pyngrok", "`gpumesh serve --public`", "gpumesh[tunnel]"),
    ("scikit-learn", "the demo", "gpumesh[demo]"),
)

# CUDA's major version -> the oldest branch of NVIDIA's driver that runs what is built for it.
# NVIDIA, "CUDA Compatibility", table 1: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVERS: Mapping[int, int] = {11: 450, 12: 525, 13: 580}

LEAST_OPEN_FILES = 1024  # A worker with many slots, and a coordinator of a hundred machines, stay below it.
LEAST_SHARED_MEMORY = 256 << 20  # Bytes; containers often have 64 MiB, which two arrays fill.


def python(version: Tuple[int, int, int], platform: str, executable: str) -> Finding:
    """The interpreter.

    Args:
        platform: For people, "Linux 6.1 x86_64".
    """
    shown = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        least = ".".join(map(str, OLDEST_PYTHON))
        return fault("python", f"Python {shown} is older than {least}", f"install Python {least} or newer")
    return ok("python", f"Python {shown} ({executable}) on {platform}")


def packages(gpumesh: str, required: Mapping[str, str], optional: Mapping[str, str]) -> List[Finding]:
    """What is installed.

    Args:
        gpumesh: Its version.
        required: Name -> version of what gpumesh needs; "" for one that is missing.
        optional: The same for `OPTIONAL`.
    """
    missing = [name for name, version in required.items() if not version]
    there = ", ".join(f"{name} {version}" for name, version in sorted(required.items()) if version)
    found = [ok("packages", f"gpumesh {gpumesh} with {there}")]
    if missing:
        advice = 'install gpumesh anew: pip install --force-reinstall "gpumesh"'
        found = [fault("packages", f"gpumesh {gpumesh} lacks {', '.join(missing)}", advice)]
    for name, purpose, extra in OPTIONAL:
        version = optional.get(name, "")
        if version:
            found.append(ok("packages", f"{name} {version}, for {purpose}"))
        else:
            found.append(note("packages", f"{name} is not installed; it is for {purpose}", f'pip install "{extra}"'))
    return found


def torch_and_driver(torch: str, cuda: str, hip: str, driver: str, has_cards: bool) -> Optional[Finding]:
    """Whether this torch can work with this driver.

    Args:
        torch: Its version; "" if it is not installed.
        cuda: The CUDA version that it is built for, "12.4"; "" for none.
        hip: The same for ROCm.
        driver: NVIDIA's, "550.54.15"; "" where there is none.
        has_cards: There are GPUs here, usable or not.
    """
    if not torch:
        if has_cards:
            return warning(
                "torch", "there are GPUs here, and torch is not installed; tasks cannot use them", 'pip install "gpumesh[gpu]"'
            )
        return None
    if not cuda and not hip:
        if driver or has_cards:
            return fault(
                "torch",
                f"torch {torch} is a build for CPUs, and there are GPUs here",
                "install torch's build for your GPUs, as its own page on installing says",
            )
        return ok("torch", f"torch {torch}, a build for CPUs, as there are no GPUs here")
    if hip:
        return ok("torch", f"torch {torch} is built for ROCm {hip}")
    if not driver:
        if has_cards:
            return fault("torch", f"torch {torch} is built for CUDA {cuda}, and no NVIDIA driver answers", "install the driver")
        return ok("torch", f"torch {torch} is built for CUDA {cuda}; there is no NVIDIA driver here")
    least = _OLDEST_DRIVERS.get(_leading(cuda), 0)
    if _leading(driver) < least:
        return fault(
            "torch",
            f"torch {torch} is built for CUDA {cuda}, which needs driver {least} or newer; this one is {driver}",
            "update the driver, or install a torch for an older CUDA",
        )
    return ok("torch", f"torch {torch} for CUDA {cuda} fits driver {driver}")


def devices(rows: Sequence[Mapping[str, Any]], problem: str) -> List[Finding]:
    """Processors and GPUs.

    Args:
        rows: With kind, name, memory as text and problem ("" for a usable one).
        problem: Why the GPUs could not be looked at.
    """
    found = []
    if problem:
        found.append(warning("devices", problem, "see whether `nvidia-smi` or `rocm-smi` works here"))
    for row in rows:
        memory = f", {row['memory']}" if row["memory"] else ""
        shown = f"{row['kind']} {row['name']}{memory}"
        if row["problem"]:
            found.append(warning("devices", f"{shown} is not used: {row['problem']}"))
        else:
            found.append(ok("devices", shown))
    return found


def limits(open_files: Optional[int], shared_memory: Optional[int], shown: str, *, in_container: bool) -> List[Finding]:
    """What the system allows a process.

    Args:
        open_files: At once, for one process; None: no limit is known.
        shared_memory: Bytes of the place where objects are kept; None where that is no file system of its own.
        shown: The same for people.
    """
    found = []
    if open_files is not None:
        if open_files < LEAST_OPEN_FILES:
            found.append(
                warning(
                    "limits", f"a process may have {open_files} files open", f"raise that: ulimit -n {4 * LEAST_OPEN_FILES}"
                )
            )
        else:
            found.append(ok("limits", f"a process may have {open_files} files open"))
    if shared_memory is not None:
        if shared_memory < LEAST_SHARED_MEMORY:
            advice = (
                "start the container with more: docker run --shm-size 8g" if in_container else "mount more memory at /dev/shm"
            )
            found.append(warning("limits", f"there are {shown} of shared memory for objects", advice))
        else:
            found.append(ok("limits", f"there are {shown} of shared memory for objects"))
    return found


def saved_connection(file: str, url: str, mode: Optional[int], problem: str) -> Finding:
    """The file with address and token.

    Args:
        url: "" if nothing is saved.
        mode: Its permissions, as a number; None where the system has none of that kind.
        problem: Why it cannot be used.
    """
    if problem:
        return fault("connection", f"{file} cannot be used: {problem}", "delete it, or join again")
    if not url:
        return note("connection", "no mesh is saved for this user", "start one with `gpumesh serve`, or join one")
    if mode is not None and mode & 0o077:
        return fault("connection", f"{file} holds the token of {url}, and others can read it", f"chmod 600 {file}")
    return ok("connection", f"{file} names {url}, and only this user can read it")


def clock(skew: float, doubt: float) -> Finding:
    """How far a mesh's clock is from this one.

    Args:
        skew: Seconds that it is ahead.
        doubt: By how much `skew` may be wrong.
    """
    if abs(skew) <= max(CLOCK_NOTE_SECONDS, doubt):
        return ok("clock", "its clock and this one agree", place=MESH)
    direction = "ahead of" if skew > 0 else "behind"
    return note(
        "clock",
        f"its clock is {span(abs(skew))} {direction} this one; nothing depends on that, but times in logs and events differ",
        "let both machines set their clocks by themselves (NTP)",
        place=MESH,
    )


def versions(here: Tuple[str, str], coordinator: str, workers: Sequence[Mapping[str, Any]]) -> List[Finding]:
    """Whether the machines of a mesh go together.

    Args:
        here: Versions of Python ("3.11") and gpumesh of this machine.
        coordinator: Its gpumesh.
        workers: Rows with hostname, python and gpumesh.
    """
    python_here, gpumesh_here = here
    found = []
    others: Dict[str, List[str]] = {}
    for row in workers:
        others.setdefault(str(row["gpumesh"]), []).append(str(row["hostname"]))
    if coordinator and coordinator != gpumesh_here:
        others.setdefault(coordinator, []).append("the coordinator")
    differ = {version: names for version, names in others.items() if version and version != gpumesh_here}
    if differ:
        said = "; ".join(f"{version} on {names_of(names)}" for version, names in sorted(differ.items()))
        found.append(
            warning("versions", f"gpumesh {gpumesh_here} here, {said}", "install the same version on all machines", place=MESH)
        )
    else:
        found.append(ok("versions", f"all have gpumesh {gpumesh_here}", place=MESH))
    pythons: Dict[str, List[str]] = {}
    for row in workers:
        pythons.setdefault(str(row["python"]), []).append(str(row["hostname"]))
    strangers = {version: names for version, names in pythons.items() if version != python_here}
    if strangers:
        said = "; ".join(f"{version} on {names_of(names)}" for version, names in sorted(strangers.items()))
        found.append(
            note(
                "versions",
                f"Python {python_here} here, {said}: functions that travel as bytecode run only on workers of the same version",
                "see docs/code.md, or give them the same Python",
                place=MESH,
            )
        )
    elif workers:
        found.append(ok("versions", f"{_all(len(workers))} Python {python_here}, as here", place=MESH))
    return found


def _all(count: int) -> str:
    return "its worker has" if count == 1 else f"all {count} workers have"


def names_of(names: Sequence[str], most: int = 4) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _leading(version: str) -> int:
    """The first number of a version; 0 where there is none."""
    match = re.search(r"\d+", version)
    return int(match[0]) if match else 0
