"""`gpumesh radar`: what it shows of meshes, workers, and reasons."""

from __future__ import annotations

import io
from typing import Any, List, Optional

import pytest
from rich.console import Console

from gpumesh import GPUMesh
from gpumesh.cli.radar import View, as_records
from gpumesh.cli.radar_picture import picture
from gpumesh.network.address import Address, parse_address
from gpumesh.network.announcement import Mesh
from tests.support.processes import until

TOKEN = "a token of some length"
ONE = Address("10.0.0.1", 8000)


class Watched:
    """Stands in for the Watcher: these meshes."""

    def __init__(self, *meshes: Mesh, left_out: int = 0, problem: str = "") -> None:
        self._meshes = list(meshes)
        self.left_out = left_out
        self.problem = problem

    def meshes(self) -> List[Mesh]:
        return self._meshes


def announced(name: str, *answering: Address, reason: str = "", warning: str = "") -> Mesh:
    return Mesh(f"id-{name}", name, answering or (ONE,), answering, "ab" * 16, "0.1.0", 1, reason, warning, True)


def shown(watched: Any, token: Optional[str] = None, *, width: int = 200) -> str:
    out = io.StringIO()
    view = View(watched, token)
    try:
        Console(file=out, width=width, color_system=None).print(picture(view, width=width))
    finally:
        view.close()
    return out.getvalue()


def test_a_mesh_that_answers_and_one_that_does_not() -> None:
    text = shown(
        Watched(
            announced("den", ONE),
            announced("attic", reason="10.0.0.1:8000 (refused): nothing listens", warning="two certificates"),
        )
    )

    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == [
        "mesh worker device score load status",
        "den http://10.0.0.1:8000 can be joined",
        "attic http://10.0.0.1:8000 cannot be joined: 10.0.0.1:8000 (refused): nothing listens",
        "attic: two certificates",
    ]


def test_a_narrow_terminal_gets_a_list_of_whole_words() -> None:
    text = shown(
        Watched(
            announced("den", ONE),
            announced("the cellar of the department, left", reason="10.0.0.1:8000 (refused): nothing listens"),
        ),
        width=40,
    )

    assert [line.rstrip() for line in text.splitlines()] == [
        "den http://10.0.0.1:8000",
        "  can be joined",
        "the cellar of the department, left",
        "http://10.0.0.1:8000",
        "  cannot be joined: 10.0.0.1:8000",
        "  (refused): nothing listens",
    ]


def test_names_of_strangers_are_no_markup() -> None:
    assert "[bold red]x[/]" in shown(Watched(announced("[bold red]x[/]", ONE)))


def test_nothing_and_too_much_and_no_network_are_said() -> None:
    assert shown(Watched()).strip() == "No mesh on this machine's networks; start one with `gpumesh serve`."
    assert "7 more announcements are left out" in shown(Watched(announced("den", ONE), left_out=7))
    assert shown(Watched(problem="no network at all")).strip() == "no network at all"


@pytest.mark.parametrize(("token", "said"), [(TOKEN, ""), ("another token of some length", "another token")])
def test_workers_are_shown_to_who_knows_the_token(token: str, said: str) -> None:
    coordinator = GPUMesh.start_coordinator(port=0, token=TOKEN)
    worker = GPUMesh.add_worker(coordinator.url, token=TOKEN, slots=3, score=7.0)
    view = View(Watched(announced("den", parse_address(coordinator.url))), token)  # type: ignore[arg-type]
    try:
        with GPUMesh(coordinator.url, token=TOKEN, fallback=False) as mesh:
            until(mesh.workers, 20, what="the worker")

        def record() -> Any:
            (found,) = as_records(view)
            return found if found["reason"] == said and (said or found["workers"]) else None

        found = until(record, 20, what="the record")
        out = io.StringIO()
        Console(file=out, width=200, color_system=None).print(picture(view, width=200))
    finally:
        view.close()
        worker.kill()
        coordinator.stop()

    assert found["joinable"] == (not said)
    assert found["address"] == coordinator.url
    assert token not in str(found)
    if said:
        assert found["workers"] is None
        assert "the mesh has another one" in out.getvalue()
    else:
        (seen,) = found["workers"]
        assert (seen["slots"], seen["score"], seen["alive"]) == (3, 7.0, True)
        assert "can be joined; 1 worker" in out.getvalue()
        assert "0/3" in out.getvalue()
