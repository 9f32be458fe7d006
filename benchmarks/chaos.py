"""`python -m benchmarks chaos`: a mesh of one coordinator, four workers and two clients while they are killed, frozen and cut off at random.

Every task that was submitted is accounted for exactly once at its client; tasks with `retries=0` run at most once; in the end memory, descriptors
and processes are what they were before, and nothing is left behind. Whatever is not so is printed with its story, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import re
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

from benchmarks import chaos_plan as plan
from benchmarks.chaos_faults import Faults
from benchmarks.chaos_findings import grown, marks, runs, shown, told, touches
from benchmarks.chaos_mesh import Mesh
from benchmarks.running import adopt_orphans

RATE = 25.0  # Tasks per second of each client: with a fault every two seconds, about half of what two cores can do.
WARM_UP_SECONDS = 8.0  # Everything has been used once, and is as large as it gets.
PROGRESS_SECONDS = 10.0
TICK_SECONDS = 0.02
SETTLE_SECONDS = 90.0  # From the last fault until every task is accounted for: more than any time limit in the mesh.
QUIET_SECONDS = 30.0  # From then on until memory, descriptors and processes are back.
LEFT_SECONDS = 10.0  # From the end of all until nothing of it is left.
CLIENT_BLOCKS = 15_000  # Python's blocks of memory in use in a client, above what there were: far less than one for each task.
SHOWN_VIOLATIONS = 30


class Chaos:
    """One run.

    Args:
        news: Of the clients: each one's name and what it said.

    Attributes:
        violations: What must not be.
        counts: What each client said last.
    """

    def __init__(self, mesh: Mesh, faults: List[plan.Fault], news: queue.Queue[Any], *, seconds: float) -> None:
        self._mesh = mesh
        self._seconds = seconds
        self.faults = Faults(mesh, faults)
        self.violations: List[Dict[str, Any]] = []
        self._news = news
        self.counts: Dict[str, Dict[str, Any]] = {}
        self._waiting: Dict[str, Any] = {}
        self._idle: Dict[str, Any] = {}
        self._start = time.monotonic()
        self.before: Dict[str, Dict[str, float]] = {}
        self.after: Dict[str, Dict[str, float]] = {}
        self.failed_starts = 0  # Of workers, as a supervisor sees them.
        self.runs = 0  # Of tasks that leave marks and may run again.
        self.runs_after_the_end = 0

    def run(self) -> None:
        """From the first process to the last."""
        mesh = self._mesh
        mesh.start()
        self._say("the mesh is up; warming up")
        self._order("go")
        self._go_on(WARM_UP_SECONDS)
        if not self._settle("the warm-up"):
            return
        self.before = mesh.usage()
        idle_before = dict(self._idle)
        self._say(f"quiet: {shown(self.before)}")
        self._start = time.monotonic()
        self._order("go")
        self._go_on(self._seconds, with_faults=True)
        self._settle("the last fault")
        self._check_usage()
        for client, counts in self._idle.items():
            blocks, earlier = counts.get("blocks", 0), idle_before[client].get("blocks", 0)
            self._say(f"{client} holds {blocks} blocks of memory, {earlier} before")
            if blocks > earlier + CLIENT_BLOCKS:
                self._complain(
                    "not back to the start", text=f"blocks of memory in use in {client}: {blocks} now, {earlier} before"
                )
        self._check_marks()
        for text in mesh.tracebacks():
            self._complain("a traceback in a log", text=text)
        for problem in mesh.end():
            self._complain("an end that failed", text=problem)
        self._check_database()
        self._listen()
        for left in mesh.leftovers(LEFT_SECONDS):
            self._complain("left behind", text=left)

    def totals(self) -> Dict[str, int]:
        """Of all clients."""
        names = ("submitted", "done", "given_up", "pending")
        return {name: sum(int(counts[name]) for counts in self.counts.values()) for name in names}

    def _go_on(self, seconds: float, *, with_faults: bool = False) -> None:
        begun = time.monotonic()
        told = begun
        while True:
            now = time.monotonic()
            if with_faults:
                self.faults.advance(now - begun)
            self._listen()
            self._look_after_programs()
            if now - told >= PROGRESS_SECONDS:
                told = now
                self._progress(now - begun)
            if now - begun >= seconds and (not with_faults or self.faults.is_over):
                return
            time.sleep(TICK_SECONDS)

    def _settle(self, what: str) -> bool:
        """Wait until every task is accounted for; whether that came about."""
        self._idle = {}
        self._order("hold")
        begun = told = time.monotonic()
        while len(self._idle) < len(self._mesh.clients):
            now = time.monotonic()
            self._listen()
            self._look_after_programs()
            if now - told >= PROGRESS_SECONDS:
                told = now
                self._progress(now - self._start)
            if now - begun > SETTLE_SECONDS:
                for client, waiting in self._waiting.items():
                    if client not in self._idle:
                        for number, kind, task_id, submitted in waiting:
                            task = {
                                "number": number,
                                "kind": kind,
                                "task_id": task_id,
                                "submitted_at": submitted,
                                "ended_at": now,
                            }
                            self._complain("hung", client=client, **task)
                self._complain("not settled", text=f"{SETTLE_SECONDS:g} s after {what}: {self.counts}")
                return False
            time.sleep(TICK_SECONDS)
        return True

    def _check_usage(self) -> None:
        deadline = time.monotonic() + QUIET_SECONDS
        while True:
            self.after = self._mesh.usage()
            more = grown(self.before, self.after)
            if not more or time.monotonic() > deadline:
                break
            self._listen()
            time.sleep(0.5)
        self._say(f"quiet: {shown(self.after)}")
        for text in more:
            self._complain("not back to the start", text=text)

    def _check_marks(self) -> None:
        """Tasks with `retries=0` have started once at most; how often others ran again although they had ended is a figure."""
        for client, path in zip(self._mesh.clients, self._mesh.marks):
            for number, lines in marks(Path(f"{path}.once")).items():
                if runs(lines)[0] > 1:
                    self._complain("retries=0 ran twice", client=client.name, number=number, kind="once", text="; ".join(lines))
            for lines in [*marks(Path(f"{path}.again")).values(), *marks(Path(f"{path}.jobs")).values()]:
                starts, after_the_end = runs(lines)
                self.runs += starts
                self.runs_after_the_end += after_the_end

    def _check_database(self) -> None:
        import sqlite3

        with contextlib.closing(sqlite3.connect(self._mesh.database)) as database:
            found = [str(row[0]) for row in database.execute("PRAGMA integrity_check")]
        if found != ["ok"]:
            self._complain("the database is damaged", text="; ".join(found)[:2000])

    def _look_after_programs(self) -> None:
        for program in [self._mesh.coordinator, *self._mesh.workers]:
            status = program.why_over()
            if status == 1 and program in self._mesh.workers and "joined the mesh" not in program.said_last():
                self.failed_starts += 1  # Its first call met a cut wire, and it cannot know what is there: it says so and ends.
                program.start()
            elif status is not None:
                self._complain("died by itself", text=f"{program.name}, status {status}: {program.said()[-3000:]}")
                program.start()
        for client in self._mesh.clients:
            if not client.pid and client.name not in self._idle:
                self._complain(
                    "died by itself", text=f"{client.name}, status {client.process.returncode}: {client.said()[-3000:]}"
                )
                self._idle[client.name] = {}

    def _listen(self) -> None:
        while True:
            try:
                client, news = self._news.get_nowait()
            except queue.Empty:
                return
            if "violation" in news:
                self._complain(news.pop("violation"), client=client, **news)
            elif "waiting" in news:
                self._waiting[client] = news["waiting"]
            else:
                ((what, counts),) = news.items()
                self.counts[client] = counts
                if what == "idle":
                    self._idle[client] = counts

    def _order(self, word: str) -> None:
        for client in self._mesh.clients:
            client.order(word)

    def _progress(self, seconds: float) -> None:
        totals = self.totals()
        oldest = max((counts["oldest_seconds"] for counts in self.counts.values()), default=0.0)
        self._say(
            f"{seconds:4.0f} s: {len(self.faults.done)} faults, {totals['submitted']} tasks, {totals['done']} accounted for, "
            f"{totals['pending']} pending (the oldest for {oldest:.1f} s), {totals['given_up']} given up at most once, "
            f"{len(self.violations)} violations"
        )

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def _complain(self, what: str, **story: Any) -> None:
        violation = {"violation": what, **story}
        submitted, ended = story.get("submitted_at"), story.get("ended_at")
        if submitted is not None and ended is not None:
            violation["submitted_at"] = round(submitted - self._start, 3)
            violation["ended_at"] = round(ended - self._start, 3)
            violation["faults"] = [told(done) for done in self.faults.done if touches(done, violation)][-40:]
        if story.get("task_id"):
            violation["log"] = self._lines_about(story["task_id"])
        self.violations.append(violation)
        if len(self.violations) <= SHOWN_VIOLATIONS:
            self._say(f"VIOLATION {json.dumps(violation, indent=1)}")

    def _lines_about(self, task_id: str) -> List[str]:
        """What coordinator and workers said of a task."""
        word = re.compile(rf"\b0*{re.escape(task_id)}\b")
        programs = [self._mesh.coordinator, *self._mesh.workers]
        return [f"{program.name}: {line}" for program in programs for line in program.said().splitlines() if word.search(line)][
            :40
        ]


def main(arguments: Sequence[str]) -> int:
    """Run and report; 1 when anything was not as it must be."""
    options = _parser().parse_args(arguments)
    seed = options.seed if options.seed is not None else secrets.randbelow(1_000_000)
    adopt_orphans()
    faults = plan.draw(seed, options.seconds, options.faults)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-chaos-"))
    print(f"chaos of {options.seconds:g} s with seed {seed}: {len(faults)} faults of {', '.join(options.faults)}", flush=True)
    is_well = False
    mesh = None
    try:
        news: queue.Queue[Any] = queue.Queue()
        mesh = Mesh(
            folder, seed=seed, hear=lambda client, said: news.put((client.name, said)), rate=options.rate, kinds=options.kinds
        )
        chaos = Chaos(mesh, faults, news, seconds=options.seconds)
        chaos.run()
        is_well = not chaos.violations
        _report(chaos, seed, options)
    finally:
        if mesh is not None:
            mesh.kill_all()
        if is_well and not options.keep:
            shutil.rmtree(folder)
        else:
            print(f"logs, marks and database are in {folder}", flush=True)
    return int(not is_well)


def _report(chaos: Chaos, seed: int, options: argparse.Namespace) -> None:
    kinds: Dict[str, int] = {}
    for violation in chaos.violations:
        kinds[violation["violation"]] = kinds.get(violation["violation"], 0) + 1
    totals = chaos.totals()
    print(f"faults: {len(chaos.faults.done)} ({chaos.faults.skipped} found nobody): {chaos.faults.counts()}")
    print(f"workers that found no coordinator at their first call, and were started again: {chaos.failed_starts}")
    print(f"tasks: {totals}; {chaos.runs_after_the_end} of {chaos.runs} marked runs came after the task had ended once")
    for client, counts in sorted(chaos.counts.items()):
        print(
            f"slowest of {client}: "
            + ", ".join(f"{kind} {number} {seconds:.1f} s" for seconds, kind, number, _ in counts["slowest"])
        )
    print(f"violations: {kinds or 'none'}")
    print(f"seed {seed}: {'NOT WELL' if kinds else 'all is well'}", flush=True)
    if options.json:
        result = {
            "seed": seed,
            "seconds": options.seconds,
            "faults": chaos.faults.counts(),
            "tasks": totals,
            "failed_starts": chaos.failed_starts,
            "marked_runs": chaos.runs,
            "marked_runs_after_the_end": chaos.runs_after_the_end,
            "clients": chaos.counts,
            "before": chaos.before,
            "after": chaos.after,
            "violations": chaos.violations,
        }
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults (default 60); warm-up and end come on top")
    parser.add_argument("--seed", type=int, help="of all that is random; drawn and shown when not given")
    kinds = ",".join(plan.SHARES)
    parser.add_argument(
        "--faults", type=_fault_kinds, default=list(plan.SHARES), help=f"comma-separated, of {kinds} (default all)"
    )
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=[], help="of tasks, comma-separated (default all)"
    )
    parser.add_argument("--rate", type=float, default=RATE, help=f"tasks per second of each client (default {RATE:g})")
    parser.add_argument("--json", metavar="FILE", help="write all figures and violations there")
    parser.add_argument("--keep", action="store_true", help="keep logs, marks and database even if all is well")
    return parser


def _fault_kinds(text: str) -> List[str]:
    kinds = [kind for kind in text.split(",") if kind]
    for kind in kinds:
        if kind not in plan.SHARES:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(plan.SHARES)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
