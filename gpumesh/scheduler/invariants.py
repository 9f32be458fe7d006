"""check(): every promise between the tables of a cluster that can be seen between two events, numbered. For tests and for debugging.

Each costs a walk over all tables, so nothing in the running program calls it.
"""

from __future__ import annotations

from math import isclose
from typing import Dict, List, Tuple

from gpumesh.model.ids import SEQUENCE_BITS, ClientNumber
from gpumesh.scheduler.actor_states import Actor, ActorState
from gpumesh.scheduler.cards import Lease
from gpumesh.scheduler.cluster import Cluster
from gpumesh.scheduler.confinement import ANYWHERE
from gpumesh.scheduler.dependencies import Waiting
from gpumesh.scheduler.states import Spec, Worker, WorkerState


def check(cluster: Cluster) -> None:
    """Raise AssertionError, with the number of the promise and what breaks it, if the tables disagree."""
    _check_places(cluster)
    _check_workers(cluster)
    _check_groups(cluster)
    _check_clients(cluster)
    _check_odds(cluster)
    _check_actors(cluster)
    cluster._locality.check(cluster._tasks, cluster._workers)


def _check_places(cluster: Cluster) -> None:
    places: Dict[int, List[object]] = {}
    for group in cluster._queues.groups.values():
        for lane in group.lanes.values():
            for task_id in lane.living():
                places.setdefault(task_id, []).append(group)
    for worker in cluster._workers.values():
        for task_id in worker.assigned:
            places.setdefault(task_id, []).append(worker)
    pairs = cluster._dependencies.pairs()
    waits: Dict[int, Dict[int, None]] = {}
    for task_id, producer in pairs:
        waits.setdefault(task_id, {})[producer] = None
        assert producer in cluster._tasks, f"26: task {task_id} waits for {producer}, which has ended"
    for task_id, producers in waits.items():
        waiting = cluster._tasks.get(task_id)
        assert isinstance(waiting, Waiting), f"26: task {task_id} waits for others and is not in that state"
        assert waiting.missing == producers, f"26: task {task_id} and those that it waits for disagree"
        places.setdefault(task_id, []).append(waiting)
    for task_id, delayed in cluster._delays:
        assert cluster._tasks.get(task_id) is delayed, f"36: task {task_id} waits for another try and is not in that state"
        places.setdefault(task_id, []).append(delayed)
    cluster._delays.check()
    for spec, recovering in cluster._recovering.items():
        assert recovering.spec is spec, "33: tasks are held back under another's spec"
        assert recovering.ids, "33: nothing is held back under a spec"
        for task_id in recovering.ids:
            places.setdefault(task_id, []).append(recovering)
    for actor in cluster._actors.values():
        if actor.spec is not None:
            places.setdefault(actor.id, []).append(actor)
        lined = [task_id for line in actor.lines.values() for task_id, spec in line.items() if spec is not None]
        for task_id in [*actor.parked, *actor.calls, *lined]:
            if task_id in cluster._tasks or task_id not in lined:
                places.setdefault(task_id, []).append(actor)
    cluster._patience.check()
    assert not cluster._deserted, "37: tasks are left to those who are gone"
    for task_id, found in places.items():
        where = cluster._tasks.get(task_id)
        copies = cluster._copies.get(task_id)
        if copies is not None:
            assert len(copies) > 1, f"27: task {task_id} has one attempt under way, but counts as copied"
            assert set(found) == set(copies), f"27: task {task_id} is not where its copies are"
            assert isinstance(where, Worker), f"27: task {task_id} has copies and is on no worker"
            assert where in copies, f"27: task {task_id} is on a worker that is not among its copies'"
            assert where.assigned[task_id].spec.is_repeatable, f"27: task {task_id} runs twice and must not"
            attempts = [worker.assigned[task_id].attempt for worker in copies]
            assert len(set(attempts)) == len(attempts), f"27: two attempts at task {task_id} have the same number"
            continue
        assert len(found) == 1, f"1: task {task_id} is in {len(found)} places"
        if isinstance(where, Spec):
            assert where.group is found[0], f"2: ready task {task_id} is not in the queue of its spec"
            assert task_id in where.group.lanes[where.client.number].living(), f"2: ready task {task_id} is in another's lane"
        else:
            assert where is found[0], f"2: assigned task {task_id} is not where the table of tasks says"
    assert len(places) == len(cluster._tasks), f"3: {len(cluster._tasks)} tasks, but {len(places)} of them are somewhere"


def _check_workers(cluster: Cluster) -> None:
    healthy = 0
    for ident, worker in cluster._workers.items():
        assert ident == worker.id, f"4: worker {worker.id} is filed under {ident}"
        lives = [batch for batch in [*worker.actors.values(), *worker.orphans.values()] if batch.spec.is_of_actor]
        batches = [*worker.assigned.values(), *(batch for batch in worker.orphans.values() if not batch.spec.is_of_actor)]
        load = sum(batch.width for batch in lives) + sum(batch.width for batch in batches)
        assert worker.load == load, f"5: worker {ident} has a load of {worker.load}, but {load} slots' worth of tasks"
        foreign: Dict[Tuple[str, ...], int] = {}
        for batch in batches:
            packages = batch.spec.group.packages
            if packages and batch.waiting < 0:
                foreign[packages] = foreign.get(packages, 0) + batch.width
        assert worker.foreign == foreign, f"5: worker {ident} has miscounted its load in environments"
        specs: Dict[Spec, int] = {}
        leases: Dict[Lease, int] = {}
        waits: Dict[int, int] = {}
        for batch in batches:
            if batch.waiting >= 0:
                waits[batch.spec.spec.depth] = waits.get(batch.spec.spec.depth, 0) + 1
                assert not batch.width, f"45: a task that waits takes {batch.width} slots of worker {ident}"
                assert batch.lease is None or batch.lease.is_lent, f"45: the cards of a task that waits at {ident} are not lent"
            elif batch.lease is None:
                specs[batch.spec] = specs.get(batch.spec, 0) + 1
            if batch.lease is not None:
                leases[batch.lease] = leases.get(batch.lease, 0) + 1
        assert worker.specs == specs, f"6: worker {ident} has miscounted its tasks by spec"
        assert worker.waits == waits, f"45: worker {ident} has miscounted its tasks that wait"
        lent = sum(batch.lease is not None and batch.waiting >= 0 for batch in batches)
        assert worker.cards is None or len(worker.cards.lent) == lent, f"45: worker {ident} lends cards for nobody"
        assert worker.leases == leases, f"28: worker {ident} has miscounted its tasks by lease"
        booked = set(worker.cards.leases) if worker.cards is not None else set()
        assert booked == {*leases, *(batch.lease for batch in lives if batch.lease is not None)}, (
            f"28: worker {ident} has booked cards for other leases than those in use"
        )
        takes = worker.state is WorkerState.HEALTHY
        healthy += takes
        is_away = worker.away_until is not None
        assert (worker in cluster._away) == is_away, f"34: worker {ident} is wrongly (not) among those that are away"
        healthy += is_away and worker.is_counted
        assert is_away or worker.is_counted == takes, f"10: worker {ident} is wrongly (not) counted as healthy"
        assert (worker in cluster._idle) == (takes and load < worker.slots), (
            f"7: worker {ident} is wrongly (not) among the idle"
        )
        assert (worker in cluster._stacked) == (load > worker.slots and not is_away), (
            f"7: worker {ident} is wrongly (not) among the stacked"
        )
        for task_id in worker.recalled:
            assert task_id in worker.assigned, f"8: task {task_id} was recalled from worker {ident}, which does not have it"
        for (task_id, attempt), batch in worker.orphans.items():
            assert batch.attempt == attempt, f"9: orphan {task_id} runs as attempt {batch.attempt}, not {attempt}"
            assert attempt in cluster._orphans[task_id], f"9: orphan {task_id} is not in the table of orphans"
    orphans = sum(len(worker.orphans) for worker in cluster._workers.values())
    assert orphans == sum(map(len, cluster._orphans.values())), "9: an orphan is on no worker"
    assert healthy == cluster._healthy, f"10: {healthy} workers are healthy, but {cluster._healthy} were told"
    order = [(-worker.speed, worker.id) for worker in cluster._idle]
    assert order == sorted(order), "7: the idle are not in the order of their speed"
    for worker in [*cluster._idle, *cluster._stacked]:
        assert cluster._workers.get(worker.id) is worker, (
            f"7: worker {worker.id} is gone, but still among the idle or the stacked"
        )


def _check_groups(cluster: Cluster) -> None:
    listed = list(cluster._queues._ready)
    assert len(set(map(id, listed))) == len(listed), "11: a group is listed twice"
    ready = [group for group in cluster._queues.groups.values() if group.count]
    assert sorted(map(id, listed)) == sorted(map(id, ready)), (
        "11: the list of ready groups is not that of those with ready tasks"
    )
    for key, group in cluster._queues.groups.items():
        assert key == group.key, f"12: the group of {key} is filed wrongly"
        able: Dict[Worker, int] = {}
        for worker in cluster._workers.values():
            if worker.state is WorkerState.HEALTHY and group.confinement.admits(worker.id):
                width = worker.width_of(group.need)
                if width is not None:
                    able[worker] = width
        assert group.workers == able, f"13: the group of {key} does not know who can run its tasks"
        counts = 0
        for number, lane in group.lanes.items():
            living = len(list(lane.living()))
            assert number == lane.client.number, f"14: a lane of client {lane.client.number} is filed under {number}"
            assert lane.count == living > 0, f"14: a lane counts {lane.count} ready tasks and has {living}"
            ids = [task_id for run in lane.runs for task_id in run.ids]
            assert all(run.ids for run in lane.runs), "14: a run is empty"
            assert len(ids) == living + len(lane.dead), "14: a lane has miscounted its dead"
            assert not lane.dead or cluster._has_dead, "14: a dead id was forgotten"
            counts += living
        assert group.count == counts, f"15: a group counts {group.count} ready tasks and has {counts}"
        assert group.workers or not group.count or group.confinement == ANYWHERE, f"37: the tasks of {key} wait for nobody"
        is_stuck = bool(group.count) and not group.workers
        assert (group in cluster._stuck) == is_stuck, f"16: the group of {key} is wrongly (not) among the stuck"
        if is_stuck:
            due = group.due
            group.set_due()
            assert due <= group.due, f"17: the group of {key} would look at its tasks at {due}, but {group.due} is the time"
            group.due = due
        assert group.count or group not in cluster._held, f"29: the group of {key} is held back and has nothing ready"
        if group.count:
            idle = [worker for worker in group.workers if worker.has_room(group) and not worker.is_installing(group)]
            names = ", ".join(worker.id for worker in idle)
            assert not idle or group in cluster._held, (
                f"18: {names} could run a task of {key} that is ready, and nothing speaks against it"
            )
        repeatable = sum(
            batch.spec.group is group and batch.spec.is_repeatable
            for worker in cluster._workers.values()
            for batch in [*worker.assigned.values(), *worker.orphans.values()]
        )
        assert group.repeatable == repeatable, (
            f"31: the group of {key} counts {group.repeatable} repeatable attempts, not {repeatable}"
        )
        assert (group in cluster._repeatable) == bool(repeatable), (
            f"31: the group of {key} is wrongly (not) among the repeatable"
        )
    assert not cluster._held or cluster._look_at is not None, "29: tasks are held back and nobody will look at them again"
    for group in cluster._held:
        assert cluster._queues.groups.get(group.key) is group, "29: a group that is gone is still held back"
    for group in cluster._stuck:
        assert cluster._queues.groups.get(group.key) is group, "16: a group that is gone is still stuck"


def _check_clients(cluster: Cluster) -> None:
    pending: Dict[ClientNumber, int] = {}
    for task_id, where in cluster._tasks.items():
        if isinstance(where, Worker):
            spec = where.assigned[task_id].spec
            assert task_id not in cluster._copies or where in cluster._copies[task_id]
        elif isinstance(where, Actor):
            spec = cluster._spec_at(where, task_id)
        else:
            spec = where if isinstance(where, Spec) else where.spec
        number = spec.client.number
        assert task_id >> SEQUENCE_BITS == number, f"19: task {task_id} is filed under client {number}"
        assert cluster._clients.get(number) is spec.client, f"20: task {task_id} belongs to a client that is gone"
        pending[number] = pending.get(number, 0) + 1
    specs: Dict[int, int] = {}
    for number, client in cluster._clients.items():
        found = pending.get(number, 0)
        assert client.pending == found, f"21: client {number} counts {client.pending} pending tasks and has {found}"
        holding = sum(
            batch.charge
            for worker in cluster._workers.values()
            for batch in worker.assigned.values()
            if batch.spec.client is client
        )
        assert isclose(client.holding, holding, abs_tol=1e-6), (
            f"32: client {number} is charged {client.holding} for what runs, not {holding}"
        )
        for spec in [*client.specs.values(), *client.replaced, *client.confined.values()]:
            specs[id(spec.group)] = specs.get(id(spec.group), 0) + 1
    for group in cluster._queues.groups.values():
        assert group.specs == specs.get(id(group), 0) > 0, f"22: a group counts {group.specs} specs"


def _check_odds(cluster: Cluster) -> None:
    for task_id in cluster._cancelled:
        assert isinstance(cluster._tasks.get(task_id), (Worker, Actor)), (
            f"23: task {task_id} is being cancelled, but on no worker"
        )
    for task_id in cluster._adopted:
        assert isinstance(cluster._tasks.get(task_id), (Worker, Actor)), (
            f"35: task {task_id} was taken over from a worker and is on none"
        )
    for client in cluster._away_clients:
        assert client.away_until is not None, f"34: client {client.number} is wrongly among those that are away"
        assert cluster._clients.get(client.number) is client, f"34: client {client.number} is away and gone"
    for task_id in cluster._supervision.ids():
        assert task_id in cluster._tasks, f"24: task {task_id} has ended, and its history is kept"
    for worker in cluster._workers.values():
        for task_id, batch in worker.assigned.items():
            attempt = cluster._supervision.attempt_of(task_id)
            is_newest = batch.attempt <= attempt
            assert is_newest, f"25: task {task_id} runs as attempt {batch.attempt}, its history says {attempt}"


def _check_actors(cluster: Cluster) -> None:
    lives: Dict[ClientNumber, int] = {}
    for ident, actor in cluster._actors.items():
        assert actor.id == ident, f"38: actor {actor.id} is filed under {ident}"
        assert ident not in cluster._dead, f"38: actor {ident} is dead and alive"
        worker = actor.worker
        is_housed = actor.state in (ActorState.STARTING, ActorState.ALIVE, ActorState.ENDING)
        assert (worker is not None) == is_housed, f"39: actor {ident} is {actor.state.value}, and wrongly (not) on a worker"
        assert (actor in cluster._awaited) != is_housed, (
            f"39: actor {ident} is wrongly (not) among those that wait for a worker"
        )
        assert (actor.spec is None) == (actor.state is ActorState.EXPECTED), f"39: actor {ident} is expected, or was created"
        if actor.spec is not None:
            number = actor.spec.client.number
            lives[number] = lives.get(number, 0) + 1
        if worker is None:
            assert not actor.calls, f"40: calls were sent to actor {ident}, which is nowhere"
        else:
            assert cluster._workers.get(worker.id) is worker, f"39: actor {ident} is on a worker that is gone"
            assert worker.actors.get(ident) is actor.batch, f"39: actor {ident} is not among those of its worker"
            sent = [task_id for task_id, call in worker.calls.items() if call.actor is actor]
            assert sent == list(actor.calls), f"40: the calls of actor {ident} are not those of its worker"
            takes = worker.away_until is None and not worker.is_draining
            takes = takes and actor.state is not ActorState.ENDING and not actor.is_over
            assert not (takes and actor.parked), f"41: calls of actor {ident} wait, and nothing speaks against sending them"
        for number, line in actor.lines.items():
            assert line, f"42: actor {ident} has an empty line of client {number}"
            assert next(iter(line.values())) is None, f"42: the first in a line at actor {ident} is ready"
        assert (actor in cluster._lined) == bool(actor.lines), f"42: actor {ident} is wrongly (not) among those with lines"
    for number, client in cluster._clients.items():
        assert client.actors == lives.get(number, 0), (
            f"43: client {number} counts {client.actors} actors, not {lives.get(number, 0)}"
        )
    for worker in cluster._workers.values():
        for task_id, call in worker.calls.items():
            assert call.actor.worker is worker, f"40: call {task_id} is where its actor is not"
            assert cluster._tasks.get(task_id) is call.actor, f"40: call {task_id} is not where the table of tasks says"
    for name, actor in cluster._names.items():
        assert cluster._actors.get(actor.id) is actor, f"44: the name {name!r} belongs to an actor that is gone"
