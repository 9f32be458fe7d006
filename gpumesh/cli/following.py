"""Asking a coordinator again and again, also while it is away for a moment."""

from __future__ import annotations

import time
from typing import Callable, TypeVar

import typer

from gpumesh.config import EVENT_POLL_SECONDS
from gpumesh.errors import MeshUnavailableError

T = TypeVar("T")


class Patience:
    """Asks, and goes on asking for some time when nobody answers any more. Nobody who has never answered is waited for.

    Args:
        seconds: How long to look for a coordinator that had answered before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._has_answered = False

    def ask(self, question: Callable[[], T]) -> T:
        """The answer; while the coordinator is away a person is told so.

        Raises:
            MeshUnavailableError: It is not there, or did not come back in time.
        """
        try:
            answer = question()
            self._has_answered = True
            return answer
        except MeshUnavailableError:
            if not self._has_answered:
                raise
            typer.echo(f"gpumesh: lost the coordinator; looking for it for {self._seconds:g} s", err=True)
        give_up_at = time.monotonic() + self._seconds
        while True:
            time.sleep(EVENT_POLL_SECONDS)
            try:
                answer = question()
            except MeshUnavailableError:
                if time.monotonic() > give_up_at:
                    raise
                continue
            typer.echo("gpumesh: the coordinator is back", err=True)
            return answer
