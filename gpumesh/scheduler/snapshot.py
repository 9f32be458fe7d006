"""What people may see of the mesh: plain data made from the tables, for `mesh.workers()` and for status pages. Changes nothing."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from gpumesh.config import INFEASIBLE_NOTICE_SECONDS
from gpumesh.model.ids import ClientNumber
from gpumesh.model.resources import CardReading, DeviceFacts, WorkerFacts, facts_as_dict, show_requirement
from gpumesh.scheduler.cards import CardUsage
from gpumesh.scheduler.delays import Delayed
from gpumesh.scheduler.explanation import explain
from gpumesh.scheduler.queues import Group, Lane
from gpumesh.scheduler.states import Spec, Worker

QUEUED = "queued"
INFEASIBLE = "infeasible"
DELAYED = "delayed"
WAITING_STATES = (QUEUED, DELAYED, INFEASIBLE)
WORKER_STATES = ("ready", "paused", "leaving", "away")


def worker_views(workers: Iterable[Worker]) -> List[Dict[str, Any]]:
    """One dict for each worker: its facts, the live figures of its cards, and how busy it is.

    `device`, `device_name` and `score` are those of its best usable device; `cpu_score` is of what tasks without a GPU run on.
    """
    return [_worker_view(worker) for worker in workers]


def worker_state(view: Dict[str, Any]) -> str:
    """One of WORKER_STATES, of one of `worker_views`."""
    if not view["alive"]:
        return "away"
    if view["draining"]:
        return "leaving"
    return "paused" if view["problem"] else "ready"


def waiting_views(
    groups: Iterable[Group], workers: Sequence[Worker], delays: Iterable[Tuple[int, Delayed]], now: float
) -> List[Dict[str, Any]]:
    """One dict for each client's ready tasks of each requirement: `functions`, `needs`, `count`, `client`, `state`, `reason`.

    The state is "infeasible" where nobody who is connected can ever run them, and `reason` says why; else "queued", and there is a reason
    only if they have failed before and not everybody may have them. Behind them the same of
    those that have failed and are tried again later, "delayed", one for each function; `reason` says when.
    """
    views = [_waiting_view(group, lane, workers) for group in groups for lane in group.lanes.values() if lane.count]
    waits: Dict[Spec, List[float]] = {}
    for _, delayed in delays:
        waits.setdefault(delayed.spec, []).append(max(0.0, delayed.due - now))
    return views + [_delayed_view(spec, found) for spec, found in waits.items()]


def unable_views(
    groups: Iterable[Group], workers: Sequence[Worker], client: ClientNumber, now: float
) -> List[Tuple[List[int], str]]:
    """Why nobody here can run tasks of a client, of those of which that has been told or is due: (their ids, the reason) of each kind.

    Args:
        groups: Those that nobody can run.
    """
    views: List[Tuple[List[int], str]] = []
    for group in groups:
        lane = group.lanes.get(client)
        if lane is None:
            continue
        if group.need not in lane.client.noticed and min(run.since for run in lane.runs) + INFEASIBLE_NOTICE_SECONDS > now:
            continue
        names: Dict[str, List[int]] = {}
        for run in lane.runs:
            names.setdefault(run.spec.spec.name, []).extend(each for each in run.ids if each not in lane.dead)
        views.extend((ids, explain(name, group.need, workers, client=lane.client.name)) for name, ids in names.items() if ids)
    return views


def _delayed_view(spec: Spec, waits: List[float]) -> Dict[str, Any]:
    return {
        "functions": [spec.spec.name],
        "needs": show_requirement(spec.group.need),
        "count": len(waits),
        "client": spec.client.name,
        "state": DELAYED,
        "reason": f"failed before; the next is tried again in {min(waits):.1f} s",
    }


def _waiting_view(group: Group, lane: Lane, workers: Sequence[Worker]) -> Dict[str, Any]:
    names = list(dict.fromkeys(run.spec.spec.name for run in lane.runs))
    is_possible = bool(group.workers)
    only, avoid = group.confinement
    suspected = f"failed on {' and '.join(only)}, and stays there" if only else ""
    suspected = f"failed on {avoid[0]}, and waits for another worker" if avoid else suspected
    return {
        "functions": names,
        "needs": show_requirement(group.need),
        "count": lane.count,
        "client": lane.client.name,
        "state": QUEUED if is_possible else INFEASIBLE,
        "reason": suspected if is_possible else explain(names[0], group.need, workers, client=lane.client.name),
    }


def _worker_view(worker: Worker) -> Dict[str, Any]:
    facts = worker.facts
    device = best_device(facts)
    executing = len(worker.executing())
    waiting = sum(batch.waiting >= 0 for batch in worker.assigned.values()) if worker.waits else 0
    view = facts_as_dict(facts)
    usage = {each.key: each for each in worker.cards.usage()} if worker.cards is not None else {}
    view["devices"] = [device_view(each, usage.get(each.key), worker.readings.get(each.key)) for each in facts.devices]
    view.update(
        id=worker.id,
        device=_device_label(device),
        device_name=device.name,
        score=device.score,
        cpu_score=facts.score,
        alive=worker.away_until is None,
        lost="" if worker.away_until is None else worker.away_reason,
        draining=worker.is_draining,
        running=executing - waiting,
        queued=len(worker.assigned) - executing,
        waiting=waiting,
        done=worker.done,
        crashed=worker.crashed,
        round_trip=worker.round_trip,
    )
    return view


def gone_view(worker: Worker, reason: str) -> Dict[str, Any]:
    """A worker that was lost, as it was: not alive, and `lost` says why."""
    view = _worker_view(worker)
    view.update(alive=False, lost=reason, running=0, queued=0, waiting=0)
    return view


def device_view(device: DeviceFacts, usage: Optional[CardUsage], reading: Optional[CardReading]) -> Dict[str, Any]:
    """One device: its facts, and what is known of it now.

    Args:
        device: As its worker tells it.
        usage: What is booked on it; None for what is no card.
        reading: The last of its instruments; None if there is none. What they do not tell is None in the view.

    Returns:
        The fields of DeviceFacts, with `others` as last measured, and `reserved` (bytes booked for tasks), `free` (bytes that tasks
        could still have), `tasks`, `used` (bytes, by anyone), `utilisation` (percent), `temperature` (degrees Celsius) and `power`
        (watts).
    """
    view = device._asdict()
    view["rates"] = dict(device.rates)
    if usage is not None:
        view["others"] = usage.others
    view["reserved"] = usage.reserved if usage is not None else 0
    view["tasks"] = len(usage.leases) if usage is not None else 0
    view["free"] = max(0, device.memory - view["others"] - view["reserved"])
    for name in ("used", "utilisation", "temperature", "power"):
        figure = getattr(reading, name) if reading is not None else -1
        view[name] = None if figure < 0 else figure
    return view


def best_device(facts: WorkerFacts) -> DeviceFacts:
    """The fastest device of a worker that tasks may use."""
    usable = [device for device in facts.devices if not device.problem]
    if not usable:
        return DeviceFacts("cpu", 0, "", facts.memory, facts.score)
    return max(usable, key=lambda device: device.score)  # The first of equals.


def _device_label(device: DeviceFacts) -> str:
    return device.kind if device.kind in ("cpu", "mps") else f"{device.kind}:{device.index}"
