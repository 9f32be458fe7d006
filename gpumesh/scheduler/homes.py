"""On which worker an actor lives. Changes nothing.

An actor is there for long and idle for most of it, so what counts is not when it would begin but whom it shares the machine with: the worker with
the fewest actors and tasks for its speed, or the one whose cards are the fastest for what it needs. Members of a group are spread or packed first.
"""

from __future__ import annotations

from typing import Iterable, Optional, Sequence, Tuple

from gpumesh.config import MAX_ACTORS_PER_WORKER
from gpumesh.model.resources import Requirement
from gpumesh.scheduler.actor_states import Actor
from gpumesh.scheduler.states import Worker, WorkerState


def slots_of(worker: Worker, need: Requirement) -> int:
    """Slots that an actor takes for its life: those of the cores that it asks for, none if it asks for none or lives on cards."""
    if need.needs_gpu or not need.cores:
        return 0
    return worker.width_of(need) or 0


def can_ever_live(worker: Worker, need: Requirement) -> bool:
    """Whether a worker could have an actor with this requirement if nothing else were there."""
    return worker.state is WorkerState.HEALTHY and worker.width_of(need) is not None


def has_room(worker: Worker, need: Requirement, depth: int = 0) -> bool:
    """Whether it could have one now."""
    if not can_ever_live(worker, need) or len(worker.actors) >= MAX_ACTORS_PER_WORKER:
        return False
    if need.needs_gpu:
        return worker.cards is not None and worker.cards.can_open(need, depth)
    held = sum(batch.width for batch in worker.actors.values())
    return held + slots_of(worker, need) <= worker.slots


def choose_home(actor: Actor, workers: Iterable[Worker], members: Sequence[Actor]) -> Optional[Worker]:
    """The worker that an actor is to live on; None if nobody has room for it now.

    Args:
        actor: It has a spec.
        workers: All that are connected, in order of joining.
        members: The others of its group.
    """
    assert actor.spec is not None, actor.id
    spec = actor.spec
    need = spec.group.need
    best: Optional[Worker] = None
    best_rank: Tuple[float, float] = (0.0, 0.0)
    placement = actor.plan.placement
    for worker in workers:
        if not has_room(worker, need, spec.group.depth) or (worker.facts.installing and worker.is_installing(spec.group)):
            continue
        together = sum(member.worker is worker for member in members) if placement else 0
        rank = (float(together if placement == "spread" else -together), _crowd(worker, need))
        if best is None or rank < best_rank:
            best, best_rank = worker, rank
    return best


def _crowd(worker: Worker, need: Requirement) -> float:
    """How much an actor would share a worker with others; less is better."""
    if need.needs_gpu:
        score = worker.prior(need)
        return (1 + len(worker.leases)) / score if score > 0 else 1e9
    return (1 + len(worker.actors) + min(worker.load, worker.slots)) / max(1e-9, worker.speed * worker.slots)
