"""Task specs as they travel."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from gpumesh.model.resources import ANYTHING, Requirement
from gpumesh.model.tasks import TaskSpec, spec_from_wire

SPEC = TaskSpec(b"d" * 16, "train", Requirement(device="cuda", gpus=1.0, tags=(("room", "lab"),)), timeout=3.0)


def test_a_spec_comes_back_from_plain_tuples_and_lists() -> None:
    plain = list(SPEC)
    plain[2] = [*SPEC.requirement[:6], [["room", "lab"]], ""]

    assert spec_from_wire(tuple(SPEC)) == SPEC
    assert spec_from_wire(plain) == SPEC
    assert hash(spec_from_wire(plain).requirement) == hash(SPEC.requirement)


def test_an_older_peer_leaves_out_what_has_a_default_and_a_newer_one_adds() -> None:
    assert spec_from_wire((b"d" * 16, "f")) == TaskSpec(b"d" * 16, "f", ANYTHING)
    assert spec_from_wire((*SPEC, "later", 1)) == SPEC
    assert spec_from_wire(tuple(SPEC._replace(requirement=(*SPEC.requirement, "later")))) == SPEC  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"function": b"short"},
        {"function": "d" * 16},
        {"name": b"train"},
        {"requirement": None},
        {"requirement": ("cuda", "", "1")},
        {"requirement": ("cuda", "", float("nan"))},
        {"requirement": ("cuda", "", -1.0)},
        {"requirement": (7,)},
        {"requirement": ("cuda:x", "", 1.0)},
        {"requirement": ("cuda:\u00b2", "", 1.0)},
        {"requirement": ("", "", 0.0, 0, 1.5)},
        {"requirement": ("", "", 0.0, 0, 0, 1 << 63)},
        {"requirement": ("", "", 0.0, 0, 0, 0, ("room",))},
        {"requirement": ("", "", 0.0, 0, 0, 0, 5)},
        {"timeout": "3"},
        {"timeout": float("inf")},
        {"priority": float("nan")},
        {"cost": None},
        {"retries": "three"},
        {"placement_timeout": ()},
        {"script": None},
        {"script": "train.py"},  # In which folder?
        {"script": "/etc/train.py", "code": b"c" * 16},
        {"script": "a/../train.py", "code": b"c" * 16},
        {"script": "a//train.py", "code": b"c" * 16},
        {"script": "C:/train.py", "code": b"c" * 16},
        {"script": "a\\train.py", "code": b"c" * 16},
        {"script": "train.py\0", "code": b"c" * 16},
        {"backoff": -1.0},
        {"backoff": float("inf")},
    ],
)
def test_what_is_not_a_spec_is_refused(changed: Dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        spec_from_wire(tuple(SPEC._replace(**changed)))


@pytest.mark.parametrize("fields", [None, 5, (), (b"d" * 16,), {"function": 1}, "spec"])
def test_other_shapes_are_refused(fields: Any) -> None:
    with pytest.raises(ValueError):
        spec_from_wire(fields)
