"""The session inside a task: whose its tasks are, how deep they are, and what the two ways to the coordinator have in common."""

from __future__ import annotations

import contextvars
import gc
import threading
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh.client.futures import MeshFuture, submit_one
from gpumesh.client.inputs import pack_call
from gpumesh.client.nested import NestedSession
from gpumesh.config import MAX_NESTING_DEPTH
from gpumesh.errors import NestingTooDeepError
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol.messages import DefineSpec, Query, RegisterClient, SubmitTasks
from gpumesh.runtime import nesting
from gpumesh.runtime.nesting import Running
from gpumesh.serialization import refs
from gpumesh.serialization.functions import Exported, Exporter
from gpumesh.serialization.refs import ObjectRef, RefTable
from tests.support.processes import until
from tests.support.relay_way import way
from tests.unit.client.fake_mesh import FakeMesh

PARENT = 5 << 32


@pytest.fixture
def mesh() -> Iterator[FakeMesh]:
    with FakeMesh(answers=False) as made:
        yield made


@pytest.fixture
def session(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[NestedSession]:
    for name in ("on_ended", "on_mentioned", "running", "find"):
        monkeypatch.setattr(nesting, name, None)
    with way(mesh.port) as made:
        session = NestedSession(mesh.url, made.path)
        yield session
        session.close()


def exported() -> Exported:
    return Exporter().export(lambda value: value)


def submit(session: NestedSession, payload: Any = b"call") -> MeshFuture:
    function = exported()
    handle = session.define(function, TaskSpec(function.digest, "train"))
    return submit_one(session, handle, payload)


def depths(mesh: FakeMesh) -> List[int]:
    return [TaskSpec(*message.spec).depth for message in mesh.received if type(message) is DefineSpec]


def test_its_name_says_which_task_and_where(mesh: FakeMesh, session: NestedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nesting, "running", Running(PARENT, "search", 0))
    submit(session)
    mesh.until(lambda: any(type(message) is SubmitTasks for message in mesh.received))
    (registered,) = [message for message in mesh.received if type(message) is RegisterClient]
    assert registered.name.startswith("task search on ")


def test_what_is_submitted_is_one_deeper_than_the_task(
    mesh: FakeMesh, session: NestedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = exported()
    handle = session.define(function, TaskSpec(function.digest, "train"))
    futures = []
    for depth in (3, 0, 3):
        monkeypatch.setattr(nesting, "running", Running(PARENT, "search", depth))
        futures.append(submit_one(session, handle, b"call"))  # The same handle, as somebody may have kept it.
    mesh.until(lambda: len(mesh.tasks) == 3)
    assert sorted(depths(mesh)) == [1, 4]
    submitted = [message for message in mesh.received if type(message) is SubmitTasks]
    numbers = [message.spec for message in submitted for _ in message.task_ids]
    assert numbers[0] == numbers[2] != numbers[1]


def test_one_too_deep_is_refused_before_anything_is_sent(
    mesh: FakeMesh, session: NestedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nesting, "running", Running(PARENT, "search", MAX_NESTING_DEPTH - 1))
    submit(session)
    function = exported()
    handle = session.define(function, TaskSpec(function.digest, "train"))
    mesh.until(lambda: len(mesh.tasks) == 1)
    monkeypatch.setattr(nesting, "running", Running(PARENT, "search", MAX_NESTING_DEPTH))

    for attempt in (lambda: submit(session), lambda: submit_one(session, handle, b"call")):
        with pytest.raises(NestingTooDeepError, match=r"search .* cannot submit train") as caught:
            attempt()
        assert isinstance(caught.value, RecursionError)
    assert len(mesh.tasks) == 1


def test_the_end_of_a_task_cancels_what_it_submitted_and_nothing_else(
    mesh: FakeMesh, session: NestedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Running(PARENT, "actor", 0)
    monkeypatch.setattr(nesting, "running", actor)
    own = submit(session)
    calls = [Running(PARENT + number, f"call{number}", 1) for number in (1, 2)]
    futures: Dict[int, List[MeshFuture]] = {0: [], 1: []}
    contexts = [contextvars.copy_context() for _ in calls]
    for context, call in zip(contexts, calls):
        context.run(nesting.call.set, call)
    for _ in range(3):
        for number, context in enumerate(contexts):
            futures[number].append(context.run(submit, session))
    function = exported()
    handle = session.define(function, TaskSpec(function.digest, "train"))
    sink = MeshFuture(handle)
    first = contexts[0].run(session.submit_many, handle, [b"1", b"2"], sink)
    mesh.until(lambda: len(mesh.tasks) == 9)

    contexts[0].run(nesting.ended, calls[0])

    mesh.until(lambda: len(mesh.cancelled) == 5)
    assert sorted(mesh.cancelled) == sorted([*(future.task_id for future in futures[0]), first, first + 1])
    contexts[0].run(nesting.ended, calls[0])
    assert contexts[0].run(nesting.owner) is actor, "what goes on after a call belongs to the actor"
    nesting.ended(actor)
    mesh.until(lambda: own.task_id in mesh.cancelled)


def test_what_has_ended_is_not_cancelled(mesh: FakeMesh, session: NestedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Running(PARENT, "search", 0)
    monkeypatch.setattr(nesting, "running", task)
    futures = [submit(session) for _ in range(4)]
    mesh.until(lambda: len(mesh.tasks) == 4)
    mesh.finish(futures[1].task_id, "value")
    assert futures[1].result(10) == "value"

    nesting.ended(task)

    mesh.until(lambda: len(mesh.cancelled) == 3)
    assert futures[1].task_id not in mesh.cancelled


def test_between_two_tasks_nothing_owns_it(mesh: FakeMesh, session: NestedSession) -> None:
    assert nesting.owner() is None
    submit(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    assert depths(mesh) == [1]


def test_it_comes_back_after_a_break_and_submits_again(mesh: FakeMesh, session: NestedSession) -> None:
    future = submit(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    mesh.drop()
    mesh.until(lambda: any(type(message) is RegisterClient and message.resumes for message in mesh.received))
    mesh.until(lambda: any(type(message) is SubmitTasks and message.again for message in mesh.received))
    mesh.finish(future.task_id, 7)
    assert future.result(10) == 7


def test_the_first_use_waits_for_a_coordinator_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    away = FakeMesh(answers=False)
    with way(away.port) as made:
        away.close()
        session = NestedSession(away.url, made.path)
        found: List[Any] = []
        thread = threading.Thread(target=lambda: found.append(submit(session)))
        thread.start()
        with FakeMesh(port=away.port) as mesh:
            mesh.until(lambda: len(mesh.tasks) == 1)
            thread.join(10)
            assert found[0].result(10) == int(found[0].task_id & 0xFFFFFFFF)
            session.close()


# --- the process's own objects, and the session's


class OwnSpace:
    """What stands for runtime.runner_objects."""

    OWNER = 9 << 32

    def __init__(self) -> None:
        self.table = RefTable()
        self.was_asked = 0

    def put(self, value: Any) -> ObjectRef:
        raise AssertionError("nothing is put here")

    def get(self, wanted: Any, timeout: Any = None) -> Any:
        raise AssertionError("what lies there already is not fetched to be put again")

    def delete(self, oids: List[int]) -> None:
        raise AssertionError("nothing is deleted")

    def is_made_here(self, oid: int) -> bool:
        return oid >> 32 == self.OWNER >> 32

    def made_here(self) -> List[int]:
        return [oid for oid in self.table.counts() if self.is_made_here(oid)]


@pytest.fixture
def own() -> Iterator[OwnSpace]:
    space = OwnSpace()
    refs.set_process_space(space)
    yield space
    refs.set_process_space(None)


class Questions:
    """Answers to what a session asks about objects."""

    def __init__(self, mesh: FakeMesh) -> None:
        self.asked: List[Query] = []
        self.unknown: List[List[int]] = []  # One answer each; then everything is known.
        self.holds = True
        mesh.on_query = self._answer

    def _answer(self, query: Query) -> Any:
        self.asked.append(query)
        if query.what == "hold-for-task":
            return self.holds
        return self.unknown.pop(0) if self.unknown else []


def call_with(*args: Any) -> Any:
    return pack_call(args, {}, what="train", function=None)


def test_what_the_process_has_put_is_known_before_a_call_mentions_it(
    mesh: FakeMesh, session: NestedSession, own: OwnSpace
) -> None:
    questions = Questions(mesh)
    first, second, third = (ObjectRef(own.OWNER + number, 10, own, granted=1) for number in (1, 2, 3))
    questions.unknown = [[first.oid, second.oid], [second.oid]]

    future = submit(session, call_with(first, [second]))

    mesh.until(lambda: len(mesh.tasks) == 1)
    assert [sorted(query.arguments["oids"]) for query in questions.asked] == [
        [first.oid, second.oid, third.oid],  # All that may be on its way, at once.
        [first.oid, second.oid],
        [second.oid],
    ]
    payload = mesh.tasks[future.task_id]
    assert [value.oid for _, value in payload[1]] == [first.oid]
    assert list(payload[2]) == [second.oid]
    submit(session, call_with(first, second, third))
    mesh.until(lambda: len(mesh.tasks) == 2)
    assert len(questions.asked) == 3, "what is known is not asked again"


def test_what_came_as_an_argument_needs_no_question(mesh: FakeMesh, session: NestedSession, own: OwnSpace) -> None:
    questions = Questions(mesh)
    given = ObjectRef(4 << 32 | 1, 10, own)
    future = submit(session, call_with(given))
    mesh.until(lambda: len(mesh.tasks) == 1)
    assert questions.asked == []
    assert [value.oid for _, value in mesh.tasks[future.task_id][1]] == [given.oid]


def test_what_is_unknown_for_good_does_not_hold_up_for_ever(
    mesh: FakeMesh, session: NestedSession, own: OwnSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumesh.client.nested.NESTED_OBJECTS_SECONDS", 0.05)
    questions = Questions(mesh)
    gone = ObjectRef(own.OWNER + 1, 10, own, granted=1)
    questions.unknown = [[gone.oid]] * 1000
    submit(session, call_with(gone))
    mesh.until(lambda: len(mesh.tasks) == 1)
    assert 2 <= len(questions.asked) < 100


@pytest.mark.parametrize("holds", [True, False])
def test_what_a_result_mentions_is_held_by_its_task_or_else_here(
    mesh: FakeMesh, session: NestedSession, own: OwnSpace, monkeypatch: pytest.MonkeyPatch, *, holds: bool
) -> None:
    running = Running(PARENT, "search", 0)
    monkeypatch.setattr(nesting, "find", lambda: running)
    questions = Questions(mesh)
    questions.holds = holds
    submit(session)
    ref = ObjectRef(77, 10, session.objects(), granted=1)
    elsewhere = ObjectRef(78, 10, own)
    assert nesting.on_mentioned is not None

    nesting.on_mentioned([ref, elsewhere])

    (query,) = questions.asked
    assert (query.what, query.arguments) == ("hold-for-task", {"task": PARENT, "oids": (77,)})
    del ref
    gc.collect()
    assert (77 in session.objects().table.counts()) is not holds
    monkeypatch.setattr("gpumesh.client.nested.PIN_SECONDS", 0.0)
    submit(session)
    gc.collect()
    assert 77 not in session.objects().table.counts()


def test_what_an_actor_puts_by_itself_is_not_held_for_all_its_life(
    mesh: FakeMesh, session: NestedSession, own: OwnSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nesting, "running", Running(PARENT, "actor", 0))
    questions = Questions(mesh)
    submit(session)
    ref = ObjectRef(77, 10, session.objects(), granted=1)
    assert nesting.on_mentioned is not None
    nesting.on_mentioned([ref])
    assert questions.asked == []
    del ref
    assert 77 in session.objects().table.counts()


def test_values_are_put_in_the_processs_own_space(session: NestedSession, own: OwnSpace) -> None:
    assert session.space() is own


def test_a_forgotten_session_answers_nobody(mesh: FakeMesh, session: NestedSession) -> None:
    future = submit(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    session.close()
    assert future.done()
    task = Running(PARENT, "search", 0)
    task.children = [[future.task_id, future.task_id + 1]]
    nesting.ended(task)
    until(lambda: task.is_over)
    assert mesh.cancelled == []
    assert future._status == Status.LOST


def test_a_thread_that_submits_while_its_task_ends_leaves_nothing_behind(
    mesh: FakeMesh, session: NestedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Running(PARENT, "search", 0)
    monkeypatch.setattr(nesting, "running", task)
    submit(session)
    mesh.until(lambda: len(mesh.tasks) == 1)
    nesting.ended(task)
    late = submit(session)  # It had asked whose it is before that.
    mesh.until(lambda: late.task_id in mesh.cancelled)
