"""Live figures: told at once when others take or free memory, at a slow pace else; a card that falls silent is said to be lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Coroutine, Dict, List, Tuple

import pytest

from gpumesh.devices.nvml import survey
from gpumesh.devices.offered import HostMemory, join
from gpumesh.model.resources import CardReading, DeviceFacts
from gpumesh.runtime import readings
from gpumesh.runtime.readings import Holders, Readings
from tests.support.fake_nvml import FakeNvml, record, write_module

GIB = 1 << 30


class Machine:
    """Two recorded cards whose state can be changed, and a worker that reads them by a real monitor process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.one = record("r01")
        self.devices: Tuple[DeviceFacts, ...] = join(survey(FakeNvml(self.one)), {}, HostMemory(64 * GIB, 32 * GIB))
        self.path = write_module(folder, self.one)
        self.sent: List[Tuple[CardReading, ...]] = []
        self.silent: List[Tuple[str, str]] = []
        self.readings = Readings(
            holders=lambda: Holders({os.getpid()}, ()),
            send=self.sent.append,
            on_silent=lambda key, why: self.silent.append((key[-3:], why)),
        )

    def change(self, **figures: Any) -> None:
        """The first card's; the stand-in looks at the file when the library is initialised, so here the whole module is new."""
        self.one = {**self.one, "devices": [{**self.one["devices"][0], **figures}, *self.one["devices"][1:]]}
        fresh = self.folder / "record.new"
        fresh.write_text(json.dumps({"record": self.one, "init": None}))
        os.replace(fresh, self.folder / "record.json")

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            running = asyncio.ensure_future(self.readings.run(self.devices))
            try:
                await asyncio.wait_for(test(), 30)
            finally:
                running.cancel()
                await asyncio.wait([running])

        asyncio.run(both())

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  # What is waited for comes from a file that another process reads.
            await asyncio.sleep(0.01)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(readings, "READ_SECONDS", 0.05)
    found = Machine(tmp_path / "fake")
    # Reads its record anew at each look.
    module = Path(found.folder) / "pynvml.py"
    module.write_text(
        module.read_text()
        + "\n\ndef nvmlDeviceGetHandleByUUID(uuid):\n    nvmlInit()\n    return fake.nvmlDeviceGetHandleByUUID(uuid)\n"
    )
    monkeypatch.setenv("PYTHONPATH", found.path)
    return found


def memory(free: int) -> Dict[str, int]:
    return {"total": 24146608128, "free": free, "used": 24146608128 - free}


def test_the_first_look_is_told_at_once(machine: Machine) -> None:
    async def test() -> None:
        await machine.until(lambda: bool(machine.sent))

    machine.run(test)

    (first, *_) = machine.sent
    assert [(reading.key[-3:], reading.others, reading.power) for reading in first] == [
        ("100", 1257242624, 64.81),
        ("101", 541917184, 15.749),
    ]
    assert machine.readings.last == first


def test_memory_that_others_take_is_told_long_before_the_next_regular_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "SEND_SECONDS", 1000.0)

    async def test() -> None:
        await machine.until(lambda: bool(machine.sent))
        machine.change(memory_b=memory(10 * GIB))
        await machine.until(lambda: len(machine.sent) > 1)

    machine.run(test)

    assert machine.sent[1][0].others == 24146608128 - 10 * GIB


def test_a_warmer_card_is_no_news_but_told_at_the_regular_time(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "SEND_SECONDS", 1.0)
    times: List[float] = []

    async def test() -> None:
        await machine.until(lambda: bool(machine.sent))
        times.append(time.monotonic())
        machine.change(temperature=66)
        await machine.until(lambda: machine.sent[-1][0].temperature == 66)
        times.append(time.monotonic())

    machine.run(test)

    assert len(machine.sent) == 2
    assert times[1] - times[0] > 0.9


def test_a_card_that_falls_silent_is_said_once_and_again_when_it_is_back(machine: Machine) -> None:
    lost = record("r01")["devices"][0]["uuid"]

    async def test() -> None:
        await machine.until(lambda: bool(machine.sent))
        machine.change(uuid="GPU-gone")
        await machine.until(lambda: bool(machine.silent))
        machine.change(uuid=lost)
        await machine.until(lambda: len(machine.silent) > 1)

    machine.run(test)

    assert machine.silent == [("100", "it does not answer any more"), ("100", "")]


def test_a_monitor_that_is_killed_is_started_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "RESTART_SECONDS", (0.05, 1000.0))
    monkeypatch.setattr(readings, "SEND_SECONDS", 0.0)

    async def test() -> None:
        await machine.until(lambda: bool(machine.sent))
        (pid,) = children_of(os.getpid())
        os.kill(pid, signal.SIGKILL)
        await machine.until(lambda: not children_of(os.getpid()) or pid not in children_of(os.getpid()))
        count = len(machine.sent)
        await machine.until(lambda: len(machine.sent) > count)

    machine.run(test)

    assert children_of(os.getpid()) == []


def test_where_there_is_no_library_nothing_runs(machine: Machine, tmp_path: Path) -> None:
    write_module(tmp_path / "fake", machine.one, init={"raises": "LIBRARY_NOT_FOUND"})

    asyncio.run(asyncio.wait_for(machine.readings.run(machine.devices), 30))

    assert machine.sent == []


def test_cards_that_nvml_does_not_know_start_no_process(machine: Machine) -> None:
    others = (DeviceFacts("rocm", 0, "AMD Instinct MI300X", 1, 1.0), DeviceFacts("cuda", 0, "Orin", 1, 1.0))

    asyncio.run(asyncio.wait_for(machine.readings.run(others), 1))

    assert children_of(os.getpid()) == []


def children_of(pid: int) -> List[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found.extend(int(child) for child in (task / "children").read_text().split())
    return [child for child in found if b"gpumesh.devices.monitor" in Path(f"/proc/{child}/cmdline").read_bytes()]
