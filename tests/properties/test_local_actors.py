"""The brain of one worker's actors against model processes that behave as actor_runner.py does, under any interleaving."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any, Deque, Dict, List, Optional, Set, Tuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpumesh.config import ACTOR_CLOSE_SECONDS, ACTOR_WINDOW_CALLS, CANCEL_GRACE_SECONDS, REVOKE_SETTLE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.scheduler import local
from gpumesh.scheduler import local_actor_parts as parts
from gpumesh.scheduler.local_actors import LocalActors

ACTORS = (1, 2)
PLAIN, WIDE = 100, 101  # Specs of creations.
SLOTS = {PLAIN: 0, WIDE: 2}
TIMEOUT = 50  # Added to an actor's number: the spec of its calls with a time limit.
ENDS_OF_LIVES = (Status.OK, Status.RAISED, Status.CRASHED, Status.CANCELLED, Status.NOT_RUN, Status.HANDED_BACK)
Key = Tuple[int, int]
STEPS = (*(("take_in", "start_call", "end_call", "hear") * 3), "come_up", "construct", "close")
RARELY = st.sampled_from((False, False, False, False, True))


class ModelProcess:
    """A process: what it has been sent and has not taken in, its page, what it has said and nobody has heard."""

    def __init__(self, key: Key, side_by_side: bool) -> None:
        self.key = key
        self.side_by_side = side_by_side
        self.up = self.constructing = self.alive = self.over = self.doomed = False
        self.inbox: Deque[Tuple[Any, ...]] = deque()
        self.orders = self.taken = 0
        self.queue: Deque[Tuple[int, Key]] = deque()
        self.last = 1
        self.started = self.finished = self.sent = self.interrupt = 0
        self.since = 0.0
        self.executing: Dict[int, Key] = {}
        self.held: List[Tuple[int, int, int, Any, float]] = []
        self.wire: List[Any] = []
        self.fed: List[Key] = []  # Calls, in the order in which they were sent.

    def flush(self) -> None:
        if self.held:
            self.sent = self.finished
            self.wire.append(tuple(self.held))
            self.held = []

    def take_in(self) -> None:
        """One message, if it looks: while a serial call runs it does not."""
        what, *rest = self.inbox.popleft()
        if what == "create":
            self.constructing = True
            self.started = 1
        elif what == "call":
            self.last += 1
            if not self.over:
                self.queue.append((self.last, rest[0]))
        elif what == "cancel":
            self.taken += 1
            for number, key in list(self.queue):
                if key[0] in rest[0]:
                    self.queue.remove((number, key))
                    self.held.append((*key, rest[1], {}, 0.0))
            if self.side_by_side:
                for number, key in list(self.executing.items()):
                    if key[0] in rest[0]:
                        del self.executing[number]
                        self.held.append((*key, rest[1], {}, 0.0))
                self.flush()
        else:
            self.taken += 1
            self.over = True
            self.queue.clear()
            if self.side_by_side:
                self.executing.clear()


class LocalActorsMachine(RuleBasedStateMachine):
    """Drives the brain; see the asserts."""

    @initialize(born=st.booleans())
    def begin(self, born: bool) -> None:
        self.now = 100.0
        self.local = LocalActors(numbers=count(1))
        self.processes: Dict[int, ModelProcess] = {}
        for spec, slots in SLOTS.items():
            self.local.on_creation_spec(spec, parts.CreationFacts(local.Kind(1, 0), slots))
        for actor in ACTORS:
            self.local.on_call_spec(actor, parts.CallFacts(actor))
            self.local.on_call_spec(actor + TIMEOUT, parts.CallFacts(actor, timeout=5.0))
        self.next_call = 1000
        self.attempts = dict.fromkeys(ACTORS, 0)
        self.open: Set[Key] = set()  # Creations and calls that are here.
        self.expected: Dict[Key, int] = {}  # Those whose inputs are not -> spec.
        self.lives: Dict[Key, List[Key]] = {}  # Creation -> the calls that it was meant to have, in order.
        self.ends: Dict[Key, int] = {}
        self.executed: Dict[Key, List[Key]] = {}  # Creation -> the calls that have begun.
        self.dead: Set[Key] = set()  # Ended before they had begun.
        self.unwanted: Set[Key] = set()  # Recalled.
        self.slots: Dict[Key, int] = {}
        self.taken = 0
        self.withheld = self.draining = False
        if born:
            for actor in ACTORS:
                self.create_and_construct(actor)

    # --- the shell

    def perform(self, actions: List[Any]) -> None:
        for action in actions:
            if isinstance(action, local.StartRunner):
                self.start(action)
            elif isinstance(action, local.Feed):
                self.feed(action)
            elif isinstance(action, local.Report):
                for task_id, attempt, status, _, _ in action.results:
                    self.end((task_id, attempt), status)
            elif isinstance(action, parts.Drop):
                for key in action.tasks:
                    self.open.discard(key)
                    self.expected.pop(key, None)
            elif isinstance(action, parts.SlotsTaken):
                self.taken = action.slots
            elif isinstance(action, local.Kill):
                self.processes[action.runner].doomed = True
            elif isinstance(action, parts.EndProcess):
                self.order(action.runner, ("end",))
            elif isinstance(action, parts.CancelSent):
                self.order(action.runner, ("cancel", action.tasks, action.status))
            elif isinstance(action, local.Interrupt):
                self.processes[action.runner].interrupt = action.number
            elif isinstance(action, local.AskResults):
                self.processes[action.runner].flush()
            elif isinstance(action, local.Inspect):
                process = self.processes[action.runner]
                assert not self.local._by_runner[action.runner].is_side_by_side
                page = (process.started, process.finished, process.sent, process.since)
                self.perform(self.local.on_progress(action.runner, *page, self.now))
            else:
                assert isinstance(action, parts.Alive)
                assert (action.actor, action.attempt) in self.open

    def start(self, action: local.StartRunner) -> None:
        key = self.local._by_runner[action.runner].key
        assert all(other.key != key for other in self.processes.values()), "one process for each life"
        self.processes[action.runner] = ModelProcess(key, side_by_side=key[0] == 2)

    def feed(self, action: local.Feed) -> None:
        process = self.processes[action.runner]
        assert action.tasks
        assert process.up
        assert not self.expected.keys() & set(action.tasks)
        if action.tasks[0] == process.key:
            process.inbox.append(("create",))
            return
        assert process.alive
        for key in action.tasks:
            assert key in self.open
            process.fed.append(key)
            process.inbox.append(("call", key))
        unreported = [key for key in process.fed if key not in self.ends]
        assert len(unreported) <= ACTOR_WINDOW_CALLS
        meant = [key for key in self.lives[process.key] if key in process.fed]
        assert process.fed == meant, "in the order in which they came"

    def order(self, runner: int, message: Tuple[Any, ...]) -> None:
        process = self.processes[runner]
        process.inbox.append(message)
        process.orders += 1

    def end(self, key: Key, status: int) -> None:
        assert key in self.open, "what is not here is not told"
        assert key not in self.ends, "told twice"
        self.open.discard(key)
        self.expected.pop(key, None)
        self.ends[key] = status
        if key not in self.lives:
            for process in self.processes.values():
                assert process.side_by_side or process.doomed or key not in process.executing.values(), "told while it runs"
            assert status not in (Status.CANCELLED, Status.NOT_RUN) or key in self.unwanted
            if not any(key in executed for executed in self.executed.values()):
                self.dead.add(key)
            return
        assert status in ENDS_OF_LIVES
        assert all(process.key != key for process in self.processes.values()), "told before its process is gone"
        assert not self.open.intersection(self.lives[key]), "its end is theirs"
        assert status != Status.NOT_RUN or not self.executed[key]

    # --- what arrives

    @rule(actor=st.sampled_from(ACTORS), spec=st.sampled_from((PLAIN, WIDE)), here=st.booleans())
    def begin_to_create(self, actor: int, spec: int, here: bool) -> None:
        self.create(actor, spec, here=here)

    def create(self, actor: int, spec: int, *, here: bool) -> None:
        if any(key[0] == actor for key in self.open if key in self.lives):
            return
        self.attempts[actor] += 1
        key = (actor, self.attempts[actor])
        self.open.add(key)
        self.lives[key] = []
        self.executed[key] = []
        self.slots[key] = SLOTS[spec]
        if not here:
            self.expected[key] = spec
        self.perform(self.local.on_created(spec, *key, cards=(), ordinal=0, is_here=here, now=self.now))
        assert (key in self.open) is not (self.draining or self.withheld)

    @rule(actor=st.sampled_from(ACTORS))
    def create_and_construct(self, actor: int) -> None:
        """All that it takes, at once: most of what can happen does after that."""
        before = set(self.processes)
        self.create(actor, PLAIN, here=True)
        for ident in self.processes.keys() - before:
            process = self.processes[ident]
            process.up = True
            self.perform(self.local.on_ready(ident, self.now))
            process.take_in()
            self.construct_now(process, works=True)
            self.hear_one(ident)

    @rule(actor=st.sampled_from(ACTORS), number=st.sampled_from((1, 2, 3, 300)), here=st.booleans(), limit=st.booleans())
    def call(self, actor: int, number: int, here: bool, limit: bool) -> None:
        spec = actor + TIMEOUT * limit
        tasks = [(self.next_call + i, 1, b"") for i in range(number)]
        self.next_call += number
        life = next((key for key in self.open if key in self.lives and key[0] == actor), None)
        for task_id, attempt, _ in tasks:
            self.open.add((task_id, attempt))
            if not here:
                self.expected[(task_id, attempt)] = spec
            if life is not None:
                self.lives[life].append((task_id, attempt))
        self.perform(self.local.on_called(spec, tasks, is_here=here, now=self.now))
        assert life is not None or not any((task[0], task[1]) in self.open for task in tasks)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), come=st.booleans())
    def inputs(self, data: Any, come: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        spec = self.expected.pop(key)
        if not come:
            self.open.discard(key)
            self.ends[key] = int(Status.RAISED)
            self.dead.add(key)
        event = self.local.on_inputs if come else self.local.on_inputs_lost
        self.perform(event(spec, *key, self.now))

    # --- what the processes do

    def which(self, data: Any, wanted: Any) -> Optional[int]:
        found = [ident for ident, process in sorted(self.processes.items()) if wanted(process)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=12))
    def processes_go_on(self, data: Any, steps: List[str]) -> None:
        for step in steps:
            getattr(self, step)(data)

    def come_up(self, data: Any) -> None:
        ident = self.which(data, lambda process: not process.up)
        if ident is not None:
            self.processes[ident].up = True
            self.perform(self.local.on_ready(ident, self.now))

    def take_in(self, data: Any) -> None:
        ident = self.which(data, looks)
        if ident is not None:
            process = self.processes[ident]
            number = data.draw(st.integers(1, 5))
            while number and looks(process):
                process.take_in()
                number -= 1

    def construct(self, data: Any) -> None:
        ident = self.which(data, lambda process: process.constructing)
        if ident is None:
            return
        self.construct_now(self.processes[ident], works=not data.draw(RARELY))

    def construct_now(self, process: ModelProcess, *, works: bool) -> None:
        process.constructing = False
        process.finished = process.sent = 1
        if process.interrupt == 1 or not works:
            status = Status.CANCELLED if process.interrupt == 1 else Status.RAISED
            process.over = True
            process.wire.append(((*process.key, int(status), b"", 0.0),))
        else:
            process.alive = True
            process.wire.append("alive")

    def start_call(self, data: Any) -> None:
        ident = self.which(data, lambda process: process.queue and (process.side_by_side or not process.executing))
        if ident is None:
            return
        process = self.processes[ident]
        for _ in range(data.draw(st.integers(1, 4)) if process.side_by_side else 1):
            if not process.queue:
                return
            place, key = process.queue.popleft()
            process.started, process.since = place, self.now
            while process.taken < process.orders:
                if not process.queue or process.queue[0] != (place, key):
                    process.queue.appendleft((place, key))
                process.take_in()
                if (place, key) not in process.queue:
                    return
                process.queue.popleft()
            process.executing[place] = key
            assert key not in self.executed[process.key], "it runs twice"
            assert key not in self.dead or process.doomed, "it was told not to have begun"
            self.executed[process.key].append(key)
            if not process.side_by_side:
                meant = [each for each in self.lives[process.key] if each in self.executed[process.key]]
                assert self.executed[process.key] == meant

    def end_call(self, data: Any) -> None:
        ident = self.which(data, lambda process: process.executing)
        if ident is None:
            return
        process = self.processes[ident]
        place = data.draw(st.sampled_from(sorted(process.executing)))
        key = process.executing.pop(place)
        status = Status.CANCELLED if process.interrupt == place and not process.side_by_side else Status.OK
        process.finished = place
        process.held.append((*key, int(status), b"", 0.1))
        if data.draw(RARELY) and data.draw(RARELY):
            process.over = True
            process.queue.clear()
            process.executing.clear()
            process.held.append((*process.key, int(Status.OK), b"", 1.0))
        if not process.queue or data.draw(st.booleans()):
            process.flush()

    def close(self, data: Any) -> None:
        ident = self.which(data, lambda process: process.over and not process.executing)
        if ident is not None:
            process = self.processes[ident]
            process.flush()
            process.wire.append(((*process.key, int(Status.CANCELLED), {}, 1.0),))
            self.die_now(ident)

    def hear(self, data: Any) -> None:
        for process in self.processes.values():
            if not process.queue and not process.executing:
                process.flush()
        ident = self.which(data, lambda process: process.wire)
        if ident is not None:
            self.hear_one(ident)

    def hear_one(self, ident: int) -> None:
        process = self.processes[ident]
        said = process.wire.pop(0)
        if said == "alive":
            self.perform(self.local.on_alive(ident, self.now, is_side_by_side=process.side_by_side))
        else:
            self.perform(self.local.on_results(ident, said, self.now))

    @rule(data=st.data(), what=st.sampled_from(("die", "hand_back", "drain", "abandon")), now=RARELY)
    def something_rare(self, data: Any, what: str, now: bool) -> None:
        if now and (what != "drain" or data.draw(RARELY)):
            getattr(self, what)(data)

    def die(self, data: Any) -> None:
        ident = self.which(data, lambda process: True)
        if ident is not None:
            self.die_now(ident)

    @rule()
    def doomed_die(self) -> None:
        for ident in sorted(self.processes):
            if ident in self.processes and self.processes[ident].doomed:
                self.die_now(ident)

    def die_now(self, ident: int) -> None:
        while self.processes[ident].wire:
            self.hear_one(ident)
        process = self.processes.pop(ident)
        self.perform(self.local.on_runner_down(ident, process.started, process.finished, {"exit": -9}, self.now))

    # --- wishes

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kill=st.booleans(), force=st.booleans())
    def recall(self, data: Any, kill: bool, force: bool) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, max_size=3, unique=True))
        for key in keys:
            if key in self.expected:
                continue  # Who fetches inputs is asked first.
            self.unwanted.add(key)
            self.perform(self.local.on_recalled([key], kill=kill, now=self.now, force=force and kill))

    def hand_back(self, data: Any) -> None:
        self.withheld = True
        grace = data.draw(st.sampled_from((0.5, 1.0)))
        self.perform(self.local.hand_back(None, running=data.draw(st.booleans()), now=self.now, grace_seconds=grace))

    @precondition(lambda self: self.withheld)
    @rule()
    def accept(self) -> None:
        self.withheld = False
        self.local.accept(None)

    def drain(self, data: Any) -> None:
        self.draining = True
        self.perform(self.local.drain(self.now))

    def abandon(self, data: Any) -> None:
        before = set(self.open)
        self.perform(self.local.abandon(frozenset(), self.now))
        held = [key for _, _, _, keys in self.local.held() for key in keys]
        assert not self.expected.keys() & set(held)
        for calls in self.lives.values():
            kept = [key in held for key in calls if key in before]
            assert kept == sorted(kept, reverse=True), "what is behind a forgotten call is forgotten"
        for key in [key for key in self.lives if key in self.open and key not in held]:
            self.open.discard(key)  # Silent from now on.
            self.expected.pop(key, None)

    @rule(seconds=st.sampled_from((0.001, REVOKE_SETTLE_SECONDS, 0.03, CANCEL_GRACE_SECONDS, 2.0, ACTOR_CLOSE_SECONDS)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(60):
            deadline = self.local.next_deadline()
            if deadline is None or deadline > self.now:
                return
            self.perform(self.local.on_time(self.now))
        raise AssertionError("the same deadline comes again and again")

    # --- what holds

    @invariant()
    def slots_belong_to_who_is_here(self) -> None:
        if hasattr(self, "local"):
            here = {resident.key for resident in self.local._residents.values()}
            here |= {resident.key for resident in self.local._by_runner.values()}
            assert self.taken == sum(self.slots[key] for key in here)

    @invariant()
    def what_is_held_is_open(self) -> None:
        if hasattr(self, "local"):
            held = [key for _, _, _, keys in self.local.held() for key in keys]
            assert len(set(held)) == len(held)
            assert set(held) <= self.open

    def teardown(self) -> None:
        if not hasattr(self, "local"):
            return
        self.perform(self.local.hand_back(None, running=True, now=self.now, grace_seconds=0.5))
        for _ in range(200):
            if self.local.is_idle:
                break
            self.doomed_die()
            deadline = self.local.next_deadline()
            assert deadline is not None or self.local.is_idle or any(process.doomed for process in self.processes.values())
            self.time_passes(max(0.001, (deadline or self.now) - self.now))
        assert self.local.is_idle, "whatever its processes do, an actor can be ended"
        assert not self.processes
        assert not self.open - self.expected.keys()
        assert self.local.next_deadline() is None
        assert self.taken == 0


def looks(process: ModelProcess) -> bool:
    """Whether a process takes in what it is sent."""
    if not process.inbox or process.constructing or not process.up:
        return False
    return process.side_by_side or not process.executing


TestLocalActors = LocalActorsMachine.TestCase
TestLocalActors.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
