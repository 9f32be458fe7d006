"""F01: exceptions whose constructor takes more than a message arrive as themselves."""

from __future__ import annotations

import threading
import urllib.error
from email.message import Message
from typing import Any, NoReturn

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import RemoteTaskError


class TwoArguments(Exception):
    def __init__(self, code: int, url: str) -> None:
        super().__init__(f"{code}")
        self.code = code
        self.url = url


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("keyword only")
        self.code = code


class HoldsLock(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.lock = threading.Lock()


def raise_two() -> NoReturn:
    raise TwoArguments(503, "x")


def raise_keyword_only() -> NoReturn:
    raise KeywordOnly(code=7)


def raise_with_lock() -> NoReturn:
    raise HoldsLock("held")


def raise_http_error() -> NoReturn:
    raise urllib.error.HTTPError("http://host/x", 404, "gone", Message(), None)


def raise_unknown_class() -> NoReturn:
    import sys
    import types

    module = types.ModuleType("only_on_the_worker")
    sys.modules["only_on_the_worker"] = module
    exec("class Strange(Exception):\n    pass\n", module.__dict__)
    raise module.Strange("nobody else knows me")


def test_an_exception_with_two_arguments_keeps_both_and_the_remote_traceback(mesh: GPUMesh) -> None:
    with pytest.raises(TwoArguments) as caught:
        accelerate(mesh)(raise_two).remote().result(20)

    assert (caught.value.code, caught.value.url, caught.value.args) == (503, "x", ("503",))
    assert "raise_two" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("function", "kind", "attribute", "value"),
    [
        (raise_keyword_only, KeywordOnly, "code", 7),
        (raise_with_lock, HoldsLock, "what", "held"),
        (raise_http_error, urllib.error.HTTPError, "code", 404),
    ],
)
def test_other_odd_exceptions_keep_type_and_attributes(
    mesh: GPUMesh, function: Any, kind: Any, attribute: str, value: Any
) -> None:
    with pytest.raises(kind) as caught:
        accelerate(mesh)(function).remote().result(20)

    assert getattr(caught.value, attribute) == value


def test_a_class_that_only_the_worker_knows_is_told_in_words(mesh: GPUMesh) -> None:
    with pytest.raises(RemoteTaskError) as caught:
        accelerate(mesh)(raise_unknown_class).remote().result(20)

    assert "Strange" in caught.value.type_name
    assert caught.value.remote_message == "nobody else knows me"
    assert "raise_unknown_class" in caught.value.remote_traceback
