"""The functions that the workloads run. A module of their own, so that worker processes import nothing else for them."""

from __future__ import annotations

import time
from typing import Any, Dict


def noop(item: Any = None) -> None:
    """Do nothing: what is left is the system."""


def echo(document: Dict[str, Any]) -> Dict[str, Any]:
    """Give the argument back."""
    return document


def nap(seconds: float) -> None:
    """Keep a slot for a while without using a core."""
    time.sleep(seconds)
