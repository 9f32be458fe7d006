"""Throw-away processes: bounded in time, without the secret, gone when whoever asked is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpumesh.devices import children
from gpumesh.devices.children import Finished, run_module


def write(folder: Path, code: str) -> None:
    (folder / "module_of_the_test.py").write_text(code)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the processes look for modules."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_what_it_says_and_its_exit_code_come_back(path: Path) -> None:
    write(path, "import sys; print('answer'); print('why', file=sys.stderr); sys.exit(3)")

    assert run_module("module_of_the_test", seconds=20) == Finished(3, b"answer\n", b"why\n")


def test_it_gets_our_environment_with_changes_and_without_the_secret(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMESH_TOKEN", "secret")
    monkeypatch.setenv("GPUMESH_TEST_OURS", "ours")
    write(path, "import os, gpumesh; print([os.environ.get(n) for n in ('GPUMESH_TOKEN', 'GPUMESH_TEST_OURS', 'GPUMESH_X')])")

    finished = run_module("module_of_the_test", seconds=20, changes={"GPUMESH_X": "changed"})

    assert finished.stdout.decode().strip() == "[None, 'ours', 'changed']"


def test_one_that_takes_too_long_is_killed(path: Path) -> None:
    pids = path / "pid"
    write(
        path, f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); print('begun', flush=True); time.sleep(60)"
    )

    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_module("module_of_the_test", seconds=2)

    assert caught.value.output == b"begun\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_one_that_crashes_says_by_which_signal(path: Path) -> None:
    write(path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")

    assert run_module("module_of_the_test", seconds=20).code == -signal.SIGSEGV


def test_it_ends_when_whoever_asked_is_killed(path: Path) -> None:
    pids = path / "pid"
    write(
        path,
        "import os, time\n"
        "from gpumesh.devices.children import end_with_parent\n"
        "end_with_parent()\n"
        f"open({str(pids) + '.new'!r}, 'w').write(str(os.getpid())); os.rename({str(pids) + '.new'!r}, {str(pids)!r})\n"
        "time.sleep(60)\n",
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", "from gpumesh.devices.children import run_module; run_module('module_of_the_test', seconds=50)"],
        env=children.environment(),
    )
    deadline = time.monotonic() + 20
    while not pids.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)

    asker.kill()
    asker.wait()

    pid = int(pids.read_text())
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
