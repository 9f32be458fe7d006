"""What is checked before a job is sent: payloads, what they ask of machines, options, the script; and how payloads are cut into parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest

from gpumesh import GPUMesh
from gpumesh.client import jobs
from gpumesh.client.jobs import JobClient
from gpumesh.client.options import make_options
from gpumesh.client.scripts import PackedScript, pack_script
from gpumesh.config import JOB_PART_BYTES, JOB_PART_TASKS, MAX_JOB_PAYLOAD_BYTES, MAX_JOB_VARIANTS
from gpumesh.errors import MeshUnavailableError, UnknownJobError
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.resources import Requirement
from gpumesh.model.tasks import TaskSpec


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text("print(1)\n")
    return path


@pytest.fixture
def packed(script: Path) -> PackedScript:
    return pack_script(script)


def unreachable() -> Any:
    raise AssertionError("nothing may be sent")


def plan(**options: Any) -> Any:
    return jobs._Plan(jobs._job_options(options))


def needs(payloads: List[Dict[str, Any]], packed: PackedScript, **options: Any) -> List[Requirement]:
    made = plan(**options)
    variants = [variant for variant, _ in made.encode(payloads)]
    specs = made.specs(packed)
    return [specs[variant].requirement for variant in variants]


# --- payloads


def test_payloads_become_json_and_those_that_ask_for_the_same_share_a_spec(packed: PackedScript) -> None:
    made = plan(timeout=5, retries=1, priority=2, tags={"room": "lab"})

    ready = made.encode([{"lr": 0.1, "name": "grün"}, {"lr": 0.2}])

    assert [variant for variant, _ in ready] == [0, 0]
    assert [json.loads(data) for _, data in ready] == [{"lr": 0.1, "name": "grün"}, {"lr": 0.2}]
    assert made.specs(packed) == (
        TaskSpec(
            packed.function,
            "train.py",
            Requirement(tags=(("room", "lab"),)),
            timeout=5.0,
            retries=1,
            priority=2,
            placement_timeout=-1.0,
            code=packed.code,
            place=False,
            script=packed.script,
        ),
    )


def test_keys_of_a_payload_are_options_of_its_task(packed: PackedScript) -> None:
    assert needs([{"gpu": "A100"}, {"gpu": 2}, {"cpu_cores": 4}, {"gpu": False}, {}], packed) == [
        Requirement(device="gpu", model="a100", gpus=1.0),
        Requirement(device="gpu", gpus=2.0),
        Requirement(cores=4),
        Requirement(),
        Requirement(),
    ]


def test_a_payload_overrides_what_the_job_asks_for(packed: PackedScript) -> None:
    assert needs([{}, {"gpu": False}, {"cpu_cores": 8}], packed, gpu="cuda", cores=2) == [
        Requirement(device="cuda", gpus=1.0, cores=2),
        Requirement(cores=2),
        Requirement(device="cuda", gpus=1.0, cores=8),
    ]


def test_gpu_memory_asks_for_room_on_a_gpu(packed: PackedScript) -> None:
    assert needs([{"gpu_memory_mb": 500}, {"gpu_memory_mb": 2000, "gpu": 1}, {"gpu_memory_mb": 0}], packed) == [
        Requirement(device="gpu", gpu_memory=500_000_000),
        Requirement(device="gpu", gpus=1.0, gpu_memory=2_000_000_000),
        Requirement(),
    ]


def test_costs_are_known_to_two_digits(packed: PackedScript) -> None:
    made = plan()

    ready = made.encode([{"cost": 1.234}, {"cost": 1.16}, {"cost": 1204}, {}])

    specs = made.specs(packed)
    assert [specs[variant].cost for variant, _ in ready] == [1.2, 1.2, 1200.0, 0.0]


@pytest.mark.parametrize("payloads", [None, {"lr": 1}, "abc", 3, iter([{}])])
def test_payloads_are_a_list(payloads: Any) -> None:
    with pytest.raises(TypeError, match="payloads must be a list of dicts"):
        plan().encode(payloads)


@pytest.mark.parametrize("payload", [None, 3, "x", [1], (1,)])
def test_each_payload_is_a_dict(payload: Any) -> None:
    with pytest.raises(TypeError, match=r"payloads\[1\] must be a dict"):
        plan().encode([{}, payload])


def _in_itself() -> Dict[str, Any]:
    payload: Dict[str, Any] = {"a": []}
    payload["a"].append(payload)
    return payload


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"payloads\[1\]\['a'\]\['b'\]\[1\] is of type set"),
        ({"a": object()}, r"payloads\[1\]\['a'\] is of type object"),
        ({"a": [1.0, float("nan")]}, r"payloads\[1\]\['a'\]\[1\] is nan"),
        ({"a": b"bytes"}, r"payloads\[1\]\['a'\] is of type bytes"),
        ({(1, 2): 3}, r"payloads\[1\], at its key \(1, 2\) is a key of type tuple"),
        (_in_itself(), r"payloads\[1\]\['a'\]\[0\] is a container that holds itself"),
    ],
)
def test_what_json_cannot_say_is_named_with_its_path(payload: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plan().encode([{}, payload])


def test_a_payload_that_is_too_large_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"payloads\[0\] is 8.4 MB of JSON, over the limit of 8.4 MB; put the data into a file"
    ):
        plan().encode([{"x": "a" * MAX_JOB_PAYLOAD_BYTES}])


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({"cost": "high"}, r"payloads\[0\]\['cost'\] must be a number above 0"),
        ({"cost": 0}, r"\['cost'\] must be a number above 0"),
        ({"cost": True}, r"\['cost'\]"),
        ({"gpu": [1]}, r"\['gpu'\] must be a kind, a model or a number"),
        ({"gpu": ""}, r"payloads\[0\]: a device must be named"),
        ({"gpu": 1.5}, r"payloads\[0\]: gpu=1.5"),
        ({"gpu_memory_mb": -1}, r"\['gpu_memory_mb'\] must be a number of megabytes"),
        ({"gpu_memory_mb": 100, "gpu": False}, r"payloads\[0\]: gpu_memory_mb=100 asks for memory of a GPU"),
        ({"cpu_cores": 1.5}, r"\['cpu_cores'\] must be a whole number"),
        ({"cpu_cores": 0}, r"payloads\[0\]: cores=0"),
    ],
)
def test_a_key_that_makes_no_sense_is_named(payload: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plan().encode([payload])


def test_there_is_an_end_to_different_requirements() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_JOB_VARIANTS} different combinations"):
        plan().encode([{"gpu_memory_mb": number} for number in range(MAX_JOB_VARIANTS + 1)])


# --- parts


def test_parts_are_bounded_in_number_and_size() -> None:
    small = [(0, b"{}")] * (JOB_PART_TASKS + 1)
    large = [(0, OutOfBand([b"x" * (JOB_PART_BYTES // 2)]))] * 3

    assert [len(part) for part in jobs._parts(small)] == [JOB_PART_TASKS, 1]
    assert [len(part) for part in jobs._parts(large)] == [2, 1]
    assert list(jobs._parts([])) == []


# --- options and the script: nothing is sent where they are wrong


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"retry_on": ValueError}, TypeError, "a job has no option 'retry_on'"),
        ({"idempotent": True}, TypeError, "a job has no option 'idempotent'"),
        ({"retrys": 3}, TypeError, "did you mean 'retries'"),
        ({"retries": -1}, ValueError, "retries=-1"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"memory": "much"}, ValueError, "memory 'much' is not a size"),
    ],
)
def test_options_are_checked(script: Path, options: Any, error: Any, problem: str) -> None:
    with pytest.raises(error, match=problem):
        JobClient(unreachable, "").submit(script, [{}], None, options)


def test_a_name_is_text(script: Path) -> None:
    with pytest.raises(TypeError, match="name=3 must be text"):
        JobClient(unreachable, "").submit(script, [{}], 3, {})  # type: ignore[arg-type]


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no script .*nothing.py"):
        JobClient(unreachable, "").submit(tmp_path / "nothing.py", [{}], None, {})


def test_jobs_wait_for_ever_for_a_machine_unless_told_otherwise() -> None:
    assert jobs._job_options({}) == make_options({"placement_timeout": None})
    assert jobs._job_options({"placement_timeout": 5}).placement_timeout == 5.0


class Answered(JobClient):
    """Is told these views, one after the other."""

    def __init__(self, *views: Tuple[int, int, bool]) -> None:
        super().__init__(unreachable, "")
        self._views = [
            {"version": version, "finished": finished, "counts": {"running": running}, "notices": []}
            for version, running, finished in views
        ]

    def _news(self, job: str, seen: int, deadline: Optional[float]) -> Optional[Dict[str, Any]]:
        return self._views.pop(0)

    def status(self, job: str, *, tasks: bool) -> Dict[str, Any]:
        return {"id": job}


def test_progress_is_told_when_something_is_different_whatever_the_versions_say() -> None:
    client = Answered((5, 0, False), (6, 0, False), (7, 1, False), (7, 2, False), (7, 2, False), (0, 2, True))
    told: List[Any] = []

    def on_progress(status: Dict[str, Any]) -> None:
        told.append((status["counts"].pop("running"), status["finished"]))  # Theirs to change.

    assert client.wait("j-4k7mw2qx", None, on_progress, tasks=False) == {"id": "j-4k7mw2qx"}
    assert told == [(0, False), (1, False), (2, False), (2, True)]


@pytest.mark.parametrize("ask", ["status", "wait", "cancel", "retry", "logs"])
def test_what_cannot_be_an_id_is_asked_nobody(ask: str) -> None:
    with GPUMesh("127.0.0.1:1", token="t", fallback=False, connect_timeout=0.2) as mesh:
        with pytest.raises(UnknownJobError, match="'train.py' is not a job's id"):
            getattr(mesh, ask)("train.py")
        with pytest.raises(TypeError, match="a job's id is text"):
            getattr(mesh, ask)(7)


def test_a_job_is_not_given_to_this_machine_instead_of_the_mesh_that_was_named(script: Path) -> None:
    with GPUMesh("127.0.0.1:1", token="t", connect_timeout=0.5) as mesh:
        with pytest.raises(MeshUnavailableError, match="nothing listens at 127.0.0.1:1"):
            mesh.submit(script=script, payloads=[{}])
        with pytest.raises(MeshUnavailableError, match="nothing listens"):
            mesh.jobs()
