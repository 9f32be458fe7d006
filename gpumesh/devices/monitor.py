"""A process that reads the cards' own instruments for a worker, as often as it is asked: memory, utilisation, temperature, power.

    python -m gpumesh.devices.monitor

Standard input and output, one JSON value a line. First the cards ({"devices": [fields of DeviceFacts, ...]}), no answer. Then again and again
{"own": [process ids], "leased": [keys]}, each answered with {"readings": [fields of CardReading, ...], "silent": {key: why}}: the cards that
answer, and those that do not any more. A process of its own, because a card that falls off the bus may take whoever asks it along. Ends
with its input, and with code 3 where there is no library to ask.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, Optional, Tuple

from gpumesh.devices import nvml
from gpumesh.devices.probing import device_from
from gpumesh.model.resources import DeviceFacts

NO_LIBRARY = 3  # Exit code: nobody to ask.


def read(library: nvml.Nvml, devices: Tuple[DeviceFacts, ...], request: Dict[str, Any]) -> Dict[str, Any]:
    """Answer one request."""
    readings = library.read(devices, frozenset(request["own"]), frozenset(request["leased"]))
    answered = {reading.key for reading in readings}
    silent = {device.key: "it does not answer any more" for device in devices if device.key not in answered}
    return {"readings": [list(reading) for reading in readings], "silent": silent}


def main(binding: Optional[Any] = None) -> None:
    """Serve until standard input ends.

    Args:
        binding: In place of the module `pynvml`.
    """
    library = nvml.Nvml(binding)
    if library.open().code:
        sys.exit(NO_LIBRARY)
    devices: Tuple[DeviceFacts, ...] = ()
    for line in sys.stdin:
        request = json.loads(line)
        if "devices" in request:
            devices = tuple(device_from(fields) for fields in request["devices"])
            continue
        sys.stdout.write(json.dumps(read(library, devices, request)) + "\n")
        sys.stdout.flush()
    sys.stdout.flush()
    os._exit(0)  # Past the ends of libraries, some of which crash there.


if __name__ == "__main__":
    main()
