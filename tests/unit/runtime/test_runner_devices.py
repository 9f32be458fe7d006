"""The device of a task's process. CUDA is a stand-in here; tests/gpu has the real one, tests/integration/test_placing.py real torch."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, Dict, List

import pytest

from gpumesh.runtime.runner_devices import TaskDevice, is_out_of_memory
from tests.support.fake_nvml import FakeNvml

GB = 10**9
UUID = "GPU-00000000-0000-4000-8000-000000000100"


class _Cuda(ModuleType):
    """As much of torch.cuda as is asked."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.calls: List[str] = []
        self.is_here, self.is_in_use, self.is_broken = True, True, False
        self.allocated = 0

    def is_available(self) -> bool:
        return self.is_here

    def is_initialized(self) -> bool:
        return self.is_in_use

    def synchronize(self) -> None:
        self._note("synchronize")

    def empty_cache(self) -> None:
        self._note("empty_cache")

    def _note(self, call: str) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.calls.append(call)

    def memory_allocated(self, index: int = 0) -> int:
        return self.allocated

    def memory_reserved(self, index: int = 0) -> int:
        return self.allocated + GB * (1 + index)

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, index: int) -> Any:
        self._note("mem_get_info")
        return 1 * GB, 24 * GB

    def get_device_name(self, index: int) -> str:
        return "NVIDIA GeForce RTX 3090"

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=UUID[4:])


class _Full(RuntimeError):
    """torch.OutOfMemoryError."""


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("torch")
    made.Tensor, made.nn, made.device = type("Tensor", (), {}), SimpleNamespace(Module=type("Module", (), {})), str
    made.cuda, made.OutOfMemoryError = _Cuda(), _Full
    made.backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def pretend_processes(monkeypatch: pytest.MonkeyPatch, processes: Dict[int, int]) -> None:
    listed = [{"pid": pid, "usedGpuMemory": used} for pid, used in processes.items()]
    device = {"name": "NVIDIA GeForce RTX 3090", "uuid": UUID, "processes": listed}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({"driver": "550.54.14", "devices": [device]}))  # type: ignore[arg-type]


def test_without_torch_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    device, arguments, keywords = TaskDevice(), (1,), {"a": 2}

    assert device.place(arguments, keywords) == (arguments, keywords)
    device.finish()
    assert device.free()
    assert device.kept == -1, "what the task used is not known"
    assert not device.explain_full(MemoryError(), task="f", asked="1 GPU")


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "name"), [(True, False, "cuda:0"), (False, True, "mps"), (False, False, "cpu"), (True, True, "cuda:0")]
)  # fmt: skip
def test_the_device_is_the_first_that_the_process_sees(torch: Any, has_cuda: bool, has_mps: bool, name: str) -> None:
    torch.cuda.is_here = has_cuda
    torch.backends.mps.is_available = lambda: has_mps

    device = TaskDevice()
    device.place((), {})

    assert device._name == name


def test_after_a_task_memory_is_given_back(torch: Any) -> None:
    device = TaskDevice("cuda:0")

    device.finish()
    assert device.free()

    assert torch.cuda.calls == ["synchronize", "empty_cache"]


def test_a_gpu_that_no_task_has_touched_is_not_touched(torch: Any) -> None:
    torch.cuda.is_in_use = False
    device = TaskDevice("cuda:0")

    device.finish()
    assert device.free()

    assert torch.cuda.calls == []


def test_what_only_cycles_keep_alive_is_looked_for_when_memory_has_grown(torch: Any) -> None:
    class Holder:
        """Its memory is freed with it."""

        def __init__(self) -> None:
            self.itself = self
            torch.cuda.allocated += 2 * GB

        def __del__(self) -> None:
            torch.cuda.allocated -= 2 * GB

    device = TaskDevice("cuda:0")
    Holder()
    assert device.free()
    assert torch.cuda.allocated == 0

    torch.cuda.allocated = 3 * GB  # A global of the task's.
    assert device.free()
    Holder()
    assert device.free()
    assert torch.cuda.allocated == 3 * GB


def test_what_tasks_leave_behind_is_the_most_on_any_of_the_devices(torch: Any) -> None:
    device = TaskDevice("cuda:0")
    assert device.kept == -1, "no task has ended"

    torch.cuda.allocated = 3 * GB
    assert device.free()

    assert device.kept == 5 * GB


def test_torch_without_cuda_leaves_nothing(torch: Any) -> None:
    torch.cuda.is_in_use = False
    device = TaskDevice("cuda:0")

    assert device.free()

    assert device.kept == 0


def test_nobody_knows_what_other_libraries_leave_behind(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = TaskDevice("cuda:0")
    assert device.free()
    assert device.kept == 2 * GB

    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    assert device.free()
    assert device.kept == -1
    monkeypatch.delitem(sys.modules, "cupy")
    torch.cuda.is_broken = True
    assert not device.free()
    assert device.kept == -1


def test_a_device_that_does_not_answer_is_told(torch: Any) -> None:
    torch.cuda.is_broken = True
    device = TaskDevice("cuda:0")

    with pytest.raises(RuntimeError, match="device-side assert"):
        device.finish()
    assert not device.free()


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (_Full("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"), True),
        (RuntimeError("HIP out of memory."), True),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), False),
        (RuntimeError("Found no NVIDIA driver on your system."), False),
        (AssertionError("Torch not compiled with CUDA enabled"), False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: out of memory"), False),
        (MemoryError(), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_a_full_gpu_is_recognised(torch: Any, error: BaseException, is_full: bool) -> None:
    before = error.args

    assert is_out_of_memory(torch, error) is is_full
    assert TaskDevice("cuda:0").explain_full(error, task="train", asked="1 GPU") is is_full
    assert (error.args == before) is not is_full


def test_the_error_says_which_device_was_full_and_who_is_on_it(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_processes(monkeypatch, {os.getpid(): 2 * GB, os.getppid(): 20 * GB})
    torch.cuda.allocated = GB
    error = _Full("CUDA out of memory. Tried to allocate 4.00 GiB.")

    assert TaskDevice("cuda:0").explain_full(error, task="train", asked="room on a GPU with 4 GB")

    text = str(error)
    assert type(error) is _Full
    assert text.startswith("CUDA out of memory. Tried to allocate 4.00 GiB.\ngpumesh: on ")
    assert "cuda:0 (NVIDIA GeForce RTX 3090) has 24 GB, of which 1 GB are free" in text
    assert "this process has 1 GB in tensors and 1 GB kept for more" in text
    assert f"(pid {os.getppid()}) 20 GB" in text
    assert f"(pid {os.getpid()})" not in text
    assert "train asked for room on a GPU with 4 GB; ask for more" in text


def test_where_nobody_tells_the_processes_the_rest_is_told(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_processes(monkeypatch, {2**22: 5 * GB})  # Nobody has this number: the list is not believed.
    error = _Full("CUDA out of memory.")

    TaskDevice("cuda:0").explain_full(error, task="train", asked="1 GPU")

    assert "22 GB are held by other processes and by the driver" in str(error)


def test_a_device_that_does_not_answer_is_not_asked_twice(torch: Any) -> None:
    torch.cuda.is_broken = True
    error = _Full("CUDA out of memory.")

    TaskDevice("cuda:0").explain_full(error, task="train", asked="1 GPU")

    assert "its memory cannot be read any more (RuntimeError); train asked for 1 GPU" in str(error)
