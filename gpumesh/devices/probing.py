"""Asks probe processes about the GPUs, and remembers: which there are until the next start, how fast they are per card and driver.

Nothing here loads torch or opens a driver. `head_start` is for every worker's start and reads two small files; the others run a process and
are for a thread or a command that may wait for it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from gpumesh.devices import remembered
from gpumesh.devices.children import run_module
from gpumesh.devices.detect import PROBE_SWITCH, gpus_may_exist
from gpumesh.devices.probe import ANSWER, IN_USE
from gpumesh.devices.scoring import GPU_SCORE_VARIABLE, check_score, is_off, score_rates, settle
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import DeviceFacts

logger = logging.getLogger(__name__)

PROBE = "gpumesh.devices.probe"
FORMAT = 1  # Of both files; raised when what an earlier version wrote can no longer be used.
DETECT_SECONDS = 60.0  # torch from a cold network disk; NVML alone answers within one.
MEASURE_SECONDS = 180.0  # The same, and a first context on a machine with many cards.
HEAD_START_SECONDS = 7 * 86400.0  # What was found longer ago is not told before it was looked at again.

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip


class Survey(NamedTuple):
    """What a probe found."""

    devices: Tuple[DeviceFacts, ...] = ()  # Scores are remembered ones, else guesses from the names.
    driver: str = ""  # NVIDIA's version.
    torch: str = ""  # Its version, "" if it is not installed.
    priors: Tuple[float, ...] = ()  # The guesses alone, one for each device.
    problem: str = ""  # Why nothing is known.


class Measured(NamedTuple):
    """One device after an attempt to measure it."""

    device: DeviceFacts  # With score, rates and, if it turned out to be useless, its problem.
    note: str = ""  # Why there are no figures, or why they are in doubt.
    is_final: bool = True  # Not final: to be measured again when the device is at rest.


# --- which there are


def detect() -> Survey:
    """Look at this machine's GPUs, and remember them; blocks until the probe has answered.

    Returns:
        The devices, with the scores measured earlier; none and a `problem` if even that failed.
    """
    answer, problem = _ask([])
    if problem.startswith("crashed"):  # By a card that is broken: torch may still see the others.
        again, _ = _ask(["--without-nvml"])
        answer = answer or again
    if answer is None:
        return Survey(problem=f"looking for GPUs failed: the probe {problem}")
    try:
        found = tuple(device_from(fields)._replace(rates=()) for fields in answer["devices"])
        driver, torch = str(answer["driver"]), str(answer["torch"])
    except (KeyError, TypeError, ValueError) as error:
        return Survey(problem=f"looking for GPUs failed: the probe's answer makes no sense ({error})")
    entry = {"at": time.time(), "looks": _looks(), "devices": [list(each) for each in found], "driver": driver, "torch": torch}
    remembered.remember(_file("gpus.json"), _place(), entry)
    known = overridden(_with_known_figures(found, driver, torch))
    return Survey(known, driver, torch, tuple(device.score for device in found))


def head_start() -> Tuple[DeviceFacts, ...]:
    """The GPUs found at an earlier start of this machine, if it still looks the same; for the moment until `detect` answers."""
    if os.environ.get(PROBE_SWITCH) == "1" or not gpus_may_exist():
        return ()
    entry: Any = remembered.entries(_file("gpus.json")).get(_place())
    try:
        if entry["looks"] != _looks() or not 0 <= time.time() - entry["at"] < HEAD_START_SECONDS:
            return ()
        found = tuple(device_from(fields) for fields in entry["devices"])
        return overridden(_with_known_figures(found, str(entry["driver"]), str(entry["torch"])))
    except (KeyError, TypeError, ValueError):
        return ()


def device_from(fields: Sequence[Any]) -> DeviceFacts:
    """Facts as they come out of JSON.

    Raises:
        TypeError: Too many of them.
        ValueError: Not what facts are made of.
    """
    device = DeviceFacts(*fields)
    return device._replace(
        score=check_score(device.score), rates=tuple((str(name), float(rate)) for name, rate in device.rates)
    )


def _place() -> str:
    """The machine and the program: a home folder may be shared by many machines and environments."""
    return f"{FORMAT} {os.uname().nodename if hasattr(os, 'uname') else ''} {sys.prefix}"


def _looks() -> List[str]:
    """What must be as it was for the devices to be taken for the same: the start of the system, its device files, the variables."""
    marks = [_read("/proc/sys/kernel/random/boot_id"), _driver_on_disk()]
    for folder in ("/proc/driver/nvidia/gpus", "/dev"):
        try:
            marks.extend(
                sorted(name for name in os.listdir(folder) if folder != "/dev" or name.startswith(("nvidia", "kfd", "dxg")))
            )
        except OSError:
            continue
    marks.extend(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
    return marks


def _driver_on_disk() -> str:
    """The NVIDIA driver's version as the kernel module tells it; "" where it does not."""
    return _read("/sys/module/nvidia/version")


# --- how fast they are


def measure(survey: Survey, number: int, *, force: bool = False, save: bool = True, is_last_try: bool = True) -> Measured:
    """Measure one device of a survey; blocks for some seconds, or not at all when its figures are known.

    Figures that were taken while others used the device, or while it was too hot, are not kept; on the last try they count all the
    same, but not below what the name promises by more than `scoring.PRIOR_SPREAD`.

    Args:
        number: Place in `survey.devices`.
        force: Measure again even if figures are remembered.
        save: Remember the figures.
        is_last_try: Nobody will come back to measure it at rest.
    """
    device, prior = survey.devices[number], survey.priors[number]
    if not force and (device.problem or device.rates):
        return Measured(device, device.problem)
    key = _card_key(device, survey.driver)
    answer, problem = _ask_to_measure(device)
    if answer is None:
        return Measured(device._replace(problem=f"the benchmark {problem} on it"))
    if answer.get("problem"):
        problem = str(answer["problem"])
        if save:
            remembered.remember(_file("gpu-benchmark.json"), key, {"problem": problem, "torch": survey.torch})
        return Measured(device._replace(problem=problem), problem)
    if answer.get("note"):
        note = str(answer["note"])
        return Measured(device, f"not measured: {note}", is_final=is_last_try or not note.startswith(IN_USE))
    try:
        rates, score = _figures(answer)
        doubts = str(answer.get("doubts") or "")
        if doubts and not is_last_try:
            return Measured(device, f"not measured: {doubts}", is_final=False)
        if is_off(score, prior):
            logger.info("%s measured as %.3g where %.3g was expected; measuring once more", device.name, score, prior)
            second = _ask_to_measure(device)[0] or answer
            rates_again, score_again = _figures(second)
            if settle(score, score_again, prior) != score:
                rates = rates_again
            score = settle(score, score_again, prior)
    except (ValueError, KeyError, TypeError) as error:
        return Measured(device, f"not measured: {error}", is_final=is_last_try)
    measured = overridden((device._replace(score=score, rates=tuple(sorted(rates.items()))),))[0]
    if doubts:
        return Measured(measured, f"in doubt: {doubts}")
    if save:
        remembered.remember(_file("gpu-benchmark.json"), key, {"score": score, "rates": rates})
    return Measured(measured)


def overridden(devices: Tuple[DeviceFacts, ...]) -> Tuple[DeviceFacts, ...]:
    """With the score that the owner of this machine has set for its GPUs, if there is one."""
    wish = os.environ.get(GPU_SCORE_VARIABLE, "")
    if not wish:
        return devices
    try:
        score = check_score(float(wish))
    except ValueError as error:
        logger.warning("%s=%r is not used: %s", GPU_SCORE_VARIABLE, wish, error)
        return devices
    return tuple(device._replace(score=score) for device in devices)


def _figures(answer: Dict[str, Any]) -> Tuple[Dict[str, float], float]:
    rates = {str(name): float(rate) for name, rate in dict(answer["rates"]).items()}
    return rates, score_rates(rates)


def _with_known_figures(devices: Tuple[DeviceFacts, ...], driver: str, torch: str) -> Tuple[DeviceFacts, ...]:
    known = remembered.entries(_file("gpu-benchmark.json")) if devices else {}
    return tuple(_with_figures(device, known.get(_card_key(device, driver)), torch) for device in devices)


def _with_figures(device: DeviceFacts, entry: Any, torch: str) -> DeviceFacts:
    try:
        if entry.get("problem"):  # Of that torch with this card; another may have the kernels.
            return device._replace(problem=device.problem or str(entry["problem"])) if entry["torch"] == torch else device
        rates, score = entry["rates"], check_score(entry["score"])
        return device._replace(score=score, rates=tuple(sorted((str(name), float(rate)) for name, rate in rates.items())))
    except (TypeError, KeyError, ValueError, AttributeError):
        return device


def _card_key(device: DeviceFacts, driver: str) -> str:
    return f"{FORMAT} {device.uuid or f'{device.kind} {device.name} {device.index}'} driver {driver}"


# --- the processes


def _ask_to_measure(device: DeviceFacts) -> Tuple[Optional[Dict[str, Any]], str]:
    """By UUID it is the only one that the process sees, so whatever numbers torch gives, it measures this one."""
    if device.kind == "mps":
        return _ask(["--measure", "mps"])
    if device.uuid:
        return _ask(["--measure", "cuda:0"], {"CUDA_VISIBLE_DEVICES": device.uuid})
    return _ask(["--measure", f"cuda:{device.index}"])


def _ask(arguments: Sequence[str], changes: Optional[Dict[str, str]] = None) -> Tuple[Optional[Dict[str, Any]], str]:
    """What a probe answers, or None and what became of it."""
    import subprocess

    seconds = MEASURE_SECONDS if arguments else DETECT_SECONDS
    try:
        finished = run_module(PROBE, arguments, seconds=seconds, changes=changes)
    except subprocess.TimeoutExpired:
        return None, f"did not end within {seconds:g} s"
    except OSError as error:
        return None, f"could not be started ({error})"
    for line in reversed(finished.stdout.decode("utf-8", "replace").splitlines()):
        if line.startswith(ANSWER):
            try:
                answer = json.loads(line[len(ANSWER) :])
            except ValueError:
                break
            return answer if isinstance(answer, dict) else None, "answered nonsense"
    last = finished.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    words = f" ({last[0][:160]})" if last else ""
    if finished.code < 0:
        return None, f"crashed with signal {-finished.code}{words}"
    return None, f"ended with exit code {finished.code}{words}"


def _file(name: str) -> str:
    return remembered.cache_file(name)  # As a function of its own: tests have folders of theirs.


def _read(file: str) -> str:
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            return opened.read(256).strip()
    except OSError:
        return ""


def measure_all(
    survey: Survey,
    tell: Callable[[int, Measured], None],
    *,
    force: bool = False,
    save: bool = True,
    is_last_try: bool = True,
) -> List[int]:
    """Measure the devices of a survey one after the other, for they share the host's memory and bus.

    Args:
        tell: Called with the place in `survey.devices` and what came of it, after each.

    Returns:
        The places of those to be measured again later.
    """
    later = []
    for number in range(len(survey.devices)):
        measured = measure(survey, number, force=force, save=save, is_last_try=is_last_try)
        if not measured.is_final:
            later.append(number)
        tell(number, measured)
    return later
