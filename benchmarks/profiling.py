"""Where gpumesh's time goes in one workload: processor time per task (call, item) of each process, then what py-spy saw each of them do."""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from benchmarks import processes
from benchmarks.actors import CHILD_SECONDS, CHILDREN
from benchmarks.functions import echo, nap, new_array, noop, parent
from benchmarks.systems import System, create, module_of
from benchmarks.table import aligned, number
from benchmarks.workloads import NAP_SECONDS, PAD_BYTES, warm_up

Kernel = Callable[[], int]  # Runs some tasks and says how many.

START_SECONDS = 30.0  # For py-spy to attach and to write its file, beside the time it samples.


class Spent(NamedTuple):
    """What some seconds of a workload took."""

    tasks: int
    seconds: float
    cpu_seconds: Dict[int, float]  # By process.


def main(arguments: Sequence[str]) -> int:
    """Profile what the arguments ask for; 1 when py-spy is there and fails."""
    options = _parser().parse_args(arguments)
    system = create("gpumesh")
    system.open()
    try:
        warm_up(system)
        kernel = (actor_kernels if options.workload.startswith("actor") else kernels)(system, options.through)[options.workload]
        kernel()
        labels = label_processes(os.getpid(), processes.descendants(os.getpid()))
        print(cpu_table(measure(kernel, list(labels), options.seconds), labels), flush=True)
        spy = find_py_spy()
        if spy is None:
            print("\npy-spy is not installed, so functions are not shown")
            return 0
        return 0 if _show_functions(spy, kernel, labels, options) else 1
    finally:
        system.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks profile", description=__doc__)
    parser.add_argument("workload", choices=sorted(KERNEL_NAMES))
    parser.add_argument(
        "--through", choices=["stream", "futures"], default="stream", help="the throughputs through .map or .remote"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of work for each of the two measurements (default 5)")
    parser.add_argument("--top", type=int, default=15, help="functions shown for each process (default 15)")
    parser.add_argument("--rate", type=int, default=200, help="samples a second (default 200)")
    parser.add_argument("--lines", action="store_true", help="tell the lines of a function apart")
    parser.add_argument("--native", action="store_true", help="also look into extensions and the C library, where py-spy can")
    return parser


KERNEL_NAMES = (
    *("noop_latency", "noop_throughput", "small_args", "first_result", "many_pending", "idle_memory"),
    *("actor_latency", "actor_throughput", "actor_array", "actor_stream", "nested"),
)


def kernels(system: System, through: str) -> Dict[str, Kernel]:
    """A repeatable piece of each workload."""
    call = system.caller(noop)
    items = list(range(20_000))
    documents = [{"i": index, "pad": "x" * PAD_BYTES} for index in range(10_000)]

    def latency() -> int:
        for item in range(1000):
            call(item)
        return 1000

    def many(function: Callable[..., Any], arguments: Sequence[Any], way: str) -> int:
        if way == "stream":
            return sum(1 for _ in system.stream(function, arguments))
        return len(system.gather(system.submit_all(function, arguments)))

    def idle() -> int:
        time.sleep(0.5)
        return 0

    return {
        "noop_latency": latency,
        "noop_throughput": lambda: many(noop, items, through),
        "small_args": lambda: many(echo, documents, through),
        "first_result": lambda: many(nap, [NAP_SECONDS] * 50, "stream"),
        "many_pending": lambda: many(noop, range(100_000), "futures"),
        "idle_memory": idle,
        "nested": lambda: many(parent, [(module_of("gpumesh"), CHILDREN, CHILD_SECONDS)] * 50, "futures"),
    }


def actor_kernels(system: Any, through: str) -> Dict[str, Kernel]:
    """The same with an actor; there is one way only."""
    (actor,) = system.create_actors(1)
    array = new_array(1)
    return {
        "actor_latency": lambda: len(system.timed_calls(actor, "noop", range(1000), seconds=60.0).seconds),
        "actor_throughput": lambda: len(system.call_all(actor, "noop", range(10_000))),
        "actor_array": lambda: len(system.call_all(actor, "total", [array] * 100)),
        "actor_stream": lambda: sum(1 for _ in system.stream_of_actor(actor, 10_000)),
    }


def label_processes(driver: int, others: Sequence[int]) -> Dict[int, str]:
    """A name for each process: its own, numbered where several have the same."""
    names = {pid: processes.name(pid) or "ended" for pid in others}
    totals = collections.Counter(names.values())
    seen: Dict[str, int] = collections.Counter()
    labels = {driver: "driver"}
    for pid, name in names.items():
        seen[name] += 1
        labels[pid] = f"{name} {seen[name]}" if totals[name] > 1 else name
    return labels


def measure(kernel: Kernel, pids: Sequence[int], seconds: float) -> Spent:
    """Repeat the kernel for at least `seconds`."""
    used = {pid: processes.cpu_seconds(pid) for pid in pids}
    before = time.perf_counter()
    tasks = 0
    while time.perf_counter() - before < seconds:
        tasks += kernel()
    elapsed = time.perf_counter() - before
    return Spent(tasks, elapsed, {pid: processes.cpu_seconds(pid) - used[pid] for pid in pids})


def cpu_table(spent: Spent, labels: Dict[int, str]) -> str:
    """Processor time of each process, per task and as a share of one core."""
    rows = [["process", "us of CPU per task", "% of a core"]]
    for label, seconds in [
        *((labels[pid], used) for pid, used in spent.cpu_seconds.items()),
        ("all", sum(spent.cpu_seconds.values())),
    ]:
        per_task = number(seconds / spent.tasks * 1e6) if spent.tasks else "-"
        rows.append([label, per_task, number(100 * seconds / spent.seconds)])
    wall = (
        f", {number(spent.seconds / spent.tasks * 1e6)} us each, {number(spent.tasks / spent.seconds)}/s" if spent.tasks else ""
    )
    return "\n".join([f"{spent.tasks:,} tasks in {spent.seconds:.2f} s{wall}", *aligned(rows)])


def find_py_spy() -> Optional[str]:
    """The program, from the PATH or beside this interpreter."""
    beside = Path(sys.executable).parent / "py-spy"
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


def self_times(collapsed: str) -> List[Tuple[str, int]]:
    """The innermost frames of collapsed stacks ("outer;inner COUNT" in each line) with their samples, most first."""
    counts: Dict[str, int] = collections.Counter()
    for line in collapsed.splitlines():
        stack, _, count = line.rpartition(" ")
        if count.isdigit():
            counts[stack.rpartition(";")[2]] += int(count)
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def functions_text(label: str, times: List[Tuple[str, int]], *, samples_asked: float, top: int) -> str:
    """One process: the functions on top of its stack, as a share of all the time that was sampled."""
    busy = sum(count for _, count in times)
    lines = [f"{label}: busy in {100 * busy / samples_asked:.0f} % of the samples"]
    lines += [f"  {100 * count / samples_asked:5.1f} %  {frame}" for frame, count in times[:top]]
    return "\n".join(lines)


def _show_functions(spy: str, kernel: Kernel, labels: Dict[int, str], options: argparse.Namespace) -> bool:
    """Run the kernel under py-spy and print what each process did; False when nothing could be recorded."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        spies = {}
        for pid in labels:
            command = [spy, "record", "--pid", str(pid), "--duration", str(max(1, round(options.seconds)))]
            command += ["--rate", str(options.rate), "--format", "raw", "--output", str(Path(folder, str(pid)))]
            command += [] if options.lines else ["--function"]
            command += ["--native"] if options.native else []
            spies[pid] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + options.seconds + START_SECONDS
        try:
            while any(spy.poll() is None for spy in spies.values()) and time.monotonic() < deadline:
                kernel()
        finally:
            for running in spies.values():
                if running.poll() is None:
                    running.kill()
        print("\nshare of the time with this function on top of the stack, by py-spy (it slows what it watches)")
        recorded = False
        for pid, label in labels.items():
            _, said = spies[pid].communicate()
            path = Path(folder, str(pid))
            if path.exists():
                recorded = True
                times = self_times(path.read_text(encoding="utf-8", errors="replace"))
                print(
                    "\n"
                    + functions_text(label, times, samples_asked=options.rate * max(1, round(options.seconds)), top=options.top)
                )
            else:
                print(f"\n{label}: nothing recorded: {said.decode(errors='replace').strip()[-300:] or 'no reason given'}")
        return recorded
