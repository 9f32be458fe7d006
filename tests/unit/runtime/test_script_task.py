"""What a script's output comes to, and what it gets of an environment. With real processes: integration/test_script_tasks."""

from __future__ import annotations

from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumesh.config import (
    CANCEL_GRACE_SECONDS,
    SCRIPT_GRACE_SECONDS,
    SCRIPT_INTERRUPT_SECONDS,
    SCRIPT_OUTPUT_BURST_BYTES,
    SCRIPT_OUTPUT_RATE_BYTES,
    SCRIPT_OUTPUT_TAIL_BYTES,
    SCRIPT_RESULT_BYTES,
    STDERR_TAIL_BYTES,
    STDERR_TAIL_LINES,
)
from gpumesh.runtime.script_output import Forwarding, LastLine, Tail, why_no_result
from gpumesh.runtime.script_task import script_environment

# --- the last line


def last_of(*parts: bytes) -> bytes:
    line = LastLine()
    for part in parts:
        line.feed(part)
    value, length = line.value
    assert length == len(value)
    return value


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b""], b""),
        ([b"\n \n\t\n"], b""),
        ([b"1"], b"1"),
        ([b"1\n"], b"1"),
        ([b"1\n2"], b"2"),
        ([b"1\n2\n\n  \n"], b"2"),
        ([b"1\r\n2\r\n"], b"2"),
        ([b" 10%\r 100%\r[1]"], b"[1]"),
        ([b"{", b'"a"', b": 1", b"}\n", b"\n"], b'{"a": 1}'),
        ([b"1\nab", b"c\n \n", b"  "], b"abc"),
        ([b"abc", b"\n2\n"], b"2"),
        ([b"abc", b"\n"], b"abc"),
    ],
)
def test_the_last_line_that_is_not_blank_counts(parts: List[bytes], expected: bytes) -> None:
    assert last_of(*parts) == expected


@given(
    st.lists(st.binary(max_size=6).map(lambda data: data.translate(bytes(b"ab \n\r"[n % 5] for n in range(256)))), max_size=12)
)
def test_the_last_line_is_the_same_however_it_comes(parts: List[bytes]) -> None:
    whole = b"".join(parts).replace(b"\r", b"\n").split(b"\n")
    lines = [line.strip() for line in whole if line.strip()]

    assert last_of(*parts) == (lines[-1] if lines else b"")


def test_a_line_that_is_too_long_is_known_by_its_length_and_not_kept() -> None:
    line = LastLine()
    for _ in range(17):
        line.feed(b"x" * 2**20)
    line.feed(b"\n\n")

    value, length = line.value

    assert (len(value), length) == (SCRIPT_RESULT_BYTES, 17 * 2**20)
    line.feed(b"short\n")
    assert line.value == (b"short", 5)


@pytest.mark.parametrize(
    "line", [b"1", b"null", b'"\xc3\xa4"', b"[NaN, Infinity, -Infinity]", b'"\\ud800"', b'{"a": {"b": []}}']
)
def test_any_json_is_a_result(line: bytes) -> None:
    assert why_no_result("train.py", line, len(line)) == ""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "train.py printed nothing"),
        (b"done", "is not JSON (Expecting value): done; print it as one line"),
        (b"}", "is not JSON (Expecting value): }; print it as one line at the end: print(json.dumps(result))"),
        (b"{'a': 1}", "{'a': 1}"),
        (b"1 2", "is not JSON (Extra data): 1 2"),
        (b'"\xff"', "is not JSON (invalid start byte): "),
        (b"[" * 200_000, "is not JSON ("),
        (b"x" * 5000, f"{'x' * 200} ...; print"),
        (b"\x1b[31mred", "\\x1b[31mred"),
    ],
)
def test_what_is_no_json_is_shown(line: bytes, says: str) -> None:
    problem = why_no_result("train.py", line, len(line))

    assert says in problem
    assert len(problem) < 600


def test_a_result_over_the_limit_is_refused_with_both_sizes() -> None:
    assert "has 17.8 MB, over the limit of 16.8 MB" in why_no_result("train.py", b"1" * SCRIPT_RESULT_BYTES, 17_800_000)


# --- the end of what it says


def test_the_last_lines_are_kept_for_messages() -> None:
    tail = Tail()
    for number in range(1000):
        tail.feed(f"line {number}\n".encode())

    assert tail.text.splitlines() == [f"line {number}" for number in range(1000 - STDERR_TAIL_LINES, 1000)]
    tail.feed(b"x" * 10**6)
    assert tail.text == "x" * STDERR_TAIL_BYTES
    assert Tail().text == ""


# --- what goes on


def test_all_of_a_little_goes_on_at_once() -> None:
    forwarding = Forwarding(0.0)

    assert [forwarding.feed(b"line\n", float(second)) for second in range(1000)] == [[b"line\n"]] * 1000
    assert forwarding.end() == []
    assert forwarding.due() == float("inf")


def test_of_a_flood_the_beginning_and_the_end_go_on_and_the_rest_is_counted() -> None:
    forwarding = Forwarding(0.0)
    lines = [f"{number:09}\n".encode() for number in range(400_000)]

    gone = b"".join(
        part for begin in range(0, len(lines), 1000) for part in forwarding.feed(b"".join(lines[begin : begin + 1000]), 0.0)
    )
    notice, tail = forwarding.end()

    assert gone == b"".join(lines)[:SCRIPT_OUTPUT_BURST_BYTES]
    assert b"".join(lines).endswith(b"\n" + tail)
    assert SCRIPT_OUTPUT_TAIL_BYTES - 10 <= len(tail) <= SCRIPT_OUTPUT_TAIL_BYTES
    assert notice == f"\n[gpumesh: {4_000_000 - len(gone) - len(tail)} bytes of output left out]\n".encode()
    assert forwarding.end() == []


def test_what_was_held_back_goes_on_as_soon_as_it_may() -> None:
    forwarding = Forwarding(0.0)
    assert forwarding.feed(b"x" * SCRIPT_OUTPUT_BURST_BYTES, 0.0) == [b"x" * SCRIPT_OUTPUT_BURST_BYTES]

    assert forwarding.feed(b"later\n", 0.0) == []

    due = forwarding.due()
    assert due == pytest.approx(6 / SCRIPT_OUTPUT_RATE_BYTES, abs=0.002)
    assert forwarding.feed(b"", due) == [b"later\n"]
    assert forwarding.due() == float("inf")


@given(st.lists(st.tuples(st.integers(0, 3_000_000), st.floats(0, 30)), max_size=20))
def test_no_byte_goes_on_twice_and_every_other_one_is_counted(steps: List[object]) -> None:
    forwarding = Forwarding(0.0)
    now, came, gone, left_out = 0.0, 0, 0, 0
    for size, seconds in steps:  # type: ignore[misc]
        now += seconds
        came += size
        for part in [*forwarding.feed(b"y" * size, now)]:
            if part.startswith(b"\n[gpumesh: "):
                left_out += int(part.split()[1])
            else:
                gone += len(part)
    for part in forwarding.end():
        if part.startswith(b"\n[gpumesh: "):
            left_out += int(part.split()[1])
        else:
            gone += len(part)

    assert gone + left_out == came
    assert gone <= SCRIPT_OUTPUT_BURST_BYTES + SCRIPT_OUTPUT_TAIL_BYTES + now * SCRIPT_OUTPUT_RATE_BYTES + 1


# --- the environment


def test_a_script_gets_no_secret_and_utf_8() -> None:
    environment = script_environment(
        {
            "PATH": "/bin",
            "GPUMESH_TOKEN": "secret",
            "GPUMESH_RELAY_TOKEN": "secret",
            "GPUMESH_URL": "http://h:1",
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "1",
            "PYTHONIOENCODING": "latin-1",
            "PYTHONINSPECT": "1",
            "PYTHONSAFEPATH": "1",
        }
    )

    assert environment == {
        "PATH": "/bin",
        "GPUMESH_URL": "http://h:1",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONIOENCODING": "utf-8:surrogateescape",
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def test_a_script_is_killed_before_its_runner() -> None:
    assert 0 < SCRIPT_INTERRUPT_SECONDS < SCRIPT_GRACE_SECONDS < CANCEL_GRACE_SECONDS
