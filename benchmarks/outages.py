"""`python -m benchmarks idle`, `cut` and `restart`: what breaks takes minutes here, as it does where people work.

idle     a mesh that nobody uses for half an hour, through a router that forgets connections after a minute of silence
cut      a link that is cut for ten seconds in the middle of a result of 50 MB of a task of a minute
restart  a coordinator that is killed and started again while 10,000 tasks wait
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from tests.support import tasks
from tests.support.hosts import kill
from tests.support.processes import until
from tests.support.site_of_hosts import temporary_site

COMMANDS = ("idle", "cut", "restart")
_LONG = 3600.0


def main(command: str, arguments: List[str]) -> int:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=__doc__)
    measure: Callable[..., Dict[str, Any]]
    if command == "idle":
        parser.add_argument("--seconds", type=float, default=1800.0, help="of silence (default 1800)")
        parser.add_argument("--forgotten", type=int, default=60, help="seconds after which the router forgets (default 60)")
        measure = idle
    elif command == "cut":
        parser.add_argument("--task", type=float, default=60.0, help="seconds of the task (default 60)")
        parser.add_argument("--megabytes", type=int, default=50, help="of its result (default 50)")
        parser.add_argument("--seconds", type=float, default=10.0, help="for which the link is cut (default 10)")
        parser.add_argument("--rate", default="40mbit", help="of the link (default 40mbit)")
        parser.add_argument("--how", choices=("cut", "cut_what_it_sends", "cut_what_it_is_sent", "unplug"), default="cut")
        measure = cut
    else:
        parser.add_argument("--down", type=float, default=2.0, help="seconds without a coordinator (default 2)")
        parser.add_argument("--tasks", type=int, default=10_000)
        measure = restart
    print(json.dumps(measure(**vars(parser.parse_args(arguments)))), flush=True)
    return 0


def idle(seconds: float, forgotten: int) -> Dict[str, Any]:
    """How long a task takes before and after the silence, and what the programs said meanwhile."""
    from gpumesh import accelerate

    with temporary_site(3) as (site, hosts):
        hosts.forget_idle_flows(forgotten)
        programs = [site.serve(), site.join("one", hosts.two)]
        with site.client(hosts[2]) as mesh:
            task = accelerate(mesh)(tasks.noop)
            site.ident(mesh, "one")
            task.remote(0).result(60)
            before = _time(task)
            said = [len(program.lines) for program in programs]
            time.sleep(seconds)
            after = _time(task)
            lines = [line for count, program in zip(said, programs) for _, line in program.lines[count:]]
    return {
        "silence_seconds": seconds,
        "forgotten_seconds": forgotten,
        "task_before_seconds": before,
        "task_after_seconds": after,
        "said_meanwhile": lines,
    }


def cut(task: float, megabytes: int, seconds: float, rate: str, how: str) -> Dict[str, Any]:
    """How often the task was run and its result delivered, and how much later than without the cut."""
    from gpumesh import accelerate

    with temporary_site(3) as (site, hosts):
        site.serve()
        worker = site.join("one", hosts.two)
        with site.client(hosts[2]) as mesh:
            ident = site.ident(mesh, "one")
            make = accelerate(mesh)(_make)
            make.remote(0, 0.0, str(site.marks), "warm").result(60)
            hosts.limit(hosts.two, rate)
            started = time.monotonic()
            size = megabytes * 1_000_000
            make.remote(size, 0.0, str(site.marks), "plain").result(_LONG)
            plain = time.monotonic() - started

            ends: List[Any] = []
            started = time.monotonic()
            future = make.remote(size, task, str(site.marks), "cut")
            future.add_done_callback(ends.append)
            until(lambda: list(site.marks.glob("cut.*.made")), task + 60, what="the task has ended")
            time.sleep(plain / 3)
            getattr(hosts, how)(hosts.two)
            time.sleep(seconds)
            hosts.plug(hosts.two) if how == "unplug" else hosts.mend(hosts.two)
            mended = time.monotonic()
            received = len(future.result(_LONG))
            ended = time.monotonic()
            until(lambda: site.alive(mesh, "one") == [ident], 60, what="the worker is alive")
            runs = len(list(site.marks.glob("cut.*.started")))
            losses = worker.output.count("lost the coordinator")
    return {
        "how": how,
        "cut_seconds": seconds,
        "runs": runs,
        "deliveries": len(ends),
        "bytes": received,
        "result_seconds_without": plain,
        "beyond_task_result_and_cut_seconds": ended - started - task - plain - seconds,
        "from_mending_to_result_seconds": ended - mended,
        "connections_lost": losses,
    }


def restart(down: float, tasks: int) -> Dict[str, Any]:
    """How much later than the down time the last of the results comes, and how often each was run and delivered."""
    from gpumesh import accelerate

    with temporary_site(4) as (site, hosts):
        site.serve()
        for number in (1, 2):
            site.join(f"worker-{number}", hosts[number])
        with site.client(hosts[3], reconnect_timeout=_LONG) as mesh:
            for number in (1, 2):
                site.ident(mesh, f"worker-{number}")
            count = accelerate(mesh)(_count)
            count.remote(str(site.marks), -1).result(60)
            for mark in site.marks.iterdir():
                mark.unlink()
            started = time.monotonic()
            for future in [count.remote(str(site.marks), number) for number in range(tasks)]:
                future.result(_LONG)
            undisturbed = time.monotonic() - started

            delivered: List[int] = []
            lock = threading.Lock()

            def ended(future: Any) -> None:
                with lock:
                    delivered.append(future.result())

            started = time.monotonic()
            futures = [count.remote(str(site.marks), number) for number in range(tasks)]
            for future in futures:
                future.add_done_callback(ended)
            until(lambda: len(delivered) > tasks // 10, 60, what="a tenth is done")
            kill(site.coordinator)
            killed = time.monotonic()
            time.sleep(down)
            site.serve()
            was_down = time.monotonic() - killed
            for future in futures:
                future.result(_LONG)
            took = time.monotonic() - started
            runs = sum(len(mark.read_text()) for mark in site.marks.iterdir()) - tasks
    return {
        "tasks": tasks,
        "down_seconds": was_down,
        "undisturbed_seconds": undisturbed,
        "beyond_the_down_time_seconds": took - undisturbed - was_down,
        "runs": runs,
        "delivered": len(delivered),
        "delivered_twice": len(delivered) - len(set(delivered)),
    }


def _time(task: Any) -> float:
    started = time.perf_counter()
    if task.remote(1).result(90) != 1:
        raise RuntimeError("wrong answer")
    return time.perf_counter() - started


def _make(size: int, seconds: float, folder: str, name: str) -> bytes:
    """A value after some time; marks say that it has begun and that it is about to end."""
    Path(folder, f"{name}.{time.monotonic_ns()}.started").touch()
    time.sleep(seconds)
    Path(folder, f"{name}.{time.monotonic_ns()}.made").touch()
    return b"\x5a" * size


def _count(folder: str, number: int) -> int:
    """One letter for each run, in a file of its process; takes a millisecond."""
    import os

    time.sleep(0.001)
    with open(os.path.join(folder, str(os.getpid())), "a") as file:
        file.write(".")
    return number
