"""`gpumesh pause`, `resume`, `limit`: what they write and what they say; and what `join` is told about times."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, List

import pytest
from typer.testing import CliRunner

from gpumesh.cli.main import app
from gpumesh.runtime.owner_file import load_rules, rules_file
from gpumesh.scheduler.ownership import GPUS, MACHINE, Amount, Pause, Rules
from tests.support.hardware import Machine, card, uuid


class Owner:
    """Gives commands."""

    def run(self, *words: str, code: int = 0) -> str:
        """What a command says, standard error included."""
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, (done.output, done.exception)
        return done.output + (str(done.exception) if code == 1 else "")

    @property
    def rules(self) -> Rules:
        return load_rules(rules_file())

    @property
    def targets(self) -> List[str]:
        return [target for target, _ in self.rules.pauses]


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("GPUMESH_PROBE", "0")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    return Owner()


@pytest.fixture
def owner_of_cards(owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    (tmp_path / "machine").mkdir()
    machine = Machine(tmp_path / "machine", [card(0), card(1, "NVIDIA GeForce RTX 4090")])
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    return owner


def test_a_pause_lasts_until_it_is_taken_back(owner: Owner) -> None:
    said = owner.run("pause", "--reason", "  a\n call ")

    assert said == "gpumesh: this machine is paused by its owner (a call); what runs may finish\n"
    assert owner.rules == Rules(pauses=((MACHINE, Pause(reason="a call")),))
    assert owner.run("resume") == "gpumesh: this machine is lent again\n"
    assert owner.rules == Rules()


def test_a_pause_may_end_by_itself_and_is_then_swept_from_the_file(owner: Owner) -> None:
    before = time.time()
    assert "until " in owner.run("pause", "--for", "1h30m", "--now")
    ((_, pause),) = owner.rules.pauses
    assert before + 5400 <= pause.until <= time.time() + 5400
    assert pause.ends_running
    file = Path(rules_file())
    plain: Any = json.loads(file.read_text(encoding="utf-8"))
    plain["pauses"]["machine"]["until"] = before - 1
    file.write_text(json.dumps(plain), encoding="utf-8")

    owner.run("limit", "--slots", "2")

    assert owner.rules == Rules(slots=Amount(2.0))


@pytest.mark.parametrize("days", [0, 2, 30])
def test_the_end_of_a_long_pause_is_told_with_its_day(owner: Owner, days: int) -> None:
    owner.run("pause", "--for", f"{days}d1m" if days else "1s")

    ((_, pause),) = owner.rules.pauses
    end = time.localtime(pause.until)
    assert time.strftime("%H:%M", end) in pause.until_text
    if days:
        assert time.strftime("%a " if days == 2 else "%d %b ", end) in pause.until_text


def test_limits_come_and_go_one_by_one(owner: Owner) -> None:
    said = owner.run(
        "limit",
        "--slots",
        "50%",
        "--gpu-memory",
        "8GB",
        "--hours",
        "Mon-Fri  22-7",
        "--exclusive",
        "Steam.exe,blender",
        "--now",
    )

    assert "  - at most 50% of its slots\n" in said
    assert "  - only Mon-Fri 22-7\n" in said
    assert owner.rules.exclusive == ("steam", "blender")
    assert owner.rules.ends_running
    assert owner.run("limit") == said
    owner.run("limit", "--slots", "100%", "--gpu-memory", "100%", "--hours", "always", "--exclusive", "", "--let-finish")
    assert owner.rules == Rules()
    assert owner.run("limit") == "gpumesh: everything is lent, always\n"


def test_clearing_the_limits_leaves_a_pause(owner: Owner) -> None:
    owner.run("pause")
    owner.run("limit", "--slots", "1", "--hours", "1-2")

    owner.run("limit", "--clear", "--slots", "3")

    assert owner.rules == Rules(pauses=((MACHINE, Pause()),), slots=Amount(3.0))


def test_resuming_tells_which_rules_are_still_in_force(owner: Owner) -> None:
    owner.run("limit", "--hours", "22-7")
    owner.run("pause")

    assert "only 22-7" in owner.run("resume")


@pytest.mark.parametrize(
    "words",
    [
        ("pause", "--for", "2"),
        ("limit", "--slots", "0"),
        ("limit", "--gpu-memory", "0"),
        ("limit", "--hours", "9"),
        ("limit", "--only-when-idle", "-1"),
        ("limit", "--exclusive", "/bin/true"),
        ("limit", "--gpu", "0"),
        ("pause", "--gpu", "0"),
    ],
)
def test_what_has_no_meaning_changes_nothing(owner: Owner, words: List[str]) -> None:
    owner.run(*words, code=2)

    assert not Path(rules_file()).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="says who is in a container")
@pytest.mark.parametrize("command", ["limit", "join"])
def test_idleness_that_nobody_can_tell_is_refused_and_changes_nothing(
    owner: Owner, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("container", "test")
    mesh = ("http://127.0.0.1:9", "--token", "t") if command == "join" else ()

    assert "inside a container nobody can see" in owner.run(command, *mesh, "--only-when-idle", "10", code=1)

    assert not Path(rules_file()).exists()


def test_rules_that_cannot_be_read_are_not_overwritten_by_the_way(owner: Owner) -> None:
    owner.run("pause")
    file = Path(rules_file())
    file.write_text("{", encoding="utf-8")

    for words in (("pause",), ("resume",), ("limit",), ("limit", "--slots", "1")):
        assert "is paused, for its owner's rules cannot be read" in owner.run(*words, code=1)
    assert file.read_text(encoding="utf-8") == "{"
    owner.run("limit", "--clear")
    assert owner.rules == Rules()


# --- cards


def test_a_card_is_kept_by_what_names_it_for_ever(owner_of_cards: Owner) -> None:
    owner = owner_of_cards

    assert "RTX 4090" in owner.run("pause", "--gpu", "1")
    assert owner.targets == [uuid(1)]
    owner.run("pause", "--gpu", "cuda:0", "--now")  # The fastest comes first for programs.
    owner.run("pause", "--gpu", uuid(1)[:12].lower(), "--for", "1h")
    assert owner.targets == [uuid(1)], "one card, one pause: the last"
    owner.run("limit", "--gpu-memory", "50%", "--gpu", "0")
    assert owner.rules.gpu_memory == ((uuid(0), Amount(0.5, is_share=True)),)
    assert "no such GPU on this machine; there are: 0 NVIDIA GeForce RTX 3090, 1 " in owner.run("pause", "--gpu", "2", code=2)
    assert "may be GPU-00000000-0000" in owner.run("pause", "--gpu", "GPU-0000", code=2)
    owner.run("resume", "--gpu", "1")
    assert owner.targets == []


def test_one_of_all_paused_cards_is_resumed(owner_of_cards: Owner) -> None:
    owner = owner_of_cards
    owner.run("pause", "--gpu", "all")
    owner.run("pause")
    assert owner.targets == [GPUS, MACHINE]

    owner.run("resume", "--gpu", "0")

    assert owner.targets == [uuid(1), MACHINE]
    owner.run("resume", "--gpu", "all")
    assert owner.targets == [MACHINE]


def test_the_memory_of_all_cards_but_one_is_limited(owner_of_cards: Owner) -> None:
    owner = owner_of_cards
    owner.run("limit", "--gpu-memory", "25%")
    owner.run("limit", "--gpu-memory", "100%", "--gpu", "1")

    assert owner.rules.gpu_memory == ((GPUS, Amount(0.25, is_share=True)), (uuid(1), Amount(1.0, is_share=True)))
    owner.run("limit", "--gpu-memory", "100%")
    assert owner.rules.gpu_memory == ()
