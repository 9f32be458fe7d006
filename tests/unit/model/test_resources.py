"""What tasks require, what workers offer, and whether the two fit."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from gpumesh.model.resources import (
    ANYTHING,
    DeviceFacts,
    Requirement,
    WorkerFacts,
    facts_as_dict,
    facts_from_wire,
    lacks,
    make_requirement,
    parse_bytes,
    requirement_from_wire,
    show_bytes,
    show_requirement,
)

CPU = DeviceFacts("cpu", 0, "AMD Ryzen", 32 * 10**9, 0.5)
SMALL = DeviceFacts("cuda", 0, "NVIDIA GeForce RTX 3080", 10 * 10**9, 50.0)
BIG = DeviceFacts("cuda", 1, "NVIDIA A100-SXM4-80GB", 80 * 10**9, 150.0)
BOX = WorkerFacts("box", 2, 16, 32 * 10**9, 150.0, (CPU, SMALL, BIG), (("room", "lab"),), "3.11", "linux", "0.1.0", 42)
LAPTOP = WorkerFacts("laptop", 1, 4, 8 * 10**9, 0.3, (CPU,), (), "3.9", "darwin", "0.1.0", 43)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (5, 5),
        (2.9, 2),
        ("7", 7),
        ("7B", 7),
        ("16GB", 16 * 10**9),
        (" 16 gb ", 16 * 10**9),
        ("512MiB", 512 * 2**20),
        ("512M", 512 * 2**20),
        ("1.5KiB", 1536),
        (".5kB", 500),
        ("1T", 2**40),
        ("2tib", 2**41),
        ("9007199254740993", 9007199254740993),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_read_as_people_write_them(size: Any, count: int) -> None:
    assert parse_bytes(size) == count


@pytest.mark.parametrize(
    "size",
    ["", "GB", "16 XB", "-1", "1e9", "1,5GB", "16GB!", "1.", "\u0661GB", None, True, b"16GB", [16], -1, -0.5]
    + [float("nan"), float("inf"), 2**63, "9999999TB", "9" * 400],
)
def test_what_is_not_a_size_is_refused_with_its_name(size: Any) -> None:
    with pytest.raises(ValueError, match="^cache "):
        parse_bytes(size, what="cache")


@pytest.mark.parametrize(
    ("options", "need"),
    [
        ({}, ANYTHING),
        ({"gpu": None}, ANYTHING),
        ({"gpu": False}, ANYTHING),
        ({"gpu": 0}, ANYTHING),
        ({"gpu": True}, Requirement(device="gpu", gpus=1.0)),
        ({"gpu": 2}, Requirement(device="gpu", gpus=2.0)),
        ({"gpu": 0.5}, Requirement(device="gpu", gpus=0.5)),
        ({"gpu": "cuda"}, Requirement(device="cuda", gpus=1.0)),
        ({"gpu": " CUDA:1 "}, Requirement(device="cuda:1", gpus=1.0)),
        ({"gpu": "gpu"}, Requirement(device="gpu", gpus=1.0)),
        ({"gpu": "A100"}, Requirement(device="gpu", model="a100", gpus=1.0)),
        ({"gpu": "cpu"}, Requirement(device="cpu")),
        ({"device": "cpu:0"}, Requirement(device="cpu")),
        ({"device": "RTX 3080"}, Requirement(device="gpu", model="rtx 3080", gpus=1.0)),
        ({"device": "mps"}, Requirement(device="mps", gpus=1.0)),
        ({"device": "cuda", "gpu": 2}, Requirement(device="cuda", gpus=2.0)),
        ({"memory": "16GB"}, Requirement(memory=16 * 10**9)),
        ({"memory": "16GB", "gpu": "A100"}, Requirement(device="gpu", model="a100", gpu_memory=16 * 10**9)),
        ({"memory": "16GB", "device": "cuda:0"}, Requirement(device="cuda:0", gpu_memory=16 * 10**9)),
        ({"memory": "16GB", "gpu": 1}, Requirement(device="gpu", gpus=1.0, gpu_memory=16 * 10**9)),
        ({"memory": "16GB", "gpu": 0.5, "device": "A100"}, Requirement("gpu", "a100", 0.5, 16 * 10**9)),
        ({"memory": 0, "gpu": "A100"}, Requirement(device="gpu", model="a100", gpus=1.0)),
        ({"memory": "16GB", "device": "cpu"}, Requirement(device="cpu", memory=16 * 10**9)),
        ({"cores": 8, "python": "3.11"}, Requirement(cores=8, python="3.11")),
        ({"tags": {"b": 2, "a": "1"}}, Requirement(tags=(("a", "1"), ("b", "2")))),
    ],
)
def test_options_become_a_requirement(options: Dict[str, Any], need: Requirement) -> None:
    assert make_requirement(**options) == need


@pytest.mark.parametrize(
    "options",
    [
        {"gpu": -1},
        {"gpu": 1025},
        {"gpu": float("nan")},
        {"gpu": ""},
        {"gpu": []},
        {"gpu": "cuda:"},
        {"gpu": "cuda:x"},
        {"device": "cuda:\u00b2"},
        {"device": " "},
        {"memory": "much"},
        {"memory": True},
        {"cores": 0},
        {"cores": 2.5},
        {"cores": True},
        {"cores": 65537},
    ],
)
def test_options_without_meaning_are_refused(options: Dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        make_requirement(**options)


def test_a_requirement_comes_back_from_the_wire() -> None:
    need = make_requirement(gpu="cuda:1", memory="1GB", cores=2, tags={"room": "lab"}, python="3.11")

    assert requirement_from_wire([*need[:6], [["room", "lab"]], "3.11", "later"]) == need
    assert requirement_from_wire(()) == ANYTHING


@pytest.mark.parametrize(
    ("facts", "options", "reasons"),
    [
        (BOX, {}, []),
        (BOX, {"cores": 16, "memory": "32GB", "python": "3.11", "tags": {"room": "lab"}}, []),
        (BOX, {"cores": 17}, ["has 16 cores, not 17"]),
        (LAPTOP, {"memory": "16GB"}, ["has 8 GB of memory, not 16 GB"]),
        (BOX, {"python": "3.9"}, ["runs Python 3.11, not 3.9"]),
        (BOX._replace(python=""), {"python": "3.9"}, []),
        (BOX, {"tags": {"room": "lab", "fast": "yes"}}, ["has no tag fast=yes"]),
        (BOX, {"tags": {"room": "attic"}}, ["has no tag room=attic"]),
        (LAPTOP, {"gpu": 1}, ["has no GPU"]),
        (LAPTOP, {"gpu": "cpu"}, []),
        (BOX, {"gpu": "cuda"}, []),
        (BOX, {"gpu": "mps"}, ["has no mps device"]),
        (BOX, {"gpu": "cuda:1"}, []),
        (BOX, {"gpu": "cuda:2"}, ["has no cuda:2 device"]),
        (BOX, {"gpu": "a100"}, []),
        (BOX, {"gpu": "H100"}, ["has NVIDIA GeForce RTX 3080, NVIDIA A100-SXM4-80GB, not 'h100'"]),
        (BOX, {"gpu": 2}, []),
        (BOX, {"gpu": 0.5}, []),
        (BOX, {"gpu": 3}, ["has 2 such GPUs, not 3"]),
        (BOX, {"gpu": 1, "memory": "80GB"}, []),
        (BOX, {"gpu": 2, "memory": "16GB"}, ["has 1 such GPUs, not 2"]),
        (BOX, {"gpu": "RTX 3080", "memory": "16GB"}, ["has at most 10 GB on one GPU, not 16 GB"]),
        (LAPTOP, {"gpu": 1, "cores": 8, "python": "3.11"}, ["runs Python 3.9, not 3.11", "has 4 cores, not 8", "has no GPU"]),
    ],
)
def test_a_worker_is_told_what_it_lacks(facts: WorkerFacts, options: Dict[str, Any], reasons: List[str]) -> None:
    assert lacks(facts, make_requirement(**options)) == reasons


def test_facts_come_back_from_plain_tuples_and_lists() -> None:
    plain: List[Any] = list(BOX)
    plain[5] = [list(device) for device in BOX.devices]
    plain[6] = [["room", "lab"]]

    assert facts_from_wire(tuple(BOX)) == BOX
    assert facts_from_wire(plain) == BOX
    assert facts_from_wire(()) == WorkerFacts()
    plain[5] = [[*device, "later"] for device in BOX.devices]
    assert facts_from_wire([*plain, "later"]) == BOX


@pytest.mark.parametrize(
    "changed",
    [
        {"score": 0},
        {"score": -1.0},
        {"score": float("nan")},
        {"score": float("inf")},
        {"score": "fast"},
        {"score": 10**400},
        {"slots": 0},
        {"slots": 4097},
        {"slots": 1.5},
        {"slots": "2"},
        {"cores": "8"},
        {"cores": -1},
        {"memory": None},
        {"memory": 1 << 63},
        {"pid": ()},
        {"hostname": 5},
        {"python": None},
        {"problem": b""},
        {"devices": (5,)},
        {"devices": (CPU, BIG._replace(score=0.0))},
        {"devices": (CPU, BIG._replace(score=float("nan")))},
        {"devices": (CPU, BIG._replace(score=float("inf")))},
        {"devices": (CPU, BIG._replace(score=1e12, problem="lost"))},
        {"devices": (CPU, BIG._replace(system_index="0"))},
        {"devices": (CPU, SMALL, BIG._replace(index=0))},
        {"devices": ((),)},
        {"devices": (("cuda", 0, "name", "lots", 1.0),)},
        {"devices": (("cuda", -1, "name", 1, 1.0),)},
        {"devices": ((None, 0, "name", 1, 1.0),)},
        {"devices": (("cuda", 0, 7, 1, 1.0),)},
        {"devices": (("cuda", 0, "name", 1, float("nan")),)},
        {"devices": None},
        {"tags": (("room",),)},
        {"tags": 7},
    ],
)
def test_facts_out_of_shape_or_range_are_refused(changed: Dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        facts_from_wire(tuple(BOX._replace(**changed)))


@pytest.mark.parametrize("fields", [None, 5, {"hostname": "box"}, "box"])
def test_other_shapes_are_no_facts(fields: Any) -> None:
    with pytest.raises(ValueError):
        facts_from_wire(fields)


def test_facts_are_plain_data_for_people() -> None:
    plain = facts_as_dict(BOX)

    assert plain["hostname"] == "box"
    assert plain["tags"] == {"room": "lab"}
    assert plain["devices"][2] == {
        "kind": "cuda", "index": 1, "name": BIG.name, "memory": BIG.memory, "score": 150.0, "uuid": "", "system_index": -1,
        "problem": "", "others": 0, "is_integrated": False, "capability": "", "rates": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1500, "1.5 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (16 * 10**9, "16 GB"),
        (64 * 2**30, "68.7 GB"),
        (2 * 10**12, "2 TB"),
        (1234 * 10**12, "1234 TB"),
    ],
)
def test_bytes_are_shown_in_powers_of_ten(count: float, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "nothing special"),
        ({"gpu": "A100", "memory": "16GB", "cores": 8}, "room on a GPU 'a100' with 16 GB, 8 cores"),
        ({"gpu": 1, "device": "A100", "memory": "16GB"}, "1 GPU 'a100' with 16 GB"),
        ({"gpu": 2, "device": "cuda"}, "2 cuda GPUs"),
        ({"gpu": 0.5}, "0.5 GPU"),
        ({"memory": "1GiB", "python": "3.11", "tags": {"room": "lab"}}, "1.07 GB of memory, tag room=lab, Python 3.11"),
    ],
)
def test_a_requirement_is_shown_for_people(options: Dict[str, Any], text: str) -> None:
    assert show_requirement(make_requirement(**options)) == text


def test_facts_tell_versions_and_what_is_being_installed() -> None:
    facts = WorkerFacts("host", versions=(("numpy", "2.1"),), installing=(("a", "b==1"),))

    assert facts_from_wire([list(part) if isinstance(part, tuple) else part for part in facts]) == facts
    assert facts_from_wire(tuple(facts)[:12]) == facts._replace(versions=(), installing=()), "as an older worker tells them"
    assert facts_as_dict(facts)["versions"] == {"numpy": "2.1"}
    assert facts_as_dict(facts)["installing"] == [["a", "b==1"]]


@pytest.mark.parametrize("wrong", [{"versions": "numpy"}, {"versions": (("numpy",),)}, {"installing": 3}, {"installing": (4,)}])
def test_such_facts_of_another_shape_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="not worker facts"):
        facts_from_wire(tuple(WorkerFacts("host")._replace(**wrong)))
