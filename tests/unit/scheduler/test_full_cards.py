"""A task whose GPU's memory did not suffice, and that may be tried again, goes to a larger card only."""

from __future__ import annotations

from typing import Any, List

from gpumesh.model.outcomes import Status
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.model.tasks import TaskSpec
from gpumesh.scheduler.actions import Assign, Deliver, Retrying
from tests.unit.scheduler.conftest import task

GB = 10**9
ON_A_GPU = TaskSpec(b"g" * 16, "train", Requirement(device="gpu", gpus=1.0), retries=2)


def card(name: str, gigabytes: int) -> DeviceFacts:
    return DeviceFacts("cuda", 0, name, gigabytes * GB, 50.0, uuid=f"GPU-{name}")


def assigned_to(actions: List[Any]) -> List[str]:
    return [action.worker for action in actions if isinstance(action, Assign)]


def test_it_is_tried_again_on_a_larger_card_even_if_the_smaller_one_is_free(mesh: Any) -> None:
    mesh.connect("small", devices=(card("small", 8),))
    mesh.submit(1, ON_A_GPU)
    mesh.connect("large", devices=(card("large", 80),))

    actions = mesh.finish("small", task(0), status=Status.OUT_OF_MEMORY)

    assert actions[0] == Retrying(task(0), 2, "small", int(Status.RETRYABLE))
    assert assigned_to(actions) == ["large"]
    assert actions[1].cards == ("GPU-large",)
    done = mesh.finish("large", task(0), attempt=2)
    assert done == [Deliver(1, "large", [(task(0), int(Status.OK), b"value", 1.0)])]


def test_it_waits_for_the_larger_card_while_that_is_busy(mesh: Any) -> None:
    mesh.connect("large", devices=(card("large", 80),))
    mesh.submit(1, ON_A_GPU)
    mesh.connect("small", devices=(card("small", 8),))
    assert assigned_to(mesh.submit(1, ON_A_GPU)) == ["small"]

    assert assigned_to(mesh.finish("small", task(1), status=Status.OUT_OF_MEMORY)) == []

    assert assigned_to(mesh.finish("large", task(0))) == ["large"]


def test_where_nobody_has_a_larger_card_the_error_is_delivered(mesh: Any) -> None:
    mesh.connect("w1", devices=(card("one", 24),))
    mesh.connect("w2", devices=(card("two", 24),))
    [assign] = mesh.submit(1, ON_A_GPU)

    actions = mesh.finish(assign.worker, task(0), status=Status.OUT_OF_MEMORY)

    assert actions == [Deliver(1, assign.worker, [(task(0), int(Status.OUT_OF_MEMORY), b"value", 1.0)])]


def test_it_counts_as_a_failed_attempt(mesh: Any) -> None:
    spec = ON_A_GPU._replace(retries=0)
    mesh.connect("small", devices=(card("small", 8),))
    mesh.submit(1, spec)
    mesh.connect("large", devices=(card("large", 80),))

    actions = mesh.finish("small", task(0), status=Status.OUT_OF_MEMORY)

    assert actions == [Deliver(1, "small", [(task(0), int(Status.OUT_OF_MEMORY), b"value", 1.0)])]
