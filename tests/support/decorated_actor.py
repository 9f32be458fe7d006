"""A class that is decorated where it is defined: its name means the actor class, everywhere."""

from __future__ import annotations

from typing import Any

from gpumesh import GPUMesh

_nowhere: Any = GPUMesh("http://127.0.0.1:9", token="none")


@_nowhere.actor
class Greeter:
    """Greets."""

    def __init__(self, word: str) -> None:
        self.word = word

    def greet(self, whom: str) -> str:
        assert Greeter.__wrapped__ is type(self)
        return f"{self.word} {whom}"
