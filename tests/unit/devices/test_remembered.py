"""Small files of figures: added to, bounded, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumesh.devices import remembered


def test_what_is_remembered_is_there_again(tmp_path: Path) -> None:
    file = str(tmp_path / "folder" / "file.json")

    remembered.remember(file, "a", {"score": 1})
    remembered.remember(file, "b", {"score": 2})
    remembered.remember(file, "a", {"score": 3})

    assert remembered.entries(file) == {"b": {"score": 2}, "a": {"score": 3}}
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file.json"]


def test_only_so_many_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    file = str(tmp_path / "file.json")
    for number in range(remembered.MAX_ENTRIES + 3):
        remembered.remember(file, str(number), {})

    assert list(remembered.entries(file)) == [str(number) for number in range(3, remembered.MAX_ENTRIES + 3)]


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"', "null", "\x00\xff"])
def test_a_damaged_file_holds_nothing_and_is_written_anew(content: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(content, encoding="latin-1")

    assert remembered.entries(str(file)) == {}
    remembered.remember(str(file), "a", {})
    assert json.loads(file.read_text()) == {"a": {}}


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "blocker").write_text("")
    file = str(tmp_path / "blocker" / "file.json")

    remembered.remember(file, "a", {})

    assert remembered.entries(file) == {}
