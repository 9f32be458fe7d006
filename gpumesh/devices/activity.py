"""Whether a person is using this machine: how long nobody has touched it, and which programs run. Guesses nothing: what cannot be known is said.

May start small programs and take a tenth of a second: not for an event loop.

Sources, as each system offers them; the latest touch counts:

- Linux: access times of terminals (the kernel sets them when a program reads what was typed, `tty_read` in drivers/tty/tty_io.c, in steps
  of 8 s); for each graphical session X11's screen saver extension, the idle monitor of GNOME or the idle hint of logind. Input devices
  have no such times: reading them leaves no trace in the file system.
- macOS: `HIDIdleTime` of `IOHIDSystem`, nanoseconds, by `ioreg`; and terminals, for whoever works over SSH.
- Windows: `GetLastInputInfo`, of the session that this process is in.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
import time
from typing import Any, Iterable, List, Optional, Sequence, Set, Tuple

from gpumesh.model.records import NamedTuple

ASK_SECONDS = 2.0  # For a program that answers at once or not at all.
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")  # Left by Docker and Podman.
COMM_BYTES = 15  # Of a process's name that Linux keeps (TASK_COMM_LEN less its end).
TERMINALS = ("/dev/pts/[0-9]*", "/dev/tty[0-9]*", "/dev/ttys[0-9]*")  # Pseudo terminals, consoles; macOS's.
_HID_IDLE = re.compile(r'"HIDIdleTime"\s*=\s*([0-9]+)')
_GVARIANT_NUMBER = re.compile(r"\(u?i?n?t?6?4?\s*([0-9]+),?\)")


class Idleness(NamedTuple):
    """How long nobody has touched the machine."""

    seconds: Optional[float]  # None: nobody can tell.
    problem: str = ""  # Why not, for people.


def idle_time() -> Idleness:
    """How long nobody has touched this machine, as far as this process can know."""
    if sys.platform == "win32":
        return _known(_windows_idle(), "Windows does not say when somebody last touched it")
    if sys.platform == "darwin":
        idle = parse_hid_idle(_ask(["ioreg", "-r", "-d", "1", "-c", "IOHIDSystem"]))
        if idle is None:
            return Idleness(None, "the system does not say when somebody last touched it (no HIDIdleTime)")
        return Idleness(min([idle, *_terminal_idle()]))
    return _linux_idle()


def _known(seconds: Optional[float], otherwise: str) -> Idleness:
    return Idleness(seconds) if seconds is not None else Idleness(None, otherwise)


# --- Linux and other systems with terminals


def _linux_idle() -> Idleness:
    if any(os.path.exists(mark) for mark in CONTAINER_MARKS) or os.environ.get("container"):  # noqa: SIM112 - so systemd-nspawn and Podman write it
        return Idleness(None, "inside a container nobody can see who uses the machine")
    found = _terminal_idle()
    sessions = graphical_sessions(_ask(["loginctl", "list-sessions", "--no-legend"])) if _has_logind() else []
    if sessions or _has_display():
        desktop = _desktop_idle(sessions)
        if desktop is None:
            return Idleness(None, "its desktop does not say when somebody last touched it (neither X11, GNOME nor logind)")
        found.append(desktop)
    if not found:
        return Idleness(None, "it has neither terminals nor a desktop to look at")
    return Idleness(min(found))


def _terminal_idle() -> List[float]:
    """Seconds since the last input at each terminal, and since the start of the machine where it has consoles nobody used."""
    now = time.time()
    idle: List[float] = []
    for pattern in TERMINALS:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                idle.append(max(0.0, now - os.stat(path).st_atime))
    return idle


def _has_logind() -> bool:
    return os.path.isdir("/run/systemd/seats")


def _has_display() -> bool:
    """Whether there is a desktop, ours or another user's."""
    if os.environ.get("DISPLAY", "").startswith(":") or os.environ.get("WAYLAND_DISPLAY"):
        return True
    return bool(glob.glob("/tmp/.X11-unix/X*") or glob.glob("/run/user/*/wayland-*"))  # noqa: S108 - only looked at


def _desktop_idle(sessions: Sequence[str]) -> Optional[float]:
    """Seconds since somebody last touched a desktop; None when one of them cannot be asked."""
    found = [idle for idle in (_x11_idle(), _gnome_idle()) if idle is not None]
    if len(sessions) > 1 or not found:
        now = time.time()
        for session in sessions:
            text = _ask(["loginctl", "show-session", session, "-p", "IdleHint", "-p", "IdleSinceHint"])
            hint = parse_idle_hint(text, now)
            if hint is not None:
                found.append(hint)
    return min(found) if found else None


def graphical_sessions(listing: str) -> List[str]:
    """Sessions with a seat in what `loginctl list-sessions --no-legend` prints: columns session, uid, user, seat, ..."""
    rows = [line.split() for line in listing.splitlines()]
    return [row[0] for row in rows if len(row) >= 4 and row[3].startswith("seat")]


def parse_idle_hint(text: str, now: float) -> Optional[float]:
    """Idle seconds from what `loginctl show-session` prints; None when it says nothing.

    Args:
        now: Seconds since the epoch. `IdleSinceHint` counts microseconds from there.
    """
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if fields.get("IdleHint") == "no":
        return 0.0
    since = fields.get("IdleSinceHint", "")
    if fields.get("IdleHint") != "yes" or not since.isdecimal() or since == "0":
        return None
    return max(0.0, now - int(since) / 1e6)


def _gnome_idle() -> Optional[float]:
    if not os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return None
    monitor = "org.gnome.Mutter.IdleMonitor"
    return parse_gnome_idle(
        _ask(["gdbus", "call", "--session", "--dest", monitor, "--object-path", "/org/gnome/Mutter/IdleMonitor/Core",
              "--method", f"{monitor}.GetIdletime"])
    )  # fmt: skip


def parse_gnome_idle(text: str) -> Optional[float]:
    """Seconds from `(uint64 12345,)`, which counts milliseconds."""
    match = _GVARIANT_NUMBER.search(text)
    return int(match.group(1)) / 1000 if match else None


def _x11_idle() -> Optional[float]:
    """Seconds since the last input on our X display, by the screen saver extension (XScreenSaverQueryInfo)."""
    if not os.environ.get("DISPLAY", "").startswith(":") or os.environ.get("WAYLAND_DISPLAY"):
        return None  # XWayland hears only of input to its own windows.
    import ctypes

    class Info(ctypes.Structure):
        _fields_ = [
            ("window", ctypes.c_ulong), ("state", ctypes.c_int), ("kind", ctypes.c_int),
            ("til_or_since", ctypes.c_ulong), ("idle", ctypes.c_ulong), ("event_mask", ctypes.c_ulong),
        ]  # fmt: skip

    try:
        x11, saver = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
    except OSError:
        return None
    x11.XOpenDisplay.restype = ctypes.c_void_p
    x11.XDefaultRootWindow.restype = ctypes.c_ulong
    display = x11.XOpenDisplay(None)
    if not display:
        return None
    try:
        info = Info()
        root = x11.XDefaultRootWindow(ctypes.c_void_p(display))
        if not saver.XScreenSaverQueryInfo(ctypes.c_void_p(display), ctypes.c_ulong(root), ctypes.byref(info)):
            return None
        return float(info.idle) / 1000
    finally:
        x11.XCloseDisplay(ctypes.c_void_p(display))


# --- macOS, Windows


def parse_hid_idle(text: str) -> Optional[float]:
    """Seconds from what `ioreg` prints; `HIDIdleTime` counts nanoseconds."""
    found = [int(match.group(1)) / 1e9 for match in _HID_IDLE.finditer(text)]
    return min(found, default=None)


def _windows_idle() -> Optional[float]:
    import ctypes

    class LastInputInfo(ctypes.Structure):
        _fields_ = [("size", ctypes.c_uint), ("tick", ctypes.c_uint)]

    windows: Any = getattr(ctypes, "windll", None)
    if windows is None:
        return None
    info = LastInputInfo(ctypes.sizeof(LastInputInfo), 0)
    if not windows.user32.GetLastInputInfo(ctypes.byref(info)):
        return None
    elapsed: int = (windows.kernel32.GetTickCount() - info.tick) & 0xFFFFFFFF  # Both wrap after 49.7 days.
    return elapsed / 1000


def _ask(command: List[str]) -> str:
    """What a program prints; "" when it is not there, fails or hangs."""
    import subprocess

    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
            timeout=ASK_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


# --- programs


def running_programs(names: Sequence[str]) -> Tuple[str, ...]:
    """Those of `names` of which a process runs, in their order; what tasks of the mesh have started does not count.

    Args:
        names: Lower case, without ".exe".
    """
    import psutil

    wanted = set(names)
    found = set()
    for pid in _candidates(wanted):
        try:
            process = psutil.Process(pid)
            name = process.name().lower()
            name = name[:-4] if name.endswith(".exe") else name
            if name in wanted and name not in found and process.status() != psutil.STATUS_ZOMBIE and not _is_of_a_task(process):
                found.add(name)
        except psutil.Error:
            continue  # It ended meanwhile, or is nothing of ours.
    return tuple(name for name in names if name in found)


def _candidates(wanted: Set[str]) -> List[int]:
    """Processes whose names are worth a closer look: on Linux, where the kernel's own short name is cheap to read, few."""
    import psutil

    pids: List[int] = psutil.pids()
    if sys.platform != "linux":
        return pids
    short = {word.encode()[:COMM_BYTES] for name in wanted for word in (name, f"{name}.exe")}
    found: List[int] = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/comm", "rb", buffering=0) as file:
                name = file.read(64).rstrip(b"\n")
        except OSError:
            continue
        if name.lower() in short or not name.isascii():
            found.append(pid)
    return found


def _is_of_a_task(process: Any) -> bool:
    """Whether a worker on this machine is behind a process: its own spawner leads the session, or is an ancestor."""
    import psutil

    leader: Iterable[Any] = ()
    if hasattr(os, "getsid"):
        with contextlib.suppress(OSError, psutil.Error):
            leader = [psutil.Process(os.getsid(process.pid))]
    for other in (*leader, *process.parents()):
        with contextlib.suppress(psutil.Error):
            if other.name().startswith("gpumesh-") or other.pid == os.getpid():
                return True
    return False
