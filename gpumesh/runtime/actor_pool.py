"""The shell around LocalActors: the processes of one worker's actors are started, sent their calls, and heard.

coordinator ── RunTasks ──> here ── RunTasks, in order ──> process of the actor
coordinator <─ TasksFinished ─ here <─ TasksFinished ──── process of the actor
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Set, Tuple

from gpumesh.config import CANCEL_GRACE_SECONDS
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import (
    ActorReady,
    CancelCalls,
    EndActor,
    RunnerReady,
    RunTasks,
    SlotGranted,
    TasksFinished,
    TaskWaits,
)
from gpumesh.runtime.loop import Alarm
from gpumesh.runtime.page import CONCURRENT, FINISHED, FLUSH, INTERRUPT, ORDERS, SENT, SINCE, STARTED, WRITTEN
from gpumesh.runtime.pool_owner import PoolOwner
from gpumesh.runtime.runner_processes import Definitions, Process, ProcessUser
from gpumesh.scheduler import local
from gpumesh.scheduler.local_actor_parts import (
    Alive,
    CallFacts,
    CancelSent,
    CreationFacts,
    Drop,
    EndProcess,
    Key,
    Result,
    SlotsTaken,
)
from gpumesh.scheduler.local_actors import LocalActors

if TYPE_CHECKING:
    from gpumesh.runtime.pool import RunnerPool

_ACTOR = TaskSpec._fields.index("actor")
_TIMEOUT = TaskSpec._fields.index("timeout")
_EXPECTED = object()  # In the place of a payload whose inputs are not here.

Held = Tuple[Tuple[Any, ...], Tuple[str, ...], int, List[Key]]


class ActorPool(ProcessUser):
    """All actors of one worker.

    Args:
        pool: Of the same worker's runners.
        numbers: Of processes; shared with whoever else starts some.
        fail_environment: The ends of tasks whose environment's processes do not start.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: RunnerPool,
        definitions: Definitions,
        owner: PoolOwner,
        *,
        numbers: Iterator[int],
        fail_environment: Callable[[local.FailEnvironment], List[Result]],
    ) -> None:
        self.local = LocalActors(numbers=numbers)
        self._loop = loop
        self._pool = pool
        self._processes = pool.processes
        self._definitions = definitions
        self._owner = owner
        self._fail_environment = fail_environment
        self._callees: Dict[int, int] = {}  # Spec of calls -> their actor; of creations: 0.
        self._payloads: Dict[Key, Any] = {}  # Of what is here, until it is told or dropped.
        self._holding: Set[Key] = set()  # Those whose inputs lie in the store.
        self._alarm = Alarm(loop, self._on_time)
        self._is_closed = False

    def close(self) -> None:
        """Tell nothing any more; the processes are ended by whoever owns them."""
        self._is_closed = True
        self._alarm.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether no actor is here."""
        return self.local.is_idle

    def knows(self, spec: int) -> bool:
        """Whether a spec is of creations or calls."""
        return spec in self._callees

    # --- from the coordinator

    def define(self, number: int, spec: Tuple[Any, ...], *, threads: int, environment: int, slots: int) -> None:
        """A spec of creations or calls. `slots`: that each actor created by it takes for life."""
        actor = spec[_ACTOR]
        self._callees[number] = actor
        if actor:
            self.local.on_call_spec(number, CallFacts(actor, float(spec[_TIMEOUT])))
        else:
            self.local.on_creation_spec(number, CreationFacts(local.Kind(threads, environment), slots))

    def run(self, spec: int, tasks: Any, *, is_holding: bool, cards: Tuple[str, ...], ordinal: int) -> None:
        """Creations or calls arrived, with all they need: (task id, attempt, payload). Some of them may have been expected."""
        payloads = self._payloads
        now = self._loop.time()
        fresh: List[Tuple[int, int, Any]] = []
        for task in tasks:
            key = (task[0], task[1])
            is_expected = key in payloads
            payloads[key] = task[2]
            if is_holding:
                self._holding.add(key)
            if is_expected:
                self._perform(self.local.on_inputs(spec, key[0], key[1], now))
            else:
                fresh.append(task)
        if fresh:
            self._arrive(spec, fresh, cards, ordinal, is_here=True)

    def expect(self, spec: int, tasks: Any, *, cards: Tuple[str, ...], ordinal: int) -> List[Tuple[int, int, Any]]:
        """Creations or calls arrived, and the inputs of some are to be fetched: their places in the order are kept.

        Returns:
            Those that are wanted; `run` or `inputs_lost` follows for each.
        """
        for task in tasks:
            self._payloads[(task[0], task[1])] = _EXPECTED
        self._arrive(spec, tasks, cards, ordinal, is_here=False)
        return [task for task in tasks if (task[0], task[1]) in self._payloads]

    def inputs_lost(self, spec: int, task_id: int, attempt: int) -> None:
        """What was expected does not come; its end has been told."""
        if self._payloads.pop((task_id, attempt), None) is not None:
            self._perform(self.local.on_inputs_lost(spec, task_id, attempt, self._loop.time()))

    def callee(self, spec: int) -> int:
        """The actor that calls of this spec are for; 0 for creations."""
        return self._callees[spec]

    def _arrive(self, spec: int, tasks: Any, cards: Tuple[str, ...], ordinal: int, *, is_here: bool) -> None:
        now = self._loop.time()
        if self._callees[spec]:
            self._perform(self.local.on_called(spec, tasks, is_here=is_here, now=now))
            return
        for actor, attempt, _ in tasks:
            self._perform(self.local.on_created(spec, actor, attempt, cards=cards, ordinal=ordinal, is_here=is_here, now=now))

    def recall(self, tasks: Sequence[Key], *, kill: bool, force: bool) -> None:
        """The coordinator wants these back; some of them are ours."""
        self._perform(self.local.on_recalled(tasks, kill=kill, now=self._loop.time(), force=force))

    def drain(self) -> None:
        """The worker leaves."""
        self._perform(self.local.drain(self._loop.time()))

    def hand_back(self, cards: Optional[FrozenSet[str]], *, running: bool, grace_seconds: float = CANCEL_GRACE_SECONDS) -> None:
        """The machine's owner wants it back, or these cards."""
        self._perform(self.local.hand_back(cards, running=running, now=self._loop.time(), grace_seconds=grace_seconds))

    def accept(self, cards: Optional[FrozenSet[str]]) -> None:
        """The owner lends these again."""
        self.local.accept(cards)

    def abandon(self, *, has_store: bool) -> None:
        """The coordinator is lost, and with it the inputs of what is not here yet; without a store of our own, also of what is."""
        lost = frozenset() if has_store else frozenset(self._holding)
        self._perform(self.local.abandon(lost, self._loop.time()))

    def admitted(self, runner: int) -> None:
        """There is room on its cards for a process."""
        self._perform(self.local.on_admitted(runner, self._loop.time()))

    def held(self) -> List[Held]:
        """Every attempt that is here, each creation before its calls, in order."""
        specs = self._definitions.specs
        return [(specs[spec], cards, ordinal, tasks) for spec, cards, ordinal, tasks in self.local.held()]

    # --- acting

    def _perform(self, actions: List[Any]) -> None:
        processes = self._processes
        for action in actions:
            kind = type(action)
            if kind is local.Feed:
                self._feed(action)
            elif kind is local.Report:
                self._report(action.results)
            elif kind is Drop:
                self._drop(action.tasks)
            elif kind is local.Inspect:
                self._inspect(action.runner)
            elif kind is local.StartRunner:
                processes.start(
                    action.runner,
                    self,
                    threads=action.threads,
                    environment=action.environment,
                    cards=action.cards,
                    extra={"actor": True},
                )
                if action.cards:
                    self._pool.admit(action.runner, self.local.spec_of(action.runner), action.cards)
            elif kind is local.Interrupt:
                process = processes.by_number.get(action.runner)
                if process is not None:
                    process.page.words[INTERRUPT] = action.number
                    processes.signal(action.runner, signal.SIGINT)
            elif kind is local.AskResults:
                process = processes.by_number.get(action.runner)
                if process is not None:
                    process.page.words[FLUSH] += 1
                    processes.signal(action.runner, signal.SIGINT)
            elif kind is local.Kill:
                processes.signal(action.runner, signal.SIGKILL)
            elif kind is EndProcess:
                self._order(action.runner, EndActor())
            elif kind is CancelSent:
                self._order(action.runner, CancelCalls(action.tasks, action.status))
            elif kind is Alive:
                self._free_inputs((action.actor, action.attempt))
                self._owner.on_actor_alive(action.actor, action.attempt)
            elif kind is SlotsTaken:
                self._pool.use_slots()
            else:
                self._report(self._fail_environment(action))
        self._alarm.set(self.local.next_deadline())

    def _order(self, runner: int, message: Any) -> None:
        """Tell a process what it takes in before it starts another call."""
        process = self._processes.by_number.get(runner)
        if process is not None and process.link is not None:
            process.link.send(message)
            process.page.words[ORDERS] += 1

    def _feed(self, action: local.Feed) -> None:
        process = self._processes.by_number[action.runner]
        assert process.link is not None
        if action.spec not in process.specs:
            self._definitions.tell(process, action.spec)
        payloads = self._payloads
        if self._holding:
            for key in action.tasks:
                if key in self._holding:
                    self._owner.on_feeding(action.runner, key[0], payloads[key])
        process.link.send(RunTasks(action.spec, [(key[0], key[1], payloads[key]) for key in action.tasks]))

    def _inspect(self, runner: int) -> None:
        process = self._processes.by_number.get(runner)
        if process is not None:
            words = process.page.words
            started, finished = words[STARTED], words[FINISHED]
            since = process.page.floats[SINCE]
            self._perform(self.local.on_progress(runner, started, finished, words[SENT], since, self._loop.time()))

    def _report(self, results: List[Result]) -> None:
        payloads = self._payloads
        known: List[Result] = []
        for result in results:
            key = (result[0], result[1])
            if key in payloads:
                known.append(result)
                self._let_go(key)
        if known:
            self._owner.on_results(known)

    def _drop(self, keys: List[Key]) -> None:
        for key in keys:
            if key in self._payloads:
                self._let_go(key)

    def _let_go(self, key: Key) -> None:
        if self._payloads.pop(key) is _EXPECTED:
            self._owner.on_inputs_unwanted([key])
        elif self._holding:
            self._free_inputs(key)

    def _free_inputs(self, key: Key) -> None:
        if key in self._holding:
            self._holding.discard(key)
            self._owner.on_inputs_free(key[0])

    def _on_time(self, now: float) -> None:
        if not self._is_closed:
            self._perform(self.local.on_time(now))

    # --- from the processes

    def on_process_message(self, process: Process, kind: Any, message: Any) -> None:
        if kind is TasksFinished:
            results = message.results
            written = process.page.words[WRITTEN]
            if (
                written != process.written and results
            ):  # A look at the pipes for each result would cost every call a system call.
                process.written = written
                self._processes.drain_output(process, results[-1][0])
            self._perform(self.local.on_results(process.ident, results, self._loop.time()))
            self._owner.on_results_heard(results)
        elif kind is RunnerReady:
            self._perform(self.local.on_ready(process.ident, self._loop.time()))
        elif kind is ActorReady:
            is_side_by_side = bool(process.page.words[CONCURRENT])
            self._perform(self.local.on_alive(process.ident, self._loop.time(), is_side_by_side=is_side_by_side))
        elif kind is TaskWaits:
            if not message.waits and process.link is not None:
                process.link.send(SlotGranted(message.task_id))  # Calls take no slots, so there is always one.
        else:
            self._owner.on_runner_message(process.ident, kind, message)

    def on_process_down(self, process: Process, started: int, finished: int, details: Dict[str, Any]) -> None:
        if process.cards:
            self._pool.leave(process.ident)
        self._perform(self.local.on_runner_down(process.ident, started, finished, details, self._loop.time()))

    def running_task(self, process: Process) -> int:
        return self.local.task_at(process.ident, process.page.words[STARTED])
