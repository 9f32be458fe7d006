"""What the brain of one worker thinks in: kinds of processes, tasks, runners, and the actions that its shell performs. No decisions."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from gpumesh.config import FEED_MAX_TASKS, FEED_ONE_AHEAD_SECONDS, FEED_SECONDS, FEED_STUCK_SECONDS, RUNNER_START_SECONDS
from gpumesh.model.records import NamedTuple

OWN_ENVIRONMENT = 0  # The worker's own interpreter and packages.
LONG_FOR_ITS_KIND = 3.0  # Means: a task that runs longer is not like the others of its function.


class Kind(NamedTuple):
    """What two runners must have in common to be interchangeable."""

    threads: int  # For numeric libraries.
    environment: int  # The shell's number of it.


# --- actions


class StartRunner(NamedTuple):
    """Start a process with this number of threads for numeric libraries, in this environment, that sees these cards and no others."""

    runner: int
    threads: int
    environment: int
    cards: Tuple[str, ...] = ()


class Feed(NamedTuple):
    """Send these to the runner, in order. Each is (task id, attempt)."""

    runner: int
    spec: int
    tasks: List[Tuple[int, int]]


class Report(NamedTuple):
    """Tell the coordinator; (task id, attempt, status, payload or dict, seconds)."""

    results: List[Tuple[int, int, int, Any, float]]


class Inspect(NamedTuple):
    """Read the runner's page and answer with `on_progress`."""

    runner: int


class Revoke(NamedTuple):
    """Raise the page's REVOKED mark."""

    runner: int
    number: int


class Interrupt(NamedTuple):
    """Write INTERRUPT and send SIGINT."""

    runner: int
    number: int


class AskResults(NamedTuple):
    """Raise FLUSH and send SIGINT."""

    runner: int


class Kill(NamedTuple):
    """Kill the process; `on_runner_down` follows."""

    runner: int


class Health(NamedTuple):
    """What keeps this worker from running tasks; "" when nothing does."""

    problem: str


class FailEnvironment(NamedTuple):
    """Processes of this environment do not start: its tasks, (task id, attempt), end with an error that says so."""

    environment: int
    tasks: List[Tuple[int, int]]
    details: Dict[str, Any]


class Waits(NamedTuple):
    """Tell the coordinator: this attempt waits for other tasks and takes no slot, or wants to go on and takes it again."""

    task_id: int
    attempt: int
    waits: bool


class Grant(NamedTuple):
    """Tell the runner that its task, which has waited, may go on."""

    runner: int
    task_id: int


class RunnerState(enum.Enum):
    """STARTING -> READY <-> BUSY <-> WAITING; ENDING: killed on purpose, gone soon; RESERVED: its slot serves a wide task.

    WAITING: its task waits for other tasks, and has given its slot away.
    """

    STARTING = enum.auto()
    READY = enum.auto()
    BUSY = enum.auto()
    WAITING = enum.auto()
    RESERVED = enum.auto()
    ENDING = enum.auto()


COMING = (RunnerState.STARTING, RunnerState.ENDING)


class Task(NamedTuple):
    """One attempt on this worker."""

    task_id: int
    attempt: int
    spec: int


class SpecFacts:
    """What the brain knows of one spec."""

    __slots__ = ("timeout", "width", "kind", "depth", "mean")

    def __init__(self, timeout: float, width: int, kind: Kind, depth: int = 0) -> None:
        self.timeout = timeout
        self.width = width  # Slots that one task takes.
        self.kind = kind  # Of the process that it needs.
        self.depth = depth  # Tasks around it, which wait for it.
        self.mean: Optional[float] = None  # Seconds, decayed.


class Runner:
    """One process."""

    __slots__ = ("ident", "kind", "state", "fed", "first", "since", "revoked", "revoked_at", "interrupted", "kill_at", "reason",
                 "check_at", "reserved", "next_kind", "deaths", "width", "waiting", "is_spare")  # fmt: skip

    def __init__(self, ident: int, kind: Kind, now: float, deaths: int) -> None:
        self.ident = ident
        self.kind = kind
        self.state = RunnerState.STARTING
        self.fed: Deque[Optional[Task]] = (
            deque()
        )  # Not yet reported, in the runner's order; None: taken back, will come as NOT_RUN.
        self.first = 1  # Number (on the page) of fed[0].
        self.since = now  # Of the last feed into an idle runner, or the last results.
        self.revoked = 0  # Mark on the page; 0: none.
        self.revoked_at = 0.0
        self.interrupted = 0  # Number of the task being interrupted.
        self.kill_at = 0.0  # When the interrupt has not helped.
        self.reason = 0  # Status that the interrupted task ends with.
        self.check_at = now + RUNNER_START_SECONDS
        self.reserved: List[int] = []  # Runners whose slots this one's wide task uses.
        self.next_kind = kind  # Of the process that follows this one.
        self.deaths = deaths  # Of those in this place before, in a row: by the first task that each of them got.
        self.width = 1  # Slots that are in use while it is busy.
        self.waiting = 0  # Number of its task that has given the slot away.
        self.is_spare = False  # It is being ended because there are more than enough.


def allowance(facts: SpecFacts) -> int:
    """Tasks of a spec that a runner holds at once, the running one included."""
    mean = facts.mean
    if mean is None or mean > FEED_ONE_AHEAD_SECONDS:
        return 1
    return max(2, min(FEED_MAX_TASKS, int(FEED_SECONDS / (mean + 1e-9))))


def patience_seconds(facts: SpecFacts) -> float:
    """Seconds that a task may run before those fed behind it are taken back."""
    return max(FEED_STUCK_SECONDS, LONG_FOR_ITS_KIND * (facts.mean or 0.0))
