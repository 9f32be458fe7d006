"""What is left of the words of a worker that may only lend itself."""

from __future__ import annotations

import ast
import inspect
from typing import Any, List, Sequence, Set

import pytest

from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Bundle, OutOfBand, Stored
from gpumesh.protocol import messages as msg
from gpumesh.runtime.coordinator import Coordinator
from gpumesh.runtime.object_service import ObjectService
from gpumesh.runtime.worker_limits import ENDED_TASKS_KNOWN, WorkerLimits
from gpumesh.scheduler.directory import Directory

CLIENT = 7
TASK = CLIENT << 32
THEIRS = [(CLIENT << 32) + 100 + n for n in range(4)]  # Objects of the client.
OWN = 99 << 32  # Named after a process of the worker.
OK = int(Status.OK)

# These speak of the connection's own: facts, readings, attempts that the scheduler has given to it, transfers, pins, copies and grants.
HARMLESS: Set[str] = {
    "WorkerChanged", "WorkerReadings", "TasksWait", "ActorReady", "WorkerDraining", "OpenStore", "ObjectSent", "ObjectAt", "CancelFetch",
    "ObjectDelivered", "UnpinObjects", "ReleaseRefs", "FreeObjects",
}  # fmt: skip


class Site:
    def __init__(self, *, was_here: bool = False) -> None:
        self.directory = Directory()
        self.put(THEIRS[0])
        self.put(THEIRS[1], THEIRS[0])  # Holds the first.
        self.put(THEIRS[2])
        self.limits = WorkerLimits(self.directory, was_here=was_here)

    def put(self, oid: int, *refs: int) -> None:
        self.directory.declare(oid, 10, peer=CLIENT, owner="client", refs=refs)

    def give(self, *oids: int, task: int = TASK, attempt: int = 1) -> None:
        self.directory.hold_for_task(task, oids)
        self.limits.give([(task, attempt)])

    def left(self, message: Any) -> Any:
        return self.limits.narrowed(type(message), message)[0]

    def reads(self, *oids: int) -> List[int]:
        return [oid for oid in oids if self.left(msg.FetchObject(1, oid, 1)) is not None]


def handled(function: Any, name: str) -> Set[str]:
    """Kinds that a method compares its message's kind with."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(function).lstrip())):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == name:
            found |= {each.id for each in node.comparators if isinstance(each, ast.Name)}
    return found


def test_every_kind_that_a_worker_may_send_is_narrowed_or_known_to_be_harmless() -> None:
    """A new kind of message must be looked at before a worker-only token may send it."""
    source = inspect.getsource(ObjectService.__init__)
    of_objects = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for table in ast.walk(ast.parse(source.lstrip()))
        if isinstance(table, ast.Dict)
        for node in table.keys
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    kinds = handled(Coordinator._on_worker_message, "kind") | of_objects
    limits = Site().limits
    narrowed = {kind for kind in kinds if _is_narrowed(limits, kind)}

    assert {"TasksFinished", "FetchObject", "PutObject"} <= narrowed
    assert kinds - narrowed == HARMLESS


def _is_narrowed(limits: WorkerLimits, kind: str) -> bool:
    from gpumesh.runtime import worker_limits

    return any(known.__name__ == kind for known in worker_limits._NARROW)


def test_it_reads_what_its_task_mentions_and_what_is_in_that() -> None:
    site = Site()
    assert site.reads(*THEIRS) == []

    site.give(THEIRS[1])

    assert site.reads(*THEIRS) == THEIRS[:2]


def test_it_still_reads_it_when_the_task_has_ended_and_not_when_the_object_is_gone() -> None:
    """An actor, or a process that is used again, may have kept it."""
    site = Site()
    site.give(THEIRS[2])
    site.left(msg.TasksFinished([(TASK, 1, OK, b"", 0.1)]))
    assert site.reads(THEIRS[2]) == [THEIRS[2]]

    site.limits.gone(THEIRS[2])

    assert site.reads(THEIRS[2]) == []


def test_what_a_task_mentions_later_counts_too() -> None:
    site = Site()
    site.give()
    site.directory.hold_for_task(TASK, [THEIRS[2]])

    assert site.reads(THEIRS[2]) == [THEIRS[2]]


def test_what_it_may_not_read_is_answered() -> None:
    message, answer = Site().limits.narrowed(msg.LocateObject, msg.LocateObject(5, THEIRS[0]))

    assert message is None
    assert (answer.number, answer.oid, answer.path, answer.data) == (5, THEIRS[0], "", None)
    assert answer.error.startswith("lost: ")


def test_its_own_objects_are_its_own_and_hold_nothing_that_it_may_not_read() -> None:
    site = Site()

    message = site.left(msg.PutObject(OWN, 4, "", b"mine", [THEIRS[0], OWN + 1]))

    assert list(message.refs) == [OWN + 1]  # What nobody knows is no secret.
    assert site.reads(OWN) == [OWN]
    assert list(site.left(msg.DeleteObjects([OWN, THEIRS[0]])).oids) == [OWN]


@pytest.mark.parametrize("oid", [THEIRS[0], THEIRS[3], (CLIENT << 32) + 5000], ids=["known", "not yet", "some day"])
def test_it_makes_nothing_under_the_name_of_who_gave_it_work(oid: int) -> None:
    """The numbers of a client's next objects can be told from those of its tasks."""
    site = Site()
    site.give()

    for message in (msg.PutObject(oid, 4, "", b"bad", []), msg.CreateSegment(1, oid, 4)):
        left, answer = site.limits.narrowed(type(message), message)
        assert left is None
        assert "cannot be made by this worker" in answer.error


def test_nor_under_that_of_another_worker_whose_result_it_was_given() -> None:
    site = Site()
    other = 55 << 32
    site.put(other)
    site.give(other)

    assert site.left(msg.PutObject(other + 1, 4, "", b"bad", [])) is None


def test_it_refers_only_to_what_it_may_read() -> None:
    site = Site()
    site.give(THEIRS[2])

    assert list(site.left(msg.HoldRefs(THEIRS)).oids) == [THEIRS[2]]


RESULTS: List[Sequence[Any]] = [
    (TASK + 1, 1, OK, b"", 0.1),  # Another task.
    (TASK, 2, OK, b"", 0.1),  # Another attempt.
    ("x", 1, OK, b"", 0.1),
    (TASK, None, OK, b"", 0.1),
]


@pytest.mark.parametrize("result", RESULTS)
def test_it_ends_only_what_it_was_given(result: Sequence[Any]) -> None:
    site = Site()
    site.give()

    left = site.left(msg.TasksFinished([result, (TASK, 1, OK, b"mine", 0.1)]))

    assert [each[3] for each in left.results] == [b"mine"]


def test_an_end_may_be_told_again_but_one_handed_back_is_not_its_own_any_more() -> None:
    site = Site()
    site.give()
    site.give(task=TASK + 1)
    done, back = (TASK, 1, OK, b"", 0.1), (TASK + 1, 1, int(Status.NOT_RUN), {}, 0.0)

    for _ in range(2):
        assert site.left(msg.TasksFinished([done])).results == [done]
    assert site.left(msg.TasksFinished([back])).results == [back]
    assert site.left(msg.TasksFinished([back])).results == []
    assert site.left(msg.StreamItems(TASK + 1, 1, 0, [b""])) is None
    assert site.left(msg.TaskOutput(TASK, 1, b"late", "w")) is not None
    assert site.left(msg.TaskOutput(TASK + 2, 1, b"forged", "w")) is None
    assert site.left(msg.StreamItems(TASK + 2, 1, 0, [b""])) is None
    assert site.left(msg.StreamItems(TASK, 1, 0, [b""])) is not None


def test_only_the_last_ends_are_remembered() -> None:
    site = Site()
    for n in range(ENDED_TASKS_KNOWN + 1):
        site.give(task=TASK + n)
        site.left(msg.TasksFinished([(TASK + n, 1, OK, b"", 0.1)]))

    assert site.left(msg.TaskOutput(TASK, 1, b"", "w")) is None
    assert site.left(msg.TaskOutput(TASK + 1, 1, b"", "w")) is not None


def test_a_result_names_nothing_that_it_may_not_read() -> None:
    site = Site()
    site.give(THEIRS[2])
    site.left(msg.PutObject(OWN, 4, "", b"mine", []))

    def result(payload: Any) -> Any:
        return site.left(msg.TasksFinished([(TASK, 1, OK, payload, 0.1)])).results[0]

    assert result(Bundle(b"v", (), (THEIRS[0], THEIRS[2], OWN)))[3].refs == (THEIRS[2], OWN)
    assert result(Stored(OWN, 4))[2] == OK
    assert result(OutOfBand([b"v"]))[2] == OK
    assert result(Stored(THEIRS[0], 10))[2] == int(Status.REFUSED)
    assert result(Bundle(Stored(THEIRS[0], 10), (), ()))[2] == int(Status.REFUSED)


def test_what_is_no_result_is_left_to_who_says_so() -> None:
    message = msg.TasksFinished([b"nonsense"])  # type: ignore[list-item]

    assert Site().left(message) is message


def test_one_that_was_there_before_the_restart_brings_back_what_it_had_until_it_has_said_all() -> None:
    site = Site(was_here=True)
    assert site.limits.claimed([(TASK, 3)]) == [(TASK, 3)]
    assert list(site.left(msg.HoldRefs([THEIRS[0]])).oids) == [THEIRS[0]]
    site.left(msg.HoldRefs([], True))

    assert list(site.left(msg.HoldRefs([THEIRS[0], THEIRS[2]])).oids) == [THEIRS[0]]
    assert site.limits.claimed([(TASK, 3), (TASK + 1, 1)]) == [(TASK, 3)]


def test_one_that_never_says_that_it_has_said_all_is_not_believed_for_ever() -> None:
    site = Site(was_here=True)
    assert list(site.left(msg.HoldRefs([THEIRS[0]])).oids) == [THEIRS[0]]

    site.limits.has_returned()

    assert list(site.left(msg.HoldRefs([THEIRS[0], THEIRS[2]])).oids) == [THEIRS[0]]
    assert site.reads(*THEIRS) == [THEIRS[0]]
    assert site.limits.claimed([(TASK, 1)]) == []


def test_nobody_had_a_task_before_it_was_submitted() -> None:
    """It guesses the tasks that a client will submit next, to read what they mention."""
    site = Site(was_here=True)
    site.limits.claimed([(TASK + n, 1) for n in range(3)])

    site.limits.submitted_anew([TASK + 1])
    for n in range(2):
        site.directory.hold_for_task(TASK + n, [THEIRS[n + 1]])

    assert site.reads(*THEIRS) == THEIRS[:2], "what its own task of before mentions, and no more"
    assert [site.left(msg.TaskOutput(TASK + n, 1, b"x", "w")) is not None for n in range(3)] == [True, False, True]


def test_it_does_not_make_objects_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumesh.runtime.worker_limits.OBJECTS_AT_ONCE", 3)
    site = Site()
    puts = [msg.PutObject(OWN + n, 0, "", b"", []) for n in range(4)]

    heard = [site.limits.narrowed(msg.PutObject, put) for put in puts]

    assert [message is not None for message, _ in heard] == [True, True, True, False]
    assert heard[3][1].error.startswith("full: this worker")
    assert site.left(puts[0]) is not None, "it may tell again of what it has made"
    site.limits.gone(OWN)
    assert site.left(puts[3]) is not None


@pytest.mark.parametrize("attempt", [0, 2, 99])
def test_values_of_a_stream_are_of_the_attempt_that_it_was_given(attempt: int) -> None:
    """A later attempt's would be taken instead of those of the worker that has the task now."""
    site = Site()
    site.give()

    assert site.left(msg.StreamItems(TASK, attempt, 0, [b"forged"])) is None
    for right in (1, -1):
        assert site.left(msg.StreamItems(TASK, right, 0, [])) is not None
    assert site.left(msg.StreamItems(TASK + 1, -1, 0, [])) is None


def test_a_stranger_brings_back_nothing() -> None:
    assert Site().limits.claimed([(TASK, 1)]) == []
