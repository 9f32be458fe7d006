"""What CUDA's own library says, and how its word is joined with NVML's."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

import pytest

from gpumesh.devices import cuda_driver, nvml, offered
from gpumesh.devices.cards import Hardware
from gpumesh.devices.cuda_driver import CudaCard, CudaList
from gpumesh.devices.offered import HostMemory
from gpumesh.model.resources import DeviceFacts
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_nvml import FakeNvml, record

MIB = 1 << 20
HOST = HostMemory(16 << 30, 12 << 30)
RTX_3090: Dict[str, Any] = {
    "name": "NVIDIA GeForce RTX 3090", "uuid": "00000000000040008000000000000171", "memory": 24245 * MIB, "clock_khz": 1695000,
    "multiprocessors": 82, "integrated": 0, "domain": 0, "bus": 0xA1, "slot": 0, "memory_clock_khz": 9751000, "bus_width": 384,
    "major": 8, "minor": 6,
}  # fmt: skip
ORIN: Dict[str, Any] = {
    "name": "Orin", "uuid": "00000000000040008000000000000001", "memory": 30622 * MIB, "integrated": 1, "major": 8, "minor": 7
}  # fmt: skip


def uuid(number: int) -> str:
    """Of a made-up card."""
    return f"GPU-00000000-0000-4000-8000-0000000001{number:02d}"


def machine(*names: str) -> nvml.Survey:
    """Good cards as NVML lists them."""
    memory = nvml.Memory(8192 * MIB, 8000 * MIB, 0)
    return nvml.Survey(tuple(nvml.Card(place, name, uuid(place), memory=memory) for place, name in enumerate(names)))


def names_and_numbers(found: Any) -> List[Any]:
    """(name, CUDA's number, NVML's number, problem) of each."""
    return [(device.name, device.index, device.system_index, device.problem) for device in found]


def test_a_card_is_described_by_what_the_library_answers() -> None:
    assert cuda_driver.list_cards(FakeCuda([RTX_3090])) == CudaList(
        (
            CudaCard(
                name="NVIDIA GeForce RTX 3090",
                uuid="GPU-00000000-0000-4000-8000-000000000171",
                bus="00000000:A1:00",
                memory=24245 * MIB,
                hardware=Hardware(capability="8.6", multiprocessors=82, clock=1.695e9, bandwidth=936.096e9),
            ),
        )
    )


def test_what_an_old_library_does_not_know_is_empty() -> None:
    (card,) = cuda_driver.list_cards(FakeCuda([{"name": "Tegra X1", "memory": 3964 * MIB}])).cards

    assert card == CudaCard("Tegra X1", bus="00000000:00:00", memory=3964 * MIB)


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (FakeCuda(), CudaList()),
        (FakeCuda(init=802), CudaList((), 802, "system not yet initialized, CUDA error 802")),
        (FakeCuda(init=999), CudaList((), 999, "CUDA error 999")),
        (FakeCuda(init=34), CudaList((), cuda_driver.NOT_THERE, "only a library to link against")),
        (
            FakeCuda([ORIN, {**RTX_3090, "broken": True}]),
            CudaList((), cuda_driver.NOT_THERE, "device 1 is counted and cannot be opened"),
        ),
        (object(), CudaList((), cuda_driver.NOT_THERE, "'object' object has no attribute 'cuInit'")),
    ],
)
def test_a_library_that_shows_nothing_says_why(library: Any, expected: CudaList) -> None:
    assert cuda_driver.list_cards(library) == expected


def test_cudas_numbers_count_where_it_was_asked() -> None:
    answers = nvml.survey(FakeNvml(record("r17")))
    slow_first = CudaList((CudaCard("NVIDIA GeForce GTX 745", uuid(70)), CudaCard("NVIDIA GeForce GTX 1080 Ti", uuid(71))))

    found = offered.join(answers, {}, HOST, slow_first)

    assert names_and_numbers(found) == [("NVIDIA GeForce GTX 745", 0, 0, ""), ("NVIDIA GeForce GTX 1080 Ti", 1, 1, "")]


def test_what_cuda_does_not_show_is_hidden_or_said_to_be_missing() -> None:
    answers = machine("A", "B", "C")
    shown = CudaList((CudaCard("C", uuid(2)),))

    named = offered.join(answers, {"CUDA_VISIBLE_DEVICES": "2"}, HOST, shown)
    plain = offered.join(answers, {}, HOST, shown)

    assert names_and_numbers(named) == [
        ("C", 0, 2, ""),
        ("A", 1, 0, "hidden by CUDA_VISIBLE_DEVICES=2"),
        ("B", 2, 1, "hidden by CUDA_VISIBLE_DEVICES=2"),
    ]
    assert [problem for *_, problem in names_and_numbers(plain)] == ["", *["CUDA does not show it to programs here"] * 2]


def test_where_cuda_does_not_start_no_card_is_used_and_the_reason_is_its_own() -> None:
    shown = CudaList((), 802, "system not yet initialized, CUDA error 802")

    found = offered.join(machine("A", "B"), {"CUDA_VISIBLE_DEVICES": "1"}, HOST, shown)

    assert names_and_numbers(found) == [
        ("B", 0, 1, "CUDA does not start here (system not yet initialized, CUDA error 802)"),
        ("A", 1, 0, "hidden by CUDA_VISIBLE_DEVICES=1"),
    ]


@pytest.mark.parametrize(
    "shown",
    [
        CudaList((CudaCard("X", "GPU-other"), CudaCard("B", uuid(1)))),
        CudaList((CudaCard("B", uuid(1)), CudaCard("B", uuid(1)))),
        CudaList((), cuda_driver.NOT_THERE, "no such file"),
    ],
)
def test_where_cuda_speaks_of_other_cards_or_not_at_all_the_rules_stand_in(shown: CudaList) -> None:
    found = offered.join(machine("A", "B"), {"CUDA_VISIBLE_DEVICES": "1"}, HOST, shown)

    assert [(device.name, device.problem == "") for device in found] == [("B", True), ("A", False)]


def test_cards_without_uuid_are_matched_by_their_place_on_the_bus() -> None:
    cards = tuple(nvml.Card(place, "X", bus=f"00000000:0{place}:00", memory=nvml.Memory(MIB, MIB, 0)) for place in range(2))
    shown = CudaList((CudaCard("X", bus="00000000:01:00"), CudaCard("X", bus="00000000:00:00")))

    found = offered.join(nvml.Survey(cards), {}, HOST, shown)

    assert [(device.index, device.system_index) for device in found] == [(0, 1), (1, 0)]


def test_slices_are_offered_one_by_one_though_cuda_shows_one_to_a_process() -> None:
    answers = nvml.survey(FakeNvml(record("r11")))
    shown = CudaList((CudaCard("NVIDIA A100", "GPU-whatever"),))

    found = offered.join(answers, {"CUDA_VISIBLE_DEVICES": "MIG-00000000-0000-5000-8000-000000000112"}, HOST, shown)

    assert [(device.uuid[-3:], device.index, device.problem[:6]) for device in found] == [
        ("112", 0, ""),
        ("110", 1, "hidden"),
        ("111", 2, "hidden"),
        ("", 3, "divide"),
    ]


def test_a_jetson_without_nvml_is_found_by_cuda() -> None:
    answers = nvml.Survey((), nvml.LIBRARY_NOT_FOUND, "NVML Shared Library Not Found")

    found = offered.join(answers, {}, HOST, cuda_driver.list_cards(FakeCuda([ORIN])))

    assert found == (
        DeviceFacts(
            "cuda", 0, "Orin", 14 << 30, found[0].score, others=2 << 30, is_integrated=True, capability="8.7", system_index=-1
        ),
    )
    assert found[0].key == "cuda:0"  # The one form that its masks understand.


@pytest.mark.parametrize(
    ("fields", "one", "expected"),
    [
        ({"memory_code": nvml.NOT_SUPPORTED}, {"memory": 40 * MIB}, (40 * MIB, 0, False, "")),
        ({"memory_code": nvml.NO_PERMISSION}, {"memory": 40 * MIB}, (40 * MIB, 0, False, "")),
        ({"memory_code": nvml.NOT_SUPPORTED}, {"memory": 13 << 30, "is_integrated": True}, (13 << 30, 1 << 30, True, "")),
        ({"memory": nvml.Memory(50 * MIB, 30 * MIB, 20 * MIB)}, {"memory": 40 * MIB}, (50 * MIB, 20 * MIB, False, "")),
        (
            {"memory_code": nvml.UNKNOWN, "memory_refusal": "Unknown Error"},
            {},
            (0, 0, False, "does not tell its memory (Unknown Error)"),
        ),
    ],
)
def test_memory_that_nvml_does_not_tell_is_cudas(fields: Mapping[str, Any], one: Mapping[str, Any], expected: Any) -> None:
    answers = nvml.Survey((nvml.Card(0, "X", uuid(0), **fields),))

    (found,) = offered.join(answers, {}, HOST, CudaList((CudaCard("X", uuid(0), **one),)))

    assert (found.memory, found.others, found.is_integrated, found.problem) == expected


def test_a_name_that_is_garbage_to_nvml_is_cudas() -> None:
    (found,) = offered.join(machine(""), {}, HOST, cuda_driver.list_cards(FakeCuda([RTX_3090])))

    assert (found.name, found.uuid) == ("NVIDIA GPU", uuid(0))  # Another card: not believed.
    (found,) = offered.join(machine(""), {}, HOST, CudaList((CudaCard("NVIDIA GeForce RTX 3090", uuid(0)),)))
    assert found.name == "NVIDIA GeForce RTX 3090"


def test_of_two_cards_with_one_uuid_the_second_is_not_used() -> None:
    cards = tuple(nvml.Card(place, "X", uuid(0), memory=nvml.Memory(MIB, MIB, 0)) for place in range(2))

    one, two = offered.join(nvml.Survey(cards), {}, HOST)

    assert (one.key, one.problem) == (uuid(0), "")
    assert (two.key, two.problem) == ("cuda:1", f"has the same UUID as another card ({uuid(0)})")


def test_a_machine_without_cards_offers_none() -> None:
    assert offered.join(nvml.Survey(), {}, HOST, CudaList()) == ()
