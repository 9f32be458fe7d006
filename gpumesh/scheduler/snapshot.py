"""What people may see of the mesh: plain data made from the tables, for `mesh.workers()` and for status pages. Changes nothing."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

from gpumesh.model.resources import DeviceFacts, WorkerFacts, facts_as_dict
from gpumesh.scheduler.states import Worker


def worker_views(workers: Iterable[Worker]) -> List[Dict[str, Any]]:
    """One dict for each worker: its facts, and how busy it is."""
    return [_worker_view(worker) for worker in workers]


def _worker_view(worker: Worker) -> Dict[str, Any]:
    facts = worker.facts
    device = _main_device(facts)
    running = len(worker.executing())
    view = facts_as_dict(facts)
    view.update(
        id=worker.id,
        device=_device_label(device),
        device_name=device.name,
        alive=True,
        draining=worker.is_draining,
        running=running,
        queued=len(worker.assigned) - running,
        done=worker.done,
        round_trip=worker.round_trip,
    )
    return view


def _main_device(facts: WorkerFacts) -> DeviceFacts:
    """The device that the worker's score is of."""
    for device in facts.devices:
        if device.score == facts.score:
            return device
    return facts.devices[0] if facts.devices else DeviceFacts("cpu", 0, "", facts.memory, facts.score)


def _device_label(device: DeviceFacts) -> str:
    return device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}"
