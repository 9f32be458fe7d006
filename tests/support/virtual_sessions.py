"""Connections that break, workers that die and coordinators that are started again, around real Clusters, in virtual time.

The shell here keeps, for clients that are away, what the coordinator keeps (`runtime/coordinator.py`); all else is the Cluster's. Every
message takes its time: it is delivered when the test says so, and lost when the connection breaks before.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any, Deque, Dict, List, Optional, Sequence, Set, Tuple

from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.cluster import Cluster
from gpumesh.scheduler.invariants import check

OK, CRASHED, CANCELLED, NOT_RUN, RAISED = (
    int(status) for status in (Status.OK, Status.CRASHED, Status.CANCELLED, Status.NOT_RUN, Status.RAISED)
)
TRIED_AGAIN = (int(Status.RETRYABLE), CRASHED, int(Status.HANDED_BACK))

SPECS = [
    TaskSpec(b"a" * 16, "often"),
    TaskSpec(b"b" * 16, "once", retries=0),
    TaskSpec(b"c" * 16, "twice", idempotent=True),
    TaskSpec(b"d" * 16, "later", backoff=0.5),
]
PLAIN_SPECS = len(SPECS)  # Those of tasks that are in queues; tests/support/virtual_actors.py has more.
Result = Tuple[int, int, Any, float]


class Link:
    """A connection: messages on their way in both directions."""

    def __init__(self) -> None:
        self.up: Deque[Tuple[Any, ...]] = deque()  # To the coordinator.
        self.down: Deque[Tuple[Any, ...]] = deque()


class Agent:
    """A worker: runs as many tasks as it has slots, in order, and keeps their results."""

    def __init__(self, ident: str, slots: int) -> None:
        self.id = WorkerId(ident)
        self.facts = WorkerFacts(hostname=ident, slots=slots, cores=slots, memory=1 << 30, score=float(slots))
        self.link: Optional[Link] = None
        self.attempts: Dict[Tuple[int, int], Tuple[int, bool]] = {}  # (task, attempt) -> (spec, started).
        self.kept: Dict[int, Tuple[int, int, int, Any, float]] = {}

    def start(self, starts: Dict[int, int]) -> None:
        """Start what can be started; `starts` counts how often each task was."""
        free = self.facts.slots - sum(started for _, started in self.attempts.values())
        for key, (spec, started) in list(self.attempts.items()):
            if not started and free > 0:
                self.attempts[key] = (spec, True)
                starts[key[0]] = starts.get(key[0], 0) + 1
                free -= 1

    def end(self, key: Tuple[int, int], status: int) -> None:
        """An attempt ends."""
        del self.attempts[key]
        payload = b"value" if status == OK else {"reason": "told to"}
        result = (*key, status, payload, 1.0)
        if status != NOT_RUN:
            self.kept[key[0]] = result
        if self.link is not None:
            self.link.up.append(("finished", [result]))


class Driver:
    """A client: knows which tasks have not ended, and how often each has."""

    def __init__(self, number: int) -> None:
        self.number = ClientNumber(number)
        self.link: Optional[Link] = None
        self.had_connection = False
        self.next = number << SEQUENCE_BITS
        self.pending: Dict[int, int] = {}  # Task -> spec.
        self.sent: Set[int] = set()
        self.specs: Dict[int, int] = {}  # The same of all that ever were.
        self.ends: Dict[int, List[int]] = {}
        self.received = 0


class _Session:
    """What the coordinator keeps for one client."""

    def __init__(self) -> None:
        self.link: Optional[Link] = None
        self.unconfirmed: Deque[Tuple[str, Sequence[Result]]] = deque()
        self.confirmed = 0
        self.kept: Dict[int, Tuple[str, Result]] = {}
        self.undecided: Set[int] = set()
        self.answered: Optional[Set[int]] = None

    def send(self, ident: str, results: Sequence[Result]) -> None:
        assert self.link is not None
        self.unconfirmed.append((ident, results))
        if self.answered is not None:
            self.answered.update(result[0] for result in results)
        self.link.down.append(("results", list(results)))


class Coordinator:
    """One start of it."""

    def __init__(self, now: float, workers: Optional[List[WorkerId]], first_attempt: int, *, has_lost: bool = False) -> None:
        self.cluster = Cluster()
        self.sessions: Dict[int, _Session] = {}
        self.links: Dict[str, Optional[Link]] = {}
        self.payloads: Set[int] = set()
        self.defined: Dict[int, Set[int]] = {}
        self.wanted: List[Sequence[Result]] = []
        self.is_incoming = False
        self.gone: List[str] = []  # Workers that were given up.
        self.perform(self.cluster.handle(ev.Started(workers, first_attempt, has_lost), now))

    def handle(self, event: Any, now: float) -> None:
        self.perform(self.cluster.handle(event, now))
        check(self.cluster)

    def to_worker(self, ident: str, message: Tuple[Any, ...]) -> None:
        link = self.links.get(ident)
        if link is not None:
            link.down.append(message)

    def forget(self, ident: str, task_ids: List[int]) -> None:
        self.to_worker(ident, ("forget", task_ids))

    def perform(self, actions: List[Any]) -> None:
        for action in actions:
            kind = type(action)
            if kind is act.Assign:
                link = self.links[action.worker]
                assert link is not None, "assigned to one that is away"
                assert all(task in self.payloads for task, _ in action.tasks), "assigned without its arguments"
                link.down.append(("run", SPECS.index(action.spec), action.tasks))
            elif kind is act.Recall:
                self.to_worker(action.worker, ("recall", action.tasks, action.kill))
            elif kind is act.Deliver:
                if self.is_incoming:
                    self.wanted.append(action.results)
                self.deliver(action.client, action.worker, action.results)
            elif kind is act.Fail:
                self.deliver(action.client, "", [(action.task_id, int(action.status), action.details, 0.0)])
            elif kind is act.Forget:
                self.payloads.difference_update(action.task_ids)
            elif kind is act.Keep:
                session = self.sessions.setdefault(action.client, _Session())
                session.kept[action.result[0]] = (action.worker, action.result)
                session.undecided.add(action.result[0])
                self.wanted.append((action.result,))
            elif kind is act.WorkerGone:
                self.links.pop(action.worker, None)
                self.gone.append(action.worker)
            elif kind is act.ClientGone:
                self.sessions.pop(action.client, None)

    def deliver(self, client: int, ident: str, results: Sequence[Result]) -> None:
        self.payloads.difference_update(result[0] for result in results)
        session = self.sessions.setdefault(client, _Session())  # Also for one that this coordinator has not seen yet.
        if session.link is None:
            session.kept.update((result[0], (ident, result)) for result in results)
        else:
            session.send(ident, results)

    # --- from workers

    def worker_says(self, agent: Agent, link: Link, message: Tuple[Any, ...], now: float) -> None:
        if message[0] == "register":
            self.links[agent.id] = link
            self.handle(ev.WorkerConnected(agent.id, agent.facts, False, message[1], message[2]), now)
        else:
            results = message[1]
            self.is_incoming = True
            self.handle(ev.AttemptsFinished(agent.id, results), now)
            self.is_incoming = False
            wanted, self.wanted = self.wanted, []
            taken = {result[0] for each in wanted for result in each}
            self.forget(agent.id, [result[0] for result in results if result[0] not in taken])

    def worker_broke(self, agent: Agent, now: float) -> None:
        self.links[agent.id] = None
        self.handle(ev.WorkerAway(agent.id, "broke"), now)

    # --- from clients

    def client_says(self, driver: Driver, link: Link, message: Tuple[Any, ...], now: float) -> None:
        kind = message[0]
        session = self.sessions.get(driver.number)
        if kind == "register":
            session = self.sessions.setdefault(driver.number, _Session())
            session.link = link
            session.answered = set() if message[1] else None
            self.handle(ev.ClientConnected(driver.number, "driver", message[1]), now)
            for number, spec in enumerate(SPECS):
                self.handle(ev.SpecDefined(driver.number, number, spec), now)
            return
        assert session is not None
        if kind == "submit":
            _, spec, ids, again = message
            if again:
                ids = self.sift(driver, session, spec, ids, now)
            self.payloads.update(ids)
            if ids:
                self.handle(ev.TasksSubmitted(driver.number, spec, ids, (), again), now)
        elif kind == "cancel":
            self.handle(ev.CancelRequested(driver.number, message[1]), now)
        elif kind == "received":
            while session.unconfirmed and session.confirmed + len(session.unconfirmed[0][1]) <= message[1]:
                ident, results = session.unconfirmed.popleft()
                session.confirmed += len(results)
                self.forget(ident, [result[0] for result in results])
        elif kind == "ends":
            session.answered = None
            for task_id in list(session.kept):
                ident, _ = session.kept.pop(task_id)
                self.forget(ident, [task_id])
            self.handle(ev.ResubmissionEnded(driver.number), now)

    def sift(self, driver: Driver, session: _Session, spec: int, ids: List[int], now: float) -> List[int]:
        confirmed: List[int] = []
        answered: List[int] = []
        rest: List[int] = []
        for task_id in ids:
            if session.answered and task_id in session.answered:
                continue
            kept = session.kept.pop(task_id, None)
            if kept is not None:
                ident, result = kept
                if SPECS[spec].retries == 0 or result[1] not in TRIED_AGAIN or task_id not in session.undecided:
                    answered.append(task_id)
                    session.send(ident, [result])
                    continue
                self.forget(ident, [task_id])
            (confirmed if self.cluster.is_confirmed(task_id) else rest).append(task_id)
        if confirmed or answered:
            self.handle(ev.TasksConfirmed(driver.number, confirmed, answered), now)
        return rest

    def client_broke(self, driver: Driver, now: float) -> None:
        session = self.sessions[driver.number]
        session.link = None
        for ident, results in session.unconfirmed:
            session.kept.update((result[0], (ident, result)) for result in results)
        session.unconfirmed.clear()
        session.confirmed = 0
        self.handle(ev.ClientAway(driver.number), now)


class World:
    """All of it."""

    def __init__(self, seed: int, *, workers: int = 3, clients: int = 2, knows_workers: bool = True) -> None:
        self.random = Random(seed)
        self.now = 100.0
        self.knows_workers = knows_workers
        self.restarts = 0
        self.agents: Dict[str, Agent] = {}
        self.drivers = [Driver(number + 1) for number in range(clients)]
        self.starts: Dict[int, int] = {}
        self.dead = 0
        self.coordinator = Coordinator(self.now, [] if knows_workers else None, 1000)
        self.missed: Dict[str, float] = {}  # As a journal knows them: workers of before that are not back, and since when.
        self.lost_at = float("-inf")  # When a worker was last given up, as the journal says.
        for _ in range(workers):
            self.join()

    # --- what can happen

    def join(self) -> None:
        ident = f"w{len(self.agents) + self.dead}"
        agent = self.agents[ident] = Agent(ident, self.random.choice((1, 1, 2)))
        self.connect_worker(agent)

    def connect_worker(self, agent: Agent) -> None:
        if agent.link is not None:
            self.coordinator.worker_broke(agent, self.now)
        link = agent.link = Link()
        groups: Dict[int, List[Tuple[int, int]]] = {}
        for key, (spec, _) in agent.attempts.items():
            groups.setdefault(spec, []).append(key)
        held = [ev.Held(SPECS[spec], tasks) for spec, tasks in groups.items()]
        link.up.append(("register", held, [(result[0], result[1]) for result in agent.kept.values()]))
        if agent.kept:
            link.up.append(("finished", list(agent.kept.values())))

    def break_worker(self, agent: Agent) -> None:
        if agent.link is not None:
            agent.link = None
            if agent.id in self.coordinator.links:
                self.coordinator.worker_broke(agent, self.now)

    def kill_worker(self, agent: Agent) -> None:
        self.break_worker(agent)
        del self.agents[agent.id]
        self.dead += 1

    def connect_client(self, driver: Driver) -> None:
        if driver.link is not None:
            self.break_client(driver)
        link = driver.link = Link()
        driver.received = 0
        link.up.append(("register", driver.had_connection))
        if driver.had_connection:
            for task_id, spec in driver.pending.items():
                link.up.append(("submit", spec, [task_id], task_id in driver.sent))
            link.up.append(("ends",))
        else:
            for task_id, spec in driver.pending.items():
                link.up.append(("submit", spec, [task_id], False))
        driver.sent.update(driver.pending)
        driver.had_connection = True

    def break_client(self, driver: Driver) -> None:
        if driver.link is not None:
            driver.link = None
            if driver.number in self.coordinator.sessions and self.coordinator.sessions[driver.number].link is not None:
                self.coordinator.client_broke(driver, self.now)

    def restart(self) -> None:
        self.restarts += 1
        if self.coordinator.gone:
            self.lost_at = self.now
        connected = set(self.coordinator.links)
        self.missed = {ident: since for ident, since in self.missed.items() if ident not in connected and self.now < since + 60}
        self.missed.update(dict.fromkeys(connected, self.now))
        before = sorted(self.missed) if self.knows_workers else None
        for agent in self.agents.values():
            agent.link = None
        for driver in self.drivers:
            driver.link = None
        workers = None if before is None else [WorkerId(ident) for ident in before]
        has_lost = self.now < self.lost_at + 60
        self.coordinator = Coordinator(self.now, workers, 1000 * (self.restarts + 1), has_lost=has_lost)

    def submit(self, driver: Driver, spec: int, count: int) -> None:
        for _ in range(count):
            task_id, driver.next = driver.next, driver.next + 1
            driver.pending[task_id] = driver.specs[task_id] = spec
            if driver.link is not None:
                driver.sent.add(task_id)
                driver.link.up.append(("submit", spec, [task_id], False))

    def cancel(self, driver: Driver) -> None:
        if driver.pending and driver.link is not None:
            driver.link.up.append(("cancel", [self.random.choice(list(driver.pending))]))

    def pump(self, link: Link, agent: Optional[Agent], driver: Optional[Driver], *, up: bool) -> None:
        """One message arrives."""
        queue = link.up if up else link.down
        if not queue:
            return
        message = queue.popleft()
        if up and agent is not None:
            self.coordinator.worker_says(agent, link, message, self.now)
        elif up and driver is not None:
            self.coordinator.client_says(driver, link, message, self.now)
        elif agent is not None:
            self.agent_hears(agent, message)
        elif driver is not None:
            self.driver_hears(driver, message)

    def agent_hears(self, agent: Agent, message: Tuple[Any, ...]) -> None:
        if message[0] == "run":
            for task_id, attempt in message[2]:
                agent.attempts[task_id, attempt] = (message[1], False)
        elif message[0] == "forget":
            for task_id in message[1]:
                agent.kept.pop(task_id, None)
        else:
            for key in message[1]:
                key = tuple(key)
                if key not in agent.attempts:
                    continue
                if message[2]:
                    agent.end(key, CANCELLED)
                elif not agent.attempts[key][1]:
                    agent.end(key, NOT_RUN)

    def driver_hears(self, driver: Driver, message: Tuple[Any, ...]) -> None:
        for task_id, status, _, _ in message[1]:
            if task_id in driver.pending:
                del driver.pending[task_id]
                driver.ends.setdefault(task_id, []).append(status)
        driver.received += len(message[1])
        if driver.link is not None and self.random.random() < 0.5:
            driver.link.up.append(("received", driver.received))

    def links(self) -> List[Tuple[Link, Optional[Agent], Optional[Driver], bool]]:
        """Every direction of every connection in which something is on its way."""
        found: List[Tuple[Link, Optional[Agent], Optional[Driver], bool]] = []
        for agent in self.agents.values():
            if agent.link is not None:
                found.extend(
                    (agent.link, agent, None, up) for up in (True, False) if (agent.link.up if up else agent.link.down)
                )
        for driver in self.drivers:
            if driver.link is not None:
                found.extend(
                    (driver.link, None, driver, up) for up in (True, False) if (driver.link.up if up else driver.link.down)
                )
        return found

    def work(self, agent: Agent, *, crashes: bool) -> None:
        """One of its running tasks ends."""
        agent.start(self.starts)
        running = [key for key, (_, started) in agent.attempts.items() if started]
        if running:
            draw = self.random.random()
            agent.end(self.random.choice(running), CRASHED if crashes and draw < 0.15 else RAISED if draw < 0.25 else OK)

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        cluster = self.coordinator.cluster
        for _ in range(100):
            due = cluster.next_deadline()
            if due is None or due > self.now:
                break
            self.coordinator.perform(cluster.on_time(self.now))
            check(cluster)

    # --- a whole run

    def step(self) -> None:
        """Something happens."""
        draw = self.random.random()
        agents = list(self.agents.values())
        agent = self.random.choice(agents) if agents else None
        driver = self.random.choice(self.drivers)
        links = self.links()
        if draw < 0.45 and links:
            link, of_agent, of_driver, up = self.random.choice(links)
            self.pump(link, of_agent, of_driver, up=up)
        elif draw < 0.65 and agent is not None:
            self.work(agent, crashes=True)
        elif draw < 0.73:
            self.submit(driver, self.random.randrange(PLAIN_SPECS), self.random.choice((1, 1, 3)))
        elif draw < 0.75:
            self.cancel(driver)
        elif draw < 0.85:
            self.advance(self.random.choice((0.01, 0.1, 0.5, 2.0, 5.0)))
        elif draw < 0.875 and agent is not None:
            self.break_worker(agent)
        elif draw < 0.93:
            for each in agents:
                if each.link is None and self.random.random() < 0.7:
                    self.connect_worker(each)
        elif draw < 0.945:
            self.break_client(driver)
        elif draw < 0.985:
            for each_driver in self.drivers:
                if each_driver.link is None:
                    self.connect_client(each_driver)
        elif draw < 0.99 and agent is not None and len(agents) > 1:
            self.kill_worker(agent)
        elif draw < 0.994:
            self.restart()
        elif len(agents) < 4:
            self.join()

    def settle(self) -> None:
        """Everybody is back and nothing more breaks: everything ends."""
        for _ in range(4000):
            for agent in list(self.agents.values()):
                if agent.link is None:
                    self.connect_worker(agent)
            for driver in self.drivers:
                if driver.link is None:
                    self.connect_client(driver)
            for link, agent, driver, up in self.links():
                while link.up if up else link.down:
                    self.pump(link, agent, driver, up=up)
            for agent in self.agents.values():
                self.work(agent, crashes=False)
            self.advance(0.25)
            if not any(driver.pending for driver in self.drivers) and not self.links():
                break
        left = {task_id: spec for driver in self.drivers for task_id, spec in driver.pending.items()}
        assert not left, f"these never ended: {left}"

    def judge(self) -> None:
        """What was promised."""
        for driver in self.drivers:
            for task_id, ends in driver.ends.items():
                assert len(ends) == 1, f"task {task_id} ended {len(ends)} times"
        for task_id, count in self.starts.items():
            driver = self.drivers[(task_id >> SEQUENCE_BITS) - 1]
            assert count == 1 or SPECS[driver.specs[task_id]].retries, f"task {task_id} was started {count} times"
