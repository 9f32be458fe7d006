"""Actors at the client, over real sockets against a coordinator in miniature."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
import weakref
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from gpumesh import GPUMesh
from gpumesh.client.actors import ActorClass
from gpumesh.client.futures import MeshFuture
from gpumesh.errors import (
    ActorBusyError,
    ActorDiedError,
    MeshClosedError,
    MeshError,
    NoSuitableWorkerError,
    SerializationError,
    TaskCancelledError,
    UnknownActorError,
)
from gpumesh.model.actors import ActorPlan, read_actor
from gpumesh.model.outcomes import Status
from gpumesh.model.tasks import TaskSpec, spec_from_wire
from gpumesh.protocol.messages import (
    Answer,
    CreateDetached,
    DefineFunction,
    DefineSpec,
    HoldRefs,
    KillActor,
    PutObject,
    ReleaseRefs,
    SubmitTasks,
)
from gpumesh.serialization import functions
from gpumesh.serialization.exceptions import dump_exception
from gpumesh.serialization.values import dumps, loads, loads_call
from tests.unit.client.fake_mesh import FakeMesh
from tests.unit.client.fake_session import until


class Counter:
    """Counts."""

    step = 1

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def increment(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def get(self) -> int:
        return self.count

    def up(self) -> Iterator[int]:
        yield self.count

    def kill(self) -> str:
        return "a method of its own"


@pytest.fixture
def fake() -> Iterator[FakeMesh]:
    with FakeMesh(answers=False) as mesh:
        yield mesh


@pytest.fixture
def mesh(fake: FakeMesh) -> Iterator[GPUMesh]:
    with GPUMesh(fake.url, token="secret", fallback=False) as made:
        yield made


def specs(fake: FakeMesh) -> Dict[int, TaskSpec]:
    """By number."""
    return {each.number: spec_from_wire(each.spec) for each in fake.received if type(each) is DefineSpec}


def submitted(fake: FakeMesh) -> List[Tuple[int, TaskSpec]]:
    """(task id, spec) in the order in which they came."""
    known = specs(fake)
    return [(task_id, known[each.spec]) for each in fake.received if type(each) is SubmitTasks for task_id in each.task_ids]


def creations(fake: FakeMesh) -> List[Tuple[int, TaskSpec]]:
    return [(task_id, spec) for task_id, spec in submitted(fake) if spec.plan is not None]


def calls(fake: FakeMesh) -> List[Tuple[int, str]]:
    """(task id, method) in the order in which they came."""
    return [(task_id, spec.method) for task_id, spec in submitted(fake) if spec.actor]


def await_calls(fake: FakeMesh, count: int) -> List[Tuple[int, str]]:
    fake.until(lambda: len(calls(fake)) >= count)
    return calls(fake)


def died(handle: Any, reason: str, **more: Any) -> Dict[str, Any]:
    return {"actor": read_actor(handle.actor_id), "reason": reason, "is_gone": True, "name": "", "worker": "host (w1)", **more}


# --- classes


def test_a_class_keeps_what_people_know_it_by(mesh: GPUMesh) -> None:
    made = mesh.actor(Counter)
    assert type(made) is ActorClass
    assert (made.__name__, made.__doc__, made.__module__, made.__wrapped__) == ("Counter", "Counts.", __name__, Counter)
    assert made.step == 1
    plain = made(5)
    assert type(plain) is Counter
    assert isinstance(plain, made)  # type: ignore[arg-type]
    assert issubclass(Counter, made)  # type: ignore[arg-type]
    assert repr(made.options(gpu=1, name="n")) == "<actor class Counter with gpu=1, name='n'>"
    assert made.options(gpu=1).actor_options.task.gpu == 1
    assert made.actor_options.task.gpu is None
    with pytest.raises(AttributeError):
        made.nothing  # noqa: B018


def test_a_class_made_an_actor_can_still_be_a_base(mesh: GPUMesh) -> None:
    made: Any = mesh.actor(Counter)

    class Twice(made):  # type: ignore[misc]
        def increment(self, by: int = 1) -> int:
            return int(super().increment(2 * by))

    assert Twice(1).increment() == 3
    assert issubclass(Twice, Counter)


def test_the_decorator_is_valid_bare_and_with_options(mesh: GPUMesh) -> None:
    @mesh.actor
    class One:
        pass

    @mesh.actor(max_restarts=2)
    class Two:
        pass

    assert type(One) is ActorClass
    assert Two.actor_options.max_restarts == 2
    assert mesh.actor(Two, gpu=1).actor_options.max_restarts == 2
    with pytest.raises(TypeError, match="did you mean 'mailbox'"):
        mesh.actor(mailbx=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes a class: .*<lambda> is a function; decorate it with accelerate"):
        mesh.actor(lambda: 1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes a class: not 3"):
        mesh.actor(3)  # type: ignore[call-overload]


def test_a_class_travels_without_its_mesh(mesh: GPUMesh) -> None:
    made = mesh.actor(Counter, max_restarts=2)
    found = loads(dumps(made))
    assert found.__wrapped__ is Counter
    assert found.actor_options == made.actor_options
    assert found._mesh is None
    assert copy.deepcopy(made) is made
    assert copy.copy(made).__wrapped__ is Counter


# --- creation


def test_creation_is_a_task_that_ends_with_the_actor(fake: FakeMesh, mesh: GPUMesh) -> None:
    made = mesh.actor(
        Counter, cores=2, memory="1GB", priority=3, max_restarts=4, restart_seconds=60, max_concurrency=5, name="c", place=False
    )
    handle = made.remote(7)
    fake.until(lambda: bool(creations(fake)))
    ((task_id, spec),) = creations(fake)
    assert task_id == read_actor(handle.actor_id)
    assert (spec.name, spec.retries, spec.priority, spec.place) == ("Counter", 4, 3, False)
    assert (spec.requirement.cores, spec.requirement.memory) == (2, 10**9)
    plan = spec.plan
    assert plan is not None
    assert plan._replace(token=0, description=b"") == ActorPlan(0, "c", False, 5, 60.0)
    (put,) = [each for each in fake.received if type(each) is PutObject]
    assert plan.token == put.oid
    assert loads_call(fake.tasks[task_id]) == ((7,), {})
    bodies = {each.digest: each.body for each in fake.received if type(each) is DefineFunction}
    assert functions.load(bodies[spec.function]) == (Counter, ())
    order = [type(each) for each in fake.received if type(each) in (PutObject, SubmitTasks)]
    assert order == [PutObject, SubmitTasks], "its token has to be there before it"
    assert repr(handle) == f"<actor Counter 'c' {handle.actor_id}>"


def test_a_creation_leaves_before_what_may_mention_it(fake: FakeMesh, mesh: GPUMesh) -> None:
    from gpumesh import accelerate

    @accelerate(mesh)
    def use(handle: Any) -> int:
        return 1

    use.remote(1)
    handle = mesh.actor(Counter).remote()
    use.remote(handle)
    fake.until(lambda: len(submitted(fake)) == 3)
    assert [spec.plan is not None for _, spec in submitted(fake)] == [False, True, False]


def test_arguments_that_cannot_travel_are_said_at_once(mesh: GPUMesh) -> None:
    with pytest.raises(SerializationError, match=r"argument 'start' of Counter\(\)"):
        mesh.actor(Counter).remote(threading.Lock())

    lock = threading.Lock()

    class Holds:
        def get(self) -> Any:
            return lock

    with pytest.raises(SerializationError, match="lock"):
        mesh.actor(Holds).remote()


def test_a_closed_mesh_creates_nothing(mesh: GPUMesh) -> None:
    made = mesh.actor(Counter)
    handle = made.remote()
    mesh.close()
    with pytest.raises(MeshClosedError):
        made.remote()
    with pytest.raises(MeshClosedError):
        handle.get.remote()


# --- calls


def test_a_call_is_a_task_of_its_actor(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    future = handle.increment.remote(by=2)
    assert type(future) is MeshFuture
    ((task_id, method),) = await_calls(fake, 1)
    assert (task_id, method) == (future.task_id, "increment")
    spec = dict(submitted(fake))[task_id]
    assert (spec.actor, spec.name, spec.retries, spec.is_stream) == (read_actor(handle.actor_id), "Counter.increment", 0, False)
    assert loads_call(fake.tasks[task_id]) == ((), {"by": 2})
    fake.finish(task_id, 12)
    assert future.result(5) == 12
    assert handle.increment is handle.increment, "found like any attribute from the second time on"
    again = handle.increment.remote()
    await_calls(fake, 2)
    fake.finish(again.task_id, 13)
    assert again.result(5) == 13
    assert len(specs(fake)) == 2, "each method is defined once"


def test_a_method_can_be_called_otherwise(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    handle.get.options(timeout=5, retries=2, retry_on=(KeyError,), name="look").remote()
    ((task_id, _),) = await_calls(fake, 1)
    spec = dict(submitted(fake))[task_id]
    assert (spec.timeout, spec.retries, spec.name) == (5.0, 2, "look")
    bodies = {each.digest: each.body for each in fake.received if type(each) is DefineFunction}
    assert loads(bodies[spec.function]) == (KeyError,)


def test_a_handle_knows_the_methods(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    with pytest.raises(AttributeError, match="did you mean 'increment'"):
        handle.incremen  # noqa: B018
    with pytest.raises(AttributeError, match="Counter.step is no method"):
        handle.step  # noqa: B018
    with pytest.raises(AttributeError, match="cannot be set"):
        handle.count = 3
    with pytest.raises(TypeError, match=r"Counter.increment runs in the actor's process; call it with .remote"):
        handle.increment(3)
    with pytest.raises(TypeError, match=r".stream\(...\)"):
        handle.up()
    with pytest.raises(TypeError, match="no generator"):
        handle.increment.stream()
    assert {"increment", "get", "ready", "kill", "actor_id"} <= set(dir(handle))
    assert repr(handle.get).startswith("<method get of actor Counter a-")
    handle.method("kill").remote()
    assert await_calls(fake, 1)[0][1] == "kill"


def test_calls_of_several_methods_arrive_in_the_order_in_which_they_were_made(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    other = mesh.actor(Counter).remote()
    made: List[Any] = []
    for number in range(60):
        made.append((handle.increment if number % 3 else handle.get).remote())
        if number % 5 == 0:
            other.get.remote()
    mine = [task_id for task_id, spec in submitted_when(fake, 72) if spec.actor == read_actor(handle.actor_id)]
    assert mine == [future.task_id for future in made]


def test_what_follows_a_call_that_waits_for_a_result_is_a_message_of_its_own(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    first = handle.get.remote()
    futures = [
        handle.increment.remote(first),
        handle.increment.remote(2),
        handle.increment.remote(first),
        handle.increment.remote(4),
    ]
    await_calls(fake, 5)
    messages = [list(each.task_ids) for each in fake.received if type(each) is SubmitTasks]
    for late in (futures[0], futures[2]):
        assert any(message[-1] == late.task_id for message in messages)


def submitted_when(fake: FakeMesh, count: int) -> List[Tuple[int, TaskSpec]]:
    fake.until(lambda: len([1 for _, spec in submitted(fake) if spec.actor]) >= count)
    return submitted(fake)


def test_a_generator_method_gives_a_stream(fake: FakeMesh, mesh: GPUMesh) -> None:
    from gpumesh.client.item_streams import ItemStream
    from gpumesh.protocol.messages import StreamItems

    handle = mesh.actor(Counter).remote()
    stream = handle.up.stream()
    assert type(stream) is ItemStream
    ((task_id, _),) = await_calls(fake, 1)
    assert dict(submitted(fake))[task_id].is_stream
    fake.send(StreamItems(task_id, 1, 0, [dumps("a"), dumps("b")]), StreamItems(task_id, 1, 2, []))
    fake.finish(task_id, None)
    assert list(stream) == ["a", "b"]
    contact = handle._contact
    assert until(lambda: not contact.pending)
    assert type(handle.up.remote()) is ItemStream


def test_a_call_waits_for_the_value_of_another_client_and_later_calls_wait_behind_it(fake: FakeMesh, mesh: GPUMesh) -> None:
    with FakeMesh(answers=False) as elsewhere, GPUMesh(elsewhere.url, token="secret", fallback=False) as another:
        from gpumesh import accelerate

        theirs = accelerate(another)(abs).remote(-3)
        elsewhere.until(lambda: len(elsewhere.tasks) == 1)
        handle = mesh.actor(Counter).remote()
        futures = [
            handle.get.remote(),
            handle.increment.remote(theirs),
            handle.get.remote(),
            handle.increment.remote([1, handle]),  # More than bytes.
            handle.increment.remote(5),
        ]
        free = mesh.actor(Counter).remote()
        other = free.get.remote()
        fake.until(lambda: other.task_id in fake.tasks)
        assert [task_id for task_id, _ in calls(fake)] == [futures[0].task_id, other.task_id]
        assert futures[2].cancel(), "one that waits for its turn can be cancelled"
        elsewhere.finish(theirs.task_id, 3)
        mine = [future.task_id for future in futures]
        fake.until(lambda: futures[4].task_id in fake.tasks)
        came = [task_id for task_id, _ in calls(fake) if task_id != other.task_id]
        assert came == [mine[0], mine[1], mine[3], mine[4]]


def test_an_input_that_fails_ends_its_call_and_lets_the_others_go(fake: FakeMesh, mesh: GPUMesh) -> None:
    with FakeMesh(answers=False) as elsewhere, GPUMesh(elsewhere.url, token="secret", fallback=False) as another:
        from gpumesh import accelerate

        theirs = accelerate(another)(abs).remote(-3)
        elsewhere.until(lambda: len(elsewhere.tasks) == 1)
        handle = mesh.actor(Counter).remote()
        bad = handle.increment.remote(theirs)
        good = handle.get.remote()
        elsewhere.finish(theirs.task_id, status=Status.RAISED, payload=dump_exception(KeyError("k")))
        with pytest.raises(KeyError):
            bad.result(5)
        fake.until(lambda: good.task_id in fake.tasks)
        assert bad.task_id not in fake.tasks


def test_a_call_that_comes_back_for_want_of_an_input_goes_before_later_ones(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    first = handle.get.remote()
    second = handle.increment.remote(first)
    await_calls(fake, 2)
    assert handle._contact.channel is not None
    fake.finish(second.task_id, status=Status.INPUT_MISSING, payload={"input": first.task_id})
    assert until(lambda: bool(handle._contact.channel.lines))  # type: ignore[union-attr]
    third = handle.get.remote()
    fake.finish(first.task_id, 4)
    fake.until(lambda: third.task_id in fake.tasks)
    came = [task_id for task_id, _ in calls(fake)]
    assert came == [first.task_id, second.task_id, second.task_id, third.task_id]


def test_the_order_holds_after_a_reconnect(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    futures = [handle.get.remote()]
    await_calls(fake, 1)
    for number in range(6):
        futures.append(handle.increment.remote(number))
        futures.append(handle.get.options(name=f"g{number}").remote(b"x" * 100_000 if number % 2 else number))
    fake.until(lambda: futures[-1].task_id in fake.tasks)
    fake.received.clear()
    fake.drop()
    futures.append(handle.get.remote())
    fake.until(lambda: bool(fake.received) and futures[-1].task_id in [task_id for task_id, _ in calls(fake)], 20)
    assert [task_id for task_id, _ in submitted(fake)] == [
        read_actor(handle.actor_id),
        *[future.task_id for future in futures],
    ]
    for future in futures:
        fake.finish(future.task_id, 1)
    assert [future.result(5) for future in futures] == [1] * len(futures)


# --- how long it lives


def releases(fake: FakeMesh) -> List[int]:
    return [oid for each in fake.received if type(each) is ReleaseRefs for oid, _ in each.objects]


def test_the_last_handle_lets_the_token_go(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    fake.until(lambda: bool(creations(fake)))
    token = creations(fake)[0][1].plan.token  # type: ignore[union-attr]
    method = handle.get
    another = copy.copy(handle)
    assert another == handle
    assert hash(another) == hash(handle)
    del handle, another
    gc.collect()
    mesh._open_session().flush()
    assert token not in releases(fake), "a method keeps its actor"
    del method
    fake.until(lambda: token in releases(fake))


def test_a_pending_call_keeps_the_actor_and_an_ended_one_does_not(fake: FakeMesh, mesh: GPUMesh) -> None:
    future = mesh.actor(Counter).remote().get.remote()
    await_calls(fake, 1)
    token = creations(fake)[0][1].plan.token  # type: ignore[union-attr]
    gc.collect()
    assert token not in releases(fake)
    fake.finish(future.task_id, 3)
    assert future.result(5) == 3
    fake.until(lambda: token in releases(fake))


def test_a_handle_inside_a_value_counts(fake: FakeMesh, mesh: GPUMesh) -> None:
    from gpumesh import accelerate

    handle = mesh.actor(Counter).remote()
    future = accelerate(mesh)(len).remote([handle])
    fake.until(lambda: future.task_id in fake.tasks)
    token = creations(fake)[0][1].plan.token  # type: ignore[union-attr]
    payload = fake.tasks[future.task_id]
    assert tuple(payload[2]) == (token,)
    ref = mesh.put({"a": handle})
    fake.until(lambda: fake.refs.get(ref.oid) == [token])
    found = mesh.get(ref)["a"]
    assert found == handle
    assert found._contact is handle._contact, "all handles of a process share what is known"


def test_a_handle_that_came_with_a_result_reaches_its_actor(fake: FakeMesh, mesh: GPUMesh) -> None:
    from gpumesh import accelerate

    handle = mesh.actor(Counter, name="n").remote()
    fake.until(lambda: bool(creations(fake)))
    data = pickle.dumps([handle])
    actor, token = read_actor(handle.actor_id), creations(fake)[0][1].plan.token  # type: ignore[union-attr]
    with GPUMesh(fake.url, token="secret", fallback=False) as another:
        future = accelerate(another)(len).remote(())
        fake.until(lambda: future.task_id in fake.tasks)
        fake.finish(future.task_id, payload=(data, (), (token,)))
        (found,) = future.result(5)
        assert found == handle
        call = found.get.remote()
        fake.until(lambda: call.task_id in fake.tasks)
        assert dict(submitted(fake))[call.task_id].actor == actor
        assert repr(found) == f"<actor Counter 'n' {handle.actor_id}>"
        fake.finish(call.task_id, 5)
        assert call.result(5) == 5


def test_nothing_of_an_actor_stays_behind(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    fake.until(lambda: bool(creations(fake)))
    contact = weakref.ref(handle._contact)
    future = handle.get.remote()
    await_calls(fake, 1)
    fake.finish(future.task_id, 1)
    assert future.result(5) == 1
    del handle
    assert until(lambda: contact() is None), gc.get_referrers(contact())
    fake.finish(creations(fake)[0][0], status=Status.CANCELLED, payload={"reason": "nobody"})
    session = mesh._open_session()
    assert until(lambda: session.objects().channel.standing == {})


def test_a_mesh_object_lives_as_long_as_its_handles(fake: FakeMesh) -> None:
    handle = GPUMesh(fake.url, token="secret", fallback=False).actor(Counter).remote()
    gc.collect()
    future = handle.get.remote()
    await_calls(fake, 1)
    fake.finish(future.task_id, 1)
    assert future.result(5) == 1
    mesh = weakref.ref(handle._contact.mesh)
    session = mesh()._open_session()
    del handle, future
    gc.collect()
    assert mesh() is None
    assert until(lambda: session.is_closed), "nobody uses it any more"


# --- its end


def test_the_failure_of_the_constructor_is_the_cause_of_its_first_use(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    call = handle.get.remote()
    await_calls(fake, 1)
    cause = dump_exception(KeyError("no such model"))
    fake.finish(call.task_id, status=Status.ACTOR_DIED, payload=died(handle, "its constructor failed", cause=cause))
    with pytest.raises(ActorDiedError, match=r"Counter.get \(t-.* has no result: its constructor failed.*KeyError") as caught:
        call.result(5)
    assert type(caught.value.__cause__) is KeyError
    assert "Traceback" in str(caught.value.__cause__.__cause__) or "KeyError" in str(caught.value.__cause__.__cause__)
    assert (caught.value.actor_id, caught.value.worker, caught.value.is_gone) == (handle.actor_id, "host (w1)", True)
    later = handle.get.remote()
    assert later.done(), "nobody needs to be asked any more"
    with pytest.raises(ActorDiedError, match="its constructor failed") as caught:
        later.result()
    assert type(caught.value.__cause__) is KeyError
    with pytest.raises(ActorDiedError):
        handle.ready(5)
    assert repr(handle).endswith("which is gone>")


@pytest.mark.parametrize(
    ("status", "payload", "words", "cause"),
    [
        (Status.RAISED, dump_exception(KeyError("k")), "no instance: its constructor failed on w", KeyError),
        (Status.OK, dumps(None), "has ended itself on w", None),
        (Status.CANCELLED, {"reason": "it was killed by ann"}, "it was killed by ann", None),
        (Status.CANCELLED, {}, "was killed", None),
        (Status.CRASHED, {"exit": -9, "stderr": b"last words", "worker": "w"}, "SIGKILL", Exception),
        (Status.INFEASIBLE, {"reason": "no worker has a GPU"}, "no worker has a GPU", NoSuitableWorkerError),
        (Status.REFUSED, {"reason": "the name 'c' is taken"}, "the name 'c' is taken", MeshError),
    ],
)
def test_the_end_of_the_creation_is_the_end_of_later_calls(
    fake: FakeMesh, mesh: GPUMesh, status: Status, payload: Any, words: str, cause: Any
) -> None:
    handle = mesh.actor(Counter).remote()
    fake.until(lambda: bool(creations(fake)))
    fake.finish(creations(fake)[0][0], status=status, payload=payload)
    assert until(lambda: handle._contact.died is not None)
    future = handle.get.remote()
    with pytest.raises(ActorDiedError, match=words) as caught:
        future.result(0)
    assert cause is None or isinstance(caught.value.__cause__, cause)
    assert calls(fake) == []
    stream = handle.up.remote()
    with pytest.raises(ActorDiedError, match=words):
        next(iter(stream))


def test_a_call_that_a_restart_has_ended_says_so_and_later_ones_are_made(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter, max_restarts=1).remote()
    call = handle.get.remote()
    await_calls(fake, 1)
    fake.finish(
        call.task_id,
        status=Status.ACTOR_DIED,
        payload=died(handle, "its process died; its state was lost", is_gone=False, stderr=b"one\ntwo\n"),
    )
    with pytest.raises(ActorDiedError, match="(?s)state was lost.*retries=.*two") as caught:
        call.result(5)
    assert not caught.value.is_gone
    again = handle.get.remote()
    assert not again.done()
    fake.until(lambda: again.task_id in fake.tasks)


def test_ready_is_a_call_that_does_nothing(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    fake.on_submit = lambda task_id, payload: (task_id, 0, dumps(None), 0.0)
    handle.ready(5)
    assert [method for _, method in calls(fake)] == ["__ready__"]


def test_kill_is_an_order(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    handle.get.remote()
    assert handle.kill(force=True)
    kill = next(each for each in fake.received if type(each) is KillActor)
    assert (kill.actor, kill.force) == (read_actor(handle.actor_id), True)
    assert len(calls(fake)) == 1, "what was called before is there before"
    fake.on_order = lambda order: {"found": False}
    assert not handle.kill()


def test_an_order_is_given_again_when_the_coordinator_was_lost(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    fake.until(lambda: bool(creations(fake)))
    orders: List[Any] = []

    def answer(order: Any) -> Any:
        orders.append(order)
        if len(orders) == 1:
            threading.Thread(target=fake.drop).start()
            return Answer(0, None, "it is just leaving", "again")
        return {"found": True}

    fake.on_order = answer
    assert handle.kill()
    assert len(orders) >= 2


def test_cancelling_a_call_cancels_that_task(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter).remote()
    call = handle.get.remote()
    await_calls(fake, 1)
    assert call.cancel()
    fake.until(lambda: fake.cancelled == [call.task_id])
    with pytest.raises(TaskCancelledError):
        call.result(5)


# --- the mailbox


def test_a_full_mailbox_holds_the_caller_until_there_is_room(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter, mailbox=2).remote()
    futures = [handle.get.remote(), handle.get.remote()]
    await_calls(fake, 2)
    threading.Timer(0.1, lambda: fake.finish(futures[0].task_id, 1)).start()
    began = time.monotonic()
    third = handle.get.remote()
    assert time.monotonic() - began > 0.05
    fake.until(lambda: third.task_id in fake.tasks)


def test_a_mailbox_that_stays_full_is_an_error(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter, mailbox=1, call_timeout=0.05).remote()
    handle.get.remote()
    with pytest.raises(ActorBusyError, match=r"Counter.increment was not called: 1 calls .* mailbox=1.*call_timeout=0.05 s"):
        handle.increment.remote()
    with pytest.raises(TimeoutError):
        handle.up.remote()
    other = mesh.actor(Counter, mailbox=1).remote()
    other.get.remote()  # One actor's mailbox is not the other's.
    assert len(await_calls(fake, 2)) == 2


def test_in_a_loop_a_full_mailbox_is_said_at_once(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter, mailbox=1).remote()

    async def call_twice() -> Any:
        first = handle.get.remote()
        with pytest.raises(ActorBusyError, match="a coroutine cannot wait"):
            handle.get.remote()
        await asyncio.get_running_loop().run_in_executor(None, lambda: fake.until(lambda: first.task_id in fake.tasks))
        fake.finish(first.task_id, 3)
        return await first

    assert asyncio.run(call_twice()) == 3


# --- finding


def test_a_named_actor_is_found(fake: FakeMesh, mesh: GPUMesh) -> None:
    handle = mesh.actor(Counter, name="c").remote()
    fake.until(lambda: bool(creations(fake)))
    ((ident, spec),) = creations(fake)
    assert spec.plan is not None
    asked: List[Any] = []

    def answer(query: Any) -> Any:
        asked.append((query.what, query.arguments))
        if query.what != "actor":
            return []
        if query.arguments.get("name", "c") != "c":
            return Answer(0, None, "there is no actor with that name", "unknown")
        return {"actor": ident, "token": spec.plan.token, "description": spec.plan.description, "name": "c"}

    fake.on_query = answer
    with GPUMesh(fake.url, token="secret", fallback=False) as another:
        found = another.get_actor("c")
        assert found == handle
        assert asked[-1] == ("actor", {"name": "c"})
        fake.until(lambda: any(type(each) is HoldRefs and spec.plan.token in each.oids for each in fake.received))  # type: ignore[union-attr]
        assert another.get_actor(handle.actor_id) == handle
        assert asked[-1] == ("actor", {"id": ident})
        call = found.get.remote()
        fake.until(lambda: call.task_id in fake.tasks)
        with pytest.raises(UnknownActorError, match="no actor with that name"):
            another.get_actor("d")
        with pytest.raises(TypeError, match="takes the name"):
            another.get_actor("")


def test_a_detached_actor_is_created_by_an_order(fake: FakeMesh, mesh: GPUMesh) -> None:
    fake.on_order = lambda order: {"actor": (1 << 32) | 17}
    handle = mesh.actor(Counter, lifetime="detached", name="d").remote(5)
    assert handle.actor_id == "a-00000001-17"
    (order,) = [each for each in fake.received if type(each) is CreateDetached]
    spec = spec_from_wire(order.spec)
    assert spec.plan is not None
    assert (spec.plan.token, spec.plan.is_detached, spec.plan.name) == (0, True, "d")
    assert len(order.key) == 16
    assert loads_call(order.payload) == ((5,), {})
    assert spec.function in [each.digest for each in fake.received if type(each) is DefineFunction]
    call = handle.get.remote()
    fake.until(lambda: call.task_id in fake.tasks)
    fake.on_order = lambda order: Answer(0, None, "the name 'd' is taken", "taken")
    with pytest.raises(ValueError, match="is taken"):
        mesh.actor(Counter, lifetime="detached", name="d").remote(5)


def test_actors_are_listed(fake: FakeMesh, mesh: GPUMesh) -> None:
    fake.on_query = lambda query: [{"id": "a-1-1", "cards": ("g",)}] if query.what == "actors" else []
    assert mesh.actors() == [{"id": "a-1-1", "cards": ["g"]}]


# --- groups


def test_a_group_calls_all_its_members(fake: FakeMesh, mesh: GPUMesh) -> None:
    group = mesh.actors_group(Counter, 3, 10, placement="pack", max_restarts=1, name="g")
    fake.until(lambda: len(creations(fake)) == 3)
    plans: List[Any] = [spec.plan for _, spec in creations(fake)]
    assert [plan.name for plan in plans] == ["g-0", "g-1", "g-2"]
    assert len({plan.group for plan in plans}) == 1
    assert {plan.placement for plan in plans} == {"pack"}
    assert len(group) == 3
    assert list(group) == [group[0], group[1], group[2]]
    assert group[1:] == [group[1], group[2]]
    future = group.increment.remote(by=2)
    assert await_calls(fake, 3)
    assert not future.done()
    for place, (task_id, _) in reversed(list(enumerate(calls(fake)))):
        fake.finish(task_id, place)
    assert future.result(5) == [0, 1, 2]
    assert future.exception() is None
    assert future.done()
    assert repr(group) == "<group of 3 actors Counter>"
    assert pickle.loads(pickle.dumps(group)) == group


def test_members_may_have_arguments_of_their_own(fake: FakeMesh, mesh: GPUMesh) -> None:
    group = mesh.actors_group(mesh.actor(Counter), 3, members=[1, (2,), {"start": 3}], placement=None)
    fake.until(lambda: len(creations(fake)) == 3)
    assert [loads_call(fake.tasks[ident]) for ident, _ in creations(fake)] == [((1,), {}), ((2,), {}), ((), {"start": 3})]
    group.increment.options(name="i").scatter([4, (5,), {"by": 6}])
    assert [loads_call(fake.tasks[task_id]) for task_id, _ in await_calls(fake, 3)] == [((4,), {}), ((5,), {}), ((), {"by": 6})]
    with pytest.raises(ValueError, match="2 items for 3 members"):
        group.increment.scatter([1, 2])
    with pytest.raises(TypeError, match="in the actors' processes"):
        group.increment(1)
    with pytest.raises(TypeError, match="stream it from each member"):
        group.up.remote()
    with pytest.raises(AttributeError, match="did you mean"):
        group.incremen  # noqa: B018
    for wrong, words in (
        ({"n": 0}, "at least 1"),
        ({"n": "2"}, "whole number"),
        ({"n": 2, "placement": "near"}, "'spread', 'pack' or None"),
        ({"n": 2, "members": [1]}, "1 members for 2 members"),
        ({"n": 2, "gpus": 1}, "did you mean 'gpu'"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            mesh.actors_group(Counter, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both"):
        mesh.actors_group(Counter, 1, 5, members=[1])


def test_the_death_of_a_member_ends_the_call_of_the_group_at_once(fake: FakeMesh, mesh: GPUMesh) -> None:
    group = mesh.actors_group(Counter, 3)
    future = group.get.remote()
    tasks = await_calls(fake, 3)
    fake.finish(tasks[0][0], 1)
    fake.finish(tasks[1][0], status=Status.ACTOR_DIED, payload=died(group[1], "its process died"))
    with pytest.raises(
        ActorDiedError, match=rf"member 1 of 3 of the group \({group[1].actor_id} on host \(w1\)\).*died"
    ) as caught:
        future.result(5)
    assert caught.value.member == 1
    assert type(future.exception(5)) is ActorDiedError


def test_what_a_member_raises_is_raised(fake: FakeMesh, mesh: GPUMesh) -> None:
    group = mesh.actors_group(Counter, 2)
    future = group.get.remote()
    tasks = await_calls(fake, 2)
    fake.finish(tasks[1][0], status=Status.RAISED, payload=dump_exception(KeyError("k")))
    with pytest.raises(KeyError):
        future.result(5)


def test_the_call_of_a_group_can_be_cancelled_and_waited_for(fake: FakeMesh, mesh: GPUMesh) -> None:
    import concurrent.futures

    import gpumesh

    group = mesh.actors_group(Counter, 2)
    future = group.get.remote()
    await_calls(fake, 2)
    with pytest.raises(
        TimeoutError if hasattr(asyncio, "timeout") else concurrent.futures.TimeoutError, match="2 of 2 members"
    ):
        future.result(0.01)
    assert future.cancel()
    fake.until(lambda: sorted(fake.cancelled) == [task_id for task_id, _ in calls(fake)])
    with pytest.raises(TaskCancelledError):
        future.result(1)
    assert not future.cancel() or future.cancelled()
    other = group.get.remote()
    for task_id, _ in await_calls(fake, 4)[2:]:
        fake.finish(task_id, 1)
    assert list(gpumesh.as_completed([other], timeout=5)) == [other]
    assert concurrent.futures.wait([other], 5).done == {other}

    async def gather() -> Any:
        third = group.get.remote()
        await asyncio.get_running_loop().run_in_executor(None, lambda: await_calls(fake, 6))
        for task_id, _ in calls(fake)[4:]:
            fake.finish(task_id, 2)
        return await third

    assert asyncio.run(gather()) == [2, 2]
    group.kill()
    assert len([each for each in fake.received if type(each) is KillActor]) == 2
