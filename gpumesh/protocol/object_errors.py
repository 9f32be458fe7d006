"""Why an object is not to be had, as one text on the wire: its kind ("full: ", "lost: "), then words for people."""

from __future__ import annotations

from typing import Optional

from gpumesh.errors import MeshError, ObjectLostError, ObjectStoreFullError

FULL = "full: "
LOST = "lost: "


def to_text(error: Optional[Exception]) -> str:
    """What travels for an error of a store."""
    return f"{FULL if isinstance(error, ObjectStoreFullError) else LOST}{error}"


def from_text(text: str) -> MeshError:
    """The error for what has travelled."""
    if text.startswith(FULL):
        return ObjectStoreFullError(text[len(FULL) :])
    return ObjectLostError(text[len(LOST) :] if text.startswith(LOST) else text)
