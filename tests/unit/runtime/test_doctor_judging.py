"""What the doctor makes of facts: no machine is looked at here."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from gpumesh.model.shown import span
from gpumesh.runtime import doctor_judging as judge
from gpumesh.runtime.findings import FAULT, HERE, MESH, NOTE, OK, WARNING, Finding, as_report, fault, is_at_fault, note, ok


def states(findings: List[Finding]) -> List[str]:
    return [finding.state for finding in findings]


def row(hostname: str, python: str = "3.11", gpumesh: str = "0.1.0") -> Dict[str, Any]:
    return {"hostname": hostname, "python": python, "gpumesh": gpumesh}


def test_a_fault_elsewhere_is_no_fault_here() -> None:
    there = fault("tcp", "nothing listens", place=MESH)

    assert not is_at_fault([ok("python", "fine"), note("clock", "ahead"), there])
    assert is_at_fault([there, fault("token", "refused")])
    assert as_report([there]) == {
        "ok": True,
        "findings": [{"check": "tcp", "state": FAULT, "place": MESH, "text": "nothing listens", "advice": ""}],
    }


def test_an_old_python_is_a_fault() -> None:
    assert judge.python((3, 9, 0), "Linux", "python").state == OK
    old = judge.python((3, 8, 18), "Linux", "python")
    assert (old.state, old.text) == (FAULT, "Python 3.8.18 is older than 3.9")


def test_a_missing_package_is_a_fault_and_an_optional_one_a_note_with_its_purpose() -> None:
    found = judge.packages("0.1.0", {"msgpack": "1.1", "aiohttp": ""}, {"torch": "2.5"})

    assert found[0].state == FAULT
    assert "lacks aiohttp" in found[0].text
    told = {finding.text.split()[0]: finding for finding in found[1:]}
    assert told["torch"].state == OK
    assert told["pyngrok"].state == NOTE
    assert "serve --public" in told["pyngrok"].text
    assert told["pyngrok"].advice == 'pip install "gpumesh[tunnel]"'


@pytest.mark.parametrize(
    ("torch", "cuda", "hip", "driver", "has_cards", "state", "says"),
    [
        ("", "", "", "550.54", True, WARNING, "torch is not installed"),
        ("2.5.1+cpu", "", "", "550.54", True, FAULT, "build for CPUs, and there are GPUs"),
        ("2.5.1+cpu", "", "", "", False, OK, "there are no GPUs here"),
        ("2.5.1", "12.4", "", "525.60.13", True, OK, "fits driver 525.60.13"),
        ("2.5.1", "12.4", "", "470.57.02", True, FAULT, "needs driver 525 or newer; this one is 470.57.02"),
        ("2.9.0", "13.0", "", "570.10", True, FAULT, "needs driver 580"),
        ("2.5.1", "12.4", "", "", True, FAULT, "no NVIDIA driver answers"),
        ("2.5.1", "12.4", "", "", False, OK, "no NVIDIA driver here"),
        ("2.5.1", "", "6.2", "", True, OK, "ROCm 6.2"),
        ("9.0", "99.0", "", "550.54", True, OK, "fits"),  # Unknown: nothing is claimed.
    ],
)
def test_torch_is_held_against_the_driver(
    torch: str, cuda: str, hip: str, driver: str, has_cards: bool, state: str, says: str
) -> None:
    finding = judge.torch_and_driver(torch, cuda, hip, driver, has_cards)

    assert finding is not None
    assert finding.state == state
    assert says in finding.text


def test_without_torch_and_gpus_there_is_nothing_to_say() -> None:
    assert judge.torch_and_driver("", "", "", "", False) is None


def test_a_device_that_is_not_used_is_told_with_its_reason() -> None:
    rows = [
        {"kind": "CPU", "name": "EPYC", "memory": "8.0 GB", "problem": ""},
        {"kind": "cuda:0", "name": "NVIDIA T4", "memory": "", "problem": "the card has fallen off the bus"},
    ]

    found = judge.devices(rows, "")

    assert [(finding.state, finding.text) for finding in found] == [
        (OK, "CPU EPYC, 8.0 GB"),
        (WARNING, "cuda:0 NVIDIA T4 is not used: the card has fallen off the bus"),
    ]
    assert states(judge.devices([], "looking for GPUs failed")) == [WARNING]


def test_small_limits_are_told_with_what_raises_them() -> None:
    few, small = judge.limits(256, 64 << 20, "64 MB", in_container=True)
    assert (few.state, few.advice) == (WARNING, "raise that: ulimit -n 4096")
    assert (small.state, small.advice) == (WARNING, "start the container with more: docker run --shm-size 8g")
    assert states(judge.limits(65536, 8 << 30, "8 GB", in_container=False)) == [OK, OK]
    assert judge.limits(None, None, "", in_container=False) == []


def test_a_connection_that_others_can_read_is_a_fault() -> None:
    open_to_all = judge.saved_connection("c.json", "http://10.0.0.1:8000", 0o644, "")
    assert (open_to_all.state, open_to_all.advice) == (FAULT, "chmod 600 c.json")
    assert judge.saved_connection("c.json", "http://10.0.0.1:8000", 0o600, "").state == OK
    assert judge.saved_connection("c.json", "http://10.0.0.1:8000", None, "").state == OK  # Windows.
    assert judge.saved_connection("c.json", "", None, "").state == NOTE
    assert judge.saved_connection("c.json", "", None, "it is not JSON").state == FAULT


def test_clocks_that_differ_are_a_note_and_never_more() -> None:
    assert judge.clock(0.4, 0.5).state == OK
    assert judge.clock(8.0, 9.0).state == OK  # It may be nothing but the way there.
    ahead, behind = judge.clock(600.0, 0.5), judge.clock(-7200.0, 0.5)
    assert (ahead.state, ahead.place) == (NOTE, MESH)
    assert "10 min ahead of this one; nothing depends on that" in ahead.text
    assert "2 h behind this one" in behind.text


def test_spans_are_readable() -> None:
    assert [span(each) for each in (3, 119, 120, 7199, 7200, 172799, 172800)] == [
        "3 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 days",
    ]  # fmt: skip


def test_a_mesh_of_one_version_is_well() -> None:
    found = judge.versions(("3.11", "0.1.0"), "0.1.0", [row("a"), row("b")])

    assert [(finding.state, finding.text) for finding in found] == [
        (OK, "all have gpumesh 0.1.0"),
        (OK, "all 2 workers have Python 3.11, as here"),
    ]


def test_other_versions_are_told_with_the_machines_that_have_them() -> None:
    workers = [row("a"), row("b", python="3.9"), row("c", python="3.9", gpumesh="0.0.9")]

    gpumesh, python = judge.versions(("3.11", "0.1.0"), "0.2.0", workers)

    assert (gpumesh.state, gpumesh.place) == (WARNING, MESH)
    assert gpumesh.text == "gpumesh 0.1.0 here, 0.0.9 on c; 0.2.0 on the coordinator"
    assert python.state == NOTE
    assert python.text.startswith("Python 3.11 here, 3.9 on b, c: functions that travel as bytecode")


def test_many_machines_are_counted_not_listed() -> None:
    assert judge.names_of(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"


def test_findings_belong_here_unless_said_otherwise() -> None:
    assert {finding.place for finding in (ok("a", "b"), note("a", "b"), fault("a", "b"))} == {HERE}
