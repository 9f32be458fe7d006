"""Who uses this machine: what systems print is read right, and processes are really looked at."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpumesh.devices import activity
from tests.support.processes import until

IOREG = """
+-o IOHIDSystem  <class IOHIDSystem, id 0x1000002fb, registered, matched, active, busy 0 (0 ms), retain 33>
    {
      "HIDServiceGlobalModifiersSupported" = Yes
      "HIDIdleTime" = 4316783291
      "HIDParameters" = {"HIDPointerResolution"=26214400,"HIDClickTime"=500000000}
    }
"""
SESSIONS = """      2 1000 ada  seat0 tty2
     c1   42 gdm  seat0 tty1
     15 1000 ada        pts/3
     16 1000 ada  -     -    1234 manager - no -
"""


def test_macos_counts_nanoseconds() -> None:
    assert activity.parse_hid_idle(IOREG) == pytest.approx(4.316783291)
    assert activity.parse_hid_idle("") is None


def test_sessions_at_a_seat_are_those_that_a_person_sits_at() -> None:
    assert activity.graphical_sessions(SESSIONS) == ["2", "c1"]
    assert activity.graphical_sessions("") == []


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("IdleHint=no\nIdleSinceHint=0\n", 0.0),
        ("IdleHint=yes\nIdleSinceHint=1700000000000000\n", 60.0),
        ("IdleSinceHint=1700000000000000\nIdleHint=yes\n", 60.0),
        ("IdleHint=yes\nIdleSinceHint=0\n", None),
        ("IdleHint=yes\n", None),
        ("", None),
    ],
)
def test_logind_tells_since_when_a_session_is_idle(text: str, idle: object) -> None:
    assert activity.parse_idle_hint(text, 1700000060.0) == idle


@pytest.mark.parametrize(
    ("text", "idle"), [("(uint64 123456,)\n", 123.456), ("(uint64 0,)", 0.0), ("Error: no such name", None), ("", None)]
)
def test_gnome_counts_milliseconds(text: str, idle: object) -> None:
    assert activity.parse_gnome_idle(text) == idle


def test_a_program_that_is_not_there_or_fails_says_nothing() -> None:
    assert activity._ask(["no-such-program-anywhere"]) == ""
    assert activity._ask([sys.executable, "-c", "print('half'); raise SystemExit(1)"]) == ""


def test_what_cannot_be_known_is_said_rather_than_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(activity, "CONTAINER_MARKS", (str(tmp_path),))

    idle = activity.idle_time()

    if sys.platform == "linux":
        assert idle.seconds is None
        assert "container" in idle.problem


@pytest.mark.skipif(sys.platform != "linux", reason="terminals tell of input by their access times")
def test_input_at_a_terminal_is_a_touch_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    try:
        name = os.ttyname(follower)
        monkeypatch.setattr(activity, "CONTAINER_MARKS", ())
        monkeypatch.delenv("container", raising=False)
        monkeypatch.delenv("DISPLAY", raising=False)
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        monkeypatch.setattr(activity, "_has_display", lambda: False)
        monkeypatch.setattr(activity, "_has_logind", lambda: False)
        monkeypatch.setattr(activity, "TERMINALS", (name,))
        os.utime(name, (time.time() - 3600, time.time()))
        assert activity.idle_time().seconds == pytest.approx(3600, abs=60)

        os.write(leader, b"ls\n")
        assert os.read(follower, 10) == b"ls\n"

        seconds = activity.idle_time().seconds
        assert seconds is not None
        assert seconds < 600, "the kernel notes it, in steps of 8 s"
    finally:
        os.close(leader)
        os.close(follower)


def test_a_running_program_is_found_by_its_name_alone(tmp_path: Path) -> None:
    name = f"Gm{os.getpid()}-a-long-Name"
    shutil.copy("/bin/sleep", tmp_path / name)
    wanted = (name.lower(), "no-such-program")
    assert activity.running_programs(wanted) == ()

    process = subprocess.Popen([str(tmp_path / name), "60"], start_new_session=True)
    try:
        # A child of this process is what a worker's own would be; a stranger's is what counts.
        assert activity.running_programs(wanted) == ()
        look = f"from gpumesh.devices import activity; print(activity.running_programs({wanted!r}))"
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text().startswith("Gm"), 10)
        other = subprocess.run([sys.executable, "-c", look], stdout=subprocess.PIPE, text=True, check=True)
        assert other.stdout.strip() == str(wanted[:1])
    finally:
        process.kill()
        process.wait()
    assert activity.running_programs(wanted) == ()
