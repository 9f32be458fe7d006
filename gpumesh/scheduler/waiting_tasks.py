"""Tasks that wait for other tasks: they keep their process, and take no slot. Pure.

A worker tells when a task of its begins to wait for others, and when it wants to go on. In between its slot is given to somebody else, the deepest
that is ready first (`DEPTH_PRIORITY`): a child of a task that waits rather than one more task that would wait as well. So few wait at a time,
however many there are. Where too many do all the same, since what they wait for cannot begin, only what is deeper is begun
(`Worker.is_crowded`).

A task under a lease of cards keeps it, and its memory there, but lends it to deeper tasks while it waits: the one it waits for may need
that very card.

What waits has been started: with a worker that is lost it is lost like what executes. A worker that is back tells anew who waits.
"""

from __future__ import annotations

from typing import Iterable, List

from gpumesh.config import WAIT_SETTLE_SECONDS
from gpumesh.model.ids import ClientNumber
from gpumesh.scheduler import events as ev
from gpumesh.scheduler.actions import Action
from gpumesh.scheduler.flow import UNCAPPED
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.returns import Returns
from gpumesh.scheduler.states import Batch, Worker


class WaitingTasks(Returns):
    """See the module."""

    def _on_tasks_wait(self, event: ev.TasksWait, now: float, actions: List[Action]) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        above = -1
        for task_id, attempt in event.tasks:
            batch = worker.assigned.get(task_id)
            if batch is not None and batch.attempt == attempt:
                worker.assigned[task_id] = self._changed(worker, batch, now, waits=event.waits)
                if event.waits:
                    above = max(above, batch.spec.spec.depth)
                continue
            batch = worker.orphans.get((task_id, attempt))
            if batch is not None and not batch.spec.is_of_actor:
                worker.orphans[task_id, attempt] = self._changed(worker, batch, now, waits=event.waits)
        self._refill(worker, now, actions, above=above)
        if self._awaited:
            self._look_at_actors(now, actions)

    def _about_to_go_on(self, clients: Iterable[ClientNumber]) -> int:
        """How deep the deepest tasks are that will go on in a moment, as all that they had submitted has ended; -1: none will."""
        deepest = 0
        for number in clients:
            client = self._clients.get(number)
            if client is not None and not client.pending:
                deepest = max(deepest, max((spec.spec.depth for spec in client.specs.values()), default=0))
        return deepest - 1

    def _spare(self, group: Group, now: float) -> None:
        """A slot is kept from these for a moment: what is waited for may be on its way, or who has waited for it."""
        if group.count and group not in self._held:
            self._held[group] = UNCAPPED
            self._look_again(now + WAIT_SETTLE_SECONDS)

    def _forget_waits(self, worker: Worker, now: float) -> None:
        """It is back, and will say who waits."""
        if worker.waits:
            for task_id, batch in worker.assigned.items():
                worker.assigned[task_id] = self._changed(worker, batch, now, waits=False)
            for key, batch in worker.orphans.items():
                worker.orphans[key] = self._changed(worker, batch, now, waits=False)

    @staticmethod
    def _changed(worker: Worker, batch: Batch, now: float, *, waits: bool) -> Batch:
        """The batch of a task that waits from now on, or goes on."""
        if (batch.waiting >= 0) is waits:
            return batch
        other = batch.paused(now) if waits else batch.resumed(now)
        worker.add(other, 1)  # First: the last task of a lease closes it.
        worker.remove(batch, 1)
        return other
