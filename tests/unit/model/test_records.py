"""Our NamedTuple is the standard one in everything that is used of it."""

from __future__ import annotations

import copy
import pickle
import typing

import pytest

from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import Requirement
from gpumesh.protocol.messages import TAGS, Ping


class Ours(NamedTuple):
    """A point."""

    x: int
    y: str = "y"

    @property
    def both(self) -> str:
        """Both."""
        return f"{self.x}{self.y}"


class Theirs(typing.NamedTuple):
    """A point."""

    x: int
    y: str = "y"

    @property
    def both(self) -> str:
        """Both."""
        return f"{self.x}{self.y}"


def test_it_behaves_as_the_standard_one() -> None:
    for cls in (Ours, Theirs):
        point = cls(1)
        assert point == (1, "y") == cls(x=1, y="y")
        assert (point.x, point.y, point.both, hash(point)) == (1, "y", "1y", hash((1, "y")))
        assert repr(point) == f"{cls.__name__}(x=1, y='y')"
        assert point._replace(x=2) == cls(2)
        assert point._asdict() == {"x": 1, "y": "y"}
        assert cls._make([3, "z"]) == cls(3, "z")
        assert (cls._fields, cls._field_defaults, cls.__doc__) == (("x", "y"), {"y": "y"}, "A point.")
        assert list(cls.__annotations__) == ["x", "y"]
        assert not hasattr(point, "__dict__")
        with pytest.raises(AttributeError):
            point.x = 5  # type: ignore[misc]
        with pytest.raises(TypeError):
            cls()  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            cls(1, "y", 2)  # type: ignore[call-arg]
        with pytest.raises((ValueError, TypeError)):
            point._replace(z=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("record", [Ping(1), Requirement(device="cuda")])
def test_records_survive_pickling_and_copying(record: typing.Any) -> None:
    for again in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
        assert again == record
        assert type(again) is type(record)


def test_every_message_is_a_tuple_without_a_dictionary() -> None:
    for cls in TAGS:
        assert issubclass(cls, tuple)
        assert cls.__slots__ == ()
        assert cls.__doc__
