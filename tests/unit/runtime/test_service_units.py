"""Units and agents as their managers read them back."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpumesh.runtime.service_units import LABEL, UNIT, launchd_agent, systemd_unit, worker_command

COMMAND = worker_command(
    sys.executable,
    "http://[fd00::1]:8000",
    "/home/a b/service-token",
    ["--tag", 'room=the "big" lab, 50% of $HOME', "--tag", ""],
)
ENVIRONMENT = {"GPUMESH_SPILL_DIR": "/mnt/a disk", "PYTHONUNBUFFERED": "1"}


def test_the_command_names_a_file_and_no_token() -> None:
    assert COMMAND[:7] == [
        sys.executable,
        "-m",
        "gpumesh",
        "join",
        "http://[fd00::1]:8000",
        "--token-file",
        "/home/a b/service-token",
    ]


def test_a_unit_restarts_starts_at_login_and_lets_tasks_finish() -> None:
    lines = systemd_unit(["/usr/bin/python3", "-m", "gpumesh"], {}).splitlines()

    assert "ExecStart=/usr/bin/python3 -m gpumesh" in lines
    assert {"Restart=on-failure", "WantedBy=default.target", "TimeoutStopSec=45", "KillMode=mixed"} <= set(lines)


def test_a_unit_quotes_what_systemd_would_understand_otherwise() -> None:
    unit = systemd_unit(COMMAND, ENVIRONMENT)

    assert '--tag "room=the \\"big\\" lab, 50%% of $$HOME" --tag ""' in unit
    assert 'Environment="GPUMESH_SPILL_DIR=/mnt/a disk"' in unit


def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    file = tmp_path / UNIT
    file.write_text(systemd_unit(COMMAND, ENVIRONMENT))

    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(file)],
        check=False,
        capture_output=True,
        text=True,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_is_a_property_list_that_says_the_same() -> None:
    agent = plistlib.loads(launchd_agent(COMMAND, {**ENVIRONMENT, "A": "<&>"}, "/tmp/a & b.log").encode())

    assert agent["Label"] == LABEL
    assert agent["ProgramArguments"] == COMMAND
    assert agent["EnvironmentVariables"] == {**ENVIRONMENT, "A": "<&>"}
    assert (agent["RunAtLoad"], agent["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert agent["StandardErrorPath"] == "/tmp/a & b.log"


@pytest.mark.parametrize("evil", ["a\nExecStartPost=/bin/sh", "a\rb", "a\0b"])
def test_what_spans_lines_is_refused(evil: str) -> None:
    with pytest.raises(ValueError, match="no service's description can hold"):
        systemd_unit(["python", evil], {})
    with pytest.raises(ValueError, match="no service's description can hold"):
        systemd_unit(["python"], {"A": evil})
    with pytest.raises(ValueError, match="no service's description can hold"):
        launchd_agent(["python", evil], {}, "log")
