"""Payloads of a job from a file: JSON, JSON lines or CSV. Reads and checks; sends nothing."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Dict, List

if TYPE_CHECKING:
    from json import JSONDecodeError

Payload = Dict[str, Any]

STANDARD_INPUT = "-"
_LINES = (".jsonl", ".ndjson")
_TABLES = (".csv", ".tsv")
_DELIMITERS = ",;\t"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_FLAGS = {"true": True, "false": False}


def read_payloads(path: str) -> List[Payload]:
    """The payloads in a file, or on standard input for "-", in order.

    The file's ending says what it is: `.json` a list of objects, `.jsonl` or `.ndjson` an object on each line, `.csv` or `.tsv` a table.
    Otherwise, and on standard input, its first character does: `[` a list, `{` an object on each line, anything else a table.

    A table's first line holds the keys. A cell that is written as JSON writes a number is a number (`7`, `-0.5`, `1e-3`, but not `007`
    or `+49`), `true` and `false` in any case are booleans, an empty cell leaves its key out, anything else is text.

    Raises:
        ValueError: It holds something else, or nothing; the message names the line or the payload.
        OSError: It cannot be read.
    """
    name = "standard input" if path == STANDARD_INPUT else path
    if path == STANDARD_INPUT:
        content = sys.stdin.buffer.read()
    else:
        with open(path, "rb") as file:
            content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {line}: byte {content[error.start]:#04x} is not UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{name} holds no payloads; leave --payloads out for one task without any")
    payloads = _parse(text, os.path.splitext(path)[1].lower(), name)
    if not payloads:
        raise ValueError(f"{name} holds no payloads; leave --payloads out for one task without any")
    return payloads


def _parse(text: str, ending: str, name: str) -> List[Payload]:
    first = text.lstrip()[0]
    if ending in _LINES or (ending not in (".json", *_TABLES) and first == "{"):
        return _from_lines(text, name)
    if ending == ".json" or (ending not in _TABLES and first == "["):
        return _from_list(text, name)
    return _from_table(text, name)


def _from_list(text: str, name: str) -> List[Payload]:
    from json import JSONDecodeError

    try:
        found = _loads(text)
    except JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip()[0] == "{":
            return _from_lines(text, name)  # Many call an object on each line .json, too.
        raise ValueError(f"{name}, {_place(error, error.lineno)}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(found, list):
        raise ValueError(f"{name} holds {_kind(found)}; payloads are a list of objects, [{{...}}, {{...}}]")
    for number, payload in enumerate(found, start=1):
        if not isinstance(payload, dict):
            raise ValueError(f'{name}: payload {number} is {_kind(payload)}; each must be an object, {{"key": value}}')
    return found


def _from_lines(text: str, name: str) -> List[Payload]:
    from json import JSONDecodeError

    payloads: List[Payload] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            payload = _loads(line)
        except JSONDecodeError as error:
            raise ValueError(f"{name}, {_place(error, number)}") from None
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        if not isinstance(payload, dict):
            raise ValueError(f'{name}, line {number}: {_kind(payload)}; each line must be an object, {{"key": value}}')
        payloads.append(payload)
    return payloads


def _from_table(text: str, name: str) -> List[Payload]:
    import csv
    import io

    header, _, _ = text.lstrip("\r\n").partition("\n")
    delimiter = max(_DELIMITERS, key=header.count)  # The first of them when there is none: one column.
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    payloads: List[Payload] = []
    keys: List[str] = []
    line = 0
    try:
        for cells in rows:
            line, before = rows.line_num, line
            if not cells:
                continue  # An empty line.
            if not keys:
                keys = [cell.strip() for cell in cells]
                _check_keys(keys, f"{name}, line {before + 1}")
                continue
            if len(cells) != len(keys):
                raise ValueError(
                    f"{name}, line {before + 1}: {_count(len(cells), 'cell')}, but the header has {_count(len(keys), 'column')}"
                )
            payloads.append({key: _value(cell.strip()) for key, cell in zip(keys, cells) if cell.strip()})
    except csv.Error as error:
        raise ValueError(f"{name}, line {rows.line_num}: this is not CSV: {error}") from None
    return payloads


def _check_keys(keys: List[str], place: str) -> None:
    for column, key in enumerate(keys, start=1):
        if not key:
            raise ValueError(f"{place}: column {column} of the header has no name")
        if key in keys[: column - 1]:
            raise ValueError(f"{place}: two columns of the header are called {key!r}")


def _value(cell: str) -> Any:
    match = _NUMBER.fullmatch(cell)
    if match is not None:
        is_whole = match.group(1) is None and match.group(2) is None
        try:
            number = int(cell) if is_whole else float(cell)
        except ValueError:
            return cell  # More digits than Python converts.
        return number if abs(number) != float("inf") else cell
    return _FLAGS.get(cell.lower(), cell)


def _loads(text: str) -> Any:
    import json

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON; write null, or text")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _place(error: JSONDecodeError, line: int) -> str:
    return f"line {line}, column {error.colno}: this is not JSON: {error.msg}"


def _kind(value: Any) -> str:
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "text"), (list, "a list"), (dict, "an object"))
    return next((words for kind, words in kinds if isinstance(value, kind)), "null")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
