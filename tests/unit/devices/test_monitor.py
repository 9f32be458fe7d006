"""The monitor process: one answer for each question, from recorded machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from gpumesh.devices import children, monitor
from gpumesh.devices.nvml import Nvml, survey
from gpumesh.devices.offered import HostMemory, join
from gpumesh.model.resources import DeviceFacts
from tests.support.fake_nvml import FakeNvml, record, write_module

HOST = HostMemory(64 << 30, 32 << 30)
NOBODY = {"own": [], "leased": []}


def cards_of(one: Dict[str, Any]) -> Tuple[DeviceFacts, ...]:
    return join(survey(FakeNvml(one)), {}, HOST)


def test_one_question_has_one_answer() -> None:
    one = record("r01")
    library = Nvml(FakeNvml(one))
    library.open()

    answer = monitor.read(library, cards_of(one), NOBODY)

    assert [(row[0][-3:], *row[1:]) for row in answer["readings"]] == [
        ("100", 1257242624, 1257242624, 0.0, -1.0, 64.81),
        ("101", 541917184, 541917184, 0.0, -1.0, 15.749),
    ]
    assert answer["silent"] == {}


def test_a_card_that_is_gone_is_named() -> None:
    one = record("r01")
    library = Nvml(FakeNvml({**one, "devices": one["devices"][1:]}))
    library.open()

    answer = monitor.read(library, cards_of(one), NOBODY)

    assert [row[0][-3:] for row in answer["readings"]] == ["101"]
    assert list(answer["silent"].values()) == ["it does not answer any more"]


def start(folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpumesh.devices.monitor"],
        env=children.environment({"PYTHONPATH": os.pathsep.join([folder, children.environment()["PYTHONPATH"]])}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_a_process_answers_until_its_input_ends(tmp_path: Path) -> None:
    one = record("r01")
    process = start(write_module(tmp_path / "fake", one))
    lines: List[Any] = [{"devices": [list(card) for card in cards_of(one)]}, NOBODY, NOBODY]

    printed, _ = process.communicate(b"".join(json.dumps(line).encode() + b"\n" for line in lines), timeout=30)

    answers = [json.loads(line) for line in printed.splitlines()]
    assert [len(answer["readings"]) for answer in answers] == [2, 2]
    assert process.returncode == 0


@pytest.mark.parametrize("suffix", ["LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"])
def test_without_a_library_there_is_nobody_to_ask(suffix: str, tmp_path: Path) -> None:
    process = start(write_module(tmp_path / "fake", record("r01"), init={"raises": suffix}))

    process.communicate(timeout=30)

    assert process.returncode == monitor.NO_LIBRARY
