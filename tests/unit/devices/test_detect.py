"""Detection: limits of containers are honoured, and nothing slow happens on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, Optional

import pytest

from gpumesh.devices import benchmark, detect
from gpumesh.devices.detect import CgroupLimits, cgroup_limits, local_facts, memory_kills
from gpumesh.devices.scoring import cpu_prior
from gpumesh.model.resources import DeviceFacts, facts_from_wire
from gpumesh.version import __version__


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "cache_file", lambda: str(tmp_path / "cache" / "cpu.json"))
    monkeypatch.setenv(detect.PROBE_SWITCH, "0")


def lay(root: Path, files: Dict[str, str]) -> str:
    """Write files below a folder and name it."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(root)


def test_facts_describe_this_process_and_survive_the_wire() -> None:
    facts = local_facts(tags={"room": "lab", "floor": "2"})

    assert facts.cores == facts.slots == detect.usable_cores()
    assert facts.memory > 1 << 28
    assert facts.score == cpu_prior(facts.cores, speed=detect.clock_speed())
    assert [(device.kind, device.index, device.score) for device in facts.devices] == [("cpu", 0, facts.score)]
    assert facts.devices[0].name
    assert facts.tags == (("floor", "2"), ("room", "lab"))
    assert facts.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (facts.gpumesh, facts.pid, facts.problem) == (__version__, os.getpid(), "")
    assert facts_from_wire(tuple(facts)) == facts


def test_slots_and_score_given_by_a_person_win() -> None:
    facts = local_facts(slots=3, score=7.5)

    assert (facts.slots, facts.score, facts.devices[0].score) == (3, 7.5, 7.5)


@pytest.mark.parametrize("score", [0.0, float("nan"), float("inf")])
def test_a_score_that_is_no_weight_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="a score must be"):
        local_facts(score=score)


@pytest.mark.parametrize("slots", [0, -1, 4097])
def test_a_number_of_slots_out_of_range_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match="1 to 4096 slots"):
        local_facts(slots=slots)


def test_a_process_bound_to_one_core_offers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5}, raising=False)

    assert detect.usable_cores() == 1


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (1.5, 2), (4.0, 4), (64.0, 8)])
def test_a_cpu_quota_bounds_the_cores(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(detect, "cgroup_limits", lambda: CgroupLimits(cores=quota))

    assert detect.usable_cores() == cores


def test_a_memory_limit_bounds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "cgroup_limits", lambda: CgroupLimits(memory=1 << 20))
    assert detect.host_memory() == 1 << 20

    monkeypatch.setattr(detect, "cgroup_limits", lambda: CgroupLimits(memory=1 << 59))
    assert detect.host_memory() < 1 << 59


def test_version_2_groups_give_the_tightest_limit_on_the_way_to_the_root(tmp_path: Path) -> None:
    root = lay(
        tmp_path / "cgroup",
        {
            "cpu.max": "max 100000\n",
            "pod/cpu.max": "300000 100000\n",
            "pod/memory.max": "1000000\n",
            "pod/box/cpu.max": "max 100000\n",
            "pod/box/memory.max": "max\n",
            "other/memory.max": "5\n",
        },
    )
    membership = tmp_path / "self"
    membership.write_text("0::/pod/box\n")

    assert cgroup_limits(root, str(membership)) == CgroupLimits(cores=3.0, memory=1000000)


def test_version_1_groups_are_read_at_the_root_of_a_container_too(tmp_path: Path) -> None:
    root = lay(
        tmp_path / "cgroup",
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "2000000\n",
        },
    )
    membership = tmp_path / "self"
    membership.write_text("4:memory:/docker/abc\n3:cpuset:/\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n")

    assert cgroup_limits(root, str(membership)) == CgroupLimits(cores=1.5, memory=2000000)


def test_no_limit_is_no_limit_in_either_version(tmp_path: Path) -> None:
    root = lay(
        tmp_path / "cgroup",
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    membership = tmp_path / "self"
    membership.write_text("2:cpu:/\n4:memory:/\n0::/gone\nrubbish\n")

    assert cgroup_limits(root, str(membership)) == CgroupLimits()
    assert cgroup_limits(root, str(tmp_path / "absent")) == CgroupLimits()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Example  CPU 3000\nflags\t: a b\nprocessor\t: 1\nmodel name\t: other\n", "Example CPU 3000"),
        ("processor\t: 0\nBogoMIPS\t: 108.00\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 4 Model B Rev 1.1\n", "Raspberry Pi 4 Model B Rev 1.1"),
        ("processor : 0\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_cpu_is_named_from_what_the_kernel_says(text: str, name: str) -> None:
    assert detect._cpuinfo_name(text) == name


def test_a_machine_that_does_not_say_its_clock_counts_as_average(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(detect, "_MAX_CLOCK", str(tmp_path / "absent"))
    assert detect.clock_speed() == 1.0

    (tmp_path / "clock").write_text("4500000\n")
    monkeypatch.setattr(detect, "_MAX_CLOCK", str(tmp_path / "clock"))
    assert detect.clock_speed() == 1.5


def test_detection_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from gpumesh.devices.detect import local_facts\n"
        "local_facts()\n"
        "print([name for name in ('asyncio', 'numpy', 'psutil', 'platformdirs', 'subprocess', 'torch') if name in sys.modules])\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=30).stdout
    assert printed.decode().strip() == "[]"


@pytest.mark.parametrize(("wish", "found"), [("1", True), ("0", False)])
def test_a_person_decides_whether_gpus_are_looked_for(wish: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(detect.PROBE_SWITCH, wish)

    assert detect.gpus_may_exist() is found


@pytest.mark.skipif(sys.platform != "linux", reason="the signs are files on Linux")
def test_gpus_are_looked_for_where_there_is_a_sign_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(detect.PROBE_SWITCH, raising=False)
    monkeypatch.setattr(detect, "_GPU_SIGNS", (str(tmp_path / "nvidiactl"), str(tmp_path / "kfd")))
    assert not detect.gpus_may_exist()

    (tmp_path / "kfd").write_text("")
    assert detect.gpus_may_exist()


def test_gpus_found_at_an_earlier_start_are_told_after_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = DeviceFacts("cuda", 0, "NVIDIA A10", 24 << 30, 47.5, uuid="GPU-1")
    monkeypatch.setattr(detect, "gpus_may_exist", lambda: True)
    monkeypatch.setattr("gpumesh.devices.probing.head_start", lambda: (card,))

    facts = local_facts(score=2.0)

    assert [device.kind for device in facts.devices] == ["cpu", "cuda"]
    assert facts.devices[1] == card
    assert facts.score == 2.0


def test_the_cpu_s_figures_travel_with_it_whatever_its_score_is_said_to_be() -> None:
    benchmark.remembered.remember(
        benchmark.cache_file(), benchmark._key(), {"score": 1.5, "rate_flops": 1e11, "loop_rate": 2e7}
    )

    assert local_facts().devices[0].rates == (("float32", 1e11), ("python", 2e7))
    assert (local_facts(score=3.0).score, local_facts(score=3.0).devices[0].rates) == (3.0, local_facts().devices[0].rates)


def test_kills_for_lack_of_memory_are_those_of_the_deepest_group_that_counts_them(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/box/run\n0::/\n")
    folder = tmp_path / "memory/box"
    folder.mkdir(parents=True)
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 40\n")

    def kills() -> Optional[int]:
        return memory_kills(str(tmp_path), str(membership), str(vmstat))

    assert kills() == 40, "the machine's own count, where no group has one"
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert kills() == 3
    membership.write_text("0::/box/run\n")
    (tmp_path / "box/run").mkdir(parents=True)
    (tmp_path / "box/run/memory.events").write_text("low 0\noom 2\noom_kill 7\noom_group_kill 0\n")
    assert kills() == 7
    vmstat.unlink()
    membership.unlink()
    assert kills() is None
