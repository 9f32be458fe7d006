"""The shell around LocalPool: starts runners through the spawner, feeds them, reads their results, output and pages."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple, Union

from gpumesh.config import CANCEL_GRACE_SECONDS
from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, requirement_from_wire
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import DefineCode, RunnerReady, RunTasks, SlotGranted, TasksFinished, TaskWaits
from gpumesh.runtime.loop import Alarm
from gpumesh.runtime.page import FINISHED, FLUSH, INTERRUPT, KEPT, REVOKED, SENT, SINCE, STARTED
from gpumesh.runtime.pool_owner import PoolOwner as PoolOwner
from gpumesh.runtime.runner_processes import Definitions, Process, ProcessUser, RunnerProcesses
from gpumesh.runtime.spawner_link import Launch as Launch
from gpumesh.scheduler import local

if TYPE_CHECKING:
    from gpumesh.runtime.actor_pool import ActorPool
    from gpumesh.runtime.environments import Environment, Environments
    from gpumesh.runtime.readings import Holders
    from gpumesh.scheduler.leases import GuestAdmitted, LeaseHealth, Leases

logger = logging.getLogger(__name__)

_REQUIREMENT = TaskSpec._fields.index("requirement")
_PACKAGES = TaskSpec._fields.index("packages")
_SCRIPT = TaskSpec._fields.index("script")
_PLAN = TaskSpec._fields.index("plan")
_ACTOR = TaskSpec._fields.index("actor")
_DEPTH = TaskSpec._fields.index("depth")


class RunnerPool(ProcessUser):
    """All runners of one worker.

    Args:
        spawner: The channel to a spawner that is somebody else's, or what starts one of this pool's own; the latter is started
            again, as late as its runners are, whenever it has ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spawner: Union[socket.socket, Launch],
        owner: PoolOwner,
        *,
        slots: int,
        cores: int,
        path: Optional[List[str]] = None,
        folder: str = "",
        label: str = "",
        devices: Sequence[DeviceFacts] = (),
    ) -> None:
        self.slots = slots
        self.cores = cores
        self.label = label  # Of this worker, for people.
        self._runner_numbers = itertools.count(1)
        self.local = local.LocalPool(slots=slots, threads=max(1, cores // slots), numbers=self._runner_numbers)
        self._leases: Optional[Leases] = None  # Once a task has come for a card, or an owner has asked one back.
        self.actors: Optional[ActorPool] = None  # Once a spec is that of an actor, or of calls.
        self._devices = tuple(devices)
        self._problems = ["", ""]  # Of the slots, of the leases.
        self._loop = loop
        self.processes = RunnerProcesses(
            loop, spawner, owner, path=path, folder=folder, label=label, devices=devices, on_lost=self.close
        )
        self.turn = self.processes.turn  # Shared with the agent's link to the coordinator.
        self._environments: Optional[Environments] = None  # Once a spec names packages.
        self._owner = owner
        self._path = path
        self._processes = self.processes.by_number
        self._definitions = Definitions()
        self._payloads: Dict[int, Any] = {}  # task id -> payload, until reported.
        self._doubled: Dict[
            int, int
        ] = {}  # Task with several attempts here, as an earlier one is being ended -> how many more.
        self._holding: Set[int] = set()  # Those of them whose inputs lie in the store.
        self._packed_scripts: Set[int] = set()  # Those of them that are scripts and run in an environment.
        self._specs = self._definitions.specs
        self._alarm = Alarm(loop, self._on_time)
        self._is_closed = False
        self._is_draining = False
        self._is_withheld = False  # All of it, by the machine's owner; ...
        self._withheld_cards: FrozenSet[str] = frozenset()  # ... or these cards.
        self._lent_slots = slots

    def start(self) -> None:
        """Bring the runners up; returns at once."""
        self._perform(self.local.start(self._loop.time()))

    def close(self) -> None:
        """End all runners; their tasks are not reported any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._environments is not None:
            self._environments.close()
        self._alarm.cancel()
        if self.actors is not None:
            self.actors.close()
        self.processes.close()

    @property
    def is_idle(self) -> bool:
        """Whether no task is here."""
        return not self._payloads and (self.actors is None or self.actors.is_idle)

    def card_holders(self) -> Holders:
        """Which runners there are, for whoever counts what others hold of the cards, and on which cards they are."""
        from gpumesh.runtime.readings import Holders

        pids: List[int] = []
        keys: Set[str] = set()
        for process in self._processes.values():
            if process.pid:
                pids.append(process.pid)
                keys.update(process.cards)
        return Holders(pids, keys)

    def change_devices(self, devices: Sequence[DeviceFacts]) -> None:
        """What this machine has, and the owner lends. Processes that have been started see what they see."""
        self._devices = self.processes.devices = tuple(devices)
        if self._leases is not None:
            self._leases.on_devices(self._devices)

    # --- from the coordinator

    def define_function(self, digest: bytes, body: Any) -> None:
        """Keep a function's body for the runners that need it."""
        self._definitions.define(digest, body)

    def define_code(self, code: DefineCode) -> None:
        """Keep modules that come with functions, in the same way."""
        self._definitions.define(code.digest, code)

    def define_spec(self, spec: Tuple[Any, ...], *, cores: int, timeout: float) -> int:
        """The pool's own number of a spec; the same spec has the same number for the life of the pool."""
        number, is_new = self._definitions.number(spec)
        if is_new:
            per_slot = max(1, self.cores // self.slots)
            width = -(-cores * self.slots // self.cores) if cores else 1
            threads = min(self.cores, max(per_slot, cores))
            packages = spec[_PACKAGES] if len(spec) > _PACKAGES else ()
            environment = self._define_environment(number, packages) if packages else local.OWN_ENVIRONMENT
            if len(spec) > _ACTOR and (spec[_ACTOR] or spec[_PLAN] is not None):
                slots = min(width, self.slots) if cores else 0
                self._open_actors().define(number, spec, threads=threads, environment=environment, slots=slots)
                return number
            depth = spec[_DEPTH] if len(spec) > _DEPTH else 0
            self.local.on_spec(number, timeout=timeout, width=width, threads=threads, environment=environment, depth=depth)
        return number

    def run(self, spec: int, tasks: Any, *, is_holding: bool = False, cards: Tuple[str, ...] = (), ordinal: int = 0) -> None:
        """Attempts arrived: (task id, attempt, payload).

        Args:
            spec: What `define_spec` has returned.
            tasks: To be run in this order.
            is_holding: Their inputs lie in the store.
            cards: DeviceFacts.key of those they run on, beside the slots, in a process that sees no others.
            ordinal: Which of the processes with these cards.
        """
        if self.actors is not None and self.actors.knows(spec):
            if not self._refuses(spec, tasks):
                self.actors.run(spec, tasks, is_holding=is_holding, cards=tuple(cards), ordinal=ordinal)
            return
        payloads = self._payloads
        if is_holding:
            self._holding.update(task[0] for task in tasks)
        for task_id, _, payload in tasks:
            if task_id in payloads:
                self._doubled[task_id] = self._doubled.get(task_id, 0) + 1
            payloads[task_id] = payload
        if self._environments is not None and not self.local.is_draining:
            fields = self._specs[spec]
            if len(fields) > _SCRIPT and fields[_SCRIPT] and fields[_PACKAGES]:
                self._packed_scripts.update(task[0] for task in tasks)
            obstacle = self._environments.obstacle(spec)
            if obstacle is not None:
                self._report(self._turned_away([(task[0], task[1]) for task in tasks], obstacle))
                return
        now = self._loop.time()
        if not cards:
            self._perform(self.local.on_arrived(spec, tasks, now))
            return
        leases = self._open_leases()
        if not leases.knows(spec):
            facts = self.local.spec(spec)
            need = requirement_from_wire(self._specs[spec][_REQUIREMENT])
            leases.on_spec(spec, timeout=facts.timeout, kind=facts.kind, need=need, depth=facts.depth)
        self._perform(leases.on_arrived(tuple(cards), ordinal, spec, tasks, now))

    def expect(self, spec: int, tasks: Any, *, cards: Tuple[str, ...], ordinal: int) -> List[Tuple[int, int, Any]]:
        """Creations or calls of actors arrived, and the inputs of some are to be fetched: see `ActorPool.expect`."""
        assert self.actors is not None
        if self._refuses(spec, tasks):
            return []
        return self.actors.expect(spec, tasks, cards=cards, ordinal=ordinal)

    def _refuses(self, spec: int, tasks: Any) -> bool:
        """Whether these are creations that cannot be here because their environment is not; that is told."""
        if self._environments is None or self.local.is_draining:
            return False
        obstacle = self._environments.obstacle(spec)
        if obstacle is None:
            return False
        self._owner.on_results(self._turned_away([(task[0], task[1]) for task in tasks], obstacle))
        return True

    def recall(self, tasks: Any, *, kill: bool, force: bool = False) -> None:
        """The coordinator wants these back."""
        now = self._loop.time()
        self._perform(self.local.on_recalled(tasks, kill=kill, now=now, force=force))
        if self._leases is not None:
            self._perform(self._leases.on_recalled(tasks, kill=kill, now=now, force=force))
        if self.actors is not None:
            self.actors.recall(tasks, kill=kill, force=force)

    def drain(self) -> None:
        """Give back what has not started, finish what has."""
        self._is_draining = True
        self._perform(self.local.drain())
        if self._leases is not None:
            self._perform(self._leases.drain(self._loop.time()))
        if self.actors is not None:
            self.actors.drain()

    def hand_back(
        self, *, running: bool, cards: Optional[FrozenSet[str]] = None, grace_seconds: float = CANCEL_GRACE_SECONDS
    ) -> None:
        """The machine's owner wants it back, or the cards with these keys: what has not started is reported as NOT_RUN, now and until
        `accept`.

        Args:
            running: End what runs too, as HANDED_BACK.
            cards: Only tasks whose lease has one of these cards; None: all tasks.
            grace_seconds: From the interrupt to the kill.
        """
        now = self._loop.time()
        if cards is None:
            self._is_withheld = True
            self._perform(self.local.hand_back(running=running, now=now, grace_seconds=grace_seconds))
        if cards is not None or self._leases is not None:
            self._perform(self._open_leases().hand_back(cards, running=running, now=now, grace_seconds=grace_seconds))
        self._withheld_cards |= cards or frozenset()
        if self.actors is not None:
            self.actors.hand_back(cards, running=running, grace_seconds=grace_seconds)

    def accept(self, cards: Optional[FrozenSet[str]] = None) -> None:
        """The owner lends everything again, or these cards; cards that were asked back by name stay so until they are named here."""
        if cards is None:
            self._is_withheld = False
            self.local.accept()
        self._withheld_cards -= cards or frozenset()
        if self._leases is not None:
            self._leases.accept(cards)
        if self.actors is not None:
            self.actors.accept(cards)

    def allow(self, slots: int) -> None:
        """Use no more than so many slots for tasks without a card."""
        self._lent_slots = slots
        self.use_slots()

    def use_slots(self) -> None:
        """Those that are lent and belong to no actor."""
        taken = self.actors.local.slots_taken if self.actors is not None else 0
        self._perform(self.local.allow(max(1, self._lent_slots - taken), self._loop.time()))

    def held(self) -> List[Tuple[Tuple[Any, ...], Tuple[str, ...], int, List[Tuple[int, int]]]]:
        """Every attempt that is here, in order: (spec, cards, ordinal, [(task id, attempt), ...]) of each spec on each lease."""
        found: Dict[Tuple[int, Tuple[str, ...], int], List[Tuple[int, int]]] = {}
        leased = self._leases.tasks() if self._leases is not None else []
        for (cards, ordinal), tasks in [(((), 0), self.local.tasks()), *leased]:
            for task in tasks:
                if task.task_id in self._payloads:
                    found.setdefault((task.spec, cards, ordinal), []).append((task.task_id, task.attempt))
        held = [(self._specs[spec], cards, ordinal, tasks) for (spec, cards, ordinal), tasks in found.items()]
        return held if self.actors is None else [*held, *self.actors.held()]

    def waiting(self) -> List[Tuple[int, int]]:
        """Of these, (task id, attempt), those that wait for others, and take no slots."""
        tasks = [*self.local.waiting(), *(self._leases.waiting() if self._leases is not None else ())]
        return [(task.task_id, task.attempt) for task in tasks]

    def give_back_holding(self) -> None:
        """What has inputs in the store and has not started goes back: the store cannot be relied on any more."""
        if self._holding:
            everything = [
                *self.local.tasks(),
                *(task for _, tasks in (self._leases.tasks() if self._leases else ()) for task in tasks),
            ]
            self.recall([(task.task_id, task.attempt) for task in everything if task.task_id in self._holding], kill=False)
        if self.actors is not None:
            self.actors.abandon(has_store=False)

    def send(self, runner: int, message: Any) -> bool:
        """Tell a runner something; False if it is gone."""
        return self.processes.send(runner, message)

    def end(self, runner: int) -> None:
        """Kill a runner; another takes its place."""
        self.processes.signal(runner, signal.SIGKILL)

    # --- acting

    def _perform(self, actions: List[Any]) -> None:
        for action in actions:
            kind = type(action)
            if kind is local.Report:
                self._report(action.results)
            elif kind is local.Feed:
                self._feed(action)
            elif kind is local.Inspect:
                self._inspect(action.runner)
            elif kind is local.StartRunner:
                self.processes.start(
                    action.runner, self, threads=action.threads, environment=action.environment, cards=action.cards
                )
            elif kind is local.Revoke:
                self._processes[action.runner].page.words[REVOKED] = action.number
            elif kind is local.Interrupt:
                self._processes[action.runner].page.words[INTERRUPT] = action.number
                self.processes.signal(action.runner, signal.SIGINT)
            elif kind is local.AskResults:
                self._processes[action.runner].page.words[FLUSH] += 1
                self.processes.signal(action.runner, signal.SIGINT)
            elif kind is local.Kill:
                self.processes.signal(action.runner, signal.SIGKILL)
            elif kind is local.Health:
                self._tell_health(0, action.problem)
            elif kind is local.FailEnvironment:
                self._report(self._failures_of(action))
            elif kind is local.Grant:
                self.processes.send(action.runner, SlotGranted(action.task_id))
            elif kind is local.Waits:
                self._owner.on_tasks_wait([(action.task_id, action.attempt)], waits=action.waits)
            else:
                self._perform_of_leases(action)
        self._arm()

    def _perform_of_leases(self, action: Union[LeaseHealth, GuestAdmitted]) -> None:
        from gpumesh.scheduler.leases import LeaseHealth

        if isinstance(action, LeaseHealth):
            self._tell_health(1, action.problem)
        elif self.actors is not None:
            self.actors.admitted(action.guest)

    def admit(self, runner: int, spec: int, cards: Tuple[str, ...]) -> None:
        """The process of an actor is to have these cards: `ActorPool.admitted` follows when they have room for it."""
        need = requirement_from_wire(self._specs[spec][_REQUIREMENT])
        self._perform(self._open_leases().admit(runner, cards, need))

    def leave(self, runner: int) -> None:
        """That process is gone."""
        if self._leases is not None:
            self._leases.leave(runner)

    def _tell_health(self, place: int, problem: str) -> None:
        """Slots and leases tell of their own; what keeps either from running tasks is told."""
        before = self._problems[0] or self._problems[1]
        self._problems[place] = problem
        problem = self._problems[0] or self._problems[1]
        if problem != before:
            self._owner.on_health(problem)

    def _open_leases(self) -> Leases:
        if self._leases is None:
            from gpumesh.scheduler.leases import Leases

            self._leases = Leases(threads=self.local.plain.threads, numbers=self._runner_numbers)
            self._leases.on_devices(self._devices)
            if self._is_withheld:
                self._leases.hand_back(None, running=False, now=self._loop.time())
            if self._is_draining:
                self._leases.drain(self._loop.time())
        return self._leases

    def _open_actors(self) -> ActorPool:
        if self.actors is None:
            from gpumesh.runtime.actor_pool import ActorPool

            self.actors = ActorPool(
                self._loop,
                self,
                self._definitions,
                self._owner,
                numbers=self._runner_numbers,
                fail_environment=self._failures_of,
            )
            if self._is_withheld:
                self.actors.hand_back(None, running=False)
            if self._withheld_cards:
                self.actors.hand_back(self._withheld_cards, running=False)
            if self._is_draining:
                self.actors.drain()
        return self.actors

    def _brain(self, runner: int) -> Union[local.LocalPool, Leases]:
        """Who decides about a runner."""
        if self._leases is not None and runner in self._leases:
            return self._leases
        return self.local

    def _report(self, results: List[Tuple[int, int, int, Any, float]]) -> None:
        payloads = self._payloads
        if self._doubled:
            known = [
                result for result in results if self._halve(result[0]) or payloads.pop(result[0], payloads) is not payloads
            ]
        else:
            known = [result for result in results if payloads.pop(result[0], payloads) is not payloads]
        if self._holding:
            for result in known:
                if result[0] in self._holding:
                    self._holding.discard(result[0])
                    self._owner.on_inputs_free(result[0])
        if self._packed_scripts:
            self._packed_scripts.difference_update(result[0] for result in known)
        if known:
            self._owner.on_results(known)

    def _halve(self, task_id: int) -> bool:
        """Whether one of several attempts at a task has ended, and another is still here."""
        more = self._doubled.pop(task_id, 0)
        if more > 1:
            self._doubled[task_id] = more - 1
        return more > 0

    def _feed(self, action: local.Feed) -> None:
        process = self._processes[action.runner]
        assert process.link is not None
        spec = action.spec
        if spec not in process.specs:
            self._definitions.tell(process, spec)
        payloads = self._payloads
        if self._holding:
            for task, _ in action.tasks:
                if task in self._holding:
                    self._owner.on_feeding(action.runner, task, payloads[task])
        process.link.send(RunTasks(spec, [(task, attempt, payloads[task]) for task, attempt in action.tasks]))

    def _inspect(self, ident: int) -> None:
        page = self._processes[ident].page
        started, finished = page.words[STARTED], page.words[FINISHED]
        actions = self._brain(ident).on_progress(
            ident, started, finished, page.words[SENT], page.floats[SINCE], self._loop.time()
        )
        self._perform(actions)

    def _arm(self) -> None:
        due = self.local.next_deadline()
        if self._leases is not None:
            other = self._leases.next_deadline()
            if other is not None and (due is None or other < due):
                due = other
        self._alarm.set(due)

    def _on_time(self, now: float) -> None:
        if self._is_closed:
            return
        if self._leases is not None:
            self._perform(self._leases.on_time(now))
        self._perform(self.local.on_time(now))

    # --- environments

    def _define_environment(self, spec: int, packages: Tuple[Any, ...]) -> int:
        if self._environments is None:
            from gpumesh.runtime.environments import Environments

            self._environments = Environments(
                self._loop,
                self._path or sys.path,
                on_change=self._on_environments_changed,
                on_idle=self._on_environment_idle,
            )
        environment = self._environments.define(spec, packages)
        self.processes.add_spawner(environment.number, functools.partial(self._environments.launch, environment))
        return environment.number

    def _on_environments_changed(self) -> None:
        if self._environments is not None and not self._is_closed:
            self._owner.on_installing(self._environments.under_way())

    def _turned_away(self, tasks: List[Tuple[int, int]], obstacle: Environment) -> List[Tuple[int, int, int, Any, float]]:
        """They come again when the environment is built; or it cannot be, and that is their end."""
        if not obstacle.is_building:
            return obstacle.failures(tasks, where=self.label, scripts=self._packed_scripts)
        if not obstacle.is_announced:
            obstacle.is_announced = True
            self._owner.on_output(tasks[0][0], 2, obstacle.announcement(where=self.label).encode())
        return [(task_id, attempt, int(Status.NOT_RUN), {}, 0.0) for task_id, attempt in tasks]

    def _failures_of(self, action: local.FailEnvironment) -> List[Tuple[int, int, int, Any, float]]:
        assert self._environments is not None
        environment = self._environments.by_number(action.environment)
        environment.fail(describe_start(action.details), self._loop.time())
        return environment.failures(action.tasks, where=self.label, scripts=self._packed_scripts)

    def _on_environment_idle(self, environment: Environment) -> None:
        """Its processes end; the next task starts others."""
        self._perform(self.local.retire(environment.number))
        if self._leases is not None:
            self._perform(self._leases.retire(environment.number, self._loop.time()))
        self.processes.close_spawner(environment.number)

    # --- from the processes

    def on_process_message(self, process: Process, kind: Any, message: Any) -> None:
        if kind is TasksFinished:
            results = message.results
            if results:
                self.processes.drain_output(process, results[-1][0])
            if self._leases is not None and process.ident in self._leases:
                self._leases.on_kept(process.ident, process.page.words[KEPT] - 1)
            self._perform(self._brain(process.ident).on_results(process.ident, results, self._loop.time()))
            self._owner.on_results_heard(results)
        elif kind is TaskWaits:
            brain = self._brain(process.ident)
            self.processes.nests = True
            self._perform(brain.on_waits(process.ident, message.task_id, self._loop.time(), waits=message.waits))
        elif kind is RunnerReady:
            self._perform(self._brain(process.ident).on_ready(process.ident, self._loop.time()))
        else:
            self._owner.on_runner_message(process.ident, kind, message)

    def on_process_down(self, process: Process, started: int, finished: int, details: Dict[str, Any]) -> None:
        brain = self._brain(process.ident)
        self._perform(brain.on_runner_down(process.ident, started, finished, details, self._loop.time()))

    def running_task(self, process: Process) -> int:
        return self._brain(process.ident).task_at(process.ident, process.page.words[STARTED])

    def resume_output(self) -> None:
        """The owner takes output again."""
        self.processes.resume_output()


def describe_start(details: Dict[str, Any]) -> str:
    """Why a process does not start, for people."""
    lines = str(details.get("stderr", "")).strip().splitlines()
    said = "\n".join(f"  {line}" for line in lines)
    return f"its processes do not start (exit code {details.get('exit')}): {details.get('reason') or 'they said last:'}\n{said}".rstrip()
