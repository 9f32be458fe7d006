"""What can go wrong when the management library is asked, and that it stays with the question that went wrong."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple

import pytest

from gpumesh.devices import nvml
from gpumesh.devices.nvml import Card, Memory, Nvml
from gpumesh.model.resources import CardReading, DeviceFacts
from tests.support.fake_nvml import FakeNvml, given, raise_code, real_binding, record

MIB = 1 << 20
UUID = "GPU-00000000-0000-4000-8000-000000000100"
NOBODY = 4194304  # One more than the largest process number that Linux gives.


def one_card(**fields: Any) -> FakeNvml:
    """A machine with one good card."""
    device: Dict[str, Any] = {
        "name": "NVIDIA A10",
        "uuid": UUID,
        "memory_b": {"total": 1000 * MIB, "free": 400 * MIB, "used": 600 * MIB},
        "util_gpu": 35,
        "temperature": 51,
        "power_mw": 64810,
        **fields,
    }
    return FakeNvml({"driver": "535.129.03", "devices": [device]})


def facts(**fields: Any) -> DeviceFacts:
    """That card as it was detected."""
    return DeviceFacts("cuda", 0, "NVIDIA A10", 1000 * MIB, 47.0, uuid=UUID, system_index=0)._replace(**fields)


def read(
    binding: Any, *devices: DeviceFacts, own: Tuple[int, ...] = (), leased: Optional[Tuple[str, ...]] = None
) -> Tuple[CardReading, ...]:
    """One reading; by default something of ours runs on the card."""
    return nvml.read_cards(devices or (facts(),), own, (UUID,) if leased is None else leased, binding)


def test_a_binding_that_returns_bytes_is_read_like_any_other() -> None:
    told = record("r01")

    assert nvml.survey(FakeNvml(told, as_bytes=True)) == nvml.survey(FakeNvml(told))
    assert nvml.driver_version(FakeNvml(told, as_bytes=True)) == "535.129.03"


def test_errors_of_the_real_binding_can_be_neither_hashed_nor_compared() -> None:
    error = real_binding().NVMLError(3)

    with pytest.raises(TypeError):
        hash(error)
    with pytest.raises(AttributeError):
        _ = error == ValueError()


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"\xf8\x95", 0, 1, "invalid start byte"),
        real_binding().NVMLLibraryMismatchError("Unversioned function called and the pyNVML version does not match"),
        TypeError("takes 1 positional argument but 2 were given"),
        AttributeError("module has no such function"),
        real_binding().NVMLError(13),
        real_binding().NVMLError(4711),
    ],
)
def test_whatever_a_question_raises_costs_only_its_answer(error: Exception) -> None:
    class Broken(FakeNvml):
        def nvmlDeviceGetName(self, handle: Any) -> Any:
            raise error

        def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
            raise error

    (card,) = nvml.survey(Broken(one_card().record)).cards

    assert (card.name, card.uuid, card.code) == ("", UUID, 0)
    assert card.memory == Memory(1000 * MIB, 400 * MIB, 600 * MIB)


def test_version_2_says_what_is_used_without_the_reserve_and_version_1_what_is_free() -> None:
    (card,) = nvml.survey(
        one_card(memory_v2_mib={"total": 1000, "used": 35, "free": 400}),
    ).cards

    assert card.memory == Memory(total=1000 * MIB, free=400 * MIB, used=35 * MIB)


def test_old_bindings_know_no_version_2() -> None:
    class Old(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # type: ignore[override]
            return super().nvmlDeviceGetMemoryInfo(handle)

    (card,) = nvml.survey(Old(one_card().record)).cards

    assert card.memory == Memory(1000 * MIB, 400 * MIB, 600 * MIB)


def test_a_total_of_nothing_is_like_not_supported() -> None:
    (card,) = nvml.survey(one_card(memory_b={"total": 0, "free": 0, "used": 0})).cards

    assert (card.memory, card.memory_code) == (None, nvml.NOT_SUPPORTED)


def test_why_there_is_no_memory_is_kept_apart() -> None:
    (card,) = nvml.survey(one_card(memory={"raises": "NO_PERMISSION"})).cards

    assert (card.memory, card.memory_code, card.memory_refusal) == (None, nvml.NO_PERMISSION, "Insufficient Permissions")


def test_a_card_lost_between_two_questions_is_lost() -> None:
    (card,) = nvml.survey(one_card(memory={"raises": "GPU_IS_LOST"})).cards

    assert card == Card(0, "NVIDIA A10", UUID, code=nvml.GPU_IS_LOST, refusal="GPU is lost")


def test_the_make_is_put_together_from_single_answers() -> None:
    class Told(FakeNvml):
        def nvmlDeviceGetNumGpuCores(self, handle: Any) -> int:
            return 10496

    binding = Told(one_card(compute_capability=[8, 6], memory_bus_width=384, max_clock_mem=9751, max_clock_sm=2100).record)

    (card,) = nvml.survey(binding).cards

    assert card.hardware.capability == "8.6"
    assert (card.hardware.cores, card.hardware.clock) == (10496, 2.1e9)
    assert card.hardware.bandwidth == pytest.approx(936e9, rel=0.001)  # An RTX 3090, whose sheet says 936 GB/s.


def test_slices_are_found_where_their_number_is_not_told_and_places_are_empty() -> None:
    told = record("r11")
    told["devices"][0]["mig_devices"] = [part for part in told["devices"][0]["mig_devices"] if part["mig_index"] != 1]

    (card,) = nvml.survey(FakeNvml(told)).cards

    assert card.is_divided
    assert [part.uuid[-3:] for part in card.slices] == ["110", "112"]
    assert [part.hardware.multiprocessors for part in card.slices] == [28, 28]


def test_a_mode_that_is_only_pending_divides_nothing() -> None:
    (card,) = nvml.survey(one_card(mig_mode=[0, 1])).cards

    assert not card.is_divided


def test_a_number_that_is_a_ctypes_object_is_a_number() -> None:
    class Odd(FakeNvml):
        def nvmlDeviceGetMigMode(self, handle: Any) -> List[Any]:
            return [self.nvmlDeviceIsMigDeviceHandle(SimpleNamespace(is_slice=False)), 0]  # type: ignore[arg-type]

    (card,) = nvml.survey(Odd(one_card().record)).cards

    assert not card.is_divided


def test_without_binding_or_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.survey().code == nvml.NO_BINDING
    assert nvml.read_cards((facts(),), (), ()) == ()
    assert nvml.driver_version() == ""

    binding = one_card()
    binding.init_answer = {"raises": "LIBRARY_NOT_FOUND"}
    assert nvml.survey(binding) == nvml.Survey((), nvml.LIBRARY_NOT_FOUND, "NVML Shared Library Not Found")


def test_the_library_may_come_up_later() -> None:
    binding = one_card()
    binding.init_answer = {"raises": "DRIVER_NOT_LOADED"}
    visit = Nvml(binding)
    assert visit.open().code == nvml.DRIVER_NOT_LOADED

    binding.init_answer = None

    assert visit.open().code == 0
    with visit:
        assert len(visit.cards()) == 1
    assert not binding.is_open


def test_a_reading_has_every_figure_that_the_card_tells() -> None:
    assert read(one_card(), leased=()) == (
        CardReading(UUID, others=600 * MIB, used=600 * MIB, utilisation=35.0, temperature=51.0, power=64.81),
    )


def test_what_a_card_does_not_tell_is_minus_one() -> None:
    binding = one_card(util_gpu={"printed": "N/A"}, temperature=None, power_mw={"raises": "NO_DATA"})

    (reading,) = read(binding, leased=())

    assert reading[3:] == (-1.0, -1.0, -1.0)
    assert reading.others == 600 * MIB


def process(pid: int, mib: Optional[int]) -> Dict[str, Any]:
    """An entry of the list of processes."""
    return {"pid": pid, "usedGpuMemory": None if mib is None else mib * MIB, "gpuInstanceId": 4294967295}


def test_memory_of_our_own_processes_and_their_children_is_not_the_others() -> None:
    binding = one_card(processes=[process(os.getpid(), 250), process(os.getppid(), 100)])

    (reading,) = read(binding, own=(os.getpid(),))
    (as_child,) = read(binding, own=(os.getppid(),))

    assert (reading.others, reading.used) == (350 * MIB, 600 * MIB)
    assert as_child.others == 250 * MIB


@pytest.mark.parametrize(
    "processes",
    [
        [],  # A container: nothing is shown.
        [
            process(os.getpid(), 250),
            process(NOBODY, 1),
        ],  # The list is scrambled, or its numbers are those of another namespace.
        [process(os.getpid(), None)],  # Windows.
        [process(os.getpid(), 5000)],  # More than the card has.
        [process(os.getpid(), 250), process(0, 0)],
        {"raises": "NOT_SUPPORTED"},
        {"raises": "FUNCTION_NOT_FOUND"},
    ],
)
def test_where_nobody_can_tell_whose_memory_it_is_others_is_unknown_while_ours_run(processes: Any) -> None:
    binding = one_card(processes=processes)

    (running,) = read(binding, own=(os.getpid(),))
    (idle,) = read(binding, own=(os.getpid(),), leased=())

    assert (running.others, running.used) == (-1, 600 * MIB)
    assert idle.others == 600 * MIB


def test_a_list_that_the_binding_cannot_read_is_no_list() -> None:
    class Mismatched(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
            raise self.NVMLLibraryMismatchError("Unversioned function called")

    (reading,) = read(Mismatched(one_card().record), own=(os.getpid(),))

    assert reading.others == -1


def test_only_used_cards_that_answer_are_read() -> None:
    lost, unknown = facts(uuid="", system_index=7), facts(uuid="GPU-gone")
    others = (facts(kind="cpu"), facts(kind="rocm"), facts(problem="hidden"), lost, unknown)

    assert read(one_card(), *others) == ()
    assert [reading.key for reading in read(one_card(), *others, facts(uuid="", system_index=0))] == ["cuda:0"]


def test_a_card_that_is_found_and_yet_lost_is_not_read() -> None:
    assert read(one_card(memory={"raises": "GPU_IS_LOST"})) == ()
    (reading,) = read(one_card(memory={"raises": "NO_PERMISSION"}))
    assert (reading.others, reading.used, reading.temperature) == (-1, -1, 51.0)


def test_a_slice_is_read_by_its_own_uuid_and_old_bindings_get_bytes() -> None:
    told = record("r11")
    part = facts(uuid=told["devices"][0]["mig_devices"][1]["uuid"])

    for as_bytes in (False, True):
        (reading,) = read(FakeNvml(told, as_bytes=as_bytes), part, leased=())
        assert (reading.key, reading.used, reading.utilisation) == (part.uuid, 9880 * MIB, -1.0)


def test_on_shared_memory_others_is_what_the_host_has_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=300 * MIB))
    orin = facts(uuid="", is_integrated=True, system_index=0)
    binding = FakeNvml(record("r08"))

    (idle,) = read(binding, orin, leased=())
    (busy,) = read(binding, orin, own=(os.getpid(), NOBODY), leased=("cuda:0",))

    assert (idle.others, idle.used) == (700 * MIB, 700 * MIB)
    ours = psutil.Process().memory_info()
    assert 700 * MIB - ours.rss <= busy.others < 700 * MIB


def test_what_no_report_tells_is_refused_by_the_stand_in() -> None:
    with pytest.raises(real_binding().NVMLError, match="Not Supported"):
        FakeNvml(record("r03")).nvmlDeviceGetSerial(None)
    with pytest.raises(real_binding().NVMLError, match="Not Supported"):
        given({"printed": "N/A"})
    with pytest.raises(real_binding().NVMLError, match="GPU is lost"):
        raise_code("GPU_IS_LOST")
