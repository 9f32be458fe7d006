"""Actors and their calls as the cluster knows them. Data with the meaning of each field; the moves are made in actors.py and calls.py."""

from __future__ import annotations

import enum
from collections import deque
from typing import Deque, Dict, Optional, Tuple

from gpumesh.model.actors import ActorPlan
from gpumesh.model.ids import ClientNumber
from gpumesh.model.records import NamedTuple
from gpumesh.scheduler.states import Batch, Spec, Worker


class ActorState(enum.Enum):
    """Where an actor is in its life."""

    EXPECTED = "expected"  # Somebody calls it, and nobody has created it yet.
    WAITING = "waiting"  # For a worker with room for it.
    STARTING = "starting"  # On a worker; its constructor may still run.
    ALIVE = "alive"
    RESTARTING = "restarting"  # It has died, and waits to be started again.
    ENDING = "ending"  # On a worker, which has been told to end it.
    DEAD = "dead"  # In no table any more but that of reasons.


ACTOR_MOVES: Dict[Tuple[ActorState, ActorState], str] = {
    (ActorState.DEAD, ActorState.EXPECTED): "called, and nobody knows of it, or not any more",
    (ActorState.DEAD, ActorState.WAITING): "created when those who called it had given it up",
    (ActorState.EXPECTED, ActorState.WAITING): "created",
    (ActorState.EXPECTED, ActorState.DEAD): "nobody has created it in time",
    (ActorState.WAITING, ActorState.STARTING): "a worker has room",
    (ActorState.WAITING, ActorState.ALIVE): "a worker that is back has it",
    (ActorState.WAITING, ActorState.DEAD): "killed, or nobody can ever run it",
    (ActorState.STARTING, ActorState.ALIVE): "its constructor has returned",
    (ActorState.STARTING, ActorState.WAITING): "its worker has never seen it",
    (ActorState.STARTING, ActorState.RESTARTING): "its process or its worker has died, and it may be started again",
    (ActorState.STARTING, ActorState.ENDING): "killed, or nobody refers to it",
    (ActorState.STARTING, ActorState.DEAD): "its constructor has failed, or it may not be started again",
    (ActorState.ALIVE, ActorState.RESTARTING): "its process or its worker has died, and it may be started again",
    (ActorState.ALIVE, ActorState.ENDING): "killed, or nobody refers to it",
    (ActorState.ALIVE, ActorState.DEAD): "it may not be started again, or has ended itself",
    (ActorState.RESTARTING, ActorState.STARTING): "a worker has room",
    (ActorState.RESTARTING, ActorState.DEAD): "killed, or nobody can ever run it",
    (ActorState.ENDING, ActorState.DEAD): "ended",
}


class Call(NamedTuple):
    """Calls of one spec that were sent to an actor at the same attempt: what an assigned call knows about itself."""

    actor: Actor
    spec: Spec
    attempt: int


class Actor:
    """One actor, from the first that is heard of it to its end."""

    __slots__ = ("id", "spec", "state", "worker", "batch", "attempt", "restarts", "restarted_at", "parked", "calls", "lines", "doubtful",
                 "since", "due", "not_before", "deaths", "is_noticed", "is_forced", "why", "is_doubtful", "newest", "had_doubt", "is_over")  # fmt: skip

    def __init__(self, ident: int, now: float) -> None:
        self.id = ident  # Of the task that is its life.
        self.spec: Optional[Spec] = None  # Of its creation; None while it is only expected.
        self.state = ActorState.EXPECTED
        self.worker: Optional[Worker] = None  # Where it is; none while it waits.
        self.batch: Optional[Batch] = None  # Under which it is there.
        self.attempt = 1  # Which of its lives this is, or the next one.
        self.restarts = 0  # Ever.
        self.restarted_at: Deque[float] = deque()  # Those that count.
        self.parked: Dict[int, Spec] = {}  # Calls that are not sent yet, in order.
        self.calls: Dict[int, None] = {}  # Calls that were sent and have not ended, in order; the rest is in `worker.calls`.
        self.lines: Dict[
            ClientNumber, Dict[int, Optional[Spec]]
        ] = {}  # Calls of a client behind one whose inputs are not here, in order, that one first; None: not ready.
        self.doubtful: Dict[
            int, None
        ] = {}  # Of the parked: submitted again after a restart, and an earlier life may have begun them.
        self.since = now  # When it came to wait for a worker, or to be expected.
        self.due: Optional[float] = None  # When to look at it while it waits.
        self.not_before = 0.0  # When it may be started.
        self.deaths = 0  # In a row, each soon after its start.
        self.is_noticed = False  # Its client was told that nobody can run it.
        self.is_forced = False  # It is to be ended at once.
        self.is_doubtful = False  # It was submitted again after a restart, and an earlier life of it may be lost.
        self.newest: Dict[ClientNumber, int] = {}  # The newest call of each client that a worker brought back with it.
        self.had_doubt = False  # And nobody has brought it back, or only its end: this life is another.
        self.is_over = False  # Its worker, which is back, is about to tell that this life has ended.
        self.why = ""  # While it is ending: "killed by ..."; for people.

    @property
    def plan(self) -> ActorPlan:
        """How it lives."""
        return self.spec.spec.plan or _NO_PLAN if self.spec is not None else _NO_PLAN

    @property
    def is_housed(self) -> bool:
        """Whether it is on a worker."""
        return self.worker is not None

    @property
    def pending(self) -> int:
        """Calls that have not ended."""
        return len(self.parked) + len(self.calls) + sum(map(len, self.lines.values()))


_NO_PLAN = ActorPlan()
