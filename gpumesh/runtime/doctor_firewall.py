"""Which firewall this machine seems to have, and how to let a port through it; changes nothing and asks for no rights."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from typing import List, Mapping

from gpumesh.runtime.findings import Finding, note, ok

ASK_SECONDS = 3.0  # For a program of the system to answer.

UFW = "ufw"
FIREWALLD = "firewalld"
NFTABLES = "nftables"
IPTABLES = "iptables"
WINDOWS = "Windows Defender Firewall"
MACOS = "the macOS application firewall"

_ADVICE: Mapping[str, str] = {
    UFW: "sudo ufw allow {port}/tcp",
    FIREWALLD: "sudo firewall-cmd --permanent --add-port={port}/tcp && sudo firewall-cmd --reload",
    NFTABLES: "see `sudo nft list ruleset`, and accept tcp dport {port} in its input chain",
    IPTABLES: "sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
    WINDOWS: 'as administrator: netsh advfirewall firewall add rule name="gpumesh" dir=in action=allow protocol=TCP localport={port}',
    MACOS: "System Settings > Network > Firewall > Options: allow incoming connections for {python}",
}


def check_firewall(port: int) -> Finding:
    """Whether a firewall may keep others from a port of this machine."""
    found = active_firewalls()
    if not found:
        return ok("firewall", "no firewall of this machine's own is known to be at work")
    return hint(found, port)


def hint(firewalls: List[str], port: int) -> Finding:
    """What to do about these for others to reach a port."""
    advice = "; or ".join(advice_for(each, port) for each in firewalls)
    return note("firewall", f"{' and '.join(firewalls)} is at work here and may keep others from port {port}", advice)


def advice_for(firewall: str, port: int) -> str:
    """The command, or where to click."""
    return _ADVICE[firewall].format(port=port, python=sys.executable)


def active_firewalls() -> List[str]:
    """Those that are at work, as far as a user without rights can see."""
    if sys.platform == "win32":
        return [WINDOWS] if re.search(r"\bON\b", _ask("netsh", "advfirewall", "show", "currentprofile", "state")) else []
    if sys.platform == "darwin":
        state = _ask("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate")
        return [MACOS] if "enabled" in state.lower() else []
    if sys.platform == "linux":
        return linux_firewalls()
    return []


def linux_firewalls(root: str = "/") -> List[str]:
    """What the files of a Linux system tell; its own programs are asked only where they need no rights.

    Args:
        root: Where its files are.
    """
    found = []
    if re.search(r"^\s*ENABLED\s*=\s*yes", _read(os.path.join(root, "etc/ufw/ufw.conf")), re.MULTILINE | re.IGNORECASE):
        found.append(UFW)
    if os.path.exists(os.path.join(root, "run/firewalld")) or os.path.exists(os.path.join(root, "run/firewalld.pid")):
        found.append(FIREWALLD)
    if found:
        return found  # Both are made of what follows.
    if root == "/" and shutil.which("nft") and re.search(r"hook input.*policy drop", _ask("nft", "list", "ruleset")):
        return [NFTABLES]
    if "filter" in _read(os.path.join(root, "proc/net/ip_tables_names")).split():
        rules = _ask("iptables", "-S", "INPUT") if root == "/" and shutil.which("iptables") else ""
        if "-P INPUT DROP" in rules or re.search(r"-j (DROP|REJECT)", rules):
            return [IPTABLES]
    return []


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read(4096)
    except OSError:  # Not there, or not for us.
        return ""


def _ask(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=ASK_SECONDS)
        return done.stdout
    return ""
