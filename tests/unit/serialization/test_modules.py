"""Which modules are local, what code reaches, what of a folder travels, and when it is looked at again."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import time
import types
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from gpumesh.config import MAX_CODE_BYTES
from gpumesh.errors import SerializationError
from gpumesh.serialization import cargo, folders, modules, shipping
from gpumesh.serialization.functions import Exporter
from gpumesh.serialization.imports import imported_names

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


class Project:
    """A folder on the path of modules."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str = "") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def edit(self, name: str, text: str) -> None:
        """As an editor does: later than what has been looked at, by more than the file system's clock can tell."""
        path = self.write(name, text)
        later = time.time_ns() + 1_000_000_000
        os.utime(path, ns=(later, later))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """What tests import from it is forgotten at the end."""
    before = set(sys.modules)
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.syspath_prepend(root)
    yield Project(root)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "") or getattr(sys.modules[name], "__path__", "")):
            del sys.modules[name]


def reached(*names: str) -> List[str]:
    return sorted(modules.reach(names).modules)


def contents(found: Any) -> Dict[str, Dict[str, bytes]]:
    """Of a cargo: files by the name of their parcel."""
    return {
        parcel.name: {
            os.fsdecode(file.name): file.data for digest in parcel.pieces for file in cargo.unpack_files(found.pieces[digest])
        }
        for parcel in (found.parcels if found is not None else ())
    }


def travel(*names: str, packages: Any = ()) -> shipping.Travel:
    return shipping.Shipper().travel("f", names, packages=packages)


def shipped(*names: str) -> Dict[str, Dict[str, bytes]]:
    return contents(travel(*names).cargo)


# --- imports


def test_imports_are_read_from_bytecode_wherever_they_stand() -> None:
    source = """
import a.b as c, os
from . import x
from ..y import z
from q import *
def f():
    from .inner import thing
    class K:
        import deep.one
"""
    assert imported_names(compile(source, "x", "exec"), "p.q.r") == {
        "a.b", "os", "p.q.r", "p.q.r.x", "p.q.y", "p.q.y.z", "q", "p.q.r.inner", "p.q.r.inner.thing", "deep.one",
    }  # fmt: skip


def test_imports_with_extended_arguments_are_read() -> None:
    source = "".join(f"x{i} = {i}.5\n" for i in range(600)) + "import zz.k\nfrom ww import (a1, b2)\n"

    assert imported_names(compile(source, "x", "exec"), "") == {"zz.k", "ww", "ww.a1", "ww.b2"}


def test_a_relative_import_beyond_the_top_is_nobodys() -> None:
    assert imported_names(compile("from ... import x", "x", "exec"), "p") == set()


# --- reach


def test_a_package_is_reached_through_what_its_modules_import(project: Project) -> None:
    project.write("pkg_a/__init__.py", "import helper_a")
    project.write("pkg_a/core.py", "def f():\n    from pkg_b.deep import thing")
    project.write("pkg_a/unused.py", "import unused_helper")
    project.write("pkg_b/__init__.py")
    project.write("pkg_b/deep.py")
    project.write("helper_a.py", "import json, numpy, gpumesh")
    project.write("unused_helper.py")

    assert reached("pkg_a.core") == ["helper_a", "pkg_a", "pkg_a.core", "pkg_b", "pkg_b.deep"]


def test_nothing_is_run_to_find_out(project: Project) -> None:
    project.write("pkg_c/__init__.py", "raise RuntimeError('imported')")
    project.write("pkg_c/part.py", "import pkg_c.other")
    project.write("pkg_c/other.py")

    assert reached("pkg_c.part") == ["pkg_c", "pkg_c.other", "pkg_c.part"]
    assert "pkg_c" not in sys.modules


def test_installed_and_standard_modules_stay_where_they_are() -> None:
    assert reached("json", "os.path", "pytest", "msgpack", "gpumesh.client.mesh", "__main__") == []


def test_a_module_of_an_editable_install_is_local(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    source = project.write("src_of_it/edited/__init__.py")
    project.write("src_of_it/edited/part.py")

    class Finder:
        """As setuptools puts one on the path of finders for PEP 660."""

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name == "edited":
                return importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(source.parent)])
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])

    assert reached("edited.part") == ["edited", "edited.part"]
    assert shipped("edited.part") == {"edited": {"edited/__init__.py": b"", "edited/part.py": b""}}


def test_a_finder_that_fails_is_passed_over(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            raise ValueError(name)

    project.write("after_broken.py")
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])

    assert reached("after_broken") == ["after_broken"]


def test_a_module_under_a_name_that_leads_nowhere_travels_under_that_name(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "odd" / "test_it.py"
    path.parent.mkdir()
    path.write_text("import helper_odd")
    project.write("helper_odd.py")
    module = types.ModuleType("tmp.odd-folder.test_it")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    assert shipped(module.__name__) == {
        "tmp.odd-folder.test_it": {"tmp/odd-folder/test_it.py": b"import helper_odd"},
        "helper_odd": {"helper_odd.py": b""},
    }


def test_what_is_missing_is_known_so_that_its_appearance_is_seen(project: Project) -> None:
    project.write("wants.py", "import not_there_yet, json\nfrom wants2 import attribute")
    project.write("wants2.py", "attribute = 1")
    before = travel("wants")

    assert modules.reach(["wants"]).missing == {"not_there_yet"}
    assert before._look()
    project.write("not_there_yet.py")
    assert not before._look()


def test_a_module_with_a_syntax_error_travels_all_the_same(project: Project) -> None:
    project.write("broken_one.py", "def (")

    assert shipped("broken_one") == {"broken_one": {"broken_one.py": b"def ("}}


# --- what travels


def test_a_package_travels_whole_without_caches(project: Project) -> None:
    project.write("whole/__init__.py")
    project.write("whole/deep/er/mod.py", "x = 1")
    project.write("whole/data/table.csv", "1,2")
    project.write("whole/ünïcode/datei ß.txt", "é")
    for rubbish in ("__pycache__/x.txt", ".git/config", ".venv/bin/python", "venv/x", "node_modules/x.js", ".tox/x", "old.pyc"):
        project.write("whole/" + rubbish)
    project.write("whole/py311/pyvenv.cfg")
    project.write("whole/py311/lib/site.py")

    assert shipped("whole") == {
        "whole": {
            "whole/__init__.py": b"",
            "whole/data/table.csv": b"1,2",
            "whole/deep/er/mod.py": b"x = 1",
            "whole/ünïcode/datei ß.txt": "é".encode(),
        }
    }


def test_of_folders_without_init_the_ones_that_are_imported_from_travel(project: Project) -> None:
    project.write("space/left/a.py", "import space.right.b")
    project.write("space/left/a.txt")
    project.write("space/left/deeper/c.py")
    project.write("space/right/b.py")
    project.write("space/elsewhere/d.py")
    project.write("space/README.md")

    assert shipped("space.left.a") == {
        "space.left": {"space/left/a.py": b"import space.right.b", "space/left/a.txt": b""},
        "space.right": {"space/right/b.py": b""},
    }


def test_ignored_files_stay_unless_they_are_imported(project: Project) -> None:
    (project.root / ".git").mkdir()
    project.write(".gitignore", "*.log\n/ign/data/\n_version.py\nsecret*\n!keep.log\n")
    project.write("ign/__init__.py", "from ign import _version")
    project.write("ign/_version.py", "v = 1")
    project.write("ign/secrets.py")
    project.write("ign/a.log")
    project.write("ign/keep.log")
    project.write("ign/data/big.bin")
    project.write("ign/sub/.gitignore", "*.tmp\n")
    project.write("ign/sub/x.tmp")
    project.write("ign/sub/x.txt")

    assert sorted(shipped("ign")["ign"]) == [
        "ign/__init__.py", "ign/_version.py", "ign/keep.log", "ign/sub/.gitignore", "ign/sub/x.txt"
    ]  # fmt: skip


def test_a_package_in_an_ignored_folder_travels(project: Project) -> None:
    (project.root / ".git").mkdir()
    project.write(".gitignore", "/ignored_pkg/\n")
    project.write("ignored_pkg/__init__.py")
    project.write("ignored_pkg/data.txt")

    assert sorted(shipped("ignored_pkg")["ignored_pkg"]) == ["ignored_pkg/__init__.py", "ignored_pkg/data.txt"]


def test_what_opens_the_mesh_does_not_travel_with_a_home_folder_that_is_a_project(tmp_path: Path) -> None:
    for name in (
        ".config/gpumesh/connection.json",
        ".config/gpumesh/service-token",
        ".local/state/gpumesh/identity.pem",
        "gpumesh/model.py",
        "connection.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    entries = folders.list_folder(str(tmp_path), deep=True).entries

    assert [entry.name for entry in entries] == ["connection.json", "gpumesh/model.py"]


def test_what_ignores_is_loaded_only_where_a_pattern_could_match(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pathspec", None)
    (project.root / ".git").mkdir()
    project.write(".gitignore", "# comment\n*.log\n*.py[cod]\n/build/\n.venv/\n*.egg-info/\nfoo-*\n")
    project.write("plain/__init__.py")
    project.write("plain/notes.md")

    assert sorted(shipped("plain")["plain"]) == ["plain/__init__.py", "plain/notes.md"]


@pytest.mark.parametrize(
    "pattern", ["*.py", "a[0-9].txt", "a?.txt", "**/a1.txt", "sub/", "su*", "deep\\ name", "[ab]1.txt", "/odd/sub/a1.txt"]
)
def test_patterns_that_match_are_not_overlooked(project: Project, pattern: str) -> None:
    project.write("odd/__init__.py")
    project.write("odd/sub/a1.txt")
    project.write("odd/deep name")
    (project.root / ".git").mkdir()
    project.write(".gitignore", pattern + "\n")
    entries = folders.list_folder(str(project.root / "odd"), deep=True).entries

    assert len(entries) < 3


def test_loops_of_links_dead_links_and_pipes_are_survived(project: Project) -> None:
    project.write("looped/__init__.py")
    os.symlink(project.root / "looped", project.root / "looped" / "again")
    os.symlink("nowhere", project.root / "looped" / "dead")
    os.symlink("itself", project.root / "looped" / "itself")
    os.mkfifo(project.root / "looped" / "pipe")
    os.symlink(project.write("elsewhere.txt", "linked"), project.root / "looped" / "linked.txt")

    assert shipped("looped") == {"looped": {"looped/__init__.py": b"", "looped/linked.txt": b"linked"}}


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_what_cannot_be_read_is_left_out_with_a_warning(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    project.write("guarded/__init__.py")
    project.write("guarded/secret.txt").chmod(0)

    assert shipped("guarded") == {"guarded": {"guarded/__init__.py": b""}}
    assert "secret.txt cannot be read" in caplog.text


# --- what cannot


def test_a_compiled_module_is_refused_by_name(project: Project) -> None:
    project.write("fast/__init__.py", "def f():\n    from fast import _inner")
    library = project.write(f"fast/_inner{SUFFIX}")

    with pytest.raises(
        SerializationError, match="f needs fast._inner .imported by fast., a compiled extension module"
    ) as caught:
        travel("fast")
    assert str(library) in str(caught.value)
    assert "install 'fast' on the workers" in str(caught.value)


def test_a_compiled_module_that_the_code_can_do_without_is_no_obstacle(project: Project) -> None:
    source = "try:\n    from maybe import _inner\nexcept ImportError:\n    _inner = None"
    project.write("maybe/__init__.py", source)
    project.write(f"maybe/_inner{SUFFIX}")

    assert sorted(shipped("maybe")["maybe"]) == ["maybe/__init__.py", f"maybe/_inner{SUFFIX}"]


def test_what_an_environment_installs_does_not_travel(project: Project) -> None:
    project.write("my_tool/__init__.py", "import my_tool._inner")
    project.write(f"my_tool/_inner{SUFFIX}")
    project.write("other_tool.py")

    assert travel("my_tool", packages=["my-tool==1.0"]).cargo is None
    found = travel("my_tool", "other_tool", packages=["My.Tool[extra]>=2; python_version>'3'"]).cargo
    assert found is None or [parcel.name for parcel in found.parcels] == ["other_tool"]


def test_too_much_is_refused_with_the_biggest_named(project: Project) -> None:
    project.write("heavy/__init__.py")
    sizes = {"a.bin": 30_000_000, "data/b.bin": 20_000_000, "c.bin": 3_000_000, "d.bin": 2_000_000, "e.bin": 1_000_000}
    for name, size in sizes.items():
        os.truncate(project.write("heavy/" + name), size)
    for number in range(20):
        os.truncate(project.write(f"heavy/tiny/{number}.txt"), 10_000)

    with pytest.raises(SerializationError) as caught:
        travel("heavy")
    assert "is 56.2 MB, over the limit of 50.0 MB" in str(caught.value)
    assert "the biggest: a.bin 30.0 MB, data/b.bin 20.0 MB, c.bin 3.0 MB, d.bin 2.0 MB, e.bin 1.0 MB;" in str(caught.value)


def test_many_small_files_are_named_by_their_folder() -> None:
    entries = [(f"tiny/{number}.txt", 1000) for number in range(1000)] + [("big.bin", 500_000)]

    assert folders.biggest(entries, 5, str) == "tiny/ (1000 files) 1000000, big.bin 500000"


def test_what_the_main_program_has_at_hand_comes_along_as_far_as_there_is_room(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("model_of_main.py", "class Config: pass")
    project.write("huge_of_main/__init__.py")
    os.truncate(project.write("huge_of_main/x.bin"), MAX_CODE_BYTES + 1)
    project.write("needed.py")
    main = types.ModuleType("__main__")
    main.Config = importlib.import_module("model_of_main").Config  # type: ignore[attr-defined]
    main.huge = importlib.import_module("huge_of_main")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)

    assert sorted(shipped("needed")) == ["model_of_main", "needed"]
    assert sorted(shipped()) == ["model_of_main"]


# --- names from functions


def test_a_function_names_the_modules_it_refers_to_and_imports(project: Project) -> None:
    project.write("by_name.py", "class C: pass\ndef f(): pass")
    project.write("as_module.py")
    by_name = importlib.import_module("by_name")
    as_module = importlib.import_module("as_module")
    kind = by_name.C

    def local() -> Any:
        import inside.module

        return kind, as_module, inside.module

    exporter = Exporter()

    assert exporter.export(by_name.f).modules == ("by_name",)
    assert {"by_name", "as_module", "inside.module"} <= set(exporter.export(local).modules)


# --- looking again


def test_an_edit_is_seen_and_what_did_not_change_is_the_same_cargo(project: Project) -> None:
    project.write("edits/__init__.py", "x = 1")
    project.write("edits/data.txt", "1")
    project.write("other_edits.py")
    first = travel("edits", "other_edits")
    assert first.cargo is not None
    assert first._look()

    project.edit("edits/__init__.py", "x = 2")
    assert not first._look()
    second = travel("edits", "other_edits")
    assert second.cargo is not None
    assert second.cargo.digest != first.cargo.digest
    assert [p.digest == q.digest for p, q in zip(first.cargo.parcels, second.cargo.parcels)] == [False, True]

    project.edit("edits/__init__.py", "x = 1")
    assert travel("edits", "other_edits").cargo.digest == first.cargo.digest  # type: ignore[union-attr]
    assert not first._look()  # It was made of a look before.


def test_new_and_removed_files_are_seen(project: Project) -> None:
    project.write("grows/__init__.py")
    first = travel("grows")

    added = project.write("grows/sub/new.py")
    assert not first._look()
    second = travel("grows")
    assert sorted(contents(second.cargo)["grows"]) == ["grows/__init__.py", "grows/sub/new.py"]
    added.unlink()
    assert not second._look()


def test_a_change_too_quick_for_the_file_systems_clock_is_seen(project: Project) -> None:
    path = project.write("quick.py", "x = 1")
    first = travel("quick")
    status = os.stat(path)

    path.write_text("x = 2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert not first._look()
    assert shipped("quick") == {"quick": {"quick.py": b"x = 2"}}


def test_looking_takes_a_small_part_of_the_time(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("rested.py")
    clock = [100.0]
    monkeypatch.setattr(shipping.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(shipping, "_budget", shipping._Budget())
    found = travel("rested")
    looks: List[float] = []

    def unchanged(source: Any) -> bool:
        looks.append(clock[0])
        clock[0] += 0.001
        return True

    monkeypatch.setattr(shipping.Source, "is_unchanged", unchanged)
    while clock[0] < 101.0:
        assert found.holds()
        clock[0] += 0.0001

    assert looks[:5] == [pytest.approx(100.0 + 0.0011 * number) for number in range(5)]  # Nobody is overlooked at first.
    assert 30 <= len(looks) <= 36


def test_a_function_without_local_modules_is_never_looked_at_again() -> None:
    found = travel("json")

    assert found.cargo is None
    assert found._next_look == float("inf")
    assert found.holds()


def test_what_the_main_program_imports_later_is_seen(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("imported_later.py")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    found = travel("json")

    monkeypatch.setitem(sys.modules, "a_module_of_no_interest", types.ModuleType("a_module_of_no_interest"))
    assert found.holds()
    sys.modules["__main__"].later = importlib.import_module("imported_later")  # type: ignore[attr-defined]
    assert not found.holds()


def test_an_edit_changes_only_the_pieces_that_it_is_in(project: Project) -> None:
    project.write("pieces/__init__.py")
    for number in range(500):
        project.write(f"pieces/part{number}.txt", str(number))
    project.write("pieces/large.bin", "x" * 100_000)
    project.write("pieces/large2.bin", "y" * 100_000)
    first = travel("pieces").cargo
    project.edit("pieces/part7.txt", "edited")
    second = travel("pieces").cargo
    assert first is not None
    assert second is not None

    news = set(second.pieces) - set(first.pieces)
    assert len(second.pieces) > 4
    assert len(news) == 1
    assert [data for _, _, data in cargo.unpack_files(second.pieces[news.pop()]) if data == b"edited"] == [b"edited"]
    assert [needs for _, _, needs in second.parts()][-1] == tuple(second.pieces)


# --- named folders


def test_a_named_folders_content_travels_with_every_function(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    (folder / "sub").mkdir(parents=True)
    (folder / "tool.py").write_text("x = 1")
    (folder / "sub" / "data.csv").write_text("1")
    shipper = shipping.Shipper()
    before = shipper.travel("f", ())
    shipper.add(folder)

    assert before.cargo is None
    assert not before.holds()
    found = shipper.travel("f", ()).cargo
    (parcel,) = found.parcels  # type: ignore[union-attr]
    assert contents(found)[parcel.name] == {"tool.py": b"x = 1", "sub/data.csv": b"1"}
    assert (parcel.claims, parcel.roots) == (("tool",), ("",))


def test_a_named_package_can_be_imported_under_its_name_and_by_its_content(tmp_path: Path) -> None:
    folder = tmp_path / "named_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    shipper = shipping.Shipper()
    shipper.add(str(folder) + os.sep)

    found = shipper.travel("f", ()).cargo
    (parcel,) = found.parcels  # type: ignore[union-attr]
    assert contents(found)[parcel.name] == {"named_pkg/__init__.py": b""}
    assert (parcel.claims, parcel.roots) == (("named_pkg",), ("", "named_pkg"))


def test_a_single_file_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("1,2")
    shipper = shipping.Shipper()
    shipper.add(path)
    shipper.add(path)

    found = shipper.travel("f", ()).cargo
    (parcel,) = found.parcels  # type: ignore[union-attr]
    assert contents(found)[parcel.name] == {"table.csv": b"1,2"}


def test_naming_what_is_not_there_or_too_large_fails_at_once(tmp_path: Path) -> None:
    os.truncate(_touch(tmp_path / "big" / "x.bin"), MAX_CODE_BYTES + 1)

    with pytest.raises(ValueError, match="there is no such folder or file"):
        shipping.Shipper().add(tmp_path / "nowhere")
    with pytest.raises(SerializationError, match=r"ship\('.*big'\).* 50.0 MB.*x\.bin"):
        shipping.Shipper().add(tmp_path / "big")


def _touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize("name", ["cloudpickle", "msgpack", "platformdirs"])
def test_what_gpumesh_needs_itself_never_travels_wherever_it_lies(
    name: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    project.write(f"{name}/__init__.py")
    project.write("works_with_it.py", f"import {name}\n")
    assert reached("works_with_it", name) == ["works_with_it"]
