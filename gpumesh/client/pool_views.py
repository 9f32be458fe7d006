"""The devices of a mesh as rows for people, made of what its workers tell. Asks nobody."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

_COPIED = (
    "uuid", "capability", "memory", "others", "reserved", "free", "used", "utilisation", "temperature", "power",
)  # fmt: skip


def device_rows(workers: Iterable[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The rows of `GPUMesh.devices`.

    Args:
        workers: As `GPUMesh.workers` returns them.
    """
    rows = [_row(worker, device) for worker in workers for device in worker["devices"]]
    rows.sort(key=lambda row: (row["status"] == "unused", -row["score"]))
    return [{"index": index, **row} for index, row in enumerate(rows)]


def _row(worker: Dict[str, Any], device: Dict[str, Any]) -> Dict[str, Any]:
    reason = str(device.get("problem") or worker.get("problem") or "")
    system_index = device.get("system_index", -1)
    row = {
        "hostname": worker["hostname"],
        "device": str(device["kind"]) if device.get("problem") else label(device),  # Unused: no program has a number for it.
        "system_index": None if system_index < 0 else system_index,
        "device_name": device["name"],
        "score": device["score"],
        "status": "unused" if reason else _status(worker, device),
        "reason": reason,
        "worker": worker["id"],
    }
    row.update((name, device.get(name)) for name in _COPIED)
    return row


def label(device: Dict[str, Any]) -> str:
    """What user code on its worker calls a device: "cuda:1", "mps", "cpu"."""
    kind = str(device["kind"])
    return kind if kind in ("cpu", "mps") else f"{kind}:{device['index']}"


def _status(worker: Dict[str, Any], device: Dict[str, Any]) -> str:
    if not worker.get("alive", True):
        return "lost"
    if worker.get("draining"):
        return "leaving"
    if device["kind"] == "cpu":
        tasks = sum(int(each.get("tasks") or 0) for each in worker["devices"])
        return "busy" if int(worker.get("running") or 0) > tasks else "idle"
    return "busy" if device.get("tasks") else "idle"
