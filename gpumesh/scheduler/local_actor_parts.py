"""What the brain of one worker's actors thinks in: actors, calls, and the actions that its shell performs. No decisions."""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Tuple

from gpumesh.model.records import NamedTuple
from gpumesh.scheduler.local import Kind

Key = Tuple[int, int]  # Task id and attempt.
Result = Tuple[int, int, int, Any, float]

CREATION = 1  # Number of the creation on the page of its process; its calls are 2, 3, ... in the order in which they are sent.

# --- actions, beside StartRunner, Feed, Report, Inspect, Interrupt, AskResults, Kill and FailEnvironment of `local`


class EndProcess(NamedTuple):
    """Tell the process to begin no more calls, to close its actor, and to end."""

    runner: int


class CancelSent(NamedTuple):
    """Tell the process that these calls, which it has been sent, are to end as `status`."""

    runner: int
    tasks: List[int]
    status: int


class Alive(NamedTuple):
    """Tell the coordinator: the constructor has returned."""

    actor: int
    attempt: int


class Drop(NamedTuple):
    """Let go of what is kept for these attempts: nobody hears of them."""

    tasks: List[Key]


class SlotsTaken(NamedTuple):
    """So many slots belong to actors from now on."""

    slots: int


# --- tables


class Stage(enum.Enum):
    """STARTING (its process) -> UP (its constructor, once its inputs are here) -> ALIVE -> ENDING -> (gone).

    Every stage leads to ENDING when something is decided about its end; a process that dies leaves from any of them.
    """

    STARTING = enum.auto()
    UP = enum.auto()
    ALIVE = enum.auto()
    ENDING = enum.auto()


class CreationFacts(NamedTuple):
    """What the brain knows of the spec of a creation."""

    kind: Kind  # Of its process.
    slots: int = 0  # That it takes for life.


class CallFacts(NamedTuple):
    """What the brain knows of the spec of a call."""

    actor: int
    timeout: float = 0.0  # Seconds of run time; 0: none.


class Call:
    """One attempt at a call."""

    __slots__ = ("task_id", "attempt", "spec", "is_here", "number", "cancelled_at", "is_forced", "is_told")

    def __init__(self, task_id: int, attempt: int, spec: int, is_here: bool) -> None:
        self.task_id = task_id
        self.attempt = attempt
        self.spec = spec
        self.is_here = is_here  # With its inputs.
        self.number = 0  # On the page; 0: not sent.
        self.cancelled_at: Optional[float] = None  # It is not wanted any more, and the process has been told.
        self.is_forced = False  # It is to end at once.
        self.is_told = False  # Its end has been told without the process, which still has it.


class Resident:
    """One life of one actor on this worker."""

    __slots__ = ("actor", "attempt", "spec", "kind", "cards", "ordinal", "slots", "runner", "stage", "is_here", "is_admitted", "is_fed",
                 "is_side_by_side", "mailbox", "sent", "last", "since", "check_at", "interrupted", "reason", "kill_at", "end", "is_gentle",
                 "is_asked", "grace", "is_silent", "result", "starts", "start_at")  # fmt: skip

    def __init__(
        self, actor: int, attempt: int, spec: int, facts: CreationFacts, cards: Tuple[str, ...], ordinal: int, is_here: bool
    ) -> None:
        self.actor = actor
        self.attempt = attempt
        self.spec = spec
        self.kind = facts.kind
        self.slots = facts.slots
        self.cards = cards
        self.ordinal = ordinal
        self.runner = 0  # Its process; 0 while it has none.
        self.stage = Stage.STARTING
        self.is_here = is_here  # The inputs of its constructor.
        self.is_admitted = not cards  # There is room for it on its cards.
        self.is_fed = False  # The process has its creation.
        self.is_side_by_side = False  # Its process runs several calls at a time, and watches their time limits.
        self.mailbox: OrderedDict[Key, Call] = OrderedDict()  # Not sent, in order.
        self.sent: Dict[Key, Call] = {}  # In order; no result has come.
        self.last = CREATION  # Number of what was sent last.
        self.since = 0.0  # Of the last news of its calls.
        self.check_at = 0.0
        self.interrupted = 0  # Number of what is being interrupted.
        self.reason = 0  # Status that it ends with, or that a sent call is to; -1: it ends with the actor.
        self.kill_at = 0.0  # 0: it may take its time.
        self.end = -1  # Status that this life ends with, once we have decided it.
        self.is_gentle = False  # Ending: what runs goes on to its end first.
        self.is_asked = False  # To end.
        self.grace = 0.0  # Ending: from the last call to the kill.
        self.is_silent = False  # Nobody is to hear of its end.
        self.result: Optional[Result] = None  # The end that its process has told.
        self.starts = 0  # Processes that did not come up, in a row.
        self.start_at = 0.0  # When the next is due; 0: none is.

    @property
    def key(self) -> Key:
        """Of its creation."""
        return self.actor, self.attempt

    def running(self, number: int) -> Optional[Call]:
        """The call with this number, if its result has not come."""
        return next((call for call in self.sent.values() if call.number == number), None)
