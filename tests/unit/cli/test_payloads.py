"""Payload files: what is understood, and which one line is said about what is not."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.cli.payloads import read_payloads

Write = Callable[[str, Union[str, bytes]], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(name: str, content: Union[str, bytes]) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return file


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json", '[{"x": 1}, {"x": [1, {"y": null}]}]', [{"x": 1}, {"x": [1, {"y": None}]}]),
        ("a.json", '{"x": 1}\n{"x": 2}\n', [{"x": 1}, {"x": 2}]),  # Lines under the other name.
        ("a.jsonl", '{"x": 1}\n\n{"x": 2}', [{"x": 1}, {"x": 2}]),
        ("a.ndjson", '{"x": 1}\r\n{"x": "\u2028"}\r\n', [{"x": 1}, {"x": "\u2028"}]),
        ("a.jsonl", "{}\n", [{}]),
        ("a.csv", "lr,epochs\n0.1,3\n1e-3,5\n", [{"lr": 0.1, "epochs": 3}, {"lr": 0.001, "epochs": 5}]),
        ("a.csv", "\ufefflr , epochs\r\n 0.1 , 3 \r\n\r\n", [{"lr": 0.1, "epochs": 3}]),
        ("a.csv", "lr;name\n0.1;a,b\n", [{"lr": 0.1, "name": "a,b"}]),
        ("a.tsv", "lr\tname\n0.1\ta b\n", [{"lr": 0.1, "name": "a b"}]),
        ("a.csv", "seed\n1\n2\n", [{"seed": 1}, {"seed": 2}]),
        ("a.csv", 'text,n\n"two\nlines, ""quoted""",1\n', [{"text": 'two\nlines, "quoted"', "n": 1}]),
        ("a.csv", "a,b\n,1\n", [{"b": 1}]),
        ("payloads", '[{"x": 1}]', [{"x": 1}]),
        ("payloads", '  {"x": 1}', [{"x": 1}]),
        ("payloads", "x\n1\n", [{"x": 1}]),
        ("PAYLOADS.CSV", "[x\n1\n", [{"[x": 1}]),
    ],
)
def test_json_lines_and_tables_are_read(name: str, content: str, found: List[Dict[str, Any]], write: Write) -> None:
    assert read_payloads(write(name, content)) == found


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("0", 0),
        ("7.0", 7.0),
        ("-0.5e+3", -500.0),
        ("true", True),
        ("FALSE", False),
        ("007", "007"),
        ("+49", "+49"),
        ("1_000", "1_000"),
        (".5", ".5"),
        ("nan", "nan"),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000 if hasattr(sys, "get_int_max_str_digits") else int("9" * 5000)),
        ("yes", "yes"),
        ("٣", "٣"),
    ],
)
def test_a_cell_is_a_number_where_json_would_read_one(cell: str, value: Any, write: Write) -> None:
    (payload,) = read_payloads(write("a.csv", f"key\n{cell}\n"))

    assert payload == {"key": value}
    assert type(payload["key"]) is type(value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", '{"x": 1}', "a.json holds an object; payloads are a list of objects"),
        ("a.json", "3", "a.json holds a number"),
        ("a.json", '"text"', "a.json holds text"),
        ("a.json", "null", "a.json holds null"),
        ("a.json", '[{"x": 1}, 3]', "a.json: payload 2 is a number; each must be an object"),
        ("a.json", "[true]", "payload 1 is true or false"),
        ("a.json", "[[1]]", "payload 1 is a list"),
        ("a.json", '[\n{"x": 1},\n{"x": }\n]', "a.json, line 3, column 7: this is not JSON"),
        ("a.json", "lr,epochs\n", "a.json, line 1, column 1: this is not JSON"),
        ("a.json", '[{"x": NaN}]', "a.json: NaN is not JSON"),
        ("a.json", "[" * 100_000, "a.json: it is nested too deeply"),
        ("a.jsonl", '{"x": 1}\n{"x"\n', "a.jsonl, line 2, column"),
        ("a.jsonl", '{"x": 1}\n\n[1]\n', "a.jsonl, line 3: a list; each line must be an object"),
        ("a.jsonl", '{"x": Infinity}', "a.jsonl, line 1: Infinity is not JSON"),
        ("a.csv", "a,b\n1,2\n3\n", "a.csv, line 3: 1 cell, but the header has 2 columns"),
        ("a.csv", "a,b\n1,2,3\n", "a.csv, line 2: 3 cells, but the header has 2 columns"),
        ("a.csv", 'a,b\n"x\ny",2\n3\n', "a.csv, line 4: 1 cell, but"),
        ("a.csv", "a,,b\n1,2,3\n", "a.csv, line 1: column 2 of the header has no name"),
        ("a.csv", "a,b,a\n1,2,3\n", "a.csv, line 1: two columns of the header are called 'a'"),
        ("a.csv", 'a,b\n1,"x', "a.csv, line 2: this is not CSV"),
        ("a.csv", b"a,b\n1,\xe4\n", "a.csv, line 2: byte 0xe4 is not UTF-8 text"),
        ("a.csv", "a,b\n", "a.csv holds no payloads"),
        ("a.json", "[]", "a.json holds no payloads"),
        ("a.json", "", "a.json holds no payloads"),
        ("a.jsonl", " \n\n", "a.jsonl holds no payloads"),
    ],
)
def test_what_cannot_be_payloads_is_said_in_one_line(name: str, content: Union[str, bytes], words: str, write: Write) -> None:
    with pytest.raises(ValueError) as told:
        read_payloads(write(name, content))

    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_payloads(str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize("content", ['[{"x": 1}]', '{"x": 1}', "x\n1"])
def test_standard_input_says_by_its_first_character_what_it_is(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))

    assert read_payloads("-") == [{"x": 1}]


def test_an_error_on_standard_input_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[3]")))

    with pytest.raises(ValueError, match="standard input: payload 1 is a number"):
        read_payloads("-")


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_VALUES = st.recursive(_PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(payloads=st.lists(st.dictionaries(st.text(), _VALUES, max_size=4), min_size=1, max_size=5), is_ascii=st.booleans())
def test_whatever_python_writes_as_json_is_read_back(payloads: List[Dict[str, Any]], is_ascii: bool) -> None:
    from gpumesh.cli.payloads import _parse

    whole = json.dumps(payloads, ensure_ascii=is_ascii)
    lines = "\n".join(json.dumps(payload, ensure_ascii=is_ascii) for payload in payloads)

    assert _parse(whole, ".json", "a.json") == payloads
    assert _parse(lines, ".jsonl", "a.jsonl") == payloads
