"""What tasks print, printed here: whole lines, each with the task's name and worker in front."""

from __future__ import annotations

import sys
from typing import Callable, Dict, Optional, Tuple

from gpumesh.config import OUTPUT_READ_BYTES

OutputHook = Callable[[str, str, int, str], None]
"""(task name, worker, stream 1 or 2, one line without its end)."""


class OutputPrinter:
    """Puts pieces of output together to lines. Used by whichever thread dispatches, under the receive lock."""

    def __init__(self) -> None:
        self.hook: Optional[OutputHook] = None
        self.partial: Dict[int, Dict[int, Tuple[str, str, bytes]]] = {}  # task id -> stream -> (name, worker, unfinished line)

    def add(self, task_id: int, stream: int, data: bytes, name: str, worker: str) -> None:
        """A piece of a task's output has arrived."""
        streams = self.partial.setdefault(task_id, {})
        _, _, before = streams.get(stream, ("", "", b""))
        lines = (before + bytes(data)).split(b"\n")
        rest = lines.pop()
        if len(rest) > OUTPUT_READ_BYTES:
            lines.append(rest)
            rest = b""
        if rest:
            streams[stream] = (name, worker, rest)
        else:
            streams.pop(stream, None)
            if not streams:
                del self.partial[task_id]
        for line in lines:
            self._print(name, worker, stream, line)

    def task_ended(self, task_id: int) -> None:
        """Print what is left of the task's last line."""
        for stream, (name, worker, rest) in sorted(self.partial.pop(task_id, {}).items()):
            self._print(name, worker, stream, rest)

    def _print(self, name: str, worker: str, stream: int, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if self.hook is not None:
            self.hook(name, worker, stream, text)
            return
        target = sys.stderr if stream == 2 else sys.stdout
        if target is None:
            return
        prefix = " ".join(part for part in (name, worker) if part)
        try:
            target.write(f"({prefix}) {text}\n" if prefix else f"{text}\n")
            target.flush()
        except (OSError, ValueError):
            pass  # The program's own output is closed; its tasks go on.
