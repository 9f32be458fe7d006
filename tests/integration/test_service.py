"""`gpumesh service` with stand-ins for the service managers: what it writes, what it asks them, what it takes away again."""

from __future__ import annotations

import configparser
import os
import plistlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest
import typer

from gpumesh.cli import service
from gpumesh.protocol.auth import worker_token
from gpumesh.runtime.service_units import LABEL, UNIT
from tests.integration.programs import started_programs

TOKEN = "a token of some length"
URL = "http://10.0.0.5:8000"


class Place:
    """A user's folders, and a `systemctl` or `launchctl` that notes what it is asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.log = folder / "asked"
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN)
        self.unit = folder / "config" / "systemd" / "user" / UNIT
        self.agent = folder / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        for name, value in {"HOME": folder, "XDG_CONFIG_HOME": folder / "config", "XDG_STATE_HOME": folder / "state"}.items():
            monkeypatch.setenv(name, str(value))
        for name in ("GPUMESH_URL", "GPUMESH_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        (folder / "bin").mkdir()
        self.answer(0)

    def answer(self, code: int, says: str = "") -> None:
        """What the managers do from now on."""
        for name in ("systemctl", "launchctl"):
            program = self.folder / "bin" / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(self.log))}\necho "{says}" >&2\nexit {code}\n')
            program.chmod(0o755)

    def asked(self) -> List[str]:
        """What they were asked since the last time."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines

    def install(self, *, dry_run: bool = False, **options: object) -> None:
        service.install(
            **{"url": URL, "token_file": str(self.token_file), "slots": None, "tag": None, "dry_run": dry_run, **options}
        )  # type: ignore[arg-type]

    def saved_token(self) -> Path:
        return self.folder / "config" / "gpumesh" / "service-token"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(sys, "platform", "linux")
    return Place(tmp_path, monkeypatch)


def exec_start(unit: str) -> List[str]:
    parsed = configparser.RawConfigParser()
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit)
    return shlex.split(parsed["Service"]["ExecStart"])


def test_installing_writes_a_unit_and_starts_it(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.install(slots=2, tag=["room=the lab"])

    options = ["--slots", "2", "--tag", "room=the lab"]
    token_file = str(place.saved_token())
    assert exec_start(place.unit.read_text()) == [
        sys.executable, "-m", "gpumesh", "join", URL, "--token-file", token_file, *options,
    ]  # fmt: skip
    assert place.saved_token().read_text().strip() == TOKEN
    assert place.saved_token().stat().st_mode & 0o777 == 0o600
    assert TOKEN not in place.unit.read_text()
    said = capsys.readouterr()
    assert TOKEN not in said.out + said.err
    asked = ["systemctl --user daemon-reload", f"systemctl --user enable {UNIT}", f"systemctl --user restart {UNIT}"]
    assert place.asked() == asked
    assert "loginctl enable-linger" in said.out

    with pytest.raises(typer.Exit) as ended:
        service.status()
    assert ended.value.exit_code == 0
    assert "is installed and runs" in capsys.readouterr().out

    place.asked()
    service.remove()
    assert place.asked() == [f"systemctl --user disable --now --no-block {UNIT}", "systemctl --user daemon-reload"]
    assert not place.unit.exists()
    assert not place.saved_token().exists()


def test_a_dry_run_prints_the_unit_and_changes_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.folder.rglob("*"))

    place.install(dry_run=True)

    assert exec_start(capsys.readouterr().out)[:5] == [sys.executable, "-m", "gpumesh", "join", URL]
    assert sorted(place.folder.rglob("*")) == before
    assert place.asked() == []


def test_the_proxy_of_the_network_goes_with_a_mesh_that_is_reached_through_it(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "all_proxy", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://me:s3cr%40t@proxy.example.net:3128")
    monkeypatch.setenv("NO_PROXY", "example.net")

    place.install(url="https://mesh.example.org", dry_run=True)
    assert "Environment=HTTPS_PROXY=http://...@proxy.example.net:3128" in capsys.readouterr().out
    place.install(url="https://mesh.example.org")
    assert "s3cr" not in capsys.readouterr().out
    assert "Environment=HTTPS_PROXY=http://me:s3cr%%40t@proxy.example.net:3128" in place.unit.read_text()
    assert "Environment=NO_PROXY=example.net" in place.unit.read_text()
    assert place.unit.stat().st_mode & 0o777 == 0o600

    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.net:3128")
    place.install(url="https://mesh.example.org")
    assert place.unit.stat().st_mode & 0o777 == 0o644
    place.install()
    assert "PROXY" not in place.unit.read_text()


def test_without_a_session_of_the_manager_it_says_what_to_do_later(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.answer(1, "Failed to connect to bus: No medium found")

    place.install()

    said = capsys.readouterr().out
    assert "it could not be started from here (Failed to connect to bus: No medium found); when you are logged in: " in said
    assert place.unit.exists()
    with pytest.raises(typer.Exit) as ended:
        service.status()
    assert ended.value.exit_code == 1


def test_with_nothing_installed_there_is_nothing_to_tell_or_remove(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    service.remove()
    with pytest.raises(typer.Exit) as ended:
        service.status()

    assert ended.value.exit_code == 1
    assert place.asked() == []
    assert "there is nothing to remove" in capsys.readouterr().out


def test_on_a_mac_it_is_an_agent(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(service.sys, "platform", "darwin")
    monkeypatch.setattr(service, "_log_path", lambda: str(place.folder / "logs" / "worker.log"))
    monkeypatch.setattr(service, "_token_path", lambda: str(place.folder / "support" / "service-token"))

    place.install()

    agent = plistlib.loads(place.agent.read_bytes())
    assert agent["ProgramArguments"][:5] == [sys.executable, "-m", "gpumesh", "join", URL]
    assert TOKEN.encode() not in place.agent.read_bytes()
    user = os.getuid()
    assert place.asked() == [f"launchctl bootout gui/{user}/{LABEL}", f"launchctl bootstrap gui/{user} {place.agent}"]
    service.remove()
    assert place.asked() == [f"launchctl bootout gui/{user}/{LABEL}"]
    assert not place.agent.exists()


def test_elsewhere_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.sys, "platform", "win32")

    with pytest.raises(OSError, match="systemd and launchd only; on Windows let the Task Scheduler"):
        service.status()


def test_what_the_unit_starts_is_a_worker_that_joins(tmp_path: Path) -> None:
    with started_programs(tmp_path) as programs:
        programs.environment["GPUMESH_PROBE"] = "0"
        _, url = programs.serve("--token", TOKEN, "--no-self-worker")
        token_file = tmp_path / "worker-token"
        token_file.write_text(worker_token(TOKEN))
        words = [
            "service",
            "install",
            "--dry-run",
            url,
            "--token-file",
            str(token_file),
            "--slots",
            "1",
            "--tag",
            "room=the lab",
        ]
        printed = subprocess.run(
            [sys.executable, "-m", "gpumesh", *words],
            capture_output=True,
            text=True,
            env=programs.environment,
            check=True,
            cwd=Path.cwd(),
        )
        command = exec_start(printed.stdout)
        saved = Path(command[command.index("--token-file") + 1])
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(token_file.read_text())  # As installing does.

        worker = programs.python(*command[1:])

        worker.wait_for(rf"works for {re.escape(url)} with 1 slots")
