"""F37: what nobody on the mesh can run is told to its caller at once, with the best candidate and what it lacks; it waits, and then fails."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

from gpumesh import accelerate
from gpumesh.errors import NoSuitableWorkerError
from tests.integration.programs import started_programs
from tests.support.hardware import card, uuid
from tests.support.processes import until
from tests.support.site import NOTICE_SECONDS, Site

A100 = [card(number, "NVIDIA A100-SXM4-40GB", 40960) for number in range(2)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A worker without GPUs, and one with two A100."""
    with contextlib.ExitStack() as ends:
        site = Site(tmp_path_factory.mktemp("lab"), ends)
        site.plain = site.join()  # type: ignore[attr-defined]
        site.fitted = site.join(A100)  # type: ignore[attr-defined]
        yield site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as ends:
        yield Site(tmp_path, ends)


def seen() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")


@pytest.mark.parametrize(
    ("options", "needs", "lacks", "hint"),
    [
        (
            {"gpu": "A1000"},
            "1 GPU 'a1000'",
            "has 2 x NVIDIA A100-SXM4-40GB, not 'a1000'",
            "did you mean 'NVIDIA A100-SXM4-40GB'?",
        ),
        ({"gpu": "A100", "memory": 10**12}, "room on a GPU 'a100' with 1 TB", "has at most 42.9 GB on one GPU, not 1 TB", ""),
        ({"gpu": 3}, "3 GPUs", "has 2 such GPUs, not 3", ""),
    ],
)
def test_what_nobody_has_is_told_at_once_with_the_best_candidate_first_and_fails_in_the_end(
    lab: Any, caplog: pytest.LogCaptureFixture, options: Dict[str, Any], needs: str, lacks: str, hint: str
) -> None:
    caplog.set_level(logging.WARNING, "gpumesh")
    started = time.monotonic()
    future = accelerate(lab.mesh, placement_timeout=NOTICE_SECONDS, **options)(seen).remote()

    text = lab.notice(caplog, needs)

    assert time.monotonic() - started < NOTICE_SECONDS
    assert not future.done()
    assert text.startswith(f"task 'seen' needs {needs}, but none of 2 connected workers can run it: ")
    assert text.index(f"({lab.fitted}) {lacks}") < text.index(f"({lab.plain}) has no GPU")
    assert hint in text
    assert ("did you mean" in text) is bool(hint)
    with pytest.raises(NoSuitableWorkerError) as caught:
        future.result(30)
    assert str(caught.value) == text
    assert NOTICE_SECONDS <= time.monotonic() - started < 2 * NOTICE_SECONDS


def test_it_is_shown_as_infeasible_and_not_as_queued(lab: Any, tmp_path: Path) -> None:
    def rest(seconds: float) -> None:
        time.sleep(seconds)

    hopeless = accelerate(lab.mesh, gpu="H100")(seen).map(range(3))
    busy = accelerate(lab.mesh, name="rest", retries=0, tags={})(rest).map([20.0] * 4)
    until(lambda: len(lab.mesh.waiting()) == 2, 10, what="two kinds of tasks that wait")

    shown = {each["state"]: each for each in lab.mesh.waiting()}
    with started_programs(tmp_path) as programs:
        shown_by = programs.gpumesh("workers", "--url", lab.url, "--token", lab.token, COLUMNS="400")
        assert shown_by.wait() == 0

    assert (shown["infeasible"]["functions"], shown["infeasible"]["count"]) == (["seen"], 3)
    assert shown["infeasible"]["needs"] == "1 GPU 'h100'"
    assert "not 'h100'" in shown["infeasible"]["reason"]
    assert (shown["queued"]["functions"], shown["queued"]["reason"]) == (["rest"], "")
    assert "3 tasks wait (seen), infeasible: task 'seen' needs 1 GPU 'h100'" in shown_by.output
    assert "(rest), queued" in shown_by.output
    hopeless.cancel()
    busy.cancel()


def test_it_runs_as_soon_as_a_worker_that_can_run_it_joins(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gpumesh")
    site.join()
    tagged = accelerate(site.mesh, tags={"room": "lab"}, placement_timeout=None)(seen).remote()
    with_card = accelerate(site.mesh, gpu="A100", memory="20GB", placement_timeout=None)(seen).remote()
    site.notice(caplog, "room=lab")
    site.notice(caplog, "'a100' with 20 GB")
    assert not tagged.done()
    assert not with_card.done()

    site.join(A100, room="lab")

    assert tagged.result(30) == ""
    assert with_card.result(30) in (uuid(0), uuid(1))
    assert site.mesh.waiting() == []
