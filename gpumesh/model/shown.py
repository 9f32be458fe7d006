"""What is shown to people: what others say of themselves, fit for logs, events and terminals, and lengths of time; pure.

A line that a stranger, or a machine that is only lent, can write into a log or onto a screen must not be able to begin another line, move the
cursor or change colours there.
"""

from __future__ import annotations

import re

_COLOURS = re.compile("\x1b\\[[0-9;:]*m")  # What a program writes for emphasis: nobody misses it here.


def clean(text: str, limit: int) -> str:
    """What somebody unknown says of themselves, fit for a terminal: printable, on one line, not longer than `limit` characters."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in str(text)[: limit + 1])
    return printable if len(printable) <= limit else printable[: limit - 3] + "..."


def clean_line(text: str, limit: int) -> str:
    """The same of a sentence: white space of any kind is one blank."""
    return clean(" ".join(str(text)[: 2 * limit].split()), limit)


def clean_lines(text: str) -> str:
    """Text of several lines, such as an error with its traceback: only its line breaks and tabs are left of what moves the cursor."""
    plain = text if "\x1b" not in text else _COLOURS.sub("", text)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in plain.replace("\r\n", "\n"))


def span(seconds: float) -> str:
    """A length of time: "3 s", "12 min", "5 h", "2 days"."""
    for limit, unit, name in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400.0:.0f} days"
