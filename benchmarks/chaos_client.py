"""A client of the chaos run: submits tasks of many kinds and accounts for each of them, once. `python -m benchmarks.chaos_client SETTINGS`.

Orders come as lines on standard input: "go", "hold" (submit nothing more, and say so when all is accounted for), "end". What it has to say are
lines of JSON on standard output: {"counts": ...} each second, {"violation": ...} when it happens, {"idle": ...} after "hold".
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from benchmarks import chaos_tasks as tasks
from benchmarks.chaos_accounts import Accounts, Expected, Task
from gpumesh import GPUMesh, accelerate
from gpumesh.errors import TaskCancelledError, TaskTimeoutError, WorkerCrashedError
from gpumesh.runtime import system

TICK_SECONDS = 0.05
REPORT_SECONDS = 1.0
MOST_PENDING = 1500
STREAMS = 3  # At the same time; and jobs.
SCRIPT = Path(__file__).with_name("chaos_script.py")
UNREAD_SECONDS = 20.0  # At most.
RETRIES = 200  # More lost processes than any task meets here, if it is not the task that is to blame.
JOB_SECONDS = 300.0  # Longer than anything takes here.
LATE_SECONDS = 0.3  # The time limit of tasks that take too long.
WEIGHTS = {
    "noop": 40.0,
    "nap": 14.0,
    "nap_again": 6.0,  # idempotent=True
    "blob": 3.0,
    "buffer": 2.0,
    "unread": 1.0,  # A result whose value is asked for some seconds after it is there.
    "argument": 3.0,
    "fail": 6.0,
    "once": 8.0,  # retries=0
    "mark": 6.0,
    "follow": 4.0,  # Two tasks.
    "cancel": 2.0,
    "late": 0.5,
    "stream": 2.0,  # Of 5 to 40 tasks.
    "job": 0.4,  # Of 3 to 12 scripts, each in an interpreter of its own; with retries=0 every other time.
}


class Draw(NamedTuple):
    """A task of a stream."""

    kind: str
    number: int
    argument: float


class Client:
    """Submits at a steady rate while it is told to."""

    def __init__(self, mesh: GPUMesh, settings: Dict[str, Any], say: Callable[[Dict[str, Any]], None]) -> None:
        self._random = random.Random(settings["seed"])
        self._rate = float(settings["rate"])
        self._marks = settings["marks"]
        self._say = say
        self.accounts = Accounts(say)
        self._mesh = mesh
        again = accelerate(mesh, retries=RETRIES)
        self._functions = {
            name: again(getattr(tasks, name))
            for name in ("noop", "nap", "blob", "buffer", "measure", "fail", "mark", "follow", "mixed")
        }
        self._once = self._functions["mark"].options(retries=0)
        self._nap_again = self._functions["nap"].options(idempotent=True)
        self._late = self._functions["nap"].options(timeout=LATE_SECONDS)
        self._kinds = settings["kinds"] or list(WEIGHTS)
        self._due = 0.0
        self._readers: Dict[str, List[threading.Thread]] = {"stream": [], "job": [], "unread": []}
        self._to_cancel: List[Tuple[float, Any]] = []
        self._unread: List[Tuple[float, Task]] = []

    def tick(self, seconds: float) -> None:
        """Submit what is due after so many more seconds."""
        now = time.monotonic()
        while self._to_cancel and self._to_cancel[0][0] <= now:
            self._to_cancel.pop(0)[1].cancel()
        ready = [task for at, task in self._unread if at <= now and task.future.done()]
        if ready:
            self._unread = [(at, task) for at, task in self._unread if task not in ready]
            self._begin("unread", self._read, ready)
        self._due = min(self._due + seconds * self._rate, self._rate)  # After a freeze: no more than a second's worth.
        while self._due >= 1 and self.accounts.submitted - self.accounts.done < MOST_PENDING:
            kind = self._random.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])[0]
            self._due -= self._submit(kind)

    def settle(self) -> bool:
        """Whether nothing is pending and no stream is read any more."""
        self.tick(0)
        return not any(self._alive(kind) for kind in self._readers) and self.accounts.submitted == self.accounts.done

    def _submit(self, kind: str) -> int:
        random_ = self._random
        if kind in ("stream", "job"):
            if len(self._alive(kind)) >= STREAMS:
                return 1
            return self._begin_stream() if kind == "stream" else self._begin_job()
        if kind == "follow":
            return self._submit_two()
        task = self.accounts.open(kind)
        number = task.number
        seconds = _nap_seconds(random_)
        nbytes = _nbytes(random_)
        functions = self._functions
        if kind == "noop":
            future = functions["noop"].remote(number)
        elif kind == "nap":
            future = functions["nap"].remote(number, seconds)
        elif kind == "nap_again":
            future = self._nap_again.remote(number, seconds)
        elif kind in ("blob", "buffer"):
            task.expected = _gives_blob(number, nbytes)
            future = functions[kind].remote(number, nbytes)
        elif kind == "unread":
            task.expected = _gives_blob(number, nbytes)
            task.future = functions["blob"].remote(number, nbytes)
            self._unread.append((time.monotonic() + self._random.uniform(0.0, UNREAD_SECONDS), task))
            return 1
        elif kind == "argument":
            data = tasks.pattern(number, nbytes)
            task.expected = lambda value, error: (
                error is None and value == (number, nbytes // tasks.NUMBER_BYTES * tasks.NUMBER_BYTES)
            )
            future = functions["measure"].remote(number, data)
        elif kind == "fail":
            task.expected = _fails(number)
            future = functions["fail"].remote(number)
        elif kind == "once":
            future = self._once.remote(number, seconds / 4, f"{self._marks}.once")
        elif kind == "mark":
            future = functions["mark"].remote(number, seconds / 4, f"{self._marks}.again")
        elif kind == "late":
            task.expected = lambda value, error: isinstance(error, TaskTimeoutError)
            future = self._late.remote(number, 60.0)
        else:
            task.expected = lambda value, error: isinstance(error, TaskCancelledError) or (error is None and value == number)
            future = functions["nap"].remote(number, 2.0)
            self._to_cancel.append((time.monotonic() + 0.2, future))
        self._follow_up(task, future)
        return 1

    def _submit_two(self) -> int:
        first, second = self.accounts.open("follow"), self.accounts.open("follow")
        second.expected = lambda value, error: error is None and value == (first.number, second.number)
        future = self._functions["nap"].remote(first.number, _nap_seconds(self._random) / 4)
        other = self._functions["follow"].remote(future, second.number)
        self._follow_up(first, future)
        self._follow_up(second, other)
        return 2

    def _follow_up(self, task: Task, future: Any) -> None:
        task.future = future
        future.add_done_callback(lambda ended: self.accounts.ended(task, ended))

    def _begin_stream(self) -> int:
        opened: List[Task] = []
        items: List[Draw] = []
        for _ in range(self._random.randint(5, 40)):
            kind = self._random.choices(["noop", "nap", "blob", "fail"], [60, 20, 4, 6])[0]
            task = self.accounts.open("stream")
            argument: float = _nbytes(self._random) if kind == "blob" else _nap_seconds(self._random)
            if kind == "fail":
                task.expected = _fails(task.number)
            elif kind == "blob":
                task.expected = _gives_blob(task.number, int(argument))
            opened.append(task)
            items.append(Draw(kind, task.number, argument))
        read = self._read_in_order if self._random.random() < 0.5 else self._read_as_completed
        self._begin("stream", read, opened, items)
        return len(items)

    def _begin(self, kind: str, read: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=read, args=arguments, daemon=True)
        thread.start()
        self._readers[kind].append(thread)

    def _alive(self, kind: str) -> List[threading.Thread]:
        self._readers[kind] = [reader for reader in self._readers[kind] if reader.is_alive()]
        return self._readers[kind]

    def _read(self, ready: List[Task]) -> None:
        """On a thread of its own: while the coordinator is away, it waits."""
        for task in ready:
            self.accounts.ended(task, task.future)

    def _begin_job(self) -> int:
        at_most_once = self._random.random() < 0.5
        opened = [self.accounts.open("job once" if at_most_once else "job") for _ in range(self._random.randint(3, 12))]
        path = f"{self._marks}.{'once' if at_most_once else 'jobs'}"
        payloads = [{"number": task.number, "seconds": _nap_seconds(self._random) / 4, "path": path} for task in opened]
        self._begin("job", self._run_job, opened, payloads, 0 if at_most_once else RETRIES)
        return len(opened)

    def _run_job(self, opened: List[Task], payloads: List[Dict[str, Any]], retries: int) -> None:
        """Submit, wait, and look at each of its tasks."""
        try:
            job = self._mesh.submit(script=SCRIPT, payloads=payloads, retries=retries)
            found = self._mesh.wait(job, JOB_SECONDS)["tasks"]
        except BaseException as error:  # noqa: BLE001 - whatever ends the waiting
            self._give_up(opened, error)
            return
        for task, row in zip(opened, found):
            task.task_id = f"{job} {row['id']}"
            is_done = row["status"] == "done" and row["result"] == {"number": task.number}
            is_lost_once = task.kind == "job once" and row["status"] == "failed" and not row["result"]
            if is_lost_once:
                self.accounts.close(task, None, WorkerCrashedError(str(row["error"])))
            else:
                self.accounts.close(task, task.number if is_done else row, None)

    def _read_in_order(self, opened: List[Task], items: List[Draw]) -> None:
        """Values, in the order of the input."""
        unread = list(opened)
        try:
            for value in self._functions["mixed"].map(map(tuple, items), return_exceptions=True):
                error = value if isinstance(value, BaseException) else None
                if not unread:
                    self.accounts.complain("delivered twice", opened[-1], value, error)
                    continue
                self.accounts.close(unread.pop(0), None if error else value, error)
        except BaseException as error:  # noqa: BLE001 - whatever ends a stream early has lost what was to come
            self._give_up(unread, error)
        else:
            self._give_up(unread, None)

    def _read_as_completed(self, opened: List[Task], items: List[Draw]) -> None:
        """Futures, as they end."""
        unread = dict(enumerate(opened))
        try:
            for future in self._functions["mixed"].map(map(tuple, items)).as_completed():
                opened[future.index].future = future
                unread.pop(future.index, None)
                self.accounts.ended(opened[future.index], future)
        except BaseException as error:  # noqa: BLE001 - the same
            self._give_up(list(unread.values()), error)
        else:
            self._give_up(list(unread.values()), None)

    def _give_up(self, tasks_: List[Task], error: Optional[BaseException]) -> None:
        for task in tasks_:
            self.accounts.close(task, None, error or RuntimeError("its stream ended without it"))


def _gives_blob(number: int, nbytes: int) -> Expected:
    return lambda value, error: error is None and value == tasks.pattern(number, nbytes)


def _fails(number: int) -> Expected:
    return lambda value, error: type(error) is ValueError and str(error) == f"task {number} fails on purpose"


def _nap_seconds(random_: random.Random) -> float:
    return random_.uniform(0.02, 0.5) if random_.random() < 0.93 else random_.uniform(0.5, 3.0)


def _nbytes(random_: random.Random) -> int:
    most = random_.choices([64_000, 1_000_000, 5_000_000], [60, 30, 10])[0]
    return random_.randint(0, most)


def main() -> None:
    """Obey until the end."""
    settings = json.loads(sys.argv[1])
    lock = threading.Lock()
    words = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Where what tasks print comes out, and notices.

    def say(what: Dict[str, Any]) -> None:
        with lock:
            words.write(json.dumps(what) + "\n")
            words.flush()

    with GPUMesh(settings["url"], fallback=False, name=settings["name"]) as mesh:
        client = Client(mesh, settings, say)
        _obey(client, say)
    say({"over": client.accounts.counts()})


def _obey(client: Client, say: Callable[[Dict[str, Any]], None]) -> None:
    is_going, is_held = False, False
    orders = b""
    told_at = ticked_at = time.monotonic()
    while True:
        if select.select([0], [], [], TICK_SECONDS)[0]:
            data = os.read(0, 4096)
            if not data:
                return
            *whole, orders = (orders + data).split(b"\n")
            for order in whole:
                if order == b"end":
                    return
                is_going, is_held = order == b"go", order == b"hold"
        now = time.monotonic()
        client.tick(now - ticked_at if is_going else 0.0)
        ticked_at = now
        if is_held and client.settle():
            is_held = False
            gc.collect()
            system.trim_memory()  # So that what is left is what is held, not what lies between.
            say({"idle": {**client.accounts.counts(), "blocks": sys.getallocatedblocks()}})
        if now - told_at >= REPORT_SECONDS:
            told_at = now
            say({"counts": client.accounts.counts()})
            pending = client.accounts.pending()[:20] if not is_going else []
            if pending:
                say(
                    {
                        "waiting": [
                            [task.number, task.kind, getattr(task.future, "task_id", None), task.begun] for task in pending
                        ]
                    }
                )


if __name__ == "__main__":
    main()
