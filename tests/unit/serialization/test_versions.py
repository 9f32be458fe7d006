"""Which versions are installed here, found by name alone, and what an error makes of it."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gpumesh.errors import MeshError, ObjectLostError, SerializationError, VersionMismatchError
from gpumesh.serialization import pickling, values
from gpumesh.serialization.versions import (
    NOT_INSTALLED,
    host_name,
    loading_error,
    show_version,
    version_of,
    well_known_versions,
)


def install(folder: Path, *infos: str) -> None:
    for info in infos:
        (folder / info).mkdir(parents=True)


def test_what_stands_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "a", "torch-2.1.0+cu118.dist-info", "scikit_learn-1.5.2.dist-info", "torch_geometric-9.9.dist-info")
    install(tmp_path / "b", "torch-1.0.dist-info", "numpy-1.26.4-py3.9.egg-info", "numpy.libs", "pandas")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "missing"), str(tmp_path / "b")])

    assert well_known_versions() == (("numpy", "1.26.4"), ("scikit-learn", "1.5.2"), ("torch", "2.1.0+cu118"))


def test_nothing_is_imported_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pandas", "importlib_metadata")]:
        monkeypatch.delitem(sys.modules, name)

    assert dict(well_known_versions())["pandas"] == version_of("pandas.core.frame")
    assert "pandas" not in sys.modules


def test_the_version_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "Some_Thing-3.1.dist-info", "scikit_learn-1.5.2.dist-info")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    loaded = types.ModuleType("loaded")
    loaded.__version__ = "7"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "loaded", loaded)
    monkeypatch.setitem(sys.modules, "bare", types.ModuleType("bare"))

    assert version_of("some.thing") == ""
    assert version_of("some_thing.part") == "3.1"
    assert version_of("sklearn.svm") == "1.5.2"
    assert version_of("loaded.part") == "7"
    assert show_version("bare") == "installed without a version"
    assert show_version("absent_package") == NOT_INSTALLED


@pytest.mark.parametrize(
    ("error", "package", "words"),
    [
        (ModuleNotFoundError("No module named 'absent'", name="absent"), "absent", "module 'absent' is not installed here"),
        (
            ModuleNotFoundError("No module named 'numpy._gone'", name="numpy._gone"),
            "numpy",
            r"numpy is \d.* here.*same version",
        ),
        (ImportError("cannot import name 'x' from 'numpy'", name="numpy"), "numpy", "bring both to the same version"),
        (AttributeError("Can't get attribute 'Gone' on <module 'numpy' from 'x'>"), "numpy", r"'Gone'.*\(numpy is \d"),
        (AttributeError("'X' object has no attribute 'y'"), "", "bring both to the same version"),
        (AttributeError("Can't get attribute 'f' on <module '__main__' (built-in)>"), "", "'f'"),
        (ValueError("odd"), "", "ValueError: odd; its class cannot be rebuilt"),
    ],
)
def test_why_something_cannot_be_rebuilt(error: Exception, package: str, words: str) -> None:
    failure = loading_error("the result", error)

    assert isinstance(failure, SerializationError)
    with pytest.raises(SerializationError, match=f"the result cannot be rebuilt here: .*{words}"):
        raise failure
    assert failure.package == package
    assert failure.machine == (host_name() if package else "")
    assert bool(failure.version) == bool(package)


@pytest.mark.parametrize("error", [ObjectLostError("gone"), SerializationError("said"), VersionMismatchError("old")])
def test_an_error_of_our_own_says_it_all(error: MeshError) -> None:
    assert loading_error("the result", error) is error


def _raise(error: Exception) -> Any:
    raise error


class Broken:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def test_such_an_error_comes_through_loading_as_it_is() -> None:
    data = pickle.dumps(Broken(ObjectLostError("gone")), 5)
    with pytest.raises(ObjectLostError, match="^gone$"):
        values.loads(data)


def test_code_of_another_python_is_refused_before_it_can_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 3
    payload = values.dumps(lambda: number)
    assert values.loads(payload)() == 3

    monkeypatch.setattr(pickling, "_PYTHON", "3.8")

    with pytest.raises(VersionMismatchError, match=rf"code of Python 3\.\d+ cannot run here, on Python 3\.8 of {host_name()}"):
        values.loads(payload)


def test_an_error_out_of_a_package_names_it() -> None:
    import pandas

    try:
        pandas.DataFrame({"a": [1]}).__getitem__("b")
    except KeyError as error:
        failure = loading_error("the result", error)

    assert isinstance(failure, SerializationError)
    assert failure.package == "pandas"
    assert f"(pandas is {pandas.__version__} here); if the versions differ" in str(failure)


def test_an_error_out_of_ones_own_code_names_no_package() -> None:
    with pytest.raises(SerializationError, match="ValueError: odd; its class cannot be rebuilt") as caught:
        values.loads(pickle.dumps(Broken(ValueError("odd")), 5))
    assert caught.value.package == ""
