"""What handles know of a class."""

from __future__ import annotations

import functools
from typing import Any, AsyncIterator, Iterator

import pytest

from gpumesh.client.actor_options import make_actor_options
from gpumesh.client.actor_shapes import PLAIN, READY, STREAMS, read_shape, shape_of


class Base:
    def inherited(self) -> int:
        return 1

    def replaced(self) -> int:
        return 1


class Thing(Base):
    limit = 3

    class Part:
        """No method."""

    def __init__(self) -> None:
        self.value = 0

    def plain(self) -> int:
        return 1

    async def waits(self) -> int:
        return 1

    def tokens(self) -> Iterator[int]:
        yield 1

    async def letters(self) -> AsyncIterator[str]:
        yield "a"

    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 1

    @property
    def size(self) -> int:
        return 1

    partial = functools.partialmethod(plain)
    replaced = None  # type: ignore[assignment]

    def __call__(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def _hidden(self) -> int:
        return 1

    def _repr_html_(self) -> str:
        return ""


SHAPE = shape_of(Thing, make_actor_options({"name": "n", "mailbox": 7, "call_timeout": None, "place": False}))


def test_methods_and_their_kinds() -> None:
    assert SHAPE.class_name == "Thing"
    plain = {"plain", "waits", "static", "of_class", "partial", "inherited", "__call__", "_hidden"}
    assert {name for name, kind in SHAPE.methods.items() if kind == PLAIN} == plain
    assert {name for name, kind in SHAPE.methods.items() if kind == STREAMS} == {"tokens", "letters"}
    assert set(SHAPE.others) == {"limit", "Part", "size", "replaced"}
    assert (SHAPE.name, SHAPE.mailbox, SHAPE.call_timeout, SHAPE.place, SHAPE.is_open) == ("n", 7, None, False, False)


def test_it_travels_as_bytes() -> None:
    data = SHAPE.pack()
    assert read_shape(data) == SHAPE
    assert read_shape(bytes(bytearray(data))) is read_shape(data)


@pytest.mark.parametrize("data", [b"", b"\x93\x01\x02\x03", b"\x00", b"\xc1", SHAPE.pack()[:-3]])
def test_what_is_no_description_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="does not describe an actor"):
        read_shape(data)


def test_one_of_another_version_is_refused() -> None:
    import msgpack

    with pytest.raises(ValueError, match="version 2"):
        read_shape(msgpack.packb([2, *SHAPE]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plane", "did you mean 'plain'"),
        ("xyz", r"no method 'xyz'; it has __call__, _hidden, inherited"),
        ("limit", "Thing.limit is no method"),
        ("size", "Thing.size is no method"),
        ("value", "no method 'value'"),
        ("__len__", "no method '__len__'"),
        ("_repr_html_", "no method '_repr_html_'"),
    ],
)
def test_what_it_does_not_have_is_said_with_what_it_has(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        SHAPE.kind_of(name)


def test_every_actor_can_be_asked_whether_it_is_ready() -> None:
    assert SHAPE.kind_of(READY) == PLAIN
    with pytest.raises(AttributeError, match="it has none"):
        shape_of(type("Empty", (), {}), make_actor_options({})).kind_of("x")


def test_a_class_that_makes_up_its_methods_takes_any_public_name() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            return lambda: name

    shape = shape_of(Proxy, make_actor_options({}))
    assert shape.kind_of("anything") == PLAIN
    with pytest.raises(AttributeError):
        shape.kind_of("_repr_html_")
