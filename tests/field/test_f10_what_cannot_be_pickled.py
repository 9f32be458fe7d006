"""F10: what cannot travel is refused at submit, with the path to it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import SerializationError


class Client:
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def method(self) -> int:
        return 1


class Holder:
    def __init__(self) -> None:
        self.client = Client()


def identity(value: Any) -> Any:
    return value


def test_a_captured_lock_is_named_at_submit(mesh: GPUMesh) -> None:
    guard = threading.Lock()

    def locked() -> None:
        with guard:
            pass

    with pytest.raises(SerializationError, match="guard"):
        accelerate(mesh)(locked).remote()


def test_the_path_through_attributes_is_named(mesh: GPUMesh) -> None:
    holder = Holder()

    def captured() -> Any:
        return holder

    with pytest.raises(SerializationError, match=r"holder.*client.*guard"):
        accelerate(mesh)(captured).remote()


def test_an_argument_that_holds_a_socket_is_named(mesh: GPUMesh) -> None:
    with socket.socket() as sock, pytest.raises(SerializationError, match="value"):
        accelerate(mesh)(identity).remote(value={"connection": sock})


def test_self_of_a_bound_method_is_named(mesh: GPUMesh) -> None:
    with pytest.raises(SerializationError, match="guard"):
        accelerate(mesh)(Client().method).remote()


def test_capturing_the_mesh_itself_works(mesh: GPUMesh) -> None:
    def uses_mesh() -> str:
        return type(mesh).__name__

    assert accelerate(mesh)(uses_mesh).remote().result(20) == "GPUMesh"


def test_a_result_that_cannot_be_pickled_fails_that_task_only(mesh: GPUMesh) -> None:
    def make_lock() -> Any:
        return {"inner": threading.Lock()}

    with pytest.raises(SerializationError, match="inner"):
        accelerate(mesh)(make_lock).remote().result(20)

    assert accelerate(mesh)(identity).remote(1).result(20) == 1
