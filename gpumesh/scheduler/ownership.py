"""What the owner of a lent machine allows: rules and observations in, an offer to the mesh out. Pure.

    pause, limits, hours, ... ──> Rules ──┐
                                          ├──> Ownership.judge ──> Offer ──> offered(facts) ──> told to the mesh
    time of day, idle, programs ──────────┘

Promises:

1. What cannot be known counts against lending: rules that cannot be read, a machine of which nobody can tell whether it is in use.
2. A pause ends when its time has come or when it is taken back, and for no other reason.
3. A machine that an exclusive program has taken comes back when none has been seen for `QUIET_SECONDS`, not at the first gap.
4. A text changes only when the offer does: who is told of each change is not told every second.
"""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Tuple

from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import CardReading, DeviceFacts, WorkerFacts, show_bytes

QUIET_SECONDS = 10.0  # A game's launcher ends before the game is up; longer gaps are ends.
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
MACHINE, GPUS = "machine", "gpus"  # Targets of rules; any other names one card.
LEAST_UUID_PREFIX = 8  # Characters of a UUID that name a card: "GPU-1a2b".


class Amount(NamedTuple):
    """So many of something, or a share of what there is."""

    value: float
    is_share: bool = False

    def of(self, total: int) -> int:
        """The amount where there are `total` in all, at most that."""
        return min(total, math.floor(total * self.value + 1e-9) if self.is_share else int(self.value))


class Pause(NamedTuple):
    """Nothing new until then."""

    until: float = 0.0  # Seconds since the epoch; 0: until it is taken back.
    until_text: str = ""  # The same for people, in the owner's time zone: "22:00".
    reason: str = ""
    ends_running: bool = False  # What runs is ended, rather than let finish.

    def text(self) -> str:
        """For people."""
        until = f" until {self.until_text}" if self.until and self.until_text else ""
        return f"paused by its owner{until}" + (f" ({self.reason})" if self.reason else "")


class Window(NamedTuple):
    """A part of the week: from `start` to `end` on these days; past midnight when the end is not after the start."""

    days: Tuple[int, ...]  # 0: Monday. The day on which it starts.
    start: int  # Minutes since midnight, 0 to 1439.
    end: int  # 1 to 1440.

    @property
    def minutes(self) -> int:
        """Its length."""
        return self.end - self.start if self.end > self.start else self.end - self.start + DAY_MINUTES


class Rules(NamedTuple):
    """All that an owner has said. The default: everything is lent."""

    pauses: Tuple[Tuple[str, Pause], ...] = ()  # By target.
    slots: Optional[Amount] = None
    gpu_memory: Tuple[Tuple[str, Amount], ...] = ()  # By target; GPUS is for cards that are not named.
    hours: str = ""  # As the owner wrote it; "": always.
    windows: Tuple[Window, ...] = ()  # What that means.
    idle_minutes: float = 0.0  # Lent when nobody has touched the machine for so long.
    exclusive: Tuple[str, ...] = ()  # Names of programs while which run nothing is lent.
    ends_running: bool = False  # When hours, idleness or such a program take the machine, what runs is ended too.
    trouble: str = ""  # Not empty: the rules could not be read.

    @property
    def needs_idle(self) -> bool:
        """Whether it must be known how long nobody has touched the machine."""
        return self.idle_minutes > 0


class Observations(NamedTuple):
    """What the shell sees at one moment."""

    now: float  # Seconds of a clock that never jumps.
    wall: float  # Seconds since the epoch.
    weekday: int  # 0: Monday; local time.
    minute: float  # Since local midnight.
    idle_seconds: Optional[float] = None  # None: nobody can tell ...
    idle_problem: str = ""  # ... and why.
    programs: Tuple[str, ...] = ()  # Those of `Rules.exclusive` that run.


class CardPause(NamedTuple):
    """Cards that are not lent."""

    target: str
    problem: str
    ends_running: bool


class Offer(NamedTuple):
    """What is lent at the moment."""

    problem: str = ""  # Not empty: nothing, and why.
    ends_running: bool = False  # And what runs is to be ended.
    slots: Optional[Amount] = None
    cards: Tuple[CardPause, ...] = ()
    gpu_memory: Tuple[Tuple[str, Amount], ...] = ()


EVERYTHING = Offer()


class Ownership:
    """Judges what is lent, again whenever rules or observations are new."""

    def __init__(self) -> None:
        self.rules = Rules()
        self._program = ""  # Exclusive, seen last.
        self._seen_at: Optional[float] = None  # When that was; None: long ago.

    def judge(self, seen: Observations) -> Offer:
        """The offer at this moment; the same rules and observations give the same offer."""
        rules = self.rules
        cards = tuple(
            CardPause(target, pause.text(), pause.ends_running)
            for target, pause in rules.pauses
            if target != MACHINE and _is_on(pause, seen.wall)
        )
        problem, ends_running = self._problem(rules, seen)
        return Offer(problem, ends_running, rules.slots, cards, rules.gpu_memory)

    def _problem(self, rules: Rules, seen: Observations) -> Tuple[str, bool]:
        program = self._exclusive(rules, seen)  # First: it has to see every observation.
        if rules.trouble:
            return "paused: what its owner allows cannot be read", False
        for target, pause in rules.pauses:
            if target == MACHINE and _is_on(pause, seen.wall):
                return pause.text(), pause.ends_running
        if program:
            return f"paused while its owner runs {program}", rules.ends_running
        if rules.windows and not is_within(rules.windows, seen.weekday, seen.minute):
            return f"lent by its owner {rules.hours} only", rules.ends_running
        if rules.needs_idle:
            wanted = f"{rules.idle_minutes:g} min"
            if seen.idle_seconds is None:
                why = seen.idle_problem or "there is no telling whether it is"
                return f"lent by its owner only when idle for {wanted}, but {why}", rules.ends_running
            if seen.idle_seconds < rules.idle_minutes * 60:
                return f"in use by its owner, lent when idle for {wanted}", rules.ends_running
        return "", False

    def _exclusive(self, rules: Rules, seen: Observations) -> str:
        """The program that has the machine for itself, "" if none."""
        if not rules.exclusive:
            self._seen_at = None
            return ""
        if seen.programs:
            if self._seen_at is None or self._program not in seen.programs:
                self._program = seen.programs[0]
            self._seen_at = seen.now
        elif self._seen_at is not None and seen.now - self._seen_at >= QUIET_SECONDS:
            self._seen_at = None
        return self._program if self._seen_at is not None else ""


def _is_on(pause: Pause, wall: float) -> bool:
    return not pause.until or wall < pause.until


def is_within(windows: Tuple[Window, ...], weekday: int, minute: float) -> bool:
    """Whether a moment of the week lies in one of the windows."""
    moment = weekday * DAY_MINUTES + minute
    return any(
        (moment - day * DAY_MINUTES - window.start) % WEEK_MINUTES < window.minutes for window in windows for day in window.days
    )


# --- what that means for the mesh


def names_card(target: str, device: DeviceFacts) -> bool:
    """Whether a target means this device: a UUID or its beginning, "cuda:0" as programs number it, "0" as the system's tools do."""
    if device.kind == "cpu":
        return False
    if target == GPUS:
        return True
    word = target.lower()
    number = device.system_index if device.system_index >= 0 else device.index
    if word in (str(number), f"{device.kind}:{device.index}", device.key.lower()):
        return True
    return len(word) >= LEAST_UUID_PREFIX and bool(device.uuid) and device.uuid.lower().startswith(word)


def offered(facts: WorkerFacts, offer: Offer) -> WorkerFacts:
    """What a worker with these facts tells the mesh under this offer: fewer slots, smaller cards, cards with a problem."""
    if offer == EVERYTHING:
        return facts
    devices = tuple(_offered_device(device, offer) for device in facts.devices)
    if offer.problem:
        facts = facts._replace(problem=f"{offer.problem}; {facts.problem}" if facts.problem else offer.problem)
    if offer.slots is None:
        return facts._replace(devices=devices)
    slots = max(1, offer.slots.of(facts.slots))
    share = slots / facts.slots
    # A task that wants all cores wants all slots: both shrink alike. So does the score, which is that of all slots together.
    cores = max(1, math.ceil(facts.cores * share))
    devices = tuple(device._replace(score=device.score * share) if device.kind == "cpu" else device for device in devices)
    return facts._replace(slots=slots, cores=cores, score=facts.score * share, devices=devices)


def _offered_device(device: DeviceFacts, offer: Offer) -> DeviceFacts:
    if device.kind == "cpu":
        return device
    limit = memory_limit(device, offer)
    if limit is not None and limit < device.memory:
        # What others hold beyond the part that is not lent anyway still is missing.
        device = device._replace(memory=limit, others=max(0, device.others - (device.memory - limit)))
    problem = next((pause.problem for pause in offer.cards if names_card(pause.target, device)), "")
    if problem:
        device = device._replace(problem=f"{problem}; {device.problem}" if device.problem else problem)
    return device


def memory_limit(device: DeviceFacts, offer: Offer) -> Optional[int]:
    """Bytes of a card that are lent, None: all. A rule for this card goes before one for all."""
    found: Optional[int] = None
    for target, amount in offer.gpu_memory:
        if target != GPUS and names_card(target, device):
            return amount.of(device.memory)
        if target == GPUS and device.kind != "cpu":
            found = amount.of(device.memory)
    return found


def offered_reading(reading: CardReading, device: DeviceFacts, offer: Offer) -> CardReading:
    """A reading of a card, in terms of the part of it that is lent. `device`: as it is, not as offered."""
    limit = memory_limit(device, offer)
    if limit is None or limit >= device.memory or reading.others < 0:
        return reading
    return reading._replace(others=max(0, reading.others - (device.memory - limit)))


def withheld_cards(facts: WorkerFacts, offer: Offer) -> Dict[str, bool]:
    """Keys of the cards that are paused; whether what runs there is to be ended."""
    withheld: Dict[str, bool] = {}
    for device in facts.devices:
        ends = [pause.ends_running for pause in offer.cards if names_card(pause.target, device)]
        if ends:
            withheld[device.key] = any(ends)
    return withheld


def describe(rules: Rules, wall: float) -> List[str]:
    """The rules that are in force for people, one clause each."""
    lines: List[str] = []
    if rules.trouble:
        lines.append(f"the rules cannot be read: {rules.trouble}")
    for target, pause in rules.pauses:
        if _is_on(pause, wall):
            what = {MACHINE: "this machine", GPUS: "every GPU"}.get(target, f"GPU {target}")
            lines.append(f"{what} is {pause.text()}" + (", running work is ended" if pause.ends_running else ""))
    if rules.slots is not None:
        lines.append(f"at most {show_amount(rules.slots)} of its slots")
    for target, amount in rules.gpu_memory:
        what = "each GPU" if target == GPUS else f"GPU {target}"
        size = show_amount(amount) if amount.is_share else show_bytes(amount.value)
        lines.append(f"at most {size} of the memory of {what}")
    if rules.hours:
        lines.append(f"only {rules.hours}")
    if rules.needs_idle:
        lines.append(f"only when nobody has touched it for {rules.idle_minutes:g} min")
    if rules.exclusive:
        lines.append(f"not while {' or '.join(rules.exclusive)} runs")
    if lines and rules.ends_running:
        lines.append("running work is ended when the machine is taken back, rather than let finish")
    return lines


def show_amount(amount: Amount) -> str:
    """`50%` or `4`."""
    return f"{amount.value * 100:g}%" if amount.is_share else f"{amount.value:.0f}"
