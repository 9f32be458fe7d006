"""The file of the rules: private, written in one step, and paused rather than lent when it cannot be read."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from gpumesh.runtime.owner_file import MAX_RULES_BYTES, load_rules, rules_file, rules_locked, save_rules
from gpumesh.scheduler.ownership import MACHINE, Pause, Rules

PAUSED = Rules(pauses=((MACHINE, Pause(reason="mine")),))


def test_it_lies_beside_the_saved_connection_and_is_this_machines_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    path = Path(rules_file())

    assert path.parent == tmp_path / "gpumesh"
    assert path.name.startswith("owner-")
    assert os.uname().nodename.split(".")[0] in path.name, "a home may be shared by many machines"


def test_only_its_owner_can_read_it_whatever_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "gpumesh" / "owner-den.json"
    before = os.umask(0)
    try:
        save_rules(str(path), PAUSED)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_rules(str(path)) == PAUSED
    assert [found.name for found in path.parent.iterdir()] == [path.name], "nothing is left beside it"


def test_without_a_file_there_are_no_rules(tmp_path: Path) -> None:
    assert load_rules(str(tmp_path / "none.json")) == Rules()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"[]", "a table"),
        (b"\xff\xfe", "utf-8"),
        (b'{"quiet": 1}', "quiet is unknown"),
        (b'{"hours": "late"}', "late"),
        (b" " * (MAX_RULES_BYTES + 1), "more than"),
        (b"[" * 60000, ""),
    ],
)
def test_one_that_makes_no_sense_is_trouble_with_its_place_and_reason(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "owner.json"
    path.write_bytes(content)

    rules = load_rules(str(path))

    assert rules == Rules(trouble=rules.trouble)
    assert rules.trouble.startswith(f"{path}: ")
    assert said in rules.trouble


def test_one_that_is_no_file_is_trouble_too(tmp_path: Path) -> None:
    assert "directory" in load_rules(str(tmp_path)).trouble


def test_when_it_cannot_be_written_the_old_rules_stay(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    path.mkdir()

    with pytest.raises(OSError):
        save_rules(str(path), PAUSED)

    assert [found.name for found in tmp_path.iterdir()] == ["owner.json"]


def test_two_commands_at_the_same_time_do_not_undo_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "owner.json")

    def add(number: int) -> None:
        for step in range(20):
            with rules_locked(path):
                rules = load_rules(path)
                save_rules(path, rules._replace(pauses=(*rules.pauses, (f"{number}.{step}", Pause()))))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(load_rules(path).pauses) == 80
