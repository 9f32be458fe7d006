"""Ids of jobs, and jobs as they travel."""

from __future__ import annotations

from typing import Any

import pytest

from gpumesh.model.jobs import ID_LETTERS, JobSpec, job_from_wire, job_id, typed_job_id
from gpumesh.model.tasks import TaskSpec

KEY = bytes(range(16))
TASK = TaskSpec(bytes(16), "train.py", code=bytes(range(16)), script="train.py")
JOB = JobSpec(job_id(KEY), KEY, "sweep", "/home/ann/train.py", (TASK,), 3, "ann@box")


def test_an_id_follows_from_the_key_and_is_easily_typed() -> None:
    assert job_id(KEY) == "j-0804g1g0"
    assert job_id(b"\xff" * 16) == "j-zzzzzzzz"
    assert len(set(ID_LETTERS)) == 32


@pytest.mark.parametrize("typed", ["j-0804g1g0", "J-0804G1G0", " 0804g1g0 ", "O8O4GIGO", "o8o4glgo"])
def test_an_id_is_understood_as_people_type_it(typed: str) -> None:
    assert typed_job_id(typed) == "j-0804g1g0"


def test_the_beginning_of_an_id_is_taken_for_one() -> None:
    assert typed_job_id("080") == "j-080"


@pytest.mark.parametrize("typed", ["", "j-", "j-08", "j-0804g1g0x", "train.py", "j-08u"])
def test_what_cannot_be_an_id_is_said_to_be_none(typed: str) -> None:
    with pytest.raises(ValueError, match="is not a job's id"):
        typed_job_id(typed)


def test_an_id_is_text() -> None:
    with pytest.raises(TypeError, match="text such as"):
        typed_job_id(7)


def test_a_job_comes_back_from_the_tuple_that_travelled() -> None:
    assert job_from_wire((*JOB[:4], (tuple(TASK),), *JOB[5:], "of a newer peer")) == JOB


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"key": b"short"}, "a key of 16 bytes"),
        ({"job": "j-zzzzzzzz"}, "the id that follows from it"),
        ({"name": 3}, "names of a job are text"),
        ({"count": -1}, "0 or more tasks"),
        ({"count": True}, "0 or more tasks"),
        ({"count": 1 << 32}, "0 or more tasks"),
        ({"variants": ()}, "at least one variant"),
        ({"variants": (tuple(TASK),) * 1001}, "up to 1000 variants"),
        ({"variants": (tuple(TASK._replace(script="", code=b"")),)}, "names a script"),
        ({"variants": (("nothing",),)}, "not a task spec"),
        ({"variants": 3}, "not a job"),
    ],
)
def test_what_is_no_job_is_refused(changes: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        job_from_wire(tuple(JOB._replace(variants=(tuple(TASK),))._replace(**changes)))


def test_a_tuple_that_is_too_short_is_no_job() -> None:
    with pytest.raises(ValueError, match="not a job"):
        job_from_wire((JOB.job, JOB.key))


def test_a_job_without_tasks_needs_no_variant() -> None:
    assert job_from_wire(tuple(JOB._replace(count=0, variants=()))).count == 0
