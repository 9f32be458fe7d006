"""This machine's address in its tailnet, as the `tailscale` command tells it."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any, Dict, List

ASK_SECONDS = 5.0  # For the command; its daemon answers at once or not at all.
COMMAND = "tailscale"
_MAC_APP = "/Applications/Tailscale.app/Contents/MacOS/Tailscale"

_STATES: Dict[str, str] = {
    "NeedsLogin": "this machine is not logged in; do so with `sudo tailscale up`",
    "NeedsMachineAuth": "an administrator of the tailnet has to approve this machine first",
    "NoState": "its service is starting; try again in a moment",
    "Starting": "its service is starting; try again in a moment",
    "Stopped": "it is stopped; start it with `sudo tailscale up`",
}


def tailnet_addresses() -> List[str]:
    """The IPs of this machine in its tailnet, IPv4 first; at least one. Takes some milliseconds.

    Raises:
        RuntimeError: There is none; the message says what to do.
    """
    command = shutil.which(COMMAND) or shutil.which(_MAC_APP)
    if command is None:
        raise RuntimeError("tailscale is not installed here; see its page on downloads, or use `gpumesh serve --public`")
    try:
        done = subprocess.run(
            [command, "status", "--json", "--peers=false"], check=False, capture_output=True, text=True, timeout=ASK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"tailscale does not answer within {ASK_SECONDS:g} s; is its service running?") from None
    except OSError as error:
        raise RuntimeError(
            f"tailscale cannot be asked: {error.strerror or error}; see whether `tailscale status` works"
        ) from None
    try:
        status: Any = json.loads(done.stdout)
    except ValueError:
        said = " ".join((done.stderr or done.stdout).split())[:200] or f"it ended with exit code {done.returncode}"
        raise RuntimeError(f"tailscale says: {said}; see whether `tailscale status` works") from None
    return addresses_in(status)


def addresses_in(status: Any) -> List[str]:
    """The same from what `tailscale status --json` prints.

    Raises:
        RuntimeError: As above.
    """
    if not isinstance(status, dict):
        raise RuntimeError("tailscale answers in a form that is not known here; update gpumesh")
    state = str(status.get("BackendState", ""))
    if state != "Running":
        raise RuntimeError(f"tailscale: {_STATES.get(state, f'its state is {state!r}; see `tailscale status`')}")
    own = status.get("Self")
    found = own.get("TailscaleIPs") if isinstance(own, dict) else None
    ips = [str(each) for each in found or [] if isinstance(each, str)]
    if not ips:
        raise RuntimeError("tailscale gave this machine no address; see `tailscale status`")
    return sorted(ips, key=lambda ip: ":" in ip)
