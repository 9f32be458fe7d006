"""F01: the exception of a task comes back as itself, with the remote traceback as its cause."""

from __future__ import annotations

import io
import sys
import threading
import urllib.error
from email.message import Message
from typing import Any

import pytest

from gpumesh.errors import RemoteTaskError, WorkerCrashedError
from gpumesh.serialization import exceptions


class HTTPFailure(Exception):
    def __init__(self, code: int, url: str) -> None:
        super().__init__(f"{code}")
        self.code = code
        self.url = url


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class WithLock(Exception):
    def __init__(self, label: str) -> None:
        super().__init__(label, threading.Lock())
        self.lock = threading.Lock()
        self.label = label


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class WithSlots(Exception):
    __slots__ = ("code", "unset")

    def __init__(self, code: int, extra: int) -> None:
        super().__init__()
        self.code = code


class OwnOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(13, "denied", path)
        self.path = path


class BadInit(Exception):
    def __init__(self, *args: Any) -> None:
        if sys._getframe(1).f_code.co_name != "make_bad_init":
            raise RuntimeError("only made in one place")
        super().__init__(*args)


def make_bad_init() -> BadInit:
    return BadInit(1, 2)


def there_and_back(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return exceptions.load_exception(exceptions.dump_exception(raised))


@pytest.mark.parametrize(
    "error",
    [
        HTTPFailure(503, "x"),
        KeywordOnly(code=4),
        ValueError("a", 1),
        KeyError("key"),
        FileNotFoundError(2, "No such file", "/x"),
        OSError(5, "io", "a", None, "b"),
        OwnOSError("/secret"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(3),
        SystemExit(3),
        KeyboardInterrupt(),
        ImportError("no", name="n", path="p"),
        WorkerCrashedError("died"),
        make_bad_init(),
        WithSlots(7, 8),
        ZeroDivisionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_back_as_its_own_type_with_everything_in_it(error: BaseException) -> None:
    back = there_and_back(error)

    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    for name in ("errno", "strerror", "filename", "filename2", "code", "value", "name", "path", "object", "reason", "start"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_its_cause_is_the_remote_traceback_with_its_own_causes() -> None:
    def inner() -> None:
        raise KeyError("first")

    try:
        try:
            inner()
        except KeyError as first:
            raise HTTPFailure(503, "x") from first
    except HTTPFailure as raised:
        back = exceptions.load_exception(exceptions.dump_exception(raised))

    assert isinstance(back.__cause__, exceptions.RemoteTraceback)
    text = str(back.__cause__)
    assert "in inner" in text
    assert "KeyError: 'first'" in text
    assert "direct cause" in text
    assert "HTTPFailure: 503" in text


def test_frames_of_the_runner_are_left_out_and_frames_of_the_user_stay() -> None:
    def user_code() -> None:
        raise ValueError("mine")

    try:
        user_code()
    except ValueError as raised:
        hidden = exceptions.load_exception(exceptions.dump_exception(raised, hide_frames_of=__file__))
        shown = exceptions.load_exception(exceptions.dump_exception(raised))

    assert "in user_code" in str(shown.__cause__)
    assert "in user_code" not in str(hidden.__cause__)
    assert "ValueError: mine" in str(hidden.__cause__)


def test_what_cannot_travel_in_an_exception_is_left_out_and_listed() -> None:
    back = there_and_back(WithLock("kept"))

    assert type(back) is WithLock
    assert vars(back) == {"label": "kept"}
    assert back.args[0] == "kept"
    assert "_thread.lock" in back.args[1]
    assert "(could not travel: args[1], lock)" in str(back.__cause__)


def test_an_http_error_keeps_its_code_and_survives_losing_its_connection() -> None:
    headers = Message()
    headers["Retry-After"] = "5"

    class Response(io.BytesIO):
        def __reduce__(self) -> Any:
            raise TypeError("a live connection")

    error = urllib.error.HTTPError("http://x", 503, "busy", headers, Response(b"body"))
    back = there_and_back(error)
    error.close()

    assert isinstance(back, urllib.error.HTTPError)
    assert (back.code, back.msg, back.url, back.headers["Retry-After"]) == (503, "busy", "http://x", "5")
    assert back.read() == b""
    assert not hasattr(back, "no_such_attribute")
    assert "could not travel: " in str(back.__cause__)
    back.close()


def test_an_unprintable_exception_survives() -> None:
    back = there_and_back(Unprintable())

    assert type(back) is Unprintable
    assert "Unprintable" in str(back.__cause__)


def test_notes_are_kept() -> None:
    error = ValueError("x")
    error.__notes__ = ["first note"]  # type: ignore[attr-defined]

    back = there_and_back(error)

    assert back.__notes__ == ["first note"]  # type: ignore[attr-defined]


def test_an_exception_that_holds_itself_and_others_comes_back() -> None:
    error = HTTPFailure(500, "outer")
    error.itself = error  # type: ignore[attr-defined]
    error.others = [HTTPFailure(1, "a"), WithLock("b")]  # type: ignore[attr-defined]

    back = there_and_back(error)

    assert isinstance(back, HTTPFailure)
    assert back.itself is back  # type: ignore[attr-defined]
    assert [type(other) for other in back.others] == [HTTPFailure, WithLock]  # type: ignore[attr-defined]
    assert back.others[0].url == "a"  # type: ignore[attr-defined]


def test_a_long_chain_of_exceptions_inside_exceptions_takes_no_longer_than_its_length() -> None:
    error = HTTPFailure(0, "first")
    for code in range(1, 60):
        outer = HTTPFailure(code, "x")
        outer.inner = error  # type: ignore[attr-defined]
        outer.lock = threading.Lock()  # type: ignore[attr-defined]
        error = outer

    back = there_and_back(error)

    assert isinstance(back, HTTPFailure)
    assert back.inner.inner.code == 57  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are built in from 3.11 on")
def test_a_group_comes_back_with_its_members() -> None:
    group = ExceptionGroup("g", [HTTPFailure(1, "a"), WithLock("b"), ValueError("c")])  # noqa: F821

    back = there_and_back(group)

    assert isinstance(back, ExceptionGroup)  # noqa: F821
    assert [type(member) for member in back.exceptions] == [HTTPFailure, WithLock, ValueError]
    assert back.exceptions[0].url == "a"  # type: ignore[attr-defined]


def test_a_local_class_comes_back_as_that_very_class() -> None:
    class Local(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a)
            self.b = b

    back = there_and_back(Local(1, 2))

    assert type(back) is Local
    assert back.b == 2


def test_a_class_that_cannot_travel_arrives_as_its_text() -> None:
    lock = threading.Lock()

    class Stuck(Exception):
        def method(self) -> Any:
            return lock

    back = there_and_back(Stuck("the message"))

    assert type(back) is RemoteTaskError
    assert back.type_name.endswith("Stuck")
    assert back.remote_message == "the message"
    assert "Stuck: the message" in back.remote_traceback
    assert isinstance(back.__cause__, exceptions.RemoteTraceback)
    assert "the message" in str(back)


def test_a_class_missing_here_arrives_as_its_text() -> None:
    import pickle

    inner = b"\x80\x05\x8c\x0eabsent_package\x8c\x05Thing\x93)R."
    payload = pickle.dumps(("absent_package.Thing", "broken", "Traceback ...\nabsent_package.Thing: broken\n", inner), 5)

    back = exceptions.load_exception(payload)

    assert type(back) is RemoteTaskError
    assert (back.type_name, back.remote_message) == ("absent_package.Thing", "broken")
    assert "No module named 'absent_package'" in str(back)


def test_a_very_long_message_is_clipped_in_the_text_and_whole_in_the_exception() -> None:
    back = there_and_back(ValueError("x" * 3_000_000))

    assert len(str(back)) == 3_000_000
    assert len(str(back.__cause__)) < 1_100_000
