"""A throw-away process that looks at the GPUs, or measures one of them, prints one JSON object, and ends.

    python -m gpumesh.devices.probe                      which devices there are
    python -m gpumesh.devices.probe --without-nvml       the same as torch sees it: after NVML has crashed
    python -m gpumesh.devices.probe --measure DEVICE     how fast the one is that torch calls DEVICE ("cuda:0", "mps", "cpu")

A library that meets a broken card may crash or hang; that ends this process and no other. It also keeps whoever asks free of CUDA.
`probing` starts it and reads what it prints.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any, Dict, List, Optional, Tuple

from gpumesh.devices.children import end_with_parent
from gpumesh.model.resources import DeviceFacts

WITHOUT_NVML = "--without-nvml"
MEASURE = "--measure"
IN_USE = "it was in use"  # Begins the note on a card that can be measured when it is at rest.
ANSWER = "gpumesh-probe:"  # Begins the line that counts: libraries print too.


def detect(*, with_nvml: bool = True) -> Dict[str, Any]:
    """The devices and what else is known of the place.

    Returns:
        "devices": fields of `DeviceFacts`, one list each; "driver": its version; "torch": the version of torch, "" if there is none.
    """
    found: Tuple[DeviceFacts, ...] = ()
    driver = ""
    if with_nvml:
        from gpumesh.devices.gpus import detect_gpus
        from gpumesh.devices.watch import driver_version

        found = detect_gpus()
        driver = driver_version() if found else ""
    version = torch_version()
    if version and all(device.problem and device.system_index < 0 for device in found):  # No card, or nobody to ask about it.
        found = _by_torch() or found
    return {"devices": [list(device) for device in found], "driver": driver, "torch": version}


def _by_torch() -> Tuple[DeviceFacts, ...]:
    """What torch finds where NVML does not: AMD, Apple, old Jetsons, NVIDIA cards without NVML."""
    from gpumesh.devices import torch_cards

    try:
        torch = torch_cards.load_torch()
    except (ImportError, OSError):  # Also a library of its own that does not load.
        return ()
    return torch_cards.find_devices(torch)


def torch_version() -> str:
    """The version of torch here, without loading it; "" if it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return ""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "unknown"


def measure(name: str) -> Dict[str, Any]:
    """Measure the device that torch calls `name`.

    Returns:
        "rates": see `torch_cards.measure`; or "problem": why tasks can not use it; or "note": why it was not measured though they may.
        "doubts": what else was at work on it, "" if nothing was. "torch": the version.
    """
    version = torch_version()
    if not version:
        return {"note": "torch is not installed here", "torch": ""}
    from gpumesh.devices import torch_cards

    try:
        torch = torch_cards.load_torch()
    except (ImportError, OSError) as error:
        return {"note": f"torch does not load here ({error})"[:300], "torch": version}
    answer: Dict[str, Any] = {"torch": str(torch.__version__), "doubts": ""}
    kind, capability = name.partition(":")[0], ""
    if kind == "cuda":
        if not torch_cards.is_built_for_gpus(torch):
            return {**answer, "note": f"torch {torch.__version__} is a build without GPUs"}
        why = torch_cards.why_no_cuda(torch)
        if why:
            return {**answer, "problem": f"torch {torch.__version__} cannot use it ({why})"}
        facts = torch_cards.find_devices(torch)[int(name.partition(":")[2] or 0)]
        kind, capability = facts.kind, facts.capability
    from gpumesh.devices.watch import Watch

    watch = Watch(torch, name) if kind == "cuda" else None
    if watch is not None:
        watch.before()
    try:
        look = watch.look if watch is not None else lambda: None
        answer["rates"] = torch_cards.measure(torch, name, kind=kind, capability=capability, look=look)
    except torch_cards.WrongProduct as error:
        answer["problem"] = f"{error}; it is not used"
    except (RuntimeError, NotImplementedError) as error:
        answer.update(explain(torch, error))
    answer["doubts"] = watch.doubts() if watch is not None else ""
    return answer


# What torch says when the card is there and this build cannot run on it: CUDA and HIP.
NO_KERNELS = ("no kernel image", "invalid device function", "device kernel image is invalid", "not compatible with the current")
OCCUPIED = ("busy or unavailable", "all cuda-capable devices are busy", "out of memory", "memory allocation")


def explain(torch: Any, error: Exception) -> Dict[str, str]:
    """Whether what went wrong is the card's state for now ("note") or makes it useless ("problem")."""
    text = " ".join(str(error).split())
    words = text.lower()
    if isinstance(error, getattr(torch, "OutOfMemoryError", ())) or any(part in words for part in OCCUPIED):
        return {"note": f"{IN_USE} ({text[:120]})"}
    if any(part in words for part in NO_KERNELS):
        return {"problem": f"torch {torch.__version__} has no kernels for it ({text[:120]})"}
    return {"problem": f"it failed at a matrix product ({text[:160]})"}


def main(arguments: Optional[List[str]] = None) -> None:
    """Do what the arguments say and print the answer."""
    given = sys.argv[1:] if arguments is None else arguments
    end_with_parent()
    if MEASURE in given:
        answer = measure(given[given.index(MEASURE) + 1])
    else:
        answer = detect(with_nvml=WITHOUT_NVML not in given)
    sys.stdout.write(f"\n{ANSWER}{json.dumps(answer)}\n")
    sys.stdout.flush()
    os._exit(0)  # Past the ends of drivers and libraries, some of which crash there.


if __name__ == "__main__":
    main()
