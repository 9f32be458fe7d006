"""Throw-away processes that look at the hardware: how they are started, bounded in time, and end with whoever asked."""

from __future__ import annotations

import os
import sys
from typing import Dict, Mapping, Optional, Sequence

from gpumesh.model.records import NamedTuple

WITH_PARENT = "--with-parent"  # End when standard input does.
KILL_SECONDS = 5.0  # From the kill to the end; a process that hangs inside a driver is left to the system.
STDERR_BYTES = 2000  # Of its last words, kept.


class Finished(NamedTuple):
    """How a process ended."""

    code: int  # Negative for a signal.
    stdout: bytes
    stderr: bytes  # The end of it.


def run_module(
    module: str, arguments: Sequence[str] = (), *, seconds: float, changes: Optional[Mapping[str, str]] = None
) -> Finished:
    """Run `python -m module` in a process of its own that gets no token and ends with this one.

    Args:
        seconds: Its time; it is killed then.
        changes: What its environment has besides ours.

    Raises:
        OSError: It cannot be started.
        subprocess.TimeoutExpired: Its time was over; `output` holds what it had printed.
    """
    import subprocess  # Here, because every worker's start reads what is remembered, and only few starts run anything.

    theirs, ours = os.pipe()  # Ours is closed when we are gone, however we went, and then the process ends itself.
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, WITH_PARENT],
            env=environment(changes),
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            process.kill()
            try:
                stdout, stderr = process.communicate(timeout=KILL_SECONDS)
            except subprocess.TimeoutExpired:
                for pipe in (process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()
                raise late from None
            raise subprocess.TimeoutExpired(late.cmd, seconds, stdout, stderr) from None
    finally:
        os.close(theirs)
        os.close(ours)
    return Finished(process.returncode, stdout, stderr[-STDERR_BYTES:])


def environment(changes: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """Ours, without the secret, with this package importable, and with `changes`."""
    found = dict(os.environ)
    found.pop("GPUMESH_TOKEN", None)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [found.get("PYTHONPATH", ""), root]))  # Also from a checkout.
    found.update(changes or {})
    return found


def end_with_parent() -> None:
    """End this process as soon as whoever asked for it has ended, if it was asked to."""
    if WITH_PARENT in sys.argv:
        import threading

        threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    if not os.read(0, 1):
        os._exit(1)
