"""The same as virtual_sessions, with actors: agents keep them beside their slots, and drivers call each other's."""

from __future__ import annotations

from typing import Any, Dict, List, Set, Tuple

from gpumesh.model.actors import ActorPlan
from gpumesh.model.ids import SEQUENCE_BITS
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import events as ev
from tests.support import virtual_sessions
from tests.support.virtual_sessions import CANCELLED, CRASHED, NOT_RUN, OK, RAISED, SPECS, Agent, Driver, World

CLIENTS = 2
MAX_RESTARTS = (0, 2, 1)  # Of the actors that each driver may create.
FIRST_ACTOR = 5000  # Sequence of a driver's first actor.
ACTORS = [
    ((number + 1) << SEQUENCE_BITS) | (FIRST_ACTOR + place) for number in range(CLIENTS) for place in range(len(MAX_RESTARTS))
]
CREATION: Dict[int, int] = {}  # Actor -> number of the spec of its creation.
CALLS: Dict[int, List[int]] = {}  # Actor -> numbers of the specs of its calls.
for _actor in ACTORS:
    _place = (_actor & 0xFFFFFFFF) - FIRST_ACTOR
    CREATION[_actor] = len(SPECS)
    SPECS.append(TaskSpec(b"A" * 16, f"Actor{_actor}", retries=MAX_RESTARTS[_place], plan=ActorPlan()))
    CALLS[_actor] = [len(SPECS), len(SPECS) + 1]
    SPECS.extend(TaskSpec(b"m" * 16, "call", retries=retries, actor=_actor, method=f"m{retries}") for retries in (0, 2))


def target_of(spec: int) -> int:
    """The actor that a spec calls; 0: none."""
    return SPECS[spec].actor


def is_creation(spec: int) -> bool:
    """Whether it is the life of an actor."""
    return SPECS[spec].plan is not None


class ActorAgent(Agent):
    """Runs the calls of each actor one after the other."""

    def __init__(self, ident: str, slots: int, orders: Dict[Tuple[int, int, int], List[int]]) -> None:
        super().__init__(ident, slots)
        self.orders = orders

    def life_of(self, actor: int) -> int:
        """Which life of it is here; 0: none."""
        return next((attempt for task, attempt in self.attempts if task == actor), 0)

    def start(self, starts: Dict[int, int]) -> None:
        busy = {target_of(spec) for spec, started in self.attempts.values() if started and target_of(spec)}
        free = self.facts.slots
        free -= sum(started for spec, started in self.attempts.values() if not target_of(spec) and not is_creation(spec))
        for key, (spec, started) in list(self.attempts.items()):
            if started:
                continue
            actor = target_of(spec)
            if actor:
                life = self.life_of(actor)
                if actor in busy or not life:
                    continue
                busy.add(actor)
                self.orders.setdefault((actor, life, key[0] >> SEQUENCE_BITS), []).append(key[0])
            elif not is_creation(spec):
                if free <= 0:
                    continue
                free -= 1
            self.attempts[key] = (spec, True)
            starts[key[0]] = starts.get(key[0], 0) + 1

    def end(self, key: Tuple[int, int], status: int) -> None:
        spec, _ = self.attempts[key]
        super().end(key, status)
        if is_creation(spec):
            for other in [other for other, (its, _) in self.attempts.items() if target_of(its) == key[0]]:
                del self.attempts[other]  # Ended by that, without a word.


class ActorWorld(World):
    """All of it."""

    def __init__(self, seed: int, *, workers: int = 3, knows_workers: bool = True) -> None:
        self.orders: Dict[Tuple[int, int, int], List[int]] = {}  # (actor, life, caller) -> calls as they were started.
        self.created: Set[int] = set()
        super().__init__(seed, workers=workers, clients=CLIENTS, knows_workers=knows_workers)

    def join(self) -> None:
        ident = f"w{len(self.agents) + self.dead}"
        agent = self.agents[ident] = ActorAgent(ident, self.random.choice((1, 1, 2)), self.orders)
        self.connect_worker(agent)

    def connect_worker(self, agent: Agent) -> None:
        agent.attempts = dict(
            sorted(agent.attempts.items(), key=lambda item: not is_creation(item[1][0]))
        )  # As agents tell them.
        super().connect_worker(agent)

    def work(self, agent: Agent, *, crashes: bool) -> None:
        agent.start(self.starts)
        running = [key for key, (_, started) in agent.attempts.items() if started]
        if not running:
            return
        key = self.random.choice(running)
        draw = self.random.random()
        if is_creation(agent.attempts[key][0]):
            if crashes and draw < 0.4:
                agent.end(key, CRASHED if draw < 0.34 else OK if draw < 0.37 else RAISED)
        elif target_of(agent.attempts[key][0]):
            agent.end(key, RAISED if draw < 0.1 else OK)
        else:
            agent.end(key, CRASHED if crashes and draw < 0.15 else RAISED if draw < 0.25 else OK)

    def agent_hears(self, agent: Agent, message: Tuple[Any, ...]) -> None:
        if message[0] == "run" and target_of(message[1]) and not any(key[0] == target_of(message[1]) for key in agent.attempts):
            return  # The life that they were sent to has ended meanwhile, and they with it.
        if message[0] == "recall":
            for key in message[1]:
                found = agent.attempts.get(tuple(key))
                if found is not None and not message[2] and not found[1]:
                    agent.end(tuple(key), NOT_RUN)
                elif found is not None and message[2]:
                    agent.end(tuple(key), CANCELLED)
            return
        super().agent_hears(agent, message)

    # --- what drivers do

    def create(self, driver: Driver) -> None:
        """One more actor, if there is one that was never created."""
        new = [actor for actor in ACTORS if actor >> SEQUENCE_BITS == driver.number and actor not in self.created]
        if new:
            self.created.add(new[0])
            self.send(driver, CREATION[new[0]], new[0])

    def call(self, driver: Driver) -> None:
        """Some calls of one actor, whoever's it is."""
        if self.created:
            actor = self.random.choice(sorted(self.created))
            for _ in range(self.random.choice((1, 2, 4))):
                task_id, driver.next = driver.next, driver.next + 1
                self.send(driver, self.random.choice(CALLS[actor]), task_id)

    def send(self, driver: Driver, spec: int, task_id: int) -> None:
        driver.pending[task_id] = driver.specs[task_id] = spec
        if driver.link is not None:
            driver.sent.add(task_id)
            driver.link.up.append(("submit", spec, [task_id], False))

    def kill(self) -> None:
        """Somebody kills one."""
        if self.created:
            event = ev.ActorKilled(self.random.choice(sorted(self.created)), "killed by somebody", self.random.random() < 0.5)
            self.coordinator.handle(event, self.now)

    def step(self) -> None:
        draw = self.random.random()
        driver = self.random.choice(self.drivers)
        if draw < 0.04:
            self.create(driver)
        elif draw < 0.17:
            self.call(driver)
        elif draw < 0.175:
            self.kill()
        else:
            super().step()

    def settle(self) -> None:
        for _ in range(60):  # Calls get through as long as their actors live.
            for agent in list(self.agents.values()):
                if agent.link is None:
                    self.connect_worker(agent)
                self.work(agent, crashes=False)
            self.advance(0.1)
        for driver in self.drivers:
            if driver.link is None:
                self.connect_client(driver)
            for actor in ACTORS:
                if actor in driver.pending and driver.link is not None:
                    driver.link.up.append(("cancel", [actor]))
        super().settle()

    def judge(self) -> None:
        super().judge()
        for (actor, life, caller), calls in self.orders.items():
            assert calls == sorted(calls), f"calls of {caller} at actor {actor}, life {life}, ran as {calls}"
        if not self.restarts:
            for actor in self.created:
                most = 1 + SPECS[CREATION[actor]].retries
                moved = self.dead  # A life that a worker has never begun is no restart.
                assert self.starts.get(actor, 0) <= most + moved, f"actor {actor} was started {self.starts[actor]} times"
        cluster = self.coordinator.cluster
        assert not cluster._actors, f"actors are left: {list(cluster._actors)}"
        for worker in cluster._workers.values():
            assert not worker.actors, f"worker {worker.id} still has actors"
            assert not worker.calls, f"worker {worker.id} still has calls"


assert len(SPECS) > virtual_sessions.PLAIN_SPECS
