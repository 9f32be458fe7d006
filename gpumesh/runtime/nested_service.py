"""What the coordinator answers to clients that are inside tasks, whose objects come by two ways: their own, and their worker's."""

from __future__ import annotations

from typing import Any, Container, Dict, List

from gpumesh.scheduler.directory import Directory

QUESTIONS = frozenset({"unknown-objects", "hold-for-task"})


def answer(what: str, arguments: Dict[str, Any], directory: Directory, tasks: Container[int]) -> Any:
    """The answer to one of QUESTIONS.

    Args:
        what: "unknown-objects": those of `oids` that do not exist, or not yet. "hold-for-task": `oids` live at least as long as the task
            `task`, which is about to mention them; whether it has not ended.
        tasks: Those that have not ended.
    """
    told = arguments.get("oids")
    oids: List[int] = [oid for oid in told if type(oid) is int] if isinstance(told, (list, tuple)) else []
    if what == "unknown-objects":
        return [oid for oid in oids if oid not in directory]
    task = arguments.get("task")
    if type(task) is not int or task not in tasks:
        return False
    directory.hold_for_task(task, oids)
    return True
