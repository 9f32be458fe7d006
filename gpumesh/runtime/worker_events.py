"""Events that are seen in what a worker tells of itself: its owner takes it back, or lends it again; something is wrong with it, or a GPU of it."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

from gpumesh.model.resources import WorkerFacts
from gpumesh.runtime.event_log import EventLog

_OWNERS_WORD = "its owner"  # In every reason that comes from an owner's rules.


def note_changes(events: EventLog, worker: str, before: Optional[WorkerFacts], now: WorkerFacts) -> None:
    """Note what takes no tasks any more, and what does again.

    Args:
        worker: Its id.
        before: What it told last; None: it has just come.
    """
    earlier = {} if before is None else _problems(before)
    current = _problems(now)
    for part, (name, problem) in current.items():
        if problem != earlier.get(part, ("", ""))[1]:
            kind = "paused" if _OWNERS_WORD in problem else "unwell"
            events.note(kind, f"{name} takes no tasks: {problem}", worker=worker)
    for part, (name, _) in earlier.items():
        if part not in current and not now.problem:
            events.note("resumed", f"{name} takes tasks again", worker=worker)


def _problems(facts: WorkerFacts) -> Dict[str, Tuple[str, str]]:
    """Of the machine ("") and its GPUs by key: what people call it, and why it takes no tasks."""
    if facts.problem:
        return {"": (facts.hostname, facts.problem)}  # And with it all of its GPUs.
    return {
        device.key: (f"{device.name} of {facts.hostname}", device.problem)
        for device in facts.devices
        if device.problem and device.kind != "cpu"
    }
