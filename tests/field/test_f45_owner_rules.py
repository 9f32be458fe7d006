"""F45: the owner of a lent machine rules it. Nothing new goes to what is paused, what waits there goes elsewhere, what runs ends as chosen."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, Sequence, Tuple

import pytest

from gpumesh.client.futures import MeshFuture
from gpumesh.errors import WorkerCrashedError
from gpumesh.runtime import embedded
from gpumesh.runtime.owner import LOOK_SECONDS
from tests.integration.programs import Program, started_programs
from tests.support import lent
from tests.support.hardware import Machine, card, uuid
from tests.support.lent import SOON, Site
from tests.support.processes import until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with started_programs(tmp_path) as programs, lent.site(programs, tmp_path) as made:
        yield made


def ends(futures: Sequence[MeshFuture], names: Sequence[str], place: str) -> None:
    """All of them have ended there."""
    assert [future.result(SOON) for future in futures] == [(name, place) for name in names]


def test_a_look_at_the_rules_comes_often_enough_to_obey_within_a_second() -> None:
    assert LOOK_SECONDS <= 0.5


# --- the whole machine


def test_while_paused_nothing_new_comes_what_waits_moves_and_what_runs_finishes(site: Site) -> None:
    site.join("a")
    futures = site.submit("t0", "t1", "t2", "t3", retries=0)
    site.until_started("t0", "a")

    said = site.rule("a", "pause", "--for", "2h", "--reason", "a film")

    assert "what runs may finish" in said
    problem = site.until_problem("a", "paused by its owner until ")
    assert problem.endswith(" (a film)")
    site.join("b")
    site.until_started("t1", "b")
    site.go("t1", "t2", "t3")
    ends(futures[1:], ("t1", "t2", "t3"), "b")
    more = site.submit("t4", "t5")
    site.until_started("t4", "b")
    site.go()
    ends(futures[:1], ("t0",), "a")
    ends(more, ("t4", "t5"), "b")
    assert site.starts() == [("t0", "a")] + [(f"t{number}", "b") for number in range(1, 6)], "each once"
    listing = site.programs.gpumesh("workers", "--url", site.url, "--token", lent.TOKEN)
    assert listing.wait() == 0
    assert problem in " ".join(listing.output.split())


def test_resumed_it_works_again(site: Site) -> None:
    site.rule("a", "pause")
    site.join("a")
    futures = site.submit("t0", "t1")
    site.until_problem("a", "paused by its owner")
    assert site.starts() == []

    said = site.rule("a", "resume")

    assert "lent again" in said
    site.go()
    ends(futures, ("t0", "t1"), "a")
    site.until_lent("a")


def test_a_pause_ends_when_its_time_has_come(site: Site) -> None:
    site.rule("a", "pause", "--for", "3s")
    site.join("a")

    futures = site.submit("t0")
    site.go()

    ends(futures, ("t0",), "a")


def test_a_restart_does_not_undo_a_pause(site: Site) -> None:
    worker = site.join("a")
    site.rule("a", "pause", "--reason", "my machine")
    site.until_problem("a", "my machine")
    worker.kill()
    until(lambda: not site.view("a"), SOON)

    site.join("a")
    futures = site.submit("t0")

    assert site.until_problem("a", "paused by its owner") == "paused by its owner (my machine)"
    assert site.starts() == []
    site.rule("a", "resume")
    site.go()
    ends(futures, ("t0",), "a")


def test_what_runs_is_handed_back_at_once_when_its_owner_wants_so_and_takes_no_strike(site: Site) -> None:
    for place in "ab":
        site.join(place)
    site.rule("b", "pause")
    site.until_problem("b", "paused")
    futures = site.submit("t0", "t1", retries=1)
    site.until_started("t0", "a")

    site.rule("a", "pause", "--now")
    site.rule("b", "resume")
    site.until_started("t0", "b")
    site.rule("b", "pause", "--now")
    site.rule("a", "resume")
    site.until_started("t0", "a")
    site.rule("a", "pause", "--now")
    site.rule("b", "resume")
    site.until_started("t0", "b")
    site.go()

    ends(futures, ("t0", "t1"), "b")
    assert [place for _, place in site.starts("t0")] == ["a", "b", "a", "b"], (
        "three times, and one strike more would have failed it"
    )


@pytest.mark.parametrize("function", [lent.hold_deaf, lent.hold_partly])
def test_code_that_swallows_the_interrupt_is_handed_back_all_the_same(
    site: Site, function: Callable[[str, str], object]
) -> None:
    site.join("a")
    (future,) = site.submit("t0", function=function, retries=1)
    site.until_started("t0", "a")

    site.rule("a", "pause", "--now")
    site.until_problem("a", "paused")
    site.join("b")
    site.until_started("t0", "b")
    site.go()

    assert future.result(SOON) in (("t0", "b"), "whole")


def test_a_task_that_may_start_once_says_that_the_owner_wanted_the_machine_back(site: Site) -> None:
    site.join("a")
    (future,) = site.submit("t0", retries=0)
    site.until_started("t0", "a")

    site.rule("a", "pause", "--now")

    with pytest.raises(WorkerCrashedError, match="owner wants it back"):
        future.result(SOON)
    assert site.starts() == [("t0", "a")]


# --- Ctrl-C


def test_ctrl_c_finishes_what_runs_and_gives_the_rest_to_others(site: Site) -> None:
    worker = site.join("a")
    futures = site.submit("t0", "t1", retries=0)
    site.until_started("t0", "a")

    worker.interrupt()
    worker.wait_for("draining")
    site.join("b")
    site.until_started("t1", "b")
    assert worker.process.poll() is None
    site.go()

    assert [future.result(SOON) for future in futures] == [("t0", "a"), ("t1", "b")]
    assert worker.wait() == 0


def test_ctrl_c_twice_stops_now_and_costs_the_tasks_no_strike(site: Site) -> None:
    def leave(worker: Program) -> None:
        worker.remember_children()
        worker.interrupt()
        worker.wait_for("draining")
        worker.interrupt()
        assert worker.wait() == 0
        assert worker.survivors() == []

    worker = site.join("a")
    (future,) = site.submit("t0", retries=1)
    site.until_started("t0", "a")
    for place in ("b", "c"):
        leave(worker)
        worker = site.join(place)
        site.until_started("t0", place)
    site.go()

    assert future.result(SOON) == ("t0", "c"), "two of them would have been one strike too many"


def test_ctrl_c_twice_ends_also_what_is_deaf_to_it(site: Site) -> None:
    worker = site.join("a")
    (future,) = site.submit("t0", function=lent.hold_deaf, retries=1)
    site.until_started("t0", "a")

    worker.interrupt()
    worker.wait_for("draining")
    worker.interrupt()

    assert worker.wait() == 0
    site.join("b")
    site.until_started("t0", "b")
    site.go()
    assert future.result(SOON) == ("t0", "b")


def test_a_worker_that_a_script_stops_hands_back_what_does_not_finish_in_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_SECONDS", 0.5)
    for name, value in site.owner("script").items():
        monkeypatch.setenv(name, value)
    worker = embedded.add_worker(site.url, lent.TOKEN, slots=1, score=1.0, tags={"place": "script"})
    try:
        futures = site.submit("t0", retries=1)
        site.until_started("t0", "script")
        worker.stop()
    finally:
        worker.kill()

    site.join("a")
    site.until_started("t0", "a")
    site.rule("a", "pause", "--now")
    site.join("b")
    site.until_started("t0", "b")
    site.go()
    ends(futures, ("t0",), "b")


# --- when


def test_hours(site: Site) -> None:
    hour = time.localtime().tm_hour
    elsewhen = f"{(hour + 3) % 24}-{(hour + 5) % 24}"
    site.join("a", "--hours", elsewhen)
    assert site.until_problem("a", "lent by its owner") == f"lent by its owner {elsewhen} only"
    futures = site.submit("t0")

    site.rule("a", "limit", "--hours", f"{(hour - 2) % 24}-{(hour + 3) % 24}")

    site.until_started("t0", "a")
    site.rule("a", "limit", "--hours", elsewhen)
    site.until_problem("a", "lent by its owner")
    more = site.submit("t1")
    site.go()
    ends(futures, ("t0",), "a")
    site.rule("a", "limit", "--hours", "always")
    ends(more, ("t1",), "a")


def test_a_program_that_wants_the_machine_for_itself(site: Site, tmp_path: Path) -> None:
    game, film = (f"gm{os.getpid() % 10**6}{word}" for word in ("game", "film"))
    for name in (game, film):
        shutil.copy("/bin/sleep", tmp_path / name)
    site.join("a", "--exclusive", f"{game}, {film}.exe", slots=2)
    site.until_lent("a")
    (own,) = site.submit("own", function=_play(str(tmp_path / game)))
    site.until_started("own", "a")

    running = subprocess.Popen([str(tmp_path / film), "600"])
    try:
        # Not the game, which is looked for first: a task of the mesh is what runs that.
        assert site.until_problem("a", "paused while") == f"paused while its owner runs {film}"
        futures = site.submit("t0")
    finally:
        running.kill()
        running.wait()
    site.until_lent("a")
    site.until_started("t0", "a")
    site.go()
    assert own.result(SOON) == ("own", "a")
    ends(futures, ("t0",), "a")


def _play(program: str) -> Callable[[str, str], Tuple[str, str]]:
    def play(folder: str, name: str) -> Tuple[str, str]:
        return lent.run_program(program, folder, name)

    return play


# --- a part of it


def test_a_share_of_its_slots(site: Site) -> None:
    site.join("a", slots=4)
    futures = site.submit("t0", "t1", "t2", "t3", "t4", "t5")
    until(lambda: len(site.starts()) == 4, SOON)

    site.rule("a", "limit", "--slots", "50%")
    until(lambda: site.view("a")["slots"] == 2, SOON)
    site.go("t0", "t1")
    assert [future.result(SOON) for future in futures[:2]] == [("t0", "a"), ("t1", "a")]

    more = site.submit("t6", "t7")
    site.go("t2")
    site.until_started("t4", "a")
    assert len(site.starts()) == 5, "two run: one of the old ones and one new"
    site.go()
    assert [future.result(SOON)[1] for future in (*futures, *more)] == ["a"] * 8
    site.rule("a", "limit", "--slots", "100%")
    until(lambda: site.view("a")["slots"] == 4, SOON)


@pytest.fixture
def two_cards(site: Site, tmp_path: Path) -> Dict[str, str]:
    """The environment of an owner with two made-up cards."""
    (tmp_path / "machine").mkdir()
    machine = Machine(tmp_path / "machine", [card(0), card(1, "NVIDIA GeForce RTX 4090")])
    return site.owner("a", **machine.environment)


def join_with_cards(site: Site, environment: Dict[str, str]) -> None:
    site.join("a", environment=environment)
    until(lambda: len([device for device in site.view("a")["devices"] if device["kind"] == "cuda"]) == 2, SOON)


def problems(site: Site) -> Dict[str, str]:
    return {device["uuid"]: device["problem"] for device in site.view("a")["devices"] if device["kind"] == "cuda"}


def test_one_gpu_is_paused_and_the_rest_goes_on(site: Site, two_cards: Dict[str, str]) -> None:
    join_with_cards(site, two_cards)
    futures = site.submit_to_gpu("g0", "g1", gpu=1, retries=1)
    site.until_started("g0", "a")
    site.until_started("g1", "a")

    said = site.rule("a", "pause", "--gpu", "0", "--now", "--reason", "a game", environment=two_cards)

    assert "RTX 3090" in said
    until(lambda: problems(site)[uuid(0)] == "paused by its owner (a game)", SOON)
    assert problems(site)[uuid(1)] == ""
    assert site.problem("a") == ""
    (plain,) = site.submit("c0")
    site.until_started("c0", "a")
    started = [name for name, _ in site.starts() if name.startswith("g")]
    assert sorted(started) == ["g0", "g1"], "one of them was ended, and waits for a card"
    site.go("c0")
    ends([plain], ("c0",), "a")
    site.rule("a", "resume", "--gpu", "0", environment=two_cards)
    until(
        lambda: len([name for name, _ in site.starts() if name.startswith("g")]) == 3, SOON, what="the ended one starts again"
    )
    site.go()
    assert sorted(future.result(SOON)[0] for future in futures) == ["g0", "g1"]


def test_all_gpus_are_paused_and_only_they_until_resumed(site: Site, two_cards: Dict[str, str]) -> None:
    site.rule("a", "pause", "--gpu", "all", environment=two_cards)
    join_with_cards(site, two_cards)
    futures = site.submit_to_gpu("g0", gpu=1)
    (plain,) = site.submit("c0")
    site.go()

    assert plain.result(SOON) == ("c0", "a")
    assert set(problems(site).values()) == {"paused by its owner"}
    assert site.starts("g0") == []
    site.rule("a", "resume", environment=two_cards)
    assert futures[0].result(SOON) == ("g0", "a")


def test_a_part_of_a_gpus_memory(site: Site, two_cards: Dict[str, str]) -> None:
    site.rule("a", "limit", "--gpu-memory", "8GB", environment=two_cards)
    site.rule("a", "limit", "--gpu-memory", "50%", "--gpu", "1", environment=two_cards)
    join_with_cards(site, two_cards)

    memory = {device["uuid"]: device["memory"] for device in site.view("a")["devices"] if device["kind"] == "cuda"}

    assert memory == {uuid(0): 8 * 10**9, uuid(1): 24576 * 2**20 // 2}


# --- the rules themselves


def test_rules_that_cannot_be_read_pause_the_machine_and_say_so(site: Site) -> None:
    site.rule("a", "limit", "--slots", "1")
    worker = site.join("a")
    site.until_lent("a")

    site.rules_file("a").write_text('{"hours": "sometimes"}', encoding="utf-8")

    assert site.until_problem("a", "cannot be read") == "paused: what its owner allows cannot be read"
    worker.wait_for("owner's rules cannot be read: .*sometimes")
    refused = site.programs.gpumesh("limit", "--slots", "1", **site.owner("a"))
    assert refused.wait() == 1
    assert "begin afresh with `gpumesh limit --clear`" in refused.output
    site.rule("a", "limit", "--clear")
    site.until_lent("a")
