"""The live bar of `progress=True`: in a terminal with rich, in a notebook as HTML, elsewhere one line at the end."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, List, Optional, TextIO

REFRESH_SECONDS = 0.1
_WIDTH = 24


def show_progress(feed: Any) -> Bar:
    """Show how far a stream is, until it is done or its bar is finished. Draws on a thread of its own."""
    if _is_notebook():
        return Bar(feed, _NotebookPaint())
    stream = sys.stderr
    if stream is None or not stream.isatty():
        return Bar(feed, _LastLinePaint(stream))
    try:
        return Bar(feed, _RichPaint(feed))
    except ImportError:
        return Bar(feed, _LinePaint(stream))


class Bar:
    """Draws the state of one stream again and again."""

    def __init__(self, feed: Any, paint: Any) -> None:
        self._feed = feed
        self._paint = paint
        self._started = time.monotonic()
        self._is_over = threading.Event()
        self._finishing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gpumesh-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._feed.is_done and not self._is_over.wait(REFRESH_SECONDS):
            self._paint.draw(self._feed, time.monotonic() - self._started)
        self._paint.end(self._feed, time.monotonic() - self._started)

    def finish(self) -> None:
        """Draw the last state and stop; returns when it is drawn. Idempotent."""
        self._is_over.set()
        self._thread.join()


def describe(feed: Any, seconds: float) -> str:
    """`12/48 done, 1 failed, 3.2/s, 11 s left`: how far a stream is."""
    ended = feed.ended_count
    total = feed.length if feed.is_sized else feed.submitted if feed.is_exhausted else None
    parts: List[str] = [f"{ended}/{total} done" if total is not None else f"{ended} done"]
    if feed.failed:
        parts.append(f"{feed.failed} failed")
    if ended and seconds > 0:
        rate = ended / seconds
        parts.append(f"{rate:.3g}/s")
        if total is not None:
            parts.append(f"{(total - ended) / rate:.0f} s left" if ended < total else f"{seconds:.1f} s")
    return ", ".join(parts)


def plain_bar(feed: Any, seconds: float) -> str:
    """The same with the name and a bar of characters in front."""
    total = feed.length if feed.is_sized else feed.submitted if feed.is_exhausted else 0
    filled = _WIDTH * feed.ended_count // total if total else 0
    return f"{feed.name} [{'#' * filled}{'.' * (_WIDTH - filled)}] {describe(feed, seconds)}"


class _LinePaint:
    """One line of a terminal, drawn over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._length = 0

    def draw(self, feed: Any, seconds: float) -> None:
        line = plain_bar(feed, seconds)
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()
        self._length = len(line)

    def end(self, feed: Any, seconds: float) -> None:
        self.draw(feed, seconds)
        self._stream.write("\n")
        self._stream.flush()


class _LastLinePaint:
    """Only the end: for files and pipes."""

    def __init__(self, stream: Optional[TextIO]) -> None:
        self._stream = stream

    def draw(self, feed: Any, seconds: float) -> None:
        pass

    def end(self, feed: Any, seconds: float) -> None:
        if self._stream is not None:
            try:
                self._stream.write(plain_bar(feed, seconds) + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                pass  # Closed meanwhile.


class _RichPaint:
    """rich's bar, which also keeps what others print above it."""

    def __init__(self, feed: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), console=Console(stderr=True)
        )
        self._task = self._progress.add_task(feed.name, total=feed.length if feed.is_sized else None, told="")
        self._progress.start()

    def draw(self, feed: Any, seconds: float) -> None:
        total = feed.length if feed.is_sized else feed.submitted if feed.is_exhausted else None
        self._progress.update(self._task, completed=feed.ended_count, total=total, told=describe(feed, seconds))

    def end(self, feed: Any, seconds: float) -> None:
        self.draw(feed, seconds)
        self._progress.stop()


class _NotebookPaint:
    """One output of a notebook cell, replaced."""

    def __init__(self) -> None:
        self._display: Any = None

    def draw(self, feed: Any, seconds: float) -> None:
        import html

        from IPython.display import HTML, display

        total = feed.length if feed.is_sized else feed.submitted if feed.is_exhausted else 0
        value = f' value="{feed.ended_count}" max="{total}"' if total else ""
        page = HTML(
            f"<code>{html.escape(feed.name)}</code> <progress{value}></progress> {html.escape(describe(feed, seconds))}"
        )
        if self._display is None:
            self._display = display(page, display_id=True)
        else:
            self._display.update(page)

    def end(self, feed: Any, seconds: float) -> None:
        self.draw(feed, seconds)


def _is_notebook() -> bool:
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
