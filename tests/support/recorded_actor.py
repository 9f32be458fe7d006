"""An actor that writes down what becomes of it, where a test finds it whatever dies: births, calls that have begun, and its last words."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Dict, List, Tuple


class Recorded:
    """Counts its calls. Each line of its record is written in one piece."""

    def __init__(self, record: str) -> None:
        self._record = record
        self._count = 0
        self._write("born")

    def add(self, number: int, seconds: float = 0.0) -> Tuple[int, int]:
        """(process, calls so far in this life)."""
        self._write(f"call {number}")
        self._count += 1
        if seconds:
            time.sleep(seconds)
        return os.getpid(), self._count

    def close(self) -> None:
        """It is asked to end."""
        self._write("closed")

    def _write(self, words: str) -> None:
        fd = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, f"{os.getpid()} {words}\n".encode())
        finally:
            os.close(fd)


class Record:
    """What one actor has written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> List[List[str]]:
        """One list of words for each line, the process first."""
        try:
            return [line.split() for line in self._path.read_text().splitlines()]
        except FileNotFoundError:
            return []

    def lives(self) -> List[int]:
        """Processes, in the order of their births."""
        return [int(words[0]) for words in self.lines() if words[1] == "born"]

    def closed(self) -> List[int]:
        """Those that were asked to end."""
        return [int(words[0]) for words in self.lines() if words[1] == "closed"]

    def begun(self) -> Dict[int, List[int]]:
        """Calls that have begun, by life, in that order."""
        found: Dict[int, List[int]] = {}
        for words in self.lines():
            if words[1] == "call":
                found.setdefault(int(words[0]), []).append(int(words[2]))
        return found
