"""Small JSON files in the user's cache folder: what was found and measured earlier. Damaged, absent or read-only ones cost a measurement."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any, Dict

logger = logging.getLogger(__name__)

MAX_ENTRIES = 64  # Of one file: a home folder shared by many machines; the oldest go.


def cache_file(name: str) -> str:
    """Where a file of that name lies: in the user's cache folder."""
    if sys.platform == "linux":  # What platformdirs says too, without the 5 ms that importing it takes from a worker's start.
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache"), "gpumesh")
    else:
        import platformdirs

        folder = platformdirs.user_cache_dir("gpumesh", appauthor=False)
    return os.path.join(folder, name)


def entries(file: str) -> Dict[str, Any]:
    """All that a file holds; nothing if it cannot be read."""
    try:
        with open(file, encoding="utf-8") as opened:
            found = json.load(opened)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(file: str, key: str, entry: Dict[str, Any]) -> None:
    """Add an entry, or replace it; a folder that cannot be written to only costs the next start a measurement."""
    kept = entries(file)
    kept.pop(key, None)
    kept[key] = entry
    while len(kept) > MAX_ENTRIES:
        del kept[next(iter(kept))]
    fresh = f"{file}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(fresh, "w", encoding="utf-8") as opened:
            json.dump(kept, opened, indent=1)
        os.replace(fresh, file)  # Two writers at once: the last one's figures stay, never half of each.
    except OSError as error:
        logger.debug("%s is not remembered: %s", key, error)
