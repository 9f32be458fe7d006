"""The device of a task's process: what torch brings goes there, its memory comes back, and a card that is too small says so.

A process that runs tasks on GPUs sees the cards of its lease and no others, so its device is the first that it sees. Nothing in here
imports torch, and nothing touches a GPU before the task, or unpickling its arguments, has loaded torch.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, Dict, List, Tuple

from gpumesh.model.resources import show_bytes
from gpumesh.serialization import moving

KEPT_BYTES = 1 << 20  # Growth of a device's memory over a task that is worth a search for what only cycles keep alive.
SHOWN_PROCESSES = 5  # In a text for people; the largest.
# What else takes a GPU's memory in a process, past torch and unseen by it.
OTHER_LIBRARIES = ("jax", "tensorflow", "cupy", "numba.cuda", "pycuda", "paddle", "onnxruntime", "tensorrt", "rmm", "llama_cpp")


class TaskDevice:
    """The device on which the tasks of this process run.

    Args:
        name: As torch calls it; "": the first card that this process sees, or the CPU.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._allocated = 0  # Bytes that tasks have left on it: their globals.
        self.kept = -1  # Bytes that they have left on the fullest of this process's devices; -1: nobody can say.
        self.has_moved = False  # The last task's arguments held something that went there.

    def place(self, arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """The arguments with torch's modules and tensors on the device."""
        torch = moving.torch_loaded()
        self.has_moved = False
        if torch is None:
            return arguments, keywords
        name = self._known(torch)
        if name == "cpu":
            return arguments, keywords  # Everything arrives there.
        mover = moving.Mover(torch, name)
        arguments, keywords = mover.move(arguments), mover.move(keywords)
        self.has_moved = mover.moved > 0
        return arguments, keywords

    def finish(self) -> None:
        """Wait until the device has done what the task has asked of it: what fails there fails this task, not the next.

        Raises:
            RuntimeError: torch's error for it.
        """
        torch = moving.torch_loaded()
        if torch is not None and _cuda_in_use(torch):
            torch.cuda.synchronize()

    def free(self) -> bool:
        """Give memory that no tensor uses back to the device; False if the device does not answer this process any more."""
        torch = moving.torch_loaded()
        self.kept = -1
        if torch is None:
            return True
        try:
            if _cuda_in_use(torch):
                cuda = torch.cuda
                if cuda.memory_allocated() > self._allocated + KEPT_BYTES:
                    gc.collect()
                cuda.empty_cache()
                self._allocated = cuda.memory_allocated()
                kept = max((cuda.memory_reserved(number) for number in range(cuda.device_count())), default=0)
            elif self._name == "mps":
                torch.mps.empty_cache()
                return True
            else:
                kept = 0
        except RuntimeError:
            return False  # What a kernel did wrong stays with the process: each call raises it again from now on.
        if not any(map(sys.modules.__contains__, OTHER_LIBRARIES)):
            self.kept = kept
        return True

    def explain_full(self, error: BaseException, *, task: str, asked: str) -> bool:
        """Whether the device's memory did not suffice; then the error says itself who holds it. It keeps its type.

        Args:
            error: What the task has raised.
            task: The function's name.
            asked: Its requirement, for people.
        """
        torch = moving.torch_loaded()
        if torch is None or not is_out_of_memory(torch, error):
            return False
        error.args = (f"{error}\n{describe(torch, task=task, asked=asked)}", *error.args[1:])
        return True

    def _known(self, torch: Any) -> str:
        if not self._name:
            mps = getattr(torch.backends, "mps", None)
            if torch.cuda.is_available():
                self._name = "cuda:0"
            else:
                self._name = "mps" if mps is not None and mps.is_available() else "cpu"
        return self._name


def is_out_of_memory(torch: Any, error: BaseException) -> bool:
    """Whether a GPU's memory did not suffice."""
    kind = getattr(torch, "OutOfMemoryError", None) or getattr(torch.cuda, "OutOfMemoryError", None)
    if kind is not None and isinstance(error, kind):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "CUBLAS_STATUS_ALLOC_FAILED" in text or (
        "out of memory" in text and any(word in text for word in ("CUDA", "HIP", "MPS"))
    )


def describe(torch: Any, *, task: str, asked: str) -> str:
    """One line on the current device after `task` found no room on it."""
    where = f"{os.uname().nodename}, process {os.getpid()}" if hasattr(os, "uname") else f"process {os.getpid()}"
    asked = f"{task} asked for {asked}"
    try:
        if not _cuda_in_use(torch):
            mps = torch.mps
            total, used = mps.recommended_max_memory(), mps.driver_allocated_memory()
            facts = f"mps has {show_bytes(total)} for this process, which holds {show_bytes(used)}"
        else:
            facts = _cuda_facts(torch)
    except (RuntimeError, AttributeError) as problem:
        facts = f"its memory cannot be read any more ({type(problem).__name__})"
    return f"gpumesh: on {where}: {facts}; {asked}; ask for more with options(gpu=..., memory=...), or for less at a time"


def _cuda_facts(torch: Any) -> str:
    cuda = torch.cuda
    index = cuda.current_device()
    free, total = cuda.mem_get_info(index)
    own, kept = cuda.memory_allocated(index), cuda.memory_reserved(index)
    facts = (
        f"cuda:{index} ({cuda.get_device_name(index)}) has {show_bytes(total)}, of which {show_bytes(free)} are free; "
        f"this process has {show_bytes(own)} in tensors and {show_bytes(kept - own)} kept for more"
    )
    others = _others(_uuid_of(cuda.get_device_properties(index)), total)
    if others:
        return f"{facts}; others on it: {', '.join(others)}"
    rest = total - free - kept
    return f"{facts}; {show_bytes(rest)} are held by other processes and by the driver" if rest > 0 else facts


def _uuid_of(properties: Any) -> str:
    """As NVML writes it; "" where this version of torch does not tell."""
    uuid = str(getattr(properties, "uuid", "") or "")
    return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _others(uuid: str, total: int) -> List[str]:
    """`python (pid 4242) 3.2 GB` for each other process on a card, the largest first; nothing where NVML does not say."""
    if not uuid:
        return []
    from gpumesh.devices.nvml import processes_on

    found = processes_on(uuid, total)
    found.pop(os.getpid(), None)
    largest = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{_process_name(pid)} (pid {pid}) {show_bytes(used)}" for pid, used in largest[:SHOWN_PROCESSES]]
    return [*shown, f"and {len(largest) - SHOWN_PROCESSES} more"] if len(largest) > SHOWN_PROCESSES else shown


def _process_name(pid: int) -> str:
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "a process"  # It has ended meanwhile, or is somebody else's.


def _cuda_in_use(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized())
