"""Texts that let a system start a worker by itself: a systemd user unit, a launchd agent; pure, and the token is not in them."""

from __future__ import annotations

from typing import List, Mapping, Sequence

UNIT = "gpumesh-worker.service"
LABEL = "io.gpumesh.worker"

RESTART_SECONDS = 5  # From an end that was not asked for to the next start.
DRAIN_SECONDS = 45  # For running tasks to finish, which a worker allows 30 s, before the system kills what is left.


def systemd_unit(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A unit for `systemctl --user`, for a worker that runs `command`.

    Args:
        command: Program with its full path, and its arguments.
        environment: What it has besides the service manager's own.

    Raises:
        ValueError: Something in them cannot be written there: it spans lines.
    """
    lines = [
        "[Unit]",
        "Description=gpumesh worker: lends this machine to a mesh",
        "StartLimitIntervalSec=0",  # However long the mesh is away.
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quoted(word, in_command=True) for word in command)}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in environment.items()),
        "Restart=on-failure",
        f"RestartSec={RESTART_SECONDS}",
        "KillMode=mixed",
        f"TimeoutStopSec={DRAIN_SECONDS}",
        "Nice=5",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def launchd_agent(command: Sequence[str], environment: Mapping[str, str], log: str) -> str:
    """A property list for `~/Library/LaunchAgents`, for a worker that runs `command`.

    Args:
        log: Where its output goes, which launchd keeps nowhere by itself.

    Raises:
        ValueError: Something in them cannot be written there: it spans lines.
    """
    for text in (*command, *environment, *environment.values(), log):
        _check(text)
    words = "\n".join(f"        <string>{_escaped(word)}</string>" for word in command)
    pairs = "\n".join(
        f"        <key>{_escaped(name)}</key>\n        <string>{_escaped(value)}</string>"
        for name, value in environment.items()
    )
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
<dict>
    <key>Label</key>
    <string>{LABEL}</string>
    <key>ProgramArguments</key>
    <array>
{words}
    </array>
    <key>EnvironmentVariables</key>
    <dict>
{pairs}
    </dict>
    <key>RunAtLoad</key>
    <true/>
    <key>KeepAlive</key>
    <dict>
        <key>SuccessfulExit</key>
        <false/>
    </dict>
    <key>ThrottleInterval</key>
    <integer>{RESTART_SECONDS}</integer>
    <key>ExitTimeOut</key>
    <integer>{DRAIN_SECONDS}</integer>
    <key>Nice</key>
    <integer>5</integer>
    <key>StandardOutPath</key>
    <string>{_escaped(log)}</string>
    <key>StandardErrorPath</key>
    <string>{_escaped(log)}</string>
</dict>
</plist>
"""


def worker_command(python: str, url: str, token_file: str, options: Sequence[str]) -> List[str]:
    """What such a service runs.

    Args:
        url: The mesh's address.
        token_file: Where its token is; the token itself would be seen by everybody.
        options: More of `gpumesh join`.
    """
    return [python, "-m", "gpumesh", "join", url, "--token-file", token_file, *options]


def _quoted(text: str, *, in_command: bool = False) -> str:
    """As systemd reads it back (systemd.syntax(7), systemd.service(5))."""
    _check(text)
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if in_command:
        text = text.replace("$", "$$")
    return f'"{text}"' if not text or any(letter in text for letter in " \t;'\"\\") else text


def _escaped(text: str) -> str:
    """For XML; its own module for that takes 60 ms to load."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _check(text: str) -> None:
    if any(ord(letter) < 32 or letter == "\x7f" for letter in text):
        raise ValueError(f"{text!r} has characters that no service's description can hold")
