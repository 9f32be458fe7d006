"""The owner's rules as people write them and as the file keeps them. Pure: text and plain data, no file.

The file's form is JSON that may be edited by hand:

    {"version": 1, "pauses": {"machine": {"until": 1796076000, "until_text": "22:00", "reason": "a game", "now": true}},
     "slots": "50%", "gpu_memory": {"gpus": "8GB"}, "hours": "Mon-Fri 22-7, Sat-Sun", "only_when_idle": 10,
     "exclusive": ["steam"], "now": false}
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from gpumesh.model.resources import parse_bytes
from gpumesh.scheduler.ownership import DAY_MINUTES, Amount, Pause, Rules, Window, show_amount

VERSION = 1
MAX_PAUSE_SECONDS = 366 * 24 * 3600.0  # Longer is a slip, or "until resumed".
MAX_IDLE_MINUTES = 7 * DAY_MINUTES
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_UNIT_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 24 * 3600}
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(min|[smhd])\s*", re.IGNORECASE)
_WINDOW = re.compile(r"(?:(?P<days>[A-Za-z][A-Za-z /-]*?)\s*)?(?P<times>[0-9][0-9:]*\s*-\s*[0-9][0-9:]*)?\Z")
_KINDS: Dict[type, str] = {dict: "a table", list: "a list", str: "text", bool: "true or false"}
_KEYS = {"version", "pauses", "slots", "gpu_memory", "hours", "only_when_idle", "exclusive", "now"}


def parse_span(text: str) -> float:
    """Seconds of "2h", "90m", "1h30m", "1.5 d".

    Raises:
        ValueError: Not a length of time, nothing, or more than a year.
    """
    stripped = text.strip()
    parts = list(_SPAN.finditer(stripped))
    if not parts or "".join(part.group(0) for part in parts) != stripped:
        raise ValueError(f"{text!r} is not a length of time; write '2h', '90m' or '1h30m'")
    seconds = sum(float(part.group(1)) * _UNIT_SECONDS[part.group(2).lower()] for part in parts)
    if not 0 < seconds <= MAX_PAUSE_SECONDS:
        raise ValueError(f"{text!r} is not between a second and a year")
    return seconds


def parse_slots(text: str) -> Amount:
    """An amount of slots: "50%" or "4".

    Raises:
        ValueError: Something else, none, or more than all.
    """
    share = _parse_share(text, "slots")
    if share is not None:
        return share
    if not text.strip().isdecimal() or not 1 <= int(text) <= 4096:
        raise ValueError(f"slots {text!r} is neither a number from 1 to 4096 nor a share such as '50%'; to lend nothing, pause")
    return Amount(float(int(text)))


def parse_gpu_memory(text: str) -> Amount:
    """An amount of GPU memory: "8GB", "50%".

    Raises:
        ValueError: Something else, none, or more than all.
    """
    share = _parse_share(text, "GPU memory")
    if share is not None:
        return share
    count = parse_bytes(text, what="GPU memory")
    if count <= 0:
        raise ValueError("0 bytes of GPU memory would be no GPU; pause it instead: `gpumesh pause --gpu all`")
    return Amount(float(count))


def _parse_share(text: str, what: str) -> Optional[Amount]:
    word = text.strip()
    if not word.endswith("%"):
        return None
    try:
        percent = float(word[:-1])
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise ValueError(f"{what} {text!r} is not a share between 0% and 100%; to lend nothing, pause")
    return Amount(percent / 100, is_share=True)


def parse_hours(text: str) -> Tuple[Window, ...]:
    """Windows of the week: "22-7", "9:30-17", "Mon-Fri 22-7, Sat-Sun", "Sat/Sun 8-20". A day without times is the whole day.

    Raises:
        ValueError: The text has no meaning.
    """
    return tuple(_parse_window(part.strip(), text) for part in text.split(","))


def _parse_window(part: str, whole: str) -> Window:
    match = _WINDOW.match(part)
    if not part or match is None:
        raise ValueError(f"the hours {whole!r} have no meaning; write '22-7', '9:30-17' or 'Mon-Fri 22-7, Sat-Sun'")
    days = _parse_days(match.group("days") or "", whole)
    if match.group("times") is None:
        return Window(days, 0, DAY_MINUTES)
    first, _, last = match.group("times").partition("-")
    start, end = _parse_time(first, whole), _parse_time(last, whole)
    if start == end or (start, end) == (DAY_MINUTES, 0):
        raise ValueError(f"the hours {whole!r} begin and end at the same time; all day is '0-24'")
    return Window(days, start % DAY_MINUTES, end or DAY_MINUTES)


def _parse_days(text: str, whole: str) -> Tuple[int, ...]:
    if not text:
        return tuple(range(7))
    days: List[int] = []
    for part in text.replace(" ", "").split("/"):
        first, dash, last = part.partition("-")
        names = [name.lower()[:3] for name in ([first, last] if dash else [first])]
        if any(name not in _DAYS for name in names):
            raise ValueError(f"the hours {whole!r} name a day that is none of Mon, Tue, Wed, Thu, Fri, Sat, Sun")
        start, end = _DAYS.index(names[0]), _DAYS.index(names[-1])
        days.extend((start + step) % 7 for step in range((end - start) % 7 + 1))
    return tuple(sorted(set(days)))


def _parse_time(text: str, whole: str) -> int:
    hour, colon, minute = text.strip().partition(":")
    if not hour.isdecimal() or (colon and not minute.isdecimal()):
        raise ValueError(f"the hours {whole!r} have no meaning; write '22-7' or '9:30-17'")
    minutes = int(hour) * 60 + int(minute or 0)
    if int(minute or 0) >= 60 or minutes > DAY_MINUTES:
        raise ValueError(f"the hours {whole!r} name a time that no clock shows")
    return minutes


def parse_programs(text: str) -> Tuple[str, ...]:
    """Names of programs from "steam, blender"; without folders and ".exe", in the order given, each once.

    Raises:
        ValueError: A name has a folder in it.
    """
    names: Dict[str, None] = {}
    for part in text.split(","):
        name = part.strip()
        if "/" in name or "\\" in name:
            raise ValueError(f"{name!r} is a path; name the program as the list of processes does, such as 'blender'")
        if name:
            names[plain_name(name)] = None
    return tuple(names)


def plain_name(name: str) -> str:
    """A program's name as names are compared: neither case nor ".exe" count."""
    word = name.strip().lower()
    return word[:-4] if word.endswith(".exe") else word


def parse_minutes(number: float) -> float:
    """Minutes of idleness.

    Raises:
        ValueError: Negative, not a number, or more than a week.
    """
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= MAX_IDLE_MINUTES:
        raise ValueError(f"idle minutes must be between 0 and {MAX_IDLE_MINUTES}, not {number!r}")
    return float(number)


# --- the file's form


def rules_to_plain(rules: Rules) -> Dict[str, Any]:
    """What the file holds."""
    plain: Dict[str, Any] = {"version": VERSION}
    if rules.pauses:
        plain["pauses"] = {target: _pause_to_plain(pause) for target, pause in rules.pauses}
    if rules.slots is not None:
        plain["slots"] = show_amount(rules.slots)
    if rules.gpu_memory:
        plain["gpu_memory"] = {target: show_amount(amount) for target, amount in rules.gpu_memory}
    if rules.hours:
        plain["hours"] = rules.hours
    if rules.idle_minutes:
        plain["only_when_idle"] = rules.idle_minutes
    if rules.exclusive:
        plain["exclusive"] = list(rules.exclusive)
    if rules.ends_running:
        plain["now"] = True
    return plain


def _pause_to_plain(pause: Pause) -> Dict[str, Any]:
    plain: Dict[str, Any] = {}
    if pause.until:
        plain.update(until=pause.until, until_text=pause.until_text)
    if pause.reason:
        plain["reason"] = pause.reason
    if pause.ends_running:
        plain["now"] = True
    return plain


def rules_from_plain(plain: Any) -> Rules:
    """The rules that a file holds.

    Raises:
        ValueError: Something in it is not understood; a rule that cannot be obeyed must not be passed over.
    """
    _check(plain, dict, "the rules")
    unknown = sorted(set(map(str, plain)) - _KEYS)
    if plain.get("version", VERSION) != VERSION or unknown:
        said = ", ".join(unknown) or f"version {plain['version']!r}"
        raise ValueError(f"{said} is unknown to this gpumesh")
    slots, hours = plain.get("slots"), _check(plain.get("hours", ""), str, "hours")
    return Rules(
        pauses=_table(plain, "pauses", _pause_from_plain),
        slots=None if slots is None else parse_slots(str(slots)),
        gpu_memory=_table(plain, "gpu_memory", lambda value: parse_gpu_memory(_text_of(value))),
        hours=hours,
        windows=parse_hours(hours) if hours else (),
        idle_minutes=parse_minutes(plain.get("only_when_idle", 0)),
        exclusive=parse_programs(",".join(_strings(plain.get("exclusive", [])))),
        ends_running=_check(plain.get("now", False), bool, "now"),
    )


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else f"{value}"


def _strings(values: Any) -> Iterable[str]:
    for value in _check(values, list, "exclusive"):
        yield _check(value, str, "a program's name")


def _table(plain: Any, key: str, convert: Callable[[Any], Any]) -> Tuple[Tuple[str, Any], ...]:
    return tuple((str(target), convert(value)) for target, value in _check(plain.get(key, {}), dict, key).items())


def _pause_from_plain(plain: Any) -> Pause:
    _check(plain, dict, "a pause")
    until = plain.get("until", 0)
    if isinstance(until, bool) or not isinstance(until, (int, float)) or not 0 <= until < 1e12:
        raise ValueError(f"a pause's end must be a number of seconds since 1970, not {until!r}")
    return Pause(
        until=float(until),
        until_text=_check(plain.get("until_text", ""), str, "until_text"),
        reason=_check(plain.get("reason", ""), str, "reason"),
        ends_running=_check(plain.get("now", False), bool, "now"),
    )


def _check(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} must be {_KINDS[kind]}, not {value!r}")
    return value
