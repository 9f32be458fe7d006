"""F44 and F42 on a real card: NVML, CUDA's own library and torch speak of the same cards, in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from gpumesh.devices import nvml, probing
from gpumesh.model.resources import DeviceFacts

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip, reason="needs CUDA")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def usable() -> List[DeviceFacts]:
    """What the probe offers."""
    survey = probing.detect()
    assert not survey.problem
    assert survey.driver
    return [device for device in survey.devices if not device.problem]


def by_torch() -> List[Tuple[str, str, int]]:
    """(name, UUID, memory) by torch's numbers."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(one.name, f"GPU-{getattr(one, 'uuid', '')}", one.total_memory) for one in properties]


def test_the_cards_are_torchs_in_torchs_order() -> None:
    found = usable()
    if any(device.uuid.startswith("MIG-") for device in found):
        pytest.skip("a process sees one slice")

    assert [(device.name, device.index) for device in found] == [(name, index) for index, (name, *_) in enumerate(by_torch())]
    for device, (_, uuid, memory) in zip(found, by_torch()):
        assert uuid in (device.uuid, "GPU-")
        assert 0.9 * device.memory < memory <= device.memory * 1.01
        assert 0 <= device.others < device.memory
        assert device.capability
        assert device.score > 0


def test_cudas_library_is_read_rightly() -> None:
    code = "import json; from gpumesh.devices import cuda_driver; print(json.dumps(cuda_driver.list_cards()))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout

    cards, code_number, refusal = json.loads(printed)

    assert (code_number, refusal) == (0, "")
    assert [(card[0], card[3]) for card in cards] == [(name, memory) for name, _, memory in by_torch()]
    assert all(uuid in (card[1], "GPU-") for card, (_, uuid, _) in zip(cards, by_torch()))


def test_an_empty_list_hides_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    survey = probing.detect()

    assert survey.devices
    assert {device.problem for device in survey.devices} == {"hidden: CUDA_VISIBLE_DEVICES is empty"}


def test_the_instruments_answer() -> None:
    found = usable()

    readings = nvml.read_cards(found, (), ())

    assert [reading.key for reading in readings] == [device.key for device in found]
    for device, reading in zip(found, readings):
        assert 0 <= reading.used <= device.memory
        assert 0 <= reading.others <= device.memory
        assert -1 <= reading.utilisation <= 100
