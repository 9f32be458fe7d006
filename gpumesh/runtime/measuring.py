"""What a worker finds out about its machine after it has joined: GPUs, benchmarks, live figures. Probes run beside the agent's loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from gpumesh.model.resources import CardReading, DeviceFacts, withhold

if TYPE_CHECKING:
    from gpumesh.devices.benchmark import CpuFigures
    from gpumesh.devices.probing import Measured, Survey
    from gpumesh.runtime.readings import Readings
    from gpumesh.runtime.worker import WorkerAgent

logger = logging.getLogger("gpumesh.worker")

# Until a card that was in use is measured again; the last time, whatever comes out counts.
AGAIN_SECONDS = (60.0, 600.0, 3600.0)
KEPT_SECONDS = 2.0  # Between two looks whether the machine's owner lends it again.


class Measuring:
    """Looks at the machine and tells the agent, from `start` to `stop`.

    The looking happens on a thread of its own, which waits for processes; it ends with this process, and they end with it.

    Args:
        cpu: Measure the CPU, too, unless its figures are known.
        gpus: Look for GPUs.
        speeds: Measure the GPUs whose figures are not known.
        withheld: Why this worker does not offer the GPUs that it finds; "": it does.
    """

    def __init__(self, agent: WorkerAgent, *, cpu: bool, gpus: bool, speeds: bool, withheld: str = "") -> None:
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._cpu = cpu
        self._gpus = gpus
        self._speeds = speeds
        self._withheld = withheld
        self._is_over = threading.Event()
        self._watching: Optional[asyncio.Task[None]] = None
        self._readings: Optional[Readings] = None

    def start(self) -> None:
        """Begin; returns at once."""
        if self._cpu or self._gpus:
            threading.Thread(target=self._look, name="gpumesh-measuring", daemon=True).start()

    def stop(self) -> None:
        """Tell nothing any more."""
        self._is_over.set()
        if self._watching is not None:
            self._watching.cancel()

    # --- on the thread

    def _look(self) -> None:
        from gpumesh.devices import benchmark, probing

        survey: Optional[Survey] = None
        if self._gpus:
            survey = probing.detect()
            if survey.problem:
                logger.warning("%s; this worker offers no GPU", survey.problem)
            if self._withheld:
                survey = survey._replace(devices=withhold(survey.devices, self._withheld))
            self._tell(self._found, survey)
        if self._cpu and self._wait_until_lent():
            self._tell(self._measured_cpu, benchmark.measure_cpu())
        if survey is None or not self._speeds or not self._wait_until_lent():
            return
        pending: List[int] = list(range(len(survey.devices)))
        for pause in (0.0, *AGAIN_SECONDS):
            if not pending or self._is_over.wait(pause):
                return
            pending = [
                number for number in pending if not self._measure(survey, number, is_last_try=pause == AGAIN_SECONDS[-1])
            ]

    def _wait_until_lent(self) -> bool:
        """While its owner has the machine for themselves, it is not kept busy with benchmarks; False when this is over first."""
        while self._agent.is_kept():
            if self._is_over.wait(KEPT_SECONDS):
                return False
        return not self._is_over.is_set()

    def _measure(self, survey: Survey, number: int, *, is_last_try: bool) -> bool:
        from gpumesh.devices import probing

        if self._is_over.is_set():
            return True
        if self._agent.is_kept(survey.devices[number].key):
            return False
        measured = probing.measure(survey, number, is_last_try=is_last_try)
        self._tell(self._measured, measured)
        return measured.is_final

    def _tell(self, how: Callable[[Any], None], what: Any) -> None:
        if not self._is_over.is_set():
            try:
                self._loop.call_soon_threadsafe(self._on_loop, how, what)
            except RuntimeError:
                self._is_over.set()  # The loop is closed, and the process about to end.

    # --- on the loop

    def _on_loop(self, how: Callable[[Any], None], what: Any) -> None:
        if not self._is_over.is_set():
            how(what)

    def _found(self, survey: Survey) -> None:
        cpu = tuple(device for device in self._agent.facts.devices if device.kind == "cpu")
        for device in survey.devices:
            logger.info("found %s %s%s", device.key, device.name, f": {device.problem}" if device.problem else "")
        if (*cpu, *survey.devices) != self._agent.facts.devices:
            self._agent.change_devices((*cpu, *survey.devices))
        if any(device.system_index >= 0 and not device.problem for device in survey.devices):
            from gpumesh.runtime.readings import Readings

            self._readings = Readings(holders=self._agent.card_holders, send=self._send, on_silent=self._silent)
            self._watching = self._loop.create_task(self._readings.run(survey.devices))

    def _measured_cpu(self, figures: CpuFigures) -> None:
        cpu = tuple(device for device in self._agent.facts.devices if device.kind == "cpu")
        if any((device.score, device.rates) != (figures.score, figures.rates) for device in cpu):
            self._agent.change_score(figures.score, rates=figures.rates)

    def _measured(self, measured: Measured) -> None:
        if measured.note:
            logger.info("%s: %s", measured.device.name, measured.note)
        found = measured.device
        for device in self._agent.facts.devices:
            if (device.kind, device.key) == (found.kind, found.key):  # It may have gone silent meanwhile.
                self._replace(device._replace(score=found.score, rates=found.rates, problem=device.problem or found.problem))

    def _silent(self, key: str, why: str) -> None:
        for device in self._agent.facts.devices:
            if device.key == key and device.kind != "cpu":
                logger.warning("%s %s %s", key, device.name, why or "answers again")
                self._replace(device._replace(problem=why))

    def _replace(self, device: DeviceFacts) -> None:
        devices = self._agent.facts.devices
        changed = tuple(device if (each.kind, each.key) == (device.kind, device.key) else each for each in devices)
        if changed != devices:
            self._agent.change_devices(changed)

    def _send(self, readings: Tuple[CardReading, ...]) -> None:
        self._agent.tell_readings(readings)

    @property
    def last_readings(self) -> Dict[str, CardReading]:
        """What the cards' instruments said last, by key."""
        return {reading.key: reading for reading in self._readings.last} if self._readings is not None else {}
