"""This machine's devices as a program uses them directly: which is the best, and calls on it with torch's modules and tensors there.

A call that has nothing to do with torch and is bound to no device never comes here. GPUs are found by a probe process, at the first
question that needs to know and where there may be any; later questions, also of later programs, are answered from what it found.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

from gpumesh.errors import NoSuitableWorkerError
from gpumesh.model.resources import DeviceFacts, Requirement, WorkerFacts, lacks, make_requirement
from gpumesh.serialization import moving, refs

_known: List[WorkerFacts] = []  # Of this machine, once somebody has asked; cards do not come and go while a program runs.
_lent: Dict[int, List[Any]] = {}  # Modules of callers that are on another device for now: [module, where it belongs, calls].
_lock = threading.Lock()


def local_facts() -> WorkerFacts:
    """What this process can use of this machine. The first call may take the seconds of a probe."""
    with _lock:
        if not _known:
            from gpumesh.devices import detect, probing

            facts = detect.local_facts()
            cards: Tuple[DeviceFacts, ...] = ()
            if detect.gpus_may_exist():
                cards = probing.head_start() or probing.detect().devices
            own = tuple(device for device in facts.devices if device.kind == "cpu")
            _known.append(facts._replace(devices=(*own, *cards)))
        return _known[0]


def best_device() -> str:
    """The fastest usable device of this machine as torch calls it: "cuda:1", "mps", or "cpu" where there is no other."""
    if refs.is_task_process():
        from gpumesh.runtime.runner_cards import DEVICE

        return os.environ.get(DEVICE) or "cpu"  # A task has what it was given.
    return _fastest(local_facts().devices)


def device_named(name: str, *, function: str) -> str:
    """The fastest device of this machine that a name stands for, as torch calls it.

    Args:
        name: "cuda", "cuda:1", "RTX 3080", "cpu", ...
        function: What is to run there, for the error.

    Raises:
        NoSuitableWorkerError: There is none.
    """
    need = make_requirement(device=name)
    if not need.needs_gpu:
        return "cpu"
    facts = local_facts()
    reasons = lacks(facts, need)
    if reasons:
        raise NoSuitableWorkerError(
            f"{function} is bound to {name!r}, but this machine {' and '.join(reasons)}; "
            "call .remote(...) to run it on a worker that has one"
        )
    return _fastest(device for device in facts.devices if _is_meant(facts, device, need))


def call_here(
    function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any], *, device: str, place: bool, is_bound: bool
) -> Any:
    """Call a function on a device of this machine.

    Modules and tensors among the arguments are there for the call, and tensors of what it returns, also of a module, are on the CPU.
    A module of the caller's is moved itself, so that it can be trained, and is back where it was afterwards. Of a coroutine the
    result comes home when it ends.

    Args:
        device: As torch calls it.
        place: Move things; if not, only torch's current device is set.
        is_bound: The user has asked for this device.
    """
    torch = moving.torch_loaded()
    if torch is None and is_bound and device.startswith("cuda:") and device != "cuda:0":
        torch = _import_torch()  # Only it can make another card than the first the one that is meant by "cuda".
    if torch is None or (device == "cpu" and not is_bound):
        return function(*args, **kwargs)
    mover = moving.Mover(torch, device)
    held: List[int] = []
    if place:
        args, kwargs, held = _lend(mover, args, kwargs)
    returns_later = False
    try:
        with _current(torch, device, is_meant=is_bound or mover.seen > 0):
            value = function(*args, **kwargs)
        if not place:
            return value
        returns_later = type(value).__name__ == "coroutine"
        return _home_later(torch, value, held) if returns_later else _home(torch, value)
    finally:
        if held and not returns_later:
            _take_back(held)


def _home(torch: Any, value: Any) -> Any:
    return moving.Mover(torch, "cpu").move(value)


async def _home_later(torch: Any, coroutine: Any, held: List[int]) -> Any:
    try:
        return _home(torch, await coroutine)
    finally:
        _take_back(held)


def _lend(
    mover: moving.Mover, args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any], List[int]]:
    """The arguments on the device, and the modules that have to go back; several threads may call with the same module."""
    with _lock:
        try:
            args, kwargs = mover.move(args), mover.move(kwargs)
        except BaseException:
            mover.move_back()
            raise
        for module, origin in mover.modules:
            _lent.setdefault(id(module), [module, origin, 0])
        held = [id(module) for module in mover.modules_seen if id(module) in _lent]
        for key in held:
            _lent[key][2] += 1
    return args, kwargs, held


def _take_back(held: List[int]) -> None:
    with _lock:
        for key in held:
            lent = _lent[key]
            lent[2] -= 1
            if not lent[2]:
                del _lent[key]
                lent[0].to(lent[1])


def _current(torch: Any, device: str, *, is_meant: bool) -> ContextManager[Any]:
    if is_meant and device.startswith("cuda"):
        current: ContextManager[Any] = torch.cuda.device(device)
        return current
    return contextlib.nullcontext()


def _import_torch() -> Optional[Any]:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return torch


def _is_meant(facts: WorkerFacts, device: DeviceFacts, need: Requirement) -> bool:
    return device.kind != "cpu" and not lacks(facts._replace(devices=(device,)), need)


def _fastest(devices: Any) -> str:
    usable = [device for device in devices if device.kind != "cpu" and not device.problem]
    best = max(usable, key=lambda device: device.score, default=None)
    return "cpu" if best is None else torch_name(best)


def torch_name(device: DeviceFacts) -> str:
    """What torch calls a device; ROCm's cards are "cuda" to it."""
    if device.kind in ("cuda", "rocm"):
        return f"cuda:{device.index}"
    return device.kind


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # In a forked child: another thread of the parent may have held it.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
