"""Live figures of this worker's cards: a monitor process reads them, and what has changed goes to the coordinator."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any, Callable, Collection, Dict, List, Optional, Tuple

from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import CardReading, DeviceFacts, readings_from_wire

logger = logging.getLogger(__name__)

READ_SECONDS = 1.0  # Between two looks: a program that the owner starts fills a card within a few seconds.
SEND_SECONDS = 5.0  # Temperature and power go at this pace ...
CHANGE = 0.01  # ... and everything at once when what others hold has changed by so much of a card's memory.
ANSWER_SECONDS = 20.0  # A driver that says nothing for so long hangs; the process is given up.
RESTART_SECONDS = (1.0, 5.0, 30.0, 300.0)  # Pauses between monitors that ended by themselves; the last one is repeated.
SILENT_LOOKS = 2  # So many in a row without an answer, and the card counts as lost.
LINE_BYTES = 1 << 20


class Holders(NamedTuple):
    """Who uses the cards in this worker's name."""

    pids: Collection[int] = ()  # Of runners; what they start counts as theirs.
    keys: Collection[str] = ()  # Of the cards on which such runners are now.


class Readings:
    """Reads until it is cancelled.

    Args:
        holders: Asked before each look.
        send: Called with readings that the coordinator should know.
        on_silent: Called with a card's key and why it counts as lost, and with "" once it answers again.
    """

    def __init__(
        self,
        *,
        holders: Callable[[], Holders],
        send: Callable[[Tuple[CardReading, ...]], None],
        on_silent: Callable[[str, str], None],
    ) -> None:
        self._holders = holders
        self._send = send
        self._on_silent = on_silent
        self._sent: Dict[str, CardReading] = {}
        self._sent_at = -SEND_SECONDS
        self._misses: Dict[str, int] = {}
        self._memory: Dict[str, int] = {}
        self.last: Tuple[CardReading, ...] = ()

    async def run(self, devices: Tuple[DeviceFacts, ...]) -> None:
        """Watch these devices, those among them that NVML knows; returns at once if there are none, or nobody to ask."""
        cards = [device for device in devices if device.kind == "cuda" and device.system_index >= 0 and not device.problem]
        if not cards:
            return
        self._memory = {card.key: card.memory for card in cards}
        failures = 0
        while True:
            loop = asyncio.get_running_loop()
            started = loop.time()
            try:
                why = await self._watch(cards)
            except OSError as error:
                why = str(error)
            if not why:
                return
            failures = 0 if loop.time() - started > RESTART_SECONDS[-1] else failures + 1
            logger.info("the cards' monitor has ended (%s); starting it again", why)
            await asyncio.sleep(RESTART_SECONDS[min(failures, len(RESTART_SECONDS)) - 1])

    async def _watch(self, cards: List[DeviceFacts]) -> str:
        """One monitor from start to end; "" if there is nobody to ask."""
        from gpumesh.devices.children import environment
        from gpumesh.devices.monitor import NO_LIBRARY

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gpumesh.devices.monitor",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment(),
            limit=LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            self._write(process.stdin, {"devices": [list(card) for card in cards]})
            while True:
                holders = self._holders()
                self._write(process.stdin, {"own": sorted(holders.pids), "leased": sorted(holders.keys)})
                line = await asyncio.wait_for(process.stdout.readline(), ANSWER_SECONDS)
                if not line:
                    code = await asyncio.wait_for(process.wait(), ANSWER_SECONDS)
                    return "" if code == NO_LIBRARY else f"exit code {code}"
                self._take(json.loads(line))
                await asyncio.sleep(READ_SECONDS)
        except asyncio.TimeoutError:
            return f"no answer within {ANSWER_SECONDS:g} s"
        except (ConnectionError, ValueError, KeyError, TypeError) as error:
            return str(error) or type(error).__name__
        finally:
            if process.returncode is None:
                process.kill()
                # Reaped by the loop, now or when the driver lets it go.
                await asyncio.shield(asyncio.ensure_future(_reap(process)))

    @staticmethod
    def _write(stdin: asyncio.StreamWriter, value: Any) -> None:
        stdin.write(json.dumps(value).encode() + b"\n")

    def _take(self, answer: Dict[str, Any]) -> None:
        readings = readings_from_wire(answer["readings"])
        self.last = readings
        for key, why in answer["silent"].items():
            self._misses[key] = self._misses.get(key, 0) + 1
            if self._misses[key] == SILENT_LOOKS:
                self._on_silent(key, why)
        for reading in readings:
            if self._misses.pop(reading.key, 0) >= SILENT_LOOKS:
                self._on_silent(reading.key, "")
        now = asyncio.get_running_loop().time()
        if readings and (now - self._sent_at >= SEND_SECONDS or any(map(self._is_news, readings))):
            self._sent_at = now
            self._sent = {reading.key: reading for reading in readings}
            self._send(readings)

    def _is_news(self, reading: CardReading) -> bool:
        before: Optional[CardReading] = self._sent.get(reading.key)
        if before is None or (before.others < 0) != (reading.others < 0):
            return True
        return abs(reading.others - before.others) > CHANGE * self._memory.get(reading.key, 0)


async def _reap(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), 1.0)
    except asyncio.TimeoutError:
        logger.warning("the cards' monitor (process %d) hangs in the driver; leaving it", process.pid)
