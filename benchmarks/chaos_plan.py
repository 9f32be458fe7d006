"""What the chaos run does to whom, and when: drawn from one seed before it begins. PURE."""

from __future__ import annotations

import random
from typing import Dict, List, NamedTuple, Sequence, Tuple

FAULTS_PER_SECOND = 0.5
SHARES: Dict[str, int] = {  # Of 25 faults in a row, in random order.
    "runner": 8,  # kill -9 of a process that runs tasks
    "worker": 3,  # kill -9 of a worker's agent, and with it of all that it runs; it is started again
    "freeze": 5,  # SIGSTOP, later SIGCONT, of a runner, an agent, a whole machine, the coordinator, a client
    "cut": 7,  # of the wire between a peer and the coordinator
    "coordinator": 2,  # kill -9; it is started again at the same port with the same database
}
SHORT, LONG, BEYOND = (0.05, 1.5), (1.5, 8.0), (32.0, 36.0)  # Seconds. Silence of more than 30 s is death.
BEYOND_EVERY_SECONDS = (
    90.0  # A client gives up after 60 s without the coordinator: two such silences in a row would be its end.
)
FROZEN: Sequence[Tuple[str, int]] = (("runner", 6), ("agent", 5), ("machine", 5), ("coordinator", 3), ("client", 3))
CUTS: Sequence[Tuple[str, int]] = (("both", 3), ("up", 2), ("down", 2), ("reset", 4), ("peer", 2), ("coordinator", 2))


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        at: Seconds after the start.
        kind: A key of SHARES.
        what: Of a freeze: what is frozen (FROZEN). Of a cut: a direction that nothing passes in, "reset" of both sides, or of one side alone (CUTS).
        target: Which of several, from 0 to 1.
        among: Which of the target's processes, from 0 to 1.
        seconds: How long it lasts; of a kill: until the start of the next. 0 where there is nothing to last.
    """

    at: float
    kind: str
    what: str
    target: float
    among: float
    seconds: float

    def __str__(self) -> str:
        what = f" {self.what}" if self.what else ""
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind}{what}{lasting}"


def draw(seed: int, seconds: float, kinds: Sequence[str]) -> List[Fault]:
    """The faults of a run of this length, in their order; the last ones are over before it ends."""
    random_ = random.Random(f"faults {seed}")
    faults: List[Fault] = []
    deck: List[str] = []
    at = 0.0
    beyond_at = -BEYOND_EVERY_SECONDS
    while True:
        at += random_.expovariate(FAULTS_PER_SECOND)
        if at >= seconds or not kinds:
            return faults
        if not deck:
            deck = [kind for kind, share in SHARES.items() for _ in range(share) if kind in kinds]
            random_.shuffle(deck)
        fault = _draw_one(random_, at, deck.pop())
        if fault.seconds > LONG[1]:
            if at < beyond_at + BEYOND_EVERY_SECONDS:
                fault = fault._replace(seconds=random_.uniform(*LONG))
            else:
                beyond_at = at + fault.seconds
        if fault.at + fault.seconds < seconds:
            faults.append(fault)


def _draw_one(random_: random.Random, at: float, kind: str) -> Fault:
    what, seconds = "", 0.0
    if kind == "freeze":
        what = _weighted(random_, FROZEN)
        seconds = _duration(random_)
    elif kind == "cut":
        what = _weighted(random_, CUTS)
        seconds = 0.0 if what == "reset" else _duration(random_)
    elif kind == "worker":
        seconds = random_.uniform(0.1, 4.0)
    elif kind == "coordinator":
        seconds = random_.uniform(12.0, 20.0) if random_.random() < 0.1 else random_.uniform(0.2, 5.0)
    return Fault(round(at, 3), kind, what, random_.random(), random_.random(), round(seconds, 3))


def _weighted(random_: random.Random, choices: Sequence[Tuple[str, int]]) -> str:
    return random_.choices([name for name, _ in choices], [weight for _, weight in choices])[0]


def _duration(random_: random.Random) -> float:
    chance = random_.random()
    return random_.uniform(*(SHORT if chance < 0.72 else LONG if chance < 0.97 else BEYOND))
