"""Where the inputs of tasks lie, and how long bringing them to a worker takes: for placing tasks near them. Sizes and names; no decisions.

    task ──> Needs (its large inputs; the same for all tasks with the same ones) ──> object ──> workers that have a copy

The coordinator keeps every object. A worker that shares its memory has all of them; any other fetches what it has no copy of, at the rate of its
own connection, which is measured. Only tasks whose inputs are large enough to matter are in here: for all others nothing is asked.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from gpumesh.config import MIB
from gpumesh.model.ids import WorkerId
from gpumesh.scheduler.events import Input
from gpumesh.scheduler.queues import Group
from gpumesh.scheduler.states import Worker

TRACKED_BYTES = 1 * MIB  # Inputs of a task, together: 10 ms at the rate below, as much as a round trip between cities.
PRIOR_BYTES_PER_SECOND = 100e6  # Of a connection nobody has measured: Gigabit Ethernet carries 117 MB/s at most.
PRIOR_BYTES = 16.0 * MIB  # That guess counts as much as so many bytes: one transfer worth thinking about outweighs it.
MEMORY_BYTES = 1024.0 * MIB  # Of a connection: few enough to follow one that gets busy.
SCANNED_HOLDERS = 64  # Workers with a copy that are looked at for one task.
NO_TASK = -1


class Needs:
    """The large inputs of one or more tasks of a group."""

    __slots__ = ("group", "oids", "nbytes", "tasks")

    def __init__(self, group: Group, oids: Tuple[int, ...], nbytes: int) -> None:
        self.group = group
        self.oids = oids
        self.nbytes = nbytes  # Together.
        self.tasks = 0  # That have them; never 0.


class _Object:
    """One object that is the input of a task."""

    __slots__ = ("nbytes", "copies", "coming", "users")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.copies: Dict[Worker, None] = {}  # Who has fetched or made it.
        self.coming: Dict[Worker, int] = {}  # Who fetches it for a task given to him, and that task: it holds while he has it.
        self.users = 0  # Needs, and tasks still waiting for other inputs, that name it; never 0.


class _Path:
    """The way from the coordinator to one worker."""

    __slots__ = ("is_shared", "nbytes", "seconds")

    def __init__(self, is_shared: bool) -> None:
        self.is_shared = is_shared  # It maps what the coordinator has.
        self.nbytes = PRIOR_BYTES
        self.seconds = PRIOR_BYTES / PRIOR_BYTES_PER_SECOND  # In which so many bytes went.


class Locality:
    """See the module's text."""

    __slots__ = ("matters", "_workers", "_paths", "_far", "_tasks", "_needs", "_growing", "_objects", "_groups", "_overtaken",
                 "_kept")  # fmt: skip

    def __init__(self) -> None:
        self.matters = False  # Some task has large inputs, and for some worker they are not at hand.
        self._workers: Dict[WorkerId, Worker] = {}
        self._paths: Dict[Worker, _Path] = {}
        self._far = 0  # Workers that do not share the coordinator's memory.
        self._tasks: Dict[int, Needs] = {}
        self._needs: Dict[Tuple[Group, Tuple[int, ...]], Needs] = {}
        self._growing: Dict[int, Dict[int, None]] = {}  # Task whose inputs do not all exist -> those that do.
        self._objects: Dict[int, _Object] = {}
        self._groups: Dict[Group, int] = {}  # How many tasks with large inputs each has; never 0.
        self._overtaken: Dict[int, int] = {}  # How many times tasks behind each were taken before it; never 0.
        self._kept: Dict[int, float] = {}  # Since when each waits for the sake of a busy worker.

    def __bool__(self) -> bool:
        return bool(self._tasks) or bool(self._growing)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._tasks

    # --- workers

    def join(self, worker: Worker, *, is_near: bool) -> None:
        """A worker is here; `share` corrects what was guessed."""
        self._workers[worker.id] = worker
        self._paths[worker] = _Path(is_near)
        self._far += not is_near
        self._tell()

    def leave(self, worker: Worker) -> None:
        """It is gone, with all its copies."""
        if not self._paths.pop(worker).is_shared:
            self._far -= 1
        del self._workers[worker.id]
        for found in self._objects.values():
            found.copies.pop(worker, None)
            found.coming.pop(worker, None)
        self._tell()

    def share(self, ident: WorkerId, is_shared: bool) -> None:
        """Whether this worker has at hand what the coordinator has."""
        worker = self._workers.get(ident)
        if worker is None or self._paths[worker].is_shared is is_shared:
            return
        self._paths[worker].is_shared = is_shared
        self._far += -1 if is_shared else 1
        self._tell()

    def moved(self, ident: WorkerId, nbytes: int, seconds: float) -> None:
        """So many bytes went to this worker in this time, in which it always waited for some."""
        worker = self._workers.get(ident)
        if worker is None or nbytes <= 0 or seconds <= 0:
            return
        path = self._paths[worker]
        keep = max(0.0, 1.0 - nbytes / MEMORY_BYTES)
        path.nbytes = path.nbytes * keep + nbytes
        path.seconds = path.seconds * keep + seconds

    def rate(self, worker: Worker) -> float:
        """Bytes per second that reach it."""
        path = self._paths[worker]
        return path.nbytes / path.seconds

    # --- objects

    def copied(self, ident: WorkerId, oid: int) -> None:
        """A worker has a copy, or is being sent one. Of objects that are nobody's input nothing is kept."""
        found = self._objects.get(oid)
        worker = self._workers.get(ident)
        if found is not None and worker is not None:
            found.copies[worker] = None

    def dropped(self, ident: WorkerId, oids: Iterable[int]) -> None:
        """It no longer has these."""
        worker = self._workers.get(ident)
        for oid in oids:
            found = self._objects.get(oid)
            if found is not None and worker is not None:
                found.copies.pop(worker, None)
                found.coming.pop(worker, None)

    # --- tasks

    def add(self, task_id: int, group: Group, inputs: Sequence[Input]) -> None:
        """A task has come, with all its inputs."""
        self.extend(task_id, inputs)
        self.settle(task_id, group)

    def extend(self, task_id: int, inputs: Sequence[Input]) -> None:
        """A task that is not ready has these inputs, and may get more."""
        if not inputs:
            return
        mine = self._growing.setdefault(task_id, {})
        for oid, nbytes, copies in inputs:
            found = self._objects.get(oid)
            if found is None:
                found = self._objects[oid] = _Object(nbytes)
            if oid not in mine:
                mine[oid] = None
                found.users += 1
            for ident in copies:
                self.copied(ident, oid)

    def settle(self, task_id: int, group: Group) -> None:
        """It will get no more: whether they are worth keeping shows now."""
        mine = self._growing.pop(task_id, None)
        if mine is None:
            return
        nbytes = sum(self._objects[oid].nbytes for oid in mine)
        if nbytes < TRACKED_BYTES:
            self._release(mine)
            return
        key = (group, tuple(mine))
        needs = self._needs.get(key)
        if needs is None:
            needs = self._needs[key] = Needs(*key, nbytes)
        else:
            self._release(mine)  # Named once for all tasks that have them.
        needs.tasks += 1
        self._tasks[task_id] = needs
        self._groups[group] = self._groups.get(group, 0) + 1
        self._tell()

    def forget(self, task_id: int) -> None:
        """It has ended."""
        mine = self._growing.pop(task_id, None)
        if mine is not None:
            self._release(mine)
        needs = self._tasks.pop(task_id, None)
        if needs is None:
            return
        self._overtaken.pop(task_id, None)
        self._kept.pop(task_id, None)
        group = needs.group
        if self._groups[group] == 1:
            del self._groups[group]
        else:
            self._groups[group] -= 1
        needs.tasks -= 1
        if not needs.tasks:
            del self._needs[group, needs.oids]
            self._release(needs.oids)
        self._tell()

    def sent(self, worker: Worker, task_ids: Sequence[int]) -> None:
        """It was given these: what they need is on its way there."""
        if self._paths[worker].is_shared:
            return
        for task_id in task_ids:
            needs = self._tasks.get(task_id)
            if needs is not None:
                for oid in needs.oids:
                    found = self._objects[oid]
                    if found.coming.get(worker, NO_TASK) not in worker.assigned:
                        found.coming[worker] = task_id

    def overtake(self, task_id: int) -> None:
        """A task behind it was taken before it."""
        self._overtaken[task_id] = self._overtaken.get(task_id, 0) + 1

    def overtaken(self, task_id: int) -> int:
        """How often that has happened to it."""
        return self._overtaken.get(task_id, 0)

    def keep(self, task_id: int, now: float) -> None:
        """It stays in its queue though somebody had room for it."""
        self._kept.setdefault(task_id, now)

    def kept_since(self, task_id: int, now: float) -> float:
        """When that happened to it first; now, if it did not."""
        return self._kept.get(task_id, now)

    # --- what is asked

    def concerns(self, group: Group) -> bool:
        """Whether any task of this group has large inputs."""
        return group in self._groups

    def needs(self, task_id: int) -> Optional[Needs]:
        """Its large inputs; None: nothing worth mentioning."""
        return self._tasks.get(task_id)

    def fetch(self, needs: Needs, worker: Worker) -> float:
        """Seconds until a worker has all of these, if it begins now; 0: it has them."""
        path = self._paths[worker]
        if path.is_shared:
            return 0.0
        assigned = worker.assigned
        missing = 0
        for oid in needs.oids:
            found = self._objects[oid]
            if worker not in found.copies and found.coming.get(worker, NO_TASK) not in assigned:
                missing += found.nbytes
        return missing * path.seconds / path.nbytes

    def fetch_seconds(self, task_id: int, worker: Worker) -> float:
        """Seconds until a worker has all that a task needs."""
        needs = self._tasks.get(task_id)
        return 0.0 if needs is None else self.fetch(needs, worker)

    def holders(self, needs: Needs, among: Mapping[Worker, int]) -> List[Worker]:
        """Workers that have all of these, or soon will; not more than a few dozen."""
        if len(among) <= SCANNED_HOLDERS:
            return [worker for worker in among if not self.fetch(needs, worker)]
        found: Dict[Worker, None] = {}
        first = self._objects[needs.oids[0]]
        for workers in (first.copies, first.coming, (worker for worker, path in self._paths.items() if path.is_shared)):
            for worker in workers:
                if len(found) >= SCANNED_HOLDERS:
                    break
                if worker in among and not self.fetch(needs, worker):
                    found[worker] = None
        return list(found)

    # --- inside

    def _release(self, oids: Iterable[int]) -> None:
        for oid in oids:
            found = self._objects[oid]
            found.users -= 1
            if not found.users:
                del self._objects[oid]

    def _tell(self) -> None:
        self.matters = bool(self._far) and bool(self._tasks)

    def check(self, tasks: Mapping[int, object], workers: Mapping[WorkerId, Worker]) -> None:
        """Raise AssertionError if the tables disagree with each other, or with the tasks and workers that there are; for tests."""
        assert self._workers == workers, "33: the places of objects are kept for other workers than there are"
        assert list(self._paths) == list(self._workers.values()), "33: the path to a worker is missing, or leads nowhere"
        far = sum(not path.is_shared for path in self._paths.values())
        assert self._far == far, f"33: {self._far} workers count as distant, not {far}"
        assert self.matters is (bool(far) and bool(self._tasks)), "33: whether places matter is wrong"
        groups: Dict[Group, int] = {}
        users: Dict[int, int] = {}
        counts: Dict[Needs, int] = {}
        for task_id, needs in self._tasks.items():
            assert task_id in tasks, f"34: task {task_id} has ended, and its inputs are kept"
            assert task_id not in self._growing, f"34: the inputs of task {task_id} are kept twice"
            assert self._needs.get((needs.group, needs.oids)) is needs, (
                f"34: the inputs of task {task_id} are not those of its like"
            )
            groups[needs.group] = groups.get(needs.group, 0) + 1
            counts[needs] = counts.get(needs, 0) + 1
        assert groups == self._groups, "34: a group has miscounted its tasks with large inputs"
        assert len(counts) == len(self._needs), "34: inputs of nobody are kept"
        for needs, count in counts.items():
            assert needs.tasks == count, f"34: {needs.oids} count as inputs of {needs.tasks} tasks, not {count}"
            assert needs.nbytes >= TRACKED_BYTES, f"34: {needs.oids} are too small to be kept"
            assert needs.nbytes == sum(self._objects[oid].nbytes for oid in needs.oids), (
                f"34: the size of {needs.oids} is wrong"
            )
            for oid in needs.oids:
                users[oid] = users.get(oid, 0) + 1
        for task_id, mine in self._growing.items():
            assert task_id in tasks, f"34: task {task_id} has ended, and its inputs are kept"
            for oid in mine:
                users[oid] = users.get(oid, 0) + 1
        assert users == {oid: found.users for oid, found in self._objects.items()}, "35: an object has miscounted who names it"
        for oid, found in self._objects.items():
            for worker in (*found.copies, *found.coming):
                assert worker in self._paths, f"35: {worker.id} is gone, and counts as a place of object {oid}"
        for task_id in (*self._overtaken, *self._kept):
            assert task_id in self._tasks, f"34: task {task_id} has ended, and how it has waited is kept"
