"""What the chaos run finds in the end: marks that tasks have left, what is more than it was, and which faults a task has met."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

from benchmarks.chaos_faults import Done

MEMORY_SHARE, MEMORY_BYTES = 0.25, 24e6  # Above what it was, whichever is more: a heap has holes.
CLIENT_MEMORY_BYTES = (
    60e6  # The same for a client: its heap is as large as its largest backlog was. What it holds is counted in blocks.
)
DESCRIPTORS = 4  # Of a store that nothing was large enough for before.


def told(done: Done) -> str:
    """A fault for people."""
    return f"{done.begun:.2f} s: {done.fault}: {done.victim}"


def touches(done: Done, violation: Dict[str, Any]) -> bool:
    """Whether a fault began while the task was on its way, or shortly before, or was not over then."""
    return bool(done.begun <= violation["ended_at"] and done.ended >= violation["submitted_at"] - 1.0)


def marks(path: Path) -> Dict[int, List[str]]:
    """The lines that tasks have left, by number."""
    found: Dict[int, List[str]] = {}
    for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
        found.setdefault(int(line.split()[1]), []).append(line)
    return found


def runs(lines: List[str]) -> Tuple[int, int]:
    """How often a task with these lines has started, and how often of those it had already ended once."""
    words = [line.split()[0] for line in lines]
    starts = [place for place, word in enumerate(words) if word == "start"]
    return len(starts), sum("end" in words[:place] for place in starts)


def grown(before: Dict[str, Dict[str, float]], after: Dict[str, Dict[str, float]]) -> List[str]:
    """What is more than it was, in words."""
    found = [f"{name} is not there" for name in before if name not in after]
    for name, usage in after.items():
        for what, value in usage.items():
            limit = before[name][what]
            if what.startswith("memory"):
                limit += max(limit * MEMORY_SHARE, CLIENT_MEMORY_BYTES if name.startswith("client") else MEMORY_BYTES)
            elif what == "descriptors":
                limit += DESCRIPTORS
            if value > limit or (what == "processes" and value < limit):
                found.append(f"{what} of {name}: {value:.0f} now, {before[name][what]:.0f} before")
    return found


def shown(usage: Dict[str, Dict[str, float]]) -> str:
    """Mesh.usage for people."""
    return "; ".join(
        f"{name} {found['memory'] / 1e6:.0f} MB (all {found['memory of all'] / 1e6:.0f}), "
        f"{found['descriptors']:.0f} descriptors, {found['processes']:.0f} processes"
        for name, found in usage.items()
    )
