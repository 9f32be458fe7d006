"""What the makers say of cards: a first guess at a score until one is measured, and a measure of what is plausible. Nothing more.

`cards.csv` beside this file holds the figures, each row with its sources. Names are compared whole: a "4090 Laptop GPU" has 40 % of a 4090's
speed, and an L40S is three times an L4. A card that is not in the table is estimated from what its driver says of it, and is never 0.
"""

from __future__ import annotations

import csv
import functools
import math
import os
import re
from typing import Dict, List, Optional, Tuple

from gpumesh.devices.scoring import REFERENCE_NAME, REFERENCE_SCORE, check_score
from gpumesh.model.records import NamedTuple

UNKNOWN_SCORE = (
    20.0  # Of a card of which nothing is known: about an RTX 3060 (23 by its sheet), what people's machines hold most.
)
LEAST_SCORE = 0.5  # Whatever the estimate: below this are processors, and a first task shows how slow it really is.
MOST_SCORE = 1000.0  # No card is ten reference cards (B200: 270 by its sheet); more means that a driver answered nonsense.
FLOP_PER_BYTE = 30.0  # float32 rate over bandwidth where one is missing: 35 for an RTX 3060, 32 for a 2070, 22 for a 1080 Ti.
USUAL_CLOCK_HZ = 1.5e9  # Where the driver tells none: between a T4 (1.59) and an A100 (1.41).

# Units that do one float32 multiply-add a cycle, in one multiprocessor (CUDA programming guide, throughput of native arithmetic
# instructions); 128 in every later generation.
CORES_PER_SM: Dict[str, int] = {"6.0": 64, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}
LATER_CORES_PER_SM = 128

SLICES_PER_CARD = 7  # Compute slices of a whole card in MIG: "3g.20gb" is 3 of 7 (MIG user guide).

_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cards.csv")
_MIG_PROFILE = re.compile(r"\s+mig\s+(?:[0-9]+c\.)?([0-9]+)g\.[0-9]+gb\b.*\Z", re.IGNORECASE)
_MARKS = re.compile(r"\((?:tm|r|nvgpu)\)")


class CardSheet(NamedTuple):
    """What the maker says of one kind of card; 0.0 where no source says it. Rates are dense ones, in FLOP/s."""

    name: str
    float32: float = 0.0
    tfloat32: float = 0.0
    half: float = 0.0  # bfloat16 or float16 with float32 accumulation.
    bandwidth: float = 0.0  # Bytes/s.
    memory: int = 0  # Bytes, as NVML prints them under recent drivers.
    capability: str = ""


class Hardware(NamedTuple):
    """What a driver says of a card's make; 0 where it says nothing."""

    capability: str = ""
    multiprocessors: int = 0
    cores: int = 0  # float32 units in all.
    clock: float = 0.0  # Hz, the highest.
    bandwidth: float = 0.0  # Bytes/s, from the width of the bus and its highest clock.


def normalised(name: str) -> str:
    """The name as the table's are compared: lower case, without the maker's, hyphens as spaces.

    Drivers up to 460 leave out the word NVIDIA, some write "NVIDIA-GB10".
    """
    words = _MARKS.sub(" ", name.lower()).replace("-", " ").replace("_", " ").split()
    return " ".join(words[1:] if words[:1] == ["nvidia"] else words)


def sheet_of(name: str) -> Optional[CardSheet]:
    """The row of just this card; None if the table has none. Several of one name (the Jetson Orins) are averaged."""
    return _table().get(normalised(name))


def prior_score(name: str, hardware: Optional[Hardware] = None) -> float:
    """A guess at the score of a card that nobody has measured: by its sheet against the reference card's sheet, rate and bandwidth.

    By float32, as measured scores are (`scoring.score_rates`).

    Args:
        name: As the driver reports it. A MIG slice's ("... MIG 3g.20gb") counts for its share of the card.
        hardware: For cards that the table does not know.

    Returns:
        Between LEAST_SCORE and MOST_SCORE.
    """
    profile = _MIG_PROFILE.search(name)
    share = 1.0
    sheet = sheet_of(name)
    if sheet is None and profile:
        sheet = sheet_of(name[: profile.start()])
        share = min(1.0, int(profile.group(1)) / SLICES_PER_CARD) if sheet else 1.0
    reference = _table()[normalised(REFERENCE_NAME)]
    rate, bandwidth = (sheet.float32, sheet.bandwidth) if sheet else _estimate(hardware or Hardware())
    if rate <= 0:
        return UNKNOWN_SCORE
    if bandwidth <= 0:
        bandwidth = rate / FLOP_PER_BYTE
    score = REFERENCE_SCORE * math.sqrt(rate / reference.float32) * math.sqrt(bandwidth / reference.bandwidth) * share
    return check_score(min(MOST_SCORE, max(LEAST_SCORE, score)))


def _estimate(hardware: Hardware) -> Tuple[float, float]:
    """(float32 rate, bandwidth) from the make; a rate of 0 if it says too little."""
    cores = hardware.cores
    if not cores and hardware.multiprocessors:
        cores = hardware.multiprocessors * CORES_PER_SM.get(hardware.capability, LATER_CORES_PER_SM)
    rate = 2.0 * cores * (hardware.clock or USUAL_CLOCK_HZ)
    if not rate and hardware.bandwidth > 0:
        rate = hardware.bandwidth * FLOP_PER_BYTE
    return rate, hardware.bandwidth


@functools.cache
def _table() -> Dict[str, CardSheet]:
    rows: Dict[str, List[CardSheet]] = {}
    with open(_TABLE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sheet = CardSheet(
                name=row["name_as_reported"],
                float32=_number(row["fp32_tflops"]) * 1e12,
                tfloat32=_number(row["tf32_dense_tflops"]) * 1e12,
                half=_number(row["bf16_or_fp16_dense_tflops"]) * 1e12,
                bandwidth=_number(row["memory_bandwidth_gb_s"]) * 1e9,
                memory=int(_number(row["memory_mb"])) << 20,
                capability=row["compute_capability"],
            )
            rows.setdefault(normalised(sheet.name), []).append(sheet)
    return {name: _average(sheets) for name, sheets in rows.items()}


def _average(sheets: List[CardSheet]) -> CardSheet:
    """One sheet of several machines that report the same name: geometric means; memory and what only one tells is left out."""
    if len(sheets) == 1:
        return sheets[0]

    def mean(figures: List[float]) -> float:
        return math.exp(sum(math.log(figure) for figure in figures) / len(figures)) if all(figures) else 0.0

    return CardSheet(
        name=sheets[0].name,
        float32=mean([sheet.float32 for sheet in sheets]),
        tfloat32=mean([sheet.tfloat32 for sheet in sheets]),
        half=mean([sheet.half for sheet in sheets]),
        bandwidth=mean([sheet.bandwidth for sheet in sheets]),
        capability=sheets[0].capability,
    )


def _number(text: str) -> float:
    return float(text) if text else 0.0
