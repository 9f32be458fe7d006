"""What a runner's environment says of cards."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from gpumesh.devices import detect
from gpumesh.model.resources import DeviceFacts
from gpumesh.runtime.runner_cards import card_environment, no_card_environment

CPU = DeviceFacts("cpu", 0, "AMD Ryzen", 64 * 10**9, 0.5)
NAMED = [DeviceFacts("cuda", number, "RTX", 24 * 10**9, 100.0, uuid=f"GPU-{number}") for number in range(2)]
NUMBERED = [DeviceFacts("cuda", number, "Orin", 8 * 10**9, 10.0) for number in range(2)]
ROCM = [DeviceFacts("rocm", number, "MI210", 64 * 10**9, 90.0, uuid=f"GPU-amd{number}") for number in range(2)]
MPS = DeviceFacts("mps", 0, "Apple M3", 12 * 10**9, 10.0)


@pytest.mark.parametrize(
    ("cards", "inherited", "environment"),
    [
        (("GPU-1",), {}, {"CUDA_VISIBLE_DEVICES": "GPU-1"}),
        (("GPU-1", "GPU-0"), {"CUDA_VISIBLE_DEVICES": "3,2"}, {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-0"}),
        (("cuda:1",), {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (("cuda:0", "cuda:1"), {"CUDA_VISIBLE_DEVICES": "3,2"}, {"CUDA_VISIBLE_DEVICES": "3,2"}),
        (("cuda:1",), {"CUDA_VISIBLE_DEVICES": "3,2"}, {"CUDA_VISIBLE_DEVICES": "2"}),
        (("GPU-unknown",), {}, {"CUDA_VISIBLE_DEVICES": "GPU-unknown"}),
    ],
)
def test_a_process_sees_the_cards_of_its_lease(cards: Any, inherited: Dict[str, str], environment: Dict[str, str]) -> None:
    seen = card_environment(cards, [CPU, *NAMED, *NUMBERED], inherited)

    assert seen == {**environment, "GPUMESH_DEVICE": "cuda:0"}


@pytest.mark.parametrize(
    ("cards", "inherited", "numbers"),
    [
        (("GPU-amd1",), {}, "1"),
        (("GPU-amd0", "GPU-amd1"), {"HIP_VISIBLE_DEVICES": "2,5"}, "2,5"),
        (("GPU-amd1",), {"CUDA_VISIBLE_DEVICES": "2,5"}, "5"),
        (("GPU-amd1",), {"ROCR_VISIBLE_DEVICES": "2,5"}, "1"),
        (("rocm:1",), {}, "1"),
    ],
)
def test_rocm_counts_within_what_the_worker_may_see(cards: Any, inherited: Dict[str, str], numbers: str) -> None:
    seen = card_environment(cards, [CPU, *ROCM], inherited)

    assert seen == {"HIP_VISIBLE_DEVICES": numbers, "CUDA_VISIBLE_DEVICES": numbers, "GPUMESH_DEVICE": "cuda:0"}


def test_a_rocm_process_sees_no_cuda_card_beside_its_own() -> None:
    seen = card_environment(("GPU-amd1",), [CPU, *NAMED, *ROCM], {})

    assert seen == {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "", "GPUMESH_DEVICE": "cuda:0"}


def test_apples_card_needs_no_variable_to_be_seen() -> None:
    assert card_environment(("mps:0",), [CPU, MPS], {}) == {"GPUMESH_DEVICE": "mps"}
    assert card_environment(("mps:0",), [CPU], {}) == {"GPUMESH_DEVICE": "mps"}, "also before it is known"


def test_a_card_that_the_worker_may_not_see_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="cuda:2"):
        card_environment(("cuda:2",), [CPU, *NUMBERED], {"CUDA_VISIBLE_DEVICES": "3,2"})


def test_a_process_without_a_lease_sees_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(detect.PROBE_SWITCH, "0")

    assert no_card_environment([CPU, *NAMED]) == {"CUDA_VISIBLE_DEVICES": ""}
    assert no_card_environment([CPU, *ROCM]) == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    assert no_card_environment([CPU, NAMED[0]._replace(problem="paused")]) == {"CUDA_VISIBLE_DEVICES": ""}


def test_without_gpus_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(detect.PROBE_SWITCH, "0")

    assert no_card_environment([CPU]) == {}


def test_cards_that_may_be_found_later_are_hidden_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(detect.PROBE_SWITCH, "1")

    assert no_card_environment([CPU]) == {"CUDA_VISIBLE_DEVICES": ""}
