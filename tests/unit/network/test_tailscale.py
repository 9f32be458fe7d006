"""What the `tailscale` command says, and what follows from it; the command is a small program of the test's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from gpumesh.network.tunnels.tailscale import addresses_in, tailnet_addresses

RUNNING: Dict[str, Any] = {"BackendState": "Running", "Self": {"TailscaleIPs": ["fd7a:115c:a1e0::1", "100.101.102.103"]}}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(script: str) -> None:
        program = tmp_path / "tailscale"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


def test_the_addresses_are_told_ipv4_first(command: Callable[[str], None]) -> None:
    command(f"[ \"$1 $2\" = 'status --json' ] && echo '{json.dumps(RUNNING)}'")

    assert tailnet_addresses() == ["100.101.102.103", "fd7a:115c:a1e0::1"]


def test_a_command_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(RuntimeError, match="tailscale is not installed here; .*--public"):
        tailnet_addresses()


def test_a_service_that_does_not_run_is_told_in_its_own_words(command: Callable[[str], None]) -> None:
    command("echo 'failed to connect to local tailscaled; it does not appear to be running' >&2; exit 1")

    with pytest.raises(RuntimeError, match="tailscale says: failed to connect to local tailscaled; it does not appear"):
        tailnet_addresses()


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"BackendState": "NeedsLogin"}, "this machine is not logged in; do so with `sudo tailscale up`"),
        ({"BackendState": "Stopped"}, "it is stopped; start it with"),
        ({"BackendState": "Odd"}, "its state is 'Odd'; see `tailscale status`"),
        ({"BackendState": "Running", "Self": {"TailscaleIPs": None}}, "gave this machine no address"),
        ([], "in a form that is not known"),
    ],
)
def test_a_tailnet_that_is_not_ready_is_told_with_what_to_do(status: Any, says: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(says)):
        addresses_in(status)
