"""A process whose GPU does not answer it any more ends after its task, and the next task gets another."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, List

from gpumesh import GPUMesh, accelerate
from tests.support.hardware import card
from tests.support.processes import until
from tests.support.site import Site


def pid_after(error: str) -> int:
    """A task that leaves CUDA in this state behind; torch is a stand-in."""
    import sys
    import types

    def empty_cache() -> None:
        if error:
            raise RuntimeError(error)

    torch: Any = types.ModuleType("torch")
    torch.Tensor, torch.nn, torch.device = type("Tensor", (), {}), types.SimpleNamespace(Module=type("Module", (), {})), str
    torch.cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        synchronize=lambda: None,
        memory_allocated=lambda: 0,
        memory_reserved=lambda number: 0,
        device_count=lambda: 1,
        empty_cache=empty_cache,
    )
    sys.modules["torch"] = torch
    return os.getpid()


def test_the_next_task_gets_another_process_and_nothing_is_held_against_anyone(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ends:
        site = Site(tmp_path, ends)
        site.join([card(0)])
        task = accelerate(site.mesh, gpu=1, retries=0)(pid_after)

        fine: List[int] = [task.remote("").result(60) for _ in range(3)]
        broken = task.remote("CUDA error: device-side assert triggered").result(60)
        later: List[int] = task.map([""] * 5).result(60)

        assert set(fine) == {broken}
        assert len(set(later)) == 1
        assert broken not in later
        pids = task.options(retries=3).map(["", "lost", "", "lost", "", ""]).result(60)
        assert len(set(pids)) >= 3
        (worker,) = site.mesh.workers()
        assert (worker["problem"], worker["done"]) == ("", 15)


def import_slowly(folder: str) -> None:
    import sys

    sys.path.insert(0, folder)
    import imported_slowly  # type: ignore[import-not-found]  # noqa: F401


def test_a_process_that_was_interrupted_while_it_imported_something_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "imported_slowly.py").write_text(
        "import os, time\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt as error:\n    raise ImportError('as some C code makes of it') from None\n"
    )
    with GPUMesh.local(workers=1, slots=1) as mesh:
        future = accelerate(mesh, retries=0)(import_slowly).remote(str(tmp_path))
        spent = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 20))
        waits = accelerate(mesh, retries=0)(os.getpid).remote()

        future.cancel()

        assert waits.result(20) != spent
        until(lambda: not Path(f"/proc/{spent}").exists(), 20, what="its process has ended")
        (worker,) = mesh.workers()
        assert (worker["problem"], worker["crashed"]) == ("", 0)
