"""What this machine has: CPU, memory, and what of it we may use. Quick enough for every start: no subprocess, no benchmark.

Containers and batch systems give a process less than the machine has; what counts is the least of affinity, cgroup limits (versions 1 and
2, each level up to the root) and the hardware.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from gpumesh.devices.scoring import check_score, cpu_prior
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import DeviceFacts, WorkerFacts
from gpumesh.version import __version__

PRIOR_CLOCK_HZ = 3e9  # The clock that `scoring.cpu_prior` calls speed 1.
CPUINFO_BYTES = 4096  # The first processor's entry; the rest says the same again, and costs time on large machines.
NO_LIMIT_BYTES = 1 << 60  # cgroup version 1 writes "none" as a number near 2**63.
PROBE_SWITCH = "GPUMESH_PROBE"  # "1": look for GPUs whatever the machine looks like; "0": never.
# What a machine with a usable GPU has: CUDA on Linux, Jetson and WSL 2, ROCm. A render node (/dev/dri) alone, as any laptop has, is none.
_GPU_SIGNS = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/nvhost-gpu",
    "/dev/nvhost-ctrl-gpu",
    "/dev/dxg",
    "/dev/kfd",
    "/proc/driver/nvidia/version",
)
_CGROUP_ROOT = "/sys/fs/cgroup"
_CGROUP_MEMBERSHIP = "/proc/self/cgroup"
_VMSTAT = "/proc/vmstat"
_CPUINFO = "/proc/cpuinfo"
_MAX_CLOCK = "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"


class CgroupLimits(NamedTuple):
    """What the control groups of this process allow; None where nothing is said."""

    cores: Optional[float] = None
    memory: Optional[int] = None  # Bytes.


def local_facts(
    slots: Optional[int] = None,
    score: Optional[float] = None,
    tags: Optional[Mapping[str, str]] = None,
) -> WorkerFacts:
    """What a worker on this machine tells the mesh when it joins.

    Takes a few milliseconds: the score is the one measured earlier on this machine (`benchmark.measure_cpu`) or, failing that, an
    estimate from the number of cores; the GPUs are those found at an earlier start of a worker, if the machine still looks the same. Both
    are told again when they have been looked at (`runtime.measuring`).

    Args:
        slots: Tasks at a time; by default one per usable core.
        score: Overrides the measured or estimated one of the CPU.
        tags: For the worker to be found by.

    Raises:
        ValueError: `slots` or `score` is out of range.
    """
    from gpumesh.devices.benchmark import cached_cpu

    cores = usable_cores()
    if slots is not None and not 1 <= slots <= 4096:
        raise ValueError(f"a worker has 1 to 4096 slots, not {slots!r}")
    known = cached_cpu()
    if score is not None:
        cpu_score = check_score(score)
    else:
        cpu_score = known.score if known else cpu_prior(cores, speed=clock_speed())
    cpu = DeviceFacts("cpu", 0, cpu_name(), host_memory(), cpu_score, rates=known.rates if known else ())
    return WorkerFacts(
        hostname=host_name(),
        slots=slots or cores,
        cores=cores,
        memory=cpu.memory,
        score=cpu_score,
        devices=(cpu, *_gpus_found_earlier()),
        tags=tuple(sorted((str(name), str(value)) for name, value in (tags or {}).items())),
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        platform=sys.platform,
        gpumesh=__version__,
        pid=os.getpid(),
    )


def gpus_may_exist() -> bool:
    """Whether it is worth asking for GPUs. Takes microseconds and touches no driver."""
    wish = os.environ.get(PROBE_SWITCH, "")
    if wish in ("0", "1"):
        return wish == "1"
    if sys.platform == "darwin":
        return os.uname().machine == "arm64"
    if sys.platform == "win32":
        return os.path.exists(os.path.join(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "nvml.dll"))
    return any(map(os.path.exists, _GPU_SIGNS))


def _gpus_found_earlier() -> Tuple[DeviceFacts, ...]:
    if not gpus_may_exist():
        return ()
    from gpumesh.devices.probing import head_start

    return head_start()


def host_name() -> str:
    """What this machine calls itself."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import socket

    return socket.gethostname()


def usable_cores() -> int:
    """Cores that this process may keep busy, at least 1; a share of a core counts as one."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup_limits().cores
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    return max(1, cores)


def host_memory() -> int:
    """Bytes of memory that this process may use at most; 0 when the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows, and systems without that name.
        import psutil

        total = int(psutil.virtual_memory().total)
    limit = cgroup_limits().memory
    return total if limit is None else min(total, limit)


def cpu_name() -> str:
    """What the CPU calls itself; the architecture where it says nothing."""
    name = _cpuinfo_name(_read(_CPUINFO, limit=CPUINFO_BYTES))
    if name:
        return name
    import platform

    return platform.processor() or platform.machine() or "CPU"


def clock_speed() -> float:
    """The first core's highest clock over 3 GHz, between 0.3 and 2; 1 when the system does not say."""
    try:
        hertz = int(_read(_MAX_CLOCK)) * 1000
    except ValueError:
        return 1.0
    return min(2.0, max(0.3, hertz / PRIOR_CLOCK_HZ))


def cgroup_limits(root: Optional[str] = None, membership: Optional[str] = None) -> CgroupLimits:
    """The tightest limits on the way from our control groups up to their roots.

    Args:
        root: Where the control groups are mounted.
        membership: The file that says in which we are.
    """
    cores: List[float] = []
    memory: List[int] = []
    for line in _read(membership or _CGROUP_MEMBERSHIP).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        base = root or _CGROUP_ROOT
        if number == "0" and not controllers:
            for folder in (*_levels(base, path), *_levels(f"{base}/unified", path)):
                _add_v2(folder, cores, memory)
        elif "cpu" in names:
            for folder in (*_levels(f"{base}/{controllers}", path), *_levels(f"{base}/cpu", path)):
                _add_v1_cores(folder, cores)
        if "memory" in names:
            for folder in _levels(f"{base}/memory", path):
                _add_number(f"{folder}/memory.limit_in_bytes", memory)
    return CgroupLimits(min(cores, default=None), min(memory, default=None))


def memory_kills(root: Optional[str] = None, membership: Optional[str] = None, vmstat: Optional[str] = None) -> Optional[int]:
    """How many processes the system has killed for lack of memory so far, in our control group; None where it does not say.

    Where no control groups watch memory, those of the whole machine are counted.

    Args:
        root: Where the control groups are mounted.
        membership: The file that says in which we are.
        vmstat: The machine's own counters.
    """
    base = root or _CGROUP_ROOT
    folders: List[str] = []
    for line in _read(membership or _CGROUP_MEMBERSHIP).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            folders = [f"{folder}/memory.oom_control" for folder in _levels(f"{base}/memory", path)] + folders
        elif number == "0" and not controllers:
            folders += [f"{folder}/memory.events" for folder in (*_levels(base, path), *_levels(f"{base}/unified", path))]
    for file in (*folders, vmstat or _VMSTAT):  # The deepest first: each counts what happens below it.
        for line in _read(file).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _levels(base: str, path: str) -> Iterator[str]:
    """The group's folder and each above it; inside a container the mount may begin at the group, hence also `base` itself."""
    names = [name for name in path.split("/") if name not in ("", "..")]
    for depth in range(len(names), -1, -1):
        yield "/".join([base, *names[:depth]])


def _add_v2(folder: str, cores: List[float], memory: List[int]) -> None:
    quota, _, period = _read(f"{folder}/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(quota) and int(period):
        cores.append(int(quota) / int(period))
    _add_number(f"{folder}/memory.max", memory)


def _add_v1_cores(folder: str, cores: List[float]) -> None:
    quota, period = (_read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # No limit is written as -1.
        cores.append(int(quota) / int(period))


def _add_number(file: str, limits: List[int]) -> None:
    text = _read(file).strip()
    if text.isdigit() and 0 < int(text) < NO_LIMIT_BYTES:
        limits.append(int(text))


def _cpuinfo_name(text: str) -> str:
    """The name in /proc/cpuinfo: `model name` on x86, `Model` or `Hardware` on small ARM boards."""
    found: Dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), " ".join(value.split()))
    return found.get("model name") or found.get("Model") or found.get("Hardware") or ""


def _read(file: str, limit: int = 1 << 16) -> str:
    """A small file's text, or nothing."""
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read(limit)
    except OSError:
        return ""
