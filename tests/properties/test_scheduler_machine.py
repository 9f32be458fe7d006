"""The cluster under joins, deaths, reconnects, pauses, cancels, copies, cards and reserved slots, in any order.

After each step the tables agree with each other and with the books that the virtual mesh keeps; in the end every task has ended once.
"""

from __future__ import annotations

import random
from typing import List, Sequence, Tuple, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber, WorkerId
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler import actions as act
from gpumesh.scheduler import events as ev
from gpumesh.scheduler import states
from gpumesh.scheduler.invariants import check
from gpumesh.scheduler.states import TaskState
from tests.support.virtual_mesh import Attempt, Life, VirtualMesh, VirtualWorker

STEPS = 15_000  # In one run of this test, at least.
GB = 10**9
LAB, ATTIC = (("room", "lab"),), (("room", "attic"),)
SPECS = [
    TaskSpec(b"a" * 16, "plain"),
    TaskSpec(b"a" * 16, "once", retries=0),
    TaskSpec(b"b" * 16, "urgent", priority=5, retries=1),
    TaskSpec(b"c" * 16, "wide", Requirement(cores=3)),
    TaskSpec(b"d" * 16, "tagged", Requirement(tags=LAB), placement_timeout=7.0),
    TaskSpec(b"e" * 16, "patient", Requirement(tags=ATTIC), placement_timeout=-1.0, retries=0),
    TaskSpec(b"f" * 16, "packed", packages=("old",)),
    TaskSpec(b"a" * 16, "packed too", packages=("new", "newer")),
    TaskSpec(b"g" * 16, "copied", idempotent=True),
    TaskSpec(b"g" * 16, "copied and long", idempotent=True, retries=1, cost=8.0),
    TaskSpec(b"h" * 16, "copied and meek", idempotent=True, priority=-2),
    TaskSpec(b"i" * 16, "never copied", idempotent=True, retries=0),
    TaskSpec(b"k" * 16, "actor", Requirement(cores=2), retries=0),
    TaskSpec(b"l" * 16, "card", Requirement("gpu", gpus=1.0)),
    TaskSpec(b"l" * 16, "half a card", Requirement("gpu", gpus=0.5), idempotent=True),
    TaskSpec(b"m" * 16, "part of a card", Requirement("cuda", gpus=0.3, gpu_memory=10 * GB), retries=0),
    TaskSpec(b"n" * 16, "room on a card", Requirement("gpu", "a100", gpu_memory=16 * GB), idempotent=True, cost=2.0),
    TaskSpec(b"o" * 16, "two cards", Requirement("gpu", gpus=2.0), priority=1, retries=1),
    TaskSpec(b"p" * 16, "that card", Requirement("cuda:1", gpus=1.0), placement_timeout=3.0),
    TaskSpec(b"q" * 16, "actor on a card", Requirement("gpu", gpus=0.25), retries=0),
    TaskSpec(b"r" * 16, "with pauses", backoff=0.5),
    TaskSpec(b"r" * 16, "with long pauses", priority=1, retries=9, backoff=20.0),
    TaskSpec(b"s" * 16, "inside", depth=1),
    TaskSpec(b"s" * 16, "inside that", depth=2, retries=0),
    TaskSpec(b"t" * 16, "inside, wide", Requirement(cores=3), depth=1, idempotent=True),
    TaskSpec(b"u" * 16, "inside, on a card", Requirement("gpu", gpus=1.0), depth=1),
    TaskSpec(b"u" * 16, "inside that, on a part", Requirement("gpu", gpus=0.5), depth=2),
]
COPIED = [index for index, spec in enumerate(SPECS) if spec.idempotent and spec.retries]
ENDS = [Status.OK] * 6 + [Status.RAISED, Status.RETRYABLE, Status.CRASHED, Status.TIMED_OUT, Status.HANDED_BACK]
SECONDS = st.sampled_from([1e-6, 0.01, 0.3, 3.0])


def _card(index: int, name: str, memory: int, score: float, others: int, problem: str) -> DeviceFacts:
    return DeviceFacts("cuda", index, name, memory, score, uuid=f"GPU-{index}", problem=problem, others=others)


def _card_sets(count: int) -> List[Tuple[DeviceFacts, ...]]:
    """What the cards of a worker may be: drawn beforehand, since drawing takes most of the test's time."""
    rng = random.Random(0)
    sets: List[Tuple[DeviceFacts, ...]] = [()]
    for _ in range(count):
        indexes = rng.sample(range(3), rng.choice([1, 1, 2, 2, 3]))
        sets.append(
            tuple(
                _card(
                    index,
                    rng.choice(["NVIDIA A100", "RTX 3080"]),
                    rng.choice([10 * GB, 24 * GB, 80 * GB]),
                    rng.choice([40.0, 50.0, 100.0]),
                    rng.choice([0, 0, GB, 10 * GB]),
                    rng.choice(["", "", "", "paused by its owner"]),
                )
                for index in indexes
            )
        )
    return sets


FACTS = st.builds(
    lambda slots, cores, score, tags, installing, devices: WorkerFacts(
        "host", slots=slots, cores=cores, score=score, tags=tags, installing=installing, devices=devices
    ),
    slots=st.integers(1, 4),
    cores=st.sampled_from([1, 2, 4, 8]),
    score=st.sampled_from([0.5, 1.0, 90.0]),
    tags=st.sampled_from([(), (), LAB, ATTIC]),
    installing=st.sampled_from([(), (), (), (("old",),), (("old",), ("new", "newer"))]),
    devices=st.sampled_from([(), *_card_sets(60)]),
)
PICK = st.integers(0, 99)
LAST = WorkerFacts(
    slots=3,
    cores=8,
    tags=(("room", "attic"), ("room", "lab")),
    devices=tuple(_card(index, "NVIDIA A100", 80 * GB, 90.0, 0, "") for index in range(3)),
)


Item = TypeVar("Item")


def chosen(items: Sequence[Item], pick: int) -> Item:
    """One of them."""
    return items[pick % len(items)]


OBJECTS = {1: 1000, 2: 700_000, 3: 2 << 20, 4: 100 << 20, 5: 5 << 30}
"""Bytes of each."""


class SchedulerMachine(RuleBasedStateMachine):
    """Draws what happens; the virtual mesh does it and knows what must not follow."""

    steps = copies = leases = waits = 0  # Of all runs.

    def __init__(self) -> None:
        super().__init__()
        self.mesh = VirtualMesh(SPECS)
        self.born = 0

    @initialize(facts=FACTS, plays=st.lists(st.sampled_from(range(len(SPECS))), min_size=1, max_size=5, unique=True))
    def begin(self, facts: WorkerFacts, plays: List[int]) -> None:
        self.plays = plays  # A run with few kinds of tasks gets further than one with a few of each.
        self.mesh.connect_client(1)
        self.join(facts)
        self.mesh.submit(1, plays[0], 6)
        self.finish_all_that_run(0.01)  # Where it is known how long tasks take, more happens.

    def worker(self, pick: int) -> VirtualWorker:
        return chosen(list(self.mesh.workers.values()), pick)

    def client(self, pick: int) -> int:
        return chosen(sorted(self.mesh.clients), pick)

    # --- workers

    @precondition(lambda self: len(self.mesh.workers) < 6)
    @rule(facts=FACTS)
    def join(self, facts: WorkerFacts) -> None:
        self.born += 1
        self.mesh.connect_worker(f"w{self.born}", facts)

    @precondition(lambda self: self.mesh.workers)
    @rule(pick=PICK, facts=FACTS)
    def reconnect(self, pick: int, facts: WorkerFacts) -> None:
        self.mesh.connect_worker(self.worker(pick).id, facts)

    @precondition(lambda self: self.mesh.workers)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        self.mesh.lose_worker(self.worker(pick).id)

    @precondition(lambda self: len(self.mesh.workers) > 1)
    @rule(pick=PICK)
    def drain(self, pick: int) -> None:
        worker = self.worker(pick)
        worker.is_draining = True
        self.mesh.handle(ev.WorkerDraining(worker.id))

    @precondition(lambda self: self.mesh.workers)
    @rule(pick=PICK, facts=FACTS)
    def tell_other_facts(self, pick: int, facts: WorkerFacts) -> None:
        self.mesh.change_worker(self.worker(pick).id, facts)

    @precondition(lambda self: self.mesh.workers)
    @rule(pick=PICK, ends_running=st.sampled_from([None, False, True]))
    def pause_or_resume(self, pick: int, ends_running: bool) -> None:
        worker = self.worker(pick)
        problem = "" if worker.facts.problem else "paused by its owner"
        self.mesh.change_worker(worker.id, worker.facts._replace(problem=problem))
        if problem and ends_running is not None:
            self.mesh.hand_back(worker, ends_running=ends_running)

    @precondition(lambda self: self.mesh.workers)
    @rule(pick=PICK, slots=st.integers(1, 6), gives_back=st.booleans())
    def reserve_or_free_slots(self, pick: int, slots: int, gives_back: bool) -> None:
        """Its owner limits it, or an actor moves in or out."""
        worker = self.worker(pick)
        self.mesh.change_worker(worker.id, worker.facts._replace(slots=slots))
        if gives_back:
            self.mesh.hand_back(worker, ends_running=False)

    @precondition(lambda self: any(worker.cards() for worker in self.mesh.workers.values()))
    @rule(pick=PICK, ends_running=st.booleans())
    def pause_or_resume_a_card(self, pick: int, ends_running: bool) -> None:
        worker, key = self.card(pick)
        devices = tuple(
            device._replace(problem="" if device.problem else "paused by its owner") if device.key == key else device
            for device in worker.facts.devices
        )
        self.mesh.change_worker(worker.id, worker.facts._replace(devices=devices))
        if worker.cards()[key].problem and ends_running:
            on_it = [attempt for attempt in worker.attempts.values() if attempt.lease and key in attempt.lease[0]]
            ends = [(attempt, Status.HANDED_BACK if attempt.is_running else Status.NOT_RUN) for attempt in on_it]
            self.mesh.report(worker, ends, 0.2)

    @precondition(lambda self: any(worker.cards() for worker in self.mesh.workers.values()))
    @rule(pick=PICK, others=st.sampled_from([-1, 0, GB, 10 * GB]))
    def measure_a_card(self, pick: int, others: int) -> None:
        worker, key = self.card(pick)
        self.mesh.measure(worker.id, key, others)

    def card(self, pick: int) -> Tuple[VirtualWorker, str]:
        both = [(worker, key) for worker in self.mesh.workers.values() for key in worker.cards()]
        return chosen(both, pick)

    # --- clients

    @precondition(lambda self: len(self.mesh.clients) < 3)
    @rule()
    def connect_client(self) -> None:
        self.mesh.connect_client(next(number for number in range(1, 5) if number not in self.mesh.clients))

    @rule(pick=PICK)
    def reconnect_client(self, pick: int) -> None:
        number = self.client(pick)
        self.mesh.lose_client(number)
        self.mesh.connect_client(number)

    @precondition(lambda self: len(self.mesh.clients) > 1)
    @rule(pick=PICK)
    def lose_client(self, pick: int) -> None:
        self.mesh.lose_client(self.client(pick))

    @rule(pick=PICK, count=st.sampled_from([1, 1, 2, 3, 12]))
    def submit(self, pick: int, count: int) -> None:
        self.mesh.submit(self.client(pick), chosen(self.plays, pick // 3), count)

    @rule(pick=PICK, count=st.sampled_from([1, 3, 12]))
    def submit_with_inputs(self, pick: int, count: int) -> None:
        self.mesh.submit(self.client(pick), chosen(self.plays, pick // 3), count, self.inputs(pick))

    def inputs(self, pick: int) -> List[ev.Input]:
        """None, one or two objects, and who has them: somebody, or nobody but the coordinator."""
        holders = [worker.id for worker in self.mesh.workers.values()][: pick % 3]
        return [
            (1 + (pick + index) % len(OBJECTS), OBJECTS[1 + (pick + index) % len(OBJECTS)], holders)
            for index in range(pick // 5 % 3)
        ]

    @precondition(lambda self: self.mesh.workers)
    @rule(pick=PICK, kind=st.integers(0, 4), oid=st.sampled_from(sorted(OBJECTS)))
    def hear_of_objects(self, pick: int, kind: int, oid: int) -> None:
        ident = self.worker(pick).id
        running = sorted(
            a.life.task_id for worker in self.mesh.workers.values() for a in worker.running() if a.life.status is None
        )
        news: List[ev.Event] = [
            ev.StoreShared(ident, pick % 2 == 0),
            ev.CopyMade(ident, oid),
            ev.CopiesGone(ident, [oid, 1]),
            ev.BytesMoved(ident, OBJECTS[oid], 0.5),
            ev.ResultStored(chosen(running, pick), [(oid, OBJECTS[oid], [ident])]) if running else ev.CopyMade(ident, oid),
        ]
        self.mesh.handle(news[kind])

    @rule(pick=PICK, number=st.integers(0, len(SPECS) - 1), count=st.integers(1, 4))
    def submit_anything(self, pick: int, number: int, count: int) -> None:
        self.mesh.submit(self.client(pick), number, count)

    @rule(pick=PICK, picks=st.lists(PICK, min_size=1, max_size=3))
    def submit_dependent(self, pick: int, picks: List[int]) -> None:
        mesh = self.mesh
        client = self.client(pick)
        mine = sorted(task_id for task_id in mesh.lives if task_id >> SEQUENCE_BITS == client)
        if not mine:
            return
        producers = [chosen(mine, other) for other in picks]
        number = chosen(self.plays, pick // 3)
        task_id = (client << SEQUENCE_BITS) + mesh.clients[client]
        mesh.clients[client] += 1
        if task_id in mesh.lives:
            return
        is_known = all(producer in mesh.open for producer in producers)
        mesh.lives[task_id] = mesh.open[task_id] = Life(task_id, SPECS[number], producers)
        mesh.handle(ev.DependentSubmitted(ClientNumber(client), number, task_id, producers, self.inputs(pick)))
        assert mesh.cluster.state_of(task_id) is (TaskState.WAITING if is_known else TaskState.GONE)

    @precondition(lambda self: self.mesh.open)
    @rule(pick=PICK)
    def submit_again(self, pick: int) -> None:
        task_id = chosen(sorted(self.mesh.open), pick)
        actions = self.mesh.handle(ev.TasksSubmitted(ClientNumber(task_id >> SEQUENCE_BITS), 0, [task_id]))
        assert [type(action) for action in actions] == [act.Fail]

    @precondition(lambda self: any(life.status is not None and not life.producers for life in self.mesh.lives.values()))
    @rule(pick=PICK)
    def use_an_id_again(self, pick: int) -> None:
        mesh = self.mesh
        awaited = {producer for life in mesh.open.values() for producer in life.producers}
        ids = [task_id for task_id, life in mesh.lives.items() if life.status is not None and task_id not in awaited]
        if not ids:
            return
        task_id = chosen(sorted(ids), pick)
        number = chosen(self.plays, pick // 3)
        mesh.lives[task_id] = mesh.open[task_id] = Life(task_id, SPECS[number])
        mesh.handle(ev.TasksSubmitted(ClientNumber(task_id >> SEQUENCE_BITS), number, [task_id]))

    @precondition(lambda self: self.mesh.open)
    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def cancel(self, picks: List[int]) -> None:
        ids = sorted(self.mesh.open)
        self.mesh.cancel([chosen(ids, pick) for pick in picks])

    # --- work

    @precondition(lambda self: any(worker.running() for worker in self.mesh.workers.values()))
    @rule(pick=PICK, ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=4), seconds=SECONDS, again=st.integers(0, 1))
    def finish(self, pick: int, ends: List[Status], seconds: float, again: int) -> None:
        busy = [worker for worker in self.mesh.workers.values() if worker.running()]
        worker = chosen(busy, pick)
        ended = [attempt for attempt in worker.running() if not self.is_actor(attempt)]
        if len(ended) > len(ends):
            ended = ended[pick % (len(ended) - len(ends) + 1) :]
        self.mesh.now += 0.001
        self.mesh.report(worker, list(zip(ended, ends)), seconds, again=again)

    @precondition(lambda self: any(worker.running() for worker in self.mesh.workers.values()))
    @rule(seconds=SECONDS)
    def finish_all_that_run(self, seconds: float) -> None:
        self.mesh.pass_time(seconds)
        for worker in list(self.mesh.workers.values()):
            self.mesh.report(worker, [(a, Status.OK) for a in worker.running() if not self.is_actor(a)], seconds)

    @precondition(lambda self: any(worker.running() for worker in self.mesh.workers.values()))
    @rule(picks=st.lists(PICK, min_size=1, max_size=3))
    def begin_to_wait_or_go_on(self, picks: List[int]) -> None:
        for pick in picks:
            both = [(w, a) for w in self.mesh.workers.values() for a in w.running()]
            if both:
                worker, attempt = chosen(both, pick)
                SchedulerMachine.waits += not attempt.is_waiting
                self.mesh.wait_or_go_on(worker, attempt)

    @precondition(lambda self: any(self.is_actor(a) for worker in self.mesh.workers.values() for a in worker.running()))
    @rule(pick=PICK)
    def stop_an_actor(self, pick: int) -> None:
        both = [(w, a) for w in self.mesh.workers.values() for a in w.running() if self.is_actor(a)]
        worker, attempt = chosen(both, pick)
        self.mesh.report(worker, [(attempt, Status.OK)], 100.0)

    @staticmethod
    def is_actor(attempt: Attempt) -> bool:
        return attempt.life.spec.name.startswith("actor")

    @precondition(lambda self: any(worker.waiting() for worker in self.mesh.workers.values()))
    @rule(pick=PICK)
    def give_some_back(self, pick: int) -> None:
        queues = [worker for worker in self.mesh.workers.values() if worker.waiting()]
        worker = chosen(queues, pick)
        self.mesh.report(worker, [(attempt, Status.NOT_RUN) for attempt in worker.waiting()[-2:]], 0.0)

    @rule(pick=PICK, count=st.integers(1, 2))
    def run_short_of_work(self, pick: int, count: int) -> None:
        """Few tasks, which have run for a while, and a new worker: what can be copied is."""
        number, client = chosen(COPIED, pick), self.client(pick)
        for _ in range(2):
            self.finish_all_that_run(0.01)
            self.mesh.submit(client, number, count)
        self.mesh.pass_time(3.0, looks=20)
        self.mesh.connect_worker(f"spare{pick % 2}", LAST._replace(score=90.0))
        self.mesh.pass_time(0.5, looks=20)

    @precondition(lambda self: any(worker.recalls for worker in self.mesh.workers.values()))
    @rule()
    def obey(self) -> None:
        for worker in list(self.mesh.workers.values()):
            if worker.recalls:
                self.mesh.obey(worker)

    @precondition(lambda self: self.mesh.late)
    @rule(pick=PICK, status=st.sampled_from(ENDS))
    def hear_late(self, pick: int, status: Status) -> None:
        ident, task_id, number = chosen(self.mesh.late, pick)
        ident = chosen([ident, *self.mesh.workers], pick // 7)
        worker = self.mesh.workers.get(ident)
        if worker is None or (task_id, number) not in worker.attempts:
            result = (task_id, number, int(status), "late", 0.1)
            self.mesh.handle(ev.AttemptsFinished(WorkerId(ident), [result]))

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.0, 2.5, 60.0]))
    def wait(self, seconds: float) -> None:
        self.mesh.pass_time(seconds)

    # --- what always holds

    @invariant()
    def everything_agrees(self) -> None:
        SchedulerMachine.steps += 1
        self.mesh.is_sound = False
        check(self.mesh.cluster)
        self.mesh.check()
        self.mesh.is_sound = True

    def teardown(self) -> None:
        if not self.mesh.is_sound:
            return  # It has failed already.
        self.mesh.run_dry(LAST)
        check(self.mesh.cluster)
        self.mesh.check()
        SchedulerMachine.copies += self.mesh.copies
        SchedulerMachine.leases += self.mesh.leases


@pytest.mark.timeout(240)
def test_anything_may_happen_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_WAITING_PER_SLOT", 1)
    SchedulerMachine.steps = SchedulerMachine.copies = SchedulerMachine.leases = SchedulerMachine.waits = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            phases=(Phase.reuse, Phase.generate, Phase.shrink),
            max_examples=360,
            stateful_step_count=64,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert SchedulerMachine.steps >= STEPS
    assert SchedulerMachine.copies > 50, "second copies were hardly ever made"
    assert SchedulerMachine.leases > 1000, "cards were hardly ever used"
    assert SchedulerMachine.waits > 500, "tasks hardly ever waited for others"
