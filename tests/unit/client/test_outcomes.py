"""How the end of a task reads."""

from __future__ import annotations

import concurrent.futures
import pickle
from typing import Any, Dict

import pytest

from gpumesh.client.outcomes import exception_for
from gpumesh.errors import (
    MeshError,
    NoSuitableWorkerError,
    SerializationError,
    TaskCancelledError,
    TaskTimeoutError,
    VersionMismatchError,
    WorkerCrashedError,
)
from gpumesh.model.outcomes import Status
from gpumesh.serialization.exceptions import dump_exception
from gpumesh.serialization.versions import host_name


def outcome(status: Status, payload: Any) -> BaseException:
    return exception_for(int(status), payload, name="train", task_id=(1 << 32) | 5, worker="pc1")


@pytest.mark.parametrize(
    ("status", "details", "kind", "words"),
    [
        (Status.CRASHED, {"exit": 3}, WorkerCrashedError, ["t-00000001-5 (train)", "on pc1", "exited with code 3"]),
        (Status.CRASHED, {"exit": -11, "worker": "pc2"}, WorkerCrashedError, ["on pc2", "killed by SIGSEGV"]),
        (Status.CRASHED, {"exit": -9}, WorkerCrashedError, ["SIGKILL", "probably out of memory"]),
        (Status.CRASHED, {"exit": -9, "memory_bytes": 2.5e9}, WorkerCrashedError, ["it had reached 2.5 GB of memory"]),
        (
            Status.CRASHED,
            {"exit": -9, "memory_bytes": 2.5e9, "memory_limit_bytes": 3e9, "out_of_memory": True},
            WorkerCrashedError,
            ["SIGKILL, by the system for lack of memory; it had reached 2.5 GB of 3 GB", "options(memory=...)"],
        ),
        (
            Status.CRASHED,
            {"exit": -9, "memory_bytes": 2.5e7, "memory_limit_bytes": 3e9, "out_of_memory": False},
            WorkerCrashedError,
            ["SIGKILL, and not by the system for lack of memory; it had reached 25 MB of 3 GB"],
        ),
        (Status.CRASHED, {"exit": 1, "stderr": "a\nb\n"}, WorkerCrashedError, ["last lines on stderr:\n  a\n  b"]),
        (Status.CRASHED, {}, WorkerCrashedError, ["the process ended"]),
        (Status.LOST, {"reason": "no sign of life"}, WorkerCrashedError, ["lost its worker pc1 (no sign of life)"]),
        (Status.HANDED_BACK, {}, WorkerCrashedError, ["on pc1", "owner wants it back", "retries=0"]),
        (Status.TIMED_OUT, {"seconds": 3.0}, TaskTimeoutError, ["longer than its limit of 3 s on pc1", "options(timeout=...)"]),
        (Status.CANCELLED, {"reason": ""}, TaskCancelledError, ["t-00000001-5 (train) was cancelled"]),
        (Status.INFEASIBLE, {"reason": "needs 3 GPUs"}, NoSuitableWorkerError, ["needs 3 GPUs"]),
        (Status.REFUSED, {"reason": "too many"}, MeshError, ["refused by the coordinator: too many"]),
    ],
)
def test_each_end_says_what_happened_and_where(status: Status, details: Dict[str, Any], kind: type, words: Any) -> None:
    error = outcome(status, details)
    assert type(error) is kind
    for word in words:
        assert word in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (kind, str(error))


def test_they_are_also_the_errors_people_expect() -> None:
    assert isinstance(outcome(Status.TIMED_OUT, {}), TimeoutError)
    assert isinstance(outcome(Status.CANCELLED, {}), concurrent.futures.CancelledError)


def test_a_crash_keeps_every_attempt() -> None:
    attempts = [{"worker": "a", "exit": -9}, {"worker": "b", "exit": -9}]
    error = outcome(Status.CRASHED, {"exit": -9, "attempts": attempts})
    assert isinstance(error, WorkerCrashedError)
    assert error.attempts == attempts
    assert "2 attempts failed:\n  a: the process was killed by SIGKILL; probably out of memory" in str(error)
    assert pickle.loads(pickle.dumps(error)).attempts == attempts


def test_an_exception_of_the_function_and_one_made_here_pass_through() -> None:
    for status in (Status.RAISED, Status.RETRYABLE, Status.OUT_OF_MEMORY):
        assert isinstance(outcome(status, dump_exception(KeyError("k"))), KeyError)
    here = MeshError("closed")
    assert outcome(Status.LOST, here) is here


def test_no_worker_of_the_right_python_is_a_version_mismatch() -> None:
    error = exception_for(Status.INFEASIBLE, {"reason": "needs 3.11", "cause": "version"}, name="f", task_id=1, worker="")

    assert type(error) is VersionMismatchError
    assert str(error) == "needs 3.11"


def test_what_a_worker_could_not_rebuild_is_told_with_both_versions() -> None:
    raised = SerializationError("the function cannot be rebuilt here")
    raised.package, raised.version, raised.machine = "numpy", "0.1", "attic"

    error = exception_for(Status.RAISED, dump_exception(raised), name="f", task_id=1, worker="w7")

    assert str(error).startswith("the function cannot be rebuilt here; numpy is 0.1 on worker attic (w7), and ")
    assert str(error).endswith(f"on this machine, {host_name()}")
