"""`mesh.devices()` and its kin on real workers: what is there, what runs on it, and what is free."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh import accelerate
from tests.support.hardware import MIB, card, uuid
from tests.support.processes import until
from tests.support.site import Site

BIG = card(0, "NVIDIA A100-SXM4-40GB", 40960, used=1000)
SMALL = card(1, "NVIDIA T4", 15360, used=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with contextlib.ExitStack() as ends:
        made = Site(tmp_path_factory.mktemp("site"), ends)
        made.plain = made.join()  # type: ignore[attr-defined]
        made.fitted = made.join([BIG, SMALL])  # type: ignore[attr-defined]
        yield made


def cards(site: Any) -> List[Dict[str, Any]]:
    return [row for row in site.mesh.devices() if row["device"].startswith("cuda")]


def wait_for(path: str) -> str:
    while not os.path.exists(path):
        time.sleep(0.01)
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_all_devices_are_numbered_the_fastest_first(site: Any) -> None:
    rows = site.mesh.devices()

    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert [row["device"] for row in rows] == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert [row["device_name"] for row in rows[:2]] == ["NVIDIA A100-SXM4-40GB", "NVIDIA T4"]
    assert [row["system_index"] for row in rows] == [0, 1, None, None]
    assert [row["uuid"] for row in rows[:2]] == [uuid(0), uuid(1)]
    assert {row["worker"] for row in rows[:2]} == {site.fitted}
    assert {row["status"] for row in rows} == {"idle"}
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    assert site.mesh.device_count() == 4
    assert site.mesh.total_score() == pytest.approx(sum(row["score"] for row in rows))


def test_a_worker_is_shown_by_its_best_device(site: Any) -> None:
    shown = {worker["id"]: worker for worker in site.mesh.workers()}

    assert (shown[site.fitted]["device"], shown[site.fitted]["device_name"]) == ("cuda:0", "NVIDIA A100-SXM4-40GB")
    assert shown[site.fitted]["score"] == cards(site)[0]["score"] > shown[site.fitted]["cpu_score"]
    assert shown[site.plain]["device"] == "cpu"
    assert shown[site.plain]["score"] == shown[site.plain]["cpu_score"]


def test_a_task_is_seen_on_its_card_and_nowhere_else(site: Any, tmp_path: Path) -> None:
    before = cards(site)[0]
    assert before["others"] == 1000 * MIB
    assert before["free"] == (40960 - 1000) * MIB
    gate = tmp_path / "gate"
    future = accelerate(site.mesh, gpu="A100", memory="16GB")(wait_for).remote(str(gate))
    until(lambda: cards(site)[0]["status"] == "busy", 20, what="a busy card")

    rows = site.mesh.devices()
    gate.touch()

    assert [row["status"] for row in rows] == ["busy", "idle", "idle", "idle"]
    assert rows[0]["reserved"] >= 16 * 10**9
    assert rows[0]["free"] == before["free"] - rows[0]["reserved"]
    assert future.result(30) == uuid(0)
    until(lambda: cards(site)[0]["status"] == "idle", 20, what="an idle card")


def test_what_is_bound_to_a_device_runs_only_there(site: Any, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    function = accelerate(site.mesh)(wait_for)

    found = {name: function.to(name).remote(str(tmp_path / "gate")).result(30) for name in ("cuda:1", "T4", "cuda:0", "cuda")}

    assert found == {"cuda:1": uuid(1), "T4": uuid(1), "cuda:0": uuid(0), "cuda": uuid(0)}
    assert function.to("cpu").map([str(tmp_path / "gate")] * 4).result(30) == [""] * 4
