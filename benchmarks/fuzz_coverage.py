"""Which lines of gpumesh a case has reached: by sys.monitoring where there is one, by a trace function for some of the cases before."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any, Iterator, Set, Tuple

import gpumesh

PACKAGE = os.path.dirname(os.path.abspath(gpumesh.__file__)) + os.sep
SAMPLED = 16  # A trace function makes a case ten times as slow: one case in so many has one,
SAMPLED_LATE = 256  # and one in so many when there was nothing new for long.
PATIENCE = 64  # Cases with a trace function in which nothing was new, until half as many have one.


class Coverage:
    """Lines of the package that were reached while it watched."""

    def __init__(self) -> None:
        self._lines: Set[Tuple[Any, int]] = set()
        self._known = 0
        self._until_next = SAMPLED
        self._interval = SAMPLED
        self._in_vain = 0
        self._monitoring = getattr(sys, "monitoring", None)
        self._tool = 0
        if self._monitoring is not None:
            monitoring = self._monitoring
            self._tool = monitoring.COVERAGE_ID
            monitoring.use_tool_id(self._tool, "gpumesh fuzz")
            monitoring.register_callback(self._tool, monitoring.events.LINE, self._on_line)
            monitoring.set_events(self._tool, monitoring.events.LINE)

    @property
    def lines(self) -> int:
        """How many."""
        return len(self._lines)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """While a case runs."""
        self._until_next -= 1
        if self._monitoring is not None or self._until_next:
            yield
            return
        known = len(self._lines)
        threading.settrace(self._trace)  # For the threads that the case starts.
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self._pace(len(self._lines) > known)

    def has_news(self) -> bool:
        """Whether lines were reached since the last look that were not before."""
        is_news = len(self._lines) > self._known
        self._known = len(self._lines)
        return is_news

    def _pace(self, is_news: bool) -> None:
        """When to look again."""
        self._in_vain = 0 if is_news else self._in_vain + 1
        if is_news:
            self._interval = SAMPLED
        elif self._in_vain >= PATIENCE:
            self._in_vain, self._interval = 0, min(2 * self._interval, SAMPLED_LATE)
        self._until_next = self._interval

    def close(self) -> None:
        """Watch no more."""
        if self._monitoring is not None:
            self._monitoring.set_events(self._tool, 0)
            self._monitoring.free_tool_id(self._tool)
            self._monitoring = None

    def _on_line(self, code: Any, line: int) -> Any:
        if code.co_filename.startswith(PACKAGE):
            self._lines.add((code, line))
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]  # Each line is told of once.

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        return self._trace_line

    def _trace_line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self._lines.add((frame.f_code, frame.f_lineno))
        return self._trace_line
