"""Firewalls by what they leave in files, and how each lets a port through."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumesh.runtime import doctor_firewall as firewall
from gpumesh.runtime.findings import NOTE, OK


def write(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_system_without_any_has_none(tmp_path: Path) -> None:
    assert firewall.linux_firewalls(str(tmp_path)) == []


def test_ufw_counts_when_it_is_enabled(tmp_path: Path) -> None:
    write(tmp_path, "etc/ufw/ufw.conf", "# comment\nENABLED=no\nLOGLEVEL=low\n")
    assert firewall.linux_firewalls(str(tmp_path)) == []

    write(tmp_path, "etc/ufw/ufw.conf", "# comment\nENABLED=yes\nLOGLEVEL=low\n")
    assert firewall.linux_firewalls(str(tmp_path)) == [firewall.UFW]


def test_firewalld_counts_when_it_runs(tmp_path: Path) -> None:
    write(tmp_path, "run/firewalld/.keep")
    assert firewall.linux_firewalls(str(tmp_path)) == [firewall.FIREWALLD]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (firewall.UFW, "sudo ufw allow 8123/tcp"),
        (firewall.FIREWALLD, "--add-port=8123/tcp"),
        (firewall.NFTABLES, "tcp dport 8123"),
        (firewall.IPTABLES, "--dport 8123 -j ACCEPT"),
        (firewall.WINDOWS, "netsh advfirewall firewall add rule"),
        (firewall.MACOS, "System Settings > Network > Firewall"),
    ],
)
def test_each_has_its_own_advice(name: str, command: str) -> None:
    finding = firewall.hint([name], 8123)

    assert finding.state == NOTE
    assert f"{name} is at work here and may keep others from port 8123" in finding.text
    assert command in finding.advice


def test_none_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "active_firewalls", list)

    assert firewall.check_firewall(8000).state == OK
