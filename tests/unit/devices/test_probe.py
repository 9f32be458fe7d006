"""The probe's own judgement: what makes a card useless, and what is only its state for now."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, Dict

import pytest

from gpumesh.devices import children, probe

TORCH = SimpleNamespace(__version__="2.9", OutOfMemoryError=MemoryError)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (RuntimeError("CUDA error: no kernel image is available for execution on the device\nand more"), "problem"),
        (RuntimeError("HIP error: invalid device function"), "problem"),
        (RuntimeError("HIP error: device kernel image is invalid"), "problem"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "problem"),
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), "note"),
        (RuntimeError("CUDA error: out of memory"), "note"),
        (MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "note"),
    ],
)
def test_errors_are_told_from_states(error: Exception, answer: str) -> None:
    (found,) = probe.explain(TORCH, error).items()

    assert found[0] == answer
    assert str(error).split("\n")[0][:60] in found[1]
    assert "\n" not in found[1]
    assert (answer == "note") == found[1].startswith(probe.IN_USE)


def ask(*arguments: str) -> Dict[str, Any]:
    """The answer of a real probe."""
    printed = subprocess.run(
        [sys.executable, "-m", "gpumesh.devices.probe", *arguments],
        env=children.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    ).stdout.decode()
    return dict(json.loads(printed.split(probe.ANSWER)[1]))


def test_a_probe_says_which_torch_there_is() -> None:
    assert ask("--without-nvml")["torch"] == probe.torch_version()


def test_without_torch_there_is_nothing_to_measure_with() -> None:
    if probe.torch_version():
        pytest.skip("torch is installed here")

    assert ask("--measure", "cuda:0") == {"note": "torch is not installed here", "torch": ""}


def test_a_build_of_torch_without_gpus_is_no_fault_of_the_card() -> None:
    torch: Any = pytest.importorskip("torch")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this build has GPUs")

    assert ask("--measure", "cuda:0")["note"] == f"torch {torch.__version__} is a build without GPUs"
