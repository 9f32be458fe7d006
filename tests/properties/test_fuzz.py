"""A few thousand mutated frames into every side, the same ones each time: no crash, no hang, nothing left, and others are served.

`python -m benchmarks fuzz` does the same with a million for each, and new ones.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="an alarm ends what hangs")

from benchmarks import fuzz
from benchmarks.fuzz_sides import SIDES

SEED = 7
FOUND = Path(__file__).parents[1] / "data" / "fuzz"  # Each a case that once ended in the error that it names.
FRAMES = dict.fromkeys(SIDES, 3000)
FRAMES.update(client=1500, worker=1500, agent=1500, port=400, asking=600)
GROWTH = 3000  # Python objects; a case that left one link behind would leave a hundred thousand.


@pytest.fixture(autouse=True)
def _quiet() -> object:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("side", SIDES)
def test_mutated_frames_end_nothing_but_their_own_connection(side: str) -> None:
    if side == "port":
        pytest.importorskip("aiohttp")
        pytest.importorskip("cryptography")
    figures = fuzz.run(side, frames=FRAMES[side], seconds=30, seed=SEED, batch_frames=FRAMES[side] // 3)

    assert figures.findings == []
    assert figures.frames >= 400
    assert figures.object_growth < GROWTH
    assert figures.lines > 20, "the lines that were reached guide it"


@pytest.mark.parametrize("file", sorted(FOUND.glob("*.json")), ids=lambda file: file.stem)
def test_what_was_found_before_is_mended(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.replay(file) == 0, capsys.readouterr().out


def test_what_was_found_is_written_down_and_plays_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = fuzz.Figures("stranger", SEED)
    figures.findings.append({"side": "stranger", "case": ["00"], "problem": "it was let in"})

    assert fuzz.report(figures, tmp_path) == 1
    file = tmp_path / f"stranger-{SEED}-0.json"
    assert json.loads(file.read_text())["case"] == ["00"]
    assert fuzz.replay(file) == 0
    assert "nothing is wrong any more" in capsys.readouterr().out


def test_the_same_seed_makes_the_same_cases() -> None:
    first, second = (fuzz.run("relay", frames=500, seconds=30, seed=SEED) for _ in range(2))

    assert (first.frames, first.cases, first.corpus) == (second.frames, second.cases, second.corpus)
