"""How long a lost coordinator is looked for, and when next. Connects nothing."""

from __future__ import annotations

from gpumesh.config import RECONNECT_FIRST_DELAY_SECONDS, RECONNECT_MAX_DELAY_SECONDS


class Outage:
    """The time since a coordinator was lost.

    Args:
        patience: Seconds until it is given up.
    """

    __slots__ = ("patience", "next_at", "_began_at", "_delay")

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.next_at = 0.0  # When to try, on the monotonic clock.
        self._began_at = 0.0
        self._delay = 0.0

    def begin(self, now: float) -> None:
        """It was lost this moment."""
        self._began_at = self.next_at = now
        self._delay = RECONNECT_FIRST_DELAY_SECONDS

    def left(self, now: float) -> float:
        """Seconds until it is given up."""
        return self._began_at + self.patience - now

    def failed(self, left: float, now: float, jitter: float) -> bool:
        """An attempt that began with `left` seconds left has failed; whether there is time for another.

        Args:
            jitter: 0 to 1, drawn: clients do not come back all at once.
        """
        if left <= self._delay:
            return False
        self.next_at = now + self._delay * (0.25 + 0.75 * jitter)
        self._delay = min(2 * self._delay, RECONNECT_MAX_DELAY_SECONDS)
        return True
