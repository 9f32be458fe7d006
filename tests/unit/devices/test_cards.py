"""What the makers say of cards: exact names, and for every other a guess that starves and floods nobody."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gpumesh.devices import cards
from gpumesh.devices.cards import LEAST_SCORE, MOST_SCORE, UNKNOWN_SCORE, Hardware, normalised, prior_score, sheet_of

TABLE = Path(cards.__file__).with_name("cards.csv")


def test_every_row_has_figures_and_says_where_they_come_from() -> None:
    with open(TABLE, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    assert len(rows) > 60
    for row in rows:
        assert "http" in row["source"] or "lightning-fabric" in row["source"], row
        assert float(row["fp32_tflops"]) > 0
        sheet = sheet_of(row["name_as_reported"])
        assert sheet is not None
        assert LEAST_SCORE < prior_score(row["name_as_reported"]) < MOST_SCORE


def test_the_reference_card_is_a_hundred() -> None:
    assert prior_score("NVIDIA GeForce RTX 4090") == pytest.approx(100)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("GeForce RTX 3070", "NVIDIA GeForce RTX 3070"),
        ("NVIDIA-GB10", "NVIDIA GB10"),
        ("NVIDIA Tesla T4", "Tesla T4"),
        ("  nvidia  a100-sxm4-40GB ", "NVIDIA A100-SXM4-40GB"),
        ("Orin", "Orin (nvgpu)"),
    ],
)
def test_spellings_of_one_name(name: str, same: str) -> None:
    assert normalised(name) == normalised(same)
    assert sheet_of(name) == sheet_of(same)
    assert sheet_of(name) is not None


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA L40S", "NVIDIA L4"),
        ("NVIDIA GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 3060"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A10"),
    ],
)
def test_a_name_that_contains_another_is_another_card(name: str, other: str) -> None:
    one, two = sheet_of(name), sheet_of(other)

    assert one is not None
    assert two is not None
    assert one.name != two.name
    assert abs(prior_score(name) - prior_score(other)) > 5


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA L40", "NVIDIA GeForce ...", "GRID V100D-8C", ""])
def test_a_name_that_is_not_in_the_table_is_not_mistaken(name: str) -> None:
    assert sheet_of(name) is None
    assert prior_score(name) == UNKNOWN_SCORE


def test_an_unknown_card_is_estimated_from_its_make() -> None:
    # An RTX 3090 under another name; by its sheet it scores 63.
    cores = Hardware("8.6", cores=10496, clock=1.695e9, bandwidth=936e9)
    units = Hardware("8.6", multiprocessors=82, clock=1.695e9, bandwidth=936e9)

    assert prior_score("NVIDIA Something", cores) == pytest.approx(63, abs=1)
    assert prior_score("NVIDIA Something", units) == prior_score("NVIDIA Something", cores)
    assert prior_score("NVIDIA Something", Hardware("8.0", multiprocessors=82)) < prior_score("NVIDIA Something", units)
    assert prior_score("NVIDIA Something", Hardware(bandwidth=936e9)) == pytest.approx(56, abs=2)


@pytest.mark.parametrize(
    ("hardware", "score"),
    [
        (Hardware(cores=1, clock=1.0, bandwidth=1.0), LEAST_SCORE),
        (Hardware(cores=4294967295, clock=4.3e15, bandwidth=1e20), MOST_SCORE),
        (Hardware(), UNKNOWN_SCORE),
    ],
)
def test_nonsense_has_bounds(hardware: Hardware, score: float) -> None:
    assert prior_score("NVIDIA Something", hardware) == score


def test_a_slice_counts_for_its_share_of_the_card() -> None:
    whole = prior_score("NVIDIA A100-SXM4-40GB")

    assert prior_score("NVIDIA A100-SXM4-40GB MIG 3g.20gb") == pytest.approx(whole * 3 / 7)
    assert prior_score("NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb") == pytest.approx(whole * 2 / 7)
    assert prior_score("NVIDIA Unknown MIG 1g.5gb", Hardware("8.0", multiprocessors=14)) < UNKNOWN_SCORE


def test_machines_that_share_a_name_are_averaged() -> None:
    orin = sheet_of("Orin (nvgpu)")

    assert orin is not None
    assert 1.28e12 < orin.float32 < 5.325e12
    assert orin.memory == 0  # It depends on the machine.
