"""Rows of `mesh.devices()`: which tasks may use, how busy each is, and why not."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from gpumesh.client.pool_views import device_rows
from gpumesh.model.resources import CardReading, DeviceFacts
from gpumesh.scheduler.cards import CardUsage
from gpumesh.scheduler.snapshot import device_view

CPU = device_view(DeviceFacts("cpu", 0, "EPYC", 64, 0.5), None, None)
CARD = DeviceFacts("cuda", 1, "RTX 3080", 1000, 50.0, uuid="GPU-b", system_index=0, others=100, capability="8.6")
APPLE = device_view(DeviceFacts("mps", 0, "Apple M2", 16, 10.0), None, None)


def usage(reserved: int, leases: int) -> CardUsage:
    return CardUsage("GPU-b", "RTX 3080", 1000, 300, reserved, (None,) * leases, "")  # type: ignore[arg-type]


def worker(*devices: Dict[str, Any], **more: Any) -> Dict[str, Any]:
    return {
        "id": "w1",
        "hostname": "box",
        "alive": True,
        "draining": False,
        "running": 0,
        "problem": "",
        "devices": devices,
        **more,
    }


def test_a_card_is_shown_with_its_books_and_its_instruments() -> None:
    reading = CardReading("GPU-b", 300, 450, 97.0, 71.0, -1.0)

    (row,) = device_rows([worker(device_view(CARD, usage(200, 1), reading), running=1)])

    assert row == {
        "index": 0, "hostname": "box", "device": "cuda:1", "system_index": 0, "device_name": "RTX 3080", "score": 50.0,
        "status": "busy", "reason": "", "worker": "w1", "uuid": "GPU-b", "capability": "8.6", "memory": 1000, "others": 300,
        "reserved": 200, "free": 500, "used": 450, "utilisation": 97.0, "temperature": 71.0, "power": None,
    }  # fmt: skip


def test_what_is_booked_beyond_what_is_there_leaves_nothing_free() -> None:
    assert device_view(CARD, usage(900, 1), None)["free"] == 0
    assert device_view(CARD, None, None)["free"] == 900


@pytest.mark.parametrize(
    ("running", "leases", "statuses"), [(0, 0, ["idle", "idle"]), (1, 1, ["busy", "idle"]), (1, 0, ["idle", "busy"]), (2, 1, ["busy", "busy"])]
)  # fmt: skip
def test_a_task_on_a_card_keeps_no_cpu_busy(running: int, leases: int, statuses: Any) -> None:
    rows = device_rows([worker(CPU, device_view(CARD, usage(0, leases), None), running=running)])

    assert [(row["device"], row["status"]) for row in rows] == list(zip(["cuda:1", "cpu"], statuses))


@pytest.mark.parametrize(
    ("more", "status", "reason"),
    [
        ({"problem": "paused by its owner"}, "unused", "paused by its owner"),
        ({"draining": True}, "leaving", ""),
        ({"alive": False}, "lost", ""),
        ({}, "idle", ""),
    ],
)
def test_what_a_worker_says_holds_for_its_devices(more: Any, status: str, reason: str) -> None:
    assert [(row["status"], row["reason"]) for row in device_rows([worker(CPU, APPLE, **more)])] == [(status, reason)] * 2


def test_usable_devices_come_first_the_fastest_before_the_others() -> None:
    lost = device_view(CARD._replace(problem="fell off the bus"), None, None)

    rows = device_rows([worker(CPU, lost), worker(APPLE)])

    assert [(row["index"], row["device"], row["reason"]) for row in rows] == [
        (0, "mps", ""),
        (1, "cpu", ""),
        (2, "cuda", "fell off the bus"),
    ]
