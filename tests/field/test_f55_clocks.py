"""F55: clocks of machines differ, and jump while a task runs; nothing that is decided or shown depends on them.

The wall clock of a worker's processes is shifted by a sitecustomize of theirs; the monotonic clock, which differs between real machines
too, by a time namespace where that is allowed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from gpumesh import accelerate
from gpumesh.errors import TaskTimeoutError
from tests.support import tasks
from tests.support.hosts import REPOSITORY
from tests.support.processes import until
from tests.support.site_of_hosts import Site, site_of_hosts

SHIFT = "CLOCK_SHIFT_FILE"
SHIFTED = f"""
import os, time
_time, _time_ns = time.time, time.time_ns
def shift():
    with open(os.environ["{SHIFT}"]) as file:
        return float(file.read())
time.time = lambda: _time() + shift()
time.time_ns = lambda: _time_ns() + int(shift() * 1e9)
"""
TEN_MINUTES = 600.0
NAP = """
import time
time.sleep(0.3)
print(time.time())
"""


def clocks() -> Dict[str, float]:
    """What this process's clocks say."""
    return {"wall": time.time(), "monotonic": time.monotonic()}


def monotonic_shift(seconds: int) -> List[str]:
    """Words before a command whose monotonic clock is to be ahead by so much; none where that is not allowed."""
    words = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", str(seconds), "--boottime", str(seconds)]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        return []
    return words


class Clock:
    """The wall clock of one worker's machine."""

    def __init__(self, folder: Path, name: str) -> None:
        (folder / "site").mkdir(exist_ok=True)
        (folder / "site" / "sitecustomize.py").write_text(SHIFTED)
        self._file = folder / f"{name}.shift"
        self.environment = {SHIFT: str(self._file), "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(REPOSITORY)])}
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """Ahead of ours by so much."""
        part = self._file.with_suffix(".part")
        part.write_text(str(seconds))
        os.replace(part, self._file)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_of_hosts(tmp_path) as made:
        yield made


@pytest.fixture
def join(site: Site, tmp_path: Path) -> Callable[..., Clock]:
    def joined(place: str, seconds: float, *, monotonic: int) -> Clock:
        clock = Clock(tmp_path, place)
        clock.set(seconds)
        site.join(place, before=monotonic_shift(monotonic) if monotonic else [], environment=clock.environment)
        return clock

    return joined


def negative(value: Any) -> List[float]:
    """All negative times anywhere in there; whole numbers are none."""
    if isinstance(value, dict):
        return [found for one in value.values() for found in negative(one)]
    if isinstance(value, (list, tuple)):
        return [found for one in value for found in negative(one)]
    return [value] if isinstance(value, float) and value < 0 else []


def test_workers_ten_minutes_ahead_and_behind_are_as_good_as_any(site: Site, join: Callable[..., Clock]) -> None:
    shifts = {"ahead": TEN_MINUTES, "behind": -TEN_MINUTES}
    for place, seconds in shifts.items():
        join(place, seconds, monotonic=int(abs(seconds) * 1000))
    with site.client() as mesh:
        for place, seconds in shifts.items():
            site.ident(mesh, place)
            there = accelerate(mesh, tags={"place": place})(clocks).remote().result(20)
            assert there["wall"] - time.time() == pytest.approx(seconds, abs=10), "the clock is not shifted"
            if monotonic_shift(1):
                assert there["monotonic"] - time.monotonic() > 500_000, "the clock is not shifted"

            nap = accelerate(mesh, tags={"place": place}, timeout=20)(tasks.sleep)
            started = time.monotonic()
            futures = [nap.remote(0.2) for _ in range(4)]
            assert [future.result(20) for future in futures] == ["slept"] * 4
            assert time.monotonic() - started < 10
            for future in futures:
                assert 0.15 < future.elapsed < 10
            with pytest.raises(TaskTimeoutError):
                accelerate(mesh, tags={"place": place}, timeout=0.3)(tasks.sleep).remote(20).result(20)

        script = site.folder / "scripts" / "nap.py"
        script.parent.mkdir()
        script.write_text(NAP)
        jobs = [mesh.submit(script=str(script), payloads=[{}], tags={"place": place}) for place in shifts]
        for job, seconds in zip(jobs, shifts.values()):
            (task,) = mesh.wait(job, timeout=20)["tasks"]
            assert task["result"] - time.time() == pytest.approx(seconds, abs=20), "the clock is not shifted"
            assert 0.2 <= task["seconds"] < 10
            assert negative(mesh.status(job)) == []

        seen = mesh.workers()
        assert [view["alive"] for view in seen] == [True, True]
        assert negative(seen) == []
    assert site.complaints() == []


@pytest.mark.parametrize("jump", [TEN_MINUTES, -TEN_MINUTES], ids=["forward", "back"])
def test_a_clock_that_jumps_while_a_task_runs_changes_nothing(site: Site, join: Callable[..., Clock], jump: float) -> None:
    clock = join("one", 0.0, monotonic=0)
    with site.client() as mesh:
        site.ident(mesh, "one")
        (future,) = site.hold(mesh, "task", timeout=30, retries=0)
        site.until_started("task")

        clock.set(jump)

        look = accelerate(mesh)(clocks)
        behind = look.remote()  # Waits: there is one slot.
        time.sleep(0.5)
        site.go()
        assert future.result(20) == ("task", "one")
        assert 0.4 < future.elapsed < 20
        assert behind.result(20)["wall"] - time.time() == pytest.approx(jump, abs=10), "the clock has not jumped"
        assert behind.elapsed < 20
        until(lambda: [view["alive"] for view in mesh.workers()] == [True], 5)
        assert negative(mesh.workers()) == []
    assert site.complaints() == []
