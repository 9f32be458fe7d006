"""Shipped code in the process that imports it, and its folder on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import msgpack
import pytest

from gpumesh.errors import SerializationError
from gpumesh.model.payloads import OutOfBand
from gpumesh.runtime import code_folder
from gpumesh.runtime.code import ShippedCode
from gpumesh.runtime.code_folder import CodeFolder
from gpumesh.serialization import cargo, exceptions
from gpumesh.serialization.cargo import File, Parcel


@pytest.fixture
def folder(tmp_path: Path) -> CodeFolder:
    root = tmp_path / "code"
    root.mkdir()
    return CodeFolder(str(root))


@pytest.fixture
def code(folder: CodeFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShippedCode]:
    """What it loads is forgotten at the end, and the path of modules is as before."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(exceptions, "shown_paths", {})
    yield ShippedCode(folder)
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


PIECES: Dict[bytes, bytes] = {}


def packed(name: str, claims: Tuple[str, ...], content: List[File], roots: Tuple[str, ...] = ("",)) -> Parcel:
    pieces = {cargo.digest_of(piece): cargo.pack_files(piece) for piece in cargo.in_pieces(content)}
    PIECES.update(pieces)
    return Parcel(name, cargo.digest_of_parcel(pieces), claims, roots, (("", "/home/me"),), tuple(pieces))


def parcel(claim: str, files: Dict[str, str], roots: Tuple[str, ...] = ("",)) -> Parcel:
    return packed(claim, (claim,), [File(name.encode(), False, text.encode()) for name, text in sorted(files.items())], roots)


def define(code: ShippedCode, *parcels: Parcel) -> bytes:
    digest = b"".join(parcel.digest for parcel in parcels)
    pieces = [piece for parcel in parcels for piece in parcel.pieces]
    for piece in pieces:
        code.define(piece, OutOfBand([PIECES[piece]]), ())  # As large ones arrive.
    code.define(digest, cargo.pack(list(parcels)), tuple(pieces))
    return digest


def load(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


# --- importing


def test_the_modules_of_the_active_cargo_can_be_imported(code: ShippedCode) -> None:
    code.activate(define(code, parcel("shp", {"shp/__init__.py": "", "shp/sub/mod.py": "x = 1"})))

    assert load("shp.sub.mod").x == 1


def test_other_content_replaces_what_was_loaded(code: ShippedCode) -> None:
    one = define(code, parcel("shp", {"shp/__init__.py": "from shp import part\ny = part.x", "shp/part.py": "x = 1"}))
    two = define(code, parcel("shp", {"shp/__init__.py": "from shp import part\ny = part.x", "shp/part.py": "x = 2"}))
    seen = []
    for digest in (one, two, one, two, two):
        code.activate(digest)
        seen.append((load("shp").y, code.generation))

    assert seen == [(1, 0), (2, 1), (1, 2), (2, 3), (2, 3)]


def test_what_depends_on_replaced_content_is_loaded_anew(code: ShippedCode) -> None:
    user = parcel("user", {"user.py": "import lib\ny = lib.x"})
    code.activate(define(code, user, parcel("lib", {"lib.py": "x = 1"})))
    assert load("user").y == 1

    code.activate(define(code, user, parcel("lib", {"lib.py": "x = 2"})))

    assert load("user").y == 2


def test_state_lasts_while_the_content_is_the_same(code: ShippedCode) -> None:
    lib, other = parcel("lib", {"lib.py": "n = []"}), parcel("other", {"other.py": "import lib\nn = []"})
    small, large = define(code, lib), define(code, lib, other)
    code.activate(small)
    load("lib").n.append(1)
    code.activate(large)
    load("other").n.append(2)
    code.activate(small)
    with pytest.raises(ImportError):
        load("other")  # Not part of this cargo.
    code.activate(b"")
    with pytest.raises(ImportError):
        load("lib")
    code.activate(large)

    assert (load("lib").n, load("other").n, code.generation) == ([1], [2], 0)
    assert load("other").lib is load("lib")


def test_parts_of_one_namespace_live_side_by_side(code: ShippedCode) -> None:
    left = packed("ns.left", ("ns.left.*",), [File(b"ns/left/a.py", False, b"n = []")])
    right = packed("ns.right", ("ns.right.*",), [File(b"ns/right/b.py", False, b"n = []")])
    only, both = define(code, left), define(code, left, right)
    code.activate(only)
    load("ns.left.a").n.append(1)
    code.activate(both)
    load("ns.right.b").n.append(2)
    code.activate(only)
    code.activate(both)

    assert (load("ns.left.a").n, load("ns.right.b").n) == ([1], [2])
    assert load("ns").left.a is load("ns.left.a")


def test_a_namespace_that_became_a_package_is_one(code: ShippedCode) -> None:
    first = packed("ns2", ("ns2.*",), [File(b"ns2/a.py", False, b"x = 1")])
    code.activate(define(code, first))
    assert load("ns2.a").x == 1

    code.activate(define(code, parcel("ns2", {"ns2/__init__.py": "y = 2", "ns2/a.py": "x = 3"})))

    assert (load("ns2.a").x, load("ns2").y) == (3, 2)


def test_shipped_code_wins_over_what_lies_on_the_path_or_was_loaded_from_there(
    code: ShippedCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decoy").mkdir()
    for name in ("winner_a.py", "winner_b.py"):
        (tmp_path / "decoy" / name).write_text("x = 'decoy'")
    monkeypatch.syspath_prepend(tmp_path / "decoy")
    assert load("winner_a").x == "decoy"

    code.activate(define(code, parcel("winner_a", {"winner_a.py": "x = 1"}), parcel("winner_b", {"winner_b.py": "x = 2"})))

    assert (load("winner_a").x, load("winner_b").x) == (1, 2)


def test_the_standard_library_is_left_alone(code: ShippedCode) -> None:
    import json

    code.activate(define(code, parcel("json", {"json.py": "x = 1"})))

    assert load("json") is json


def test_named_content_is_on_the_path_of_modules(code: ShippedCode) -> None:
    named = parcel("pkgd", {"pkgd/__init__.py": "", "pkgd/tool.py": "x = 1", "pkgd/data.txt": "hello"}, ("", "pkgd"))
    code.activate(define(code, named))

    assert load("tool").x == 1
    assert [Path(path, "data.txt").read_text() for path in sys.path if Path(path, "data.txt").exists()] == ["hello"]


def test_tracebacks_name_the_places_at_the_sender(code: ShippedCode) -> None:
    code.activate(define(code, parcel("fails", {"fails.py": "def f():\n    raise ValueError('here')"})))
    with pytest.raises(ValueError, match="here") as caught:
        load("fails").f()

    text = str(exceptions.load_exception(exceptions.dump_exception(caught.value)).__cause__)
    assert 'File "/home/me/fails.py", line 2, in f\n    raise ValueError' in text


def test_an_archive_that_cannot_be_unpacked_is_an_error_that_says_so(code: ShippedCode) -> None:
    for digest, archive in ((b"damaged", b"\x93\x01\x02\x03"), (b"newer", msgpack.packb([99, []]))):
        code.define(b"piece", b"", ())
        code.define(digest, archive, (b"piece",))

    with pytest.raises(SerializationError, match="cannot be unpacked"):
        code.activate(b"damaged")
    with pytest.raises(SerializationError, match="has format 99"):
        code.activate(b"newer")


# --- the archive


@pytest.mark.parametrize("name", [b"/etc/passwd", b"../x", b"a/../../x", b"a//b", b"c:/x", b"a\\b", b"", b"a/\0"])
def test_names_that_leave_the_folder_are_refused(name: bytes) -> None:
    with pytest.raises(SerializationError, match="does not stay in its folder"):
        cargo.unpack_files(cargo.pack_files([File(name, False, b"")]))


def test_what_expands_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = cargo.pack_files([File(b"zeros", False, bytes(10_000_000))])
    monkeypatch.setattr(cargo, "MAX_CODE_BYTES", 1_000_000)
    monkeypatch.setattr(cargo, "_OVERHEAD_BYTES", 0)

    with pytest.raises(SerializationError, match="expands to more than"):
        cargo.unpack_files(packed)


def test_files_come_back_as_they_were() -> None:
    files = [File(b"a", True, b"1" * 100_000), File("ß/é".encode(), False, b"")]

    assert cargo.unpack_files(cargo.pack_files(files)) == files


# --- the folder


def test_what_is_unpacked_cannot_be_changed_by_mistake(folder: CodeFolder) -> None:
    content = [File(b"run.sh", True, b"#!"), File(b"x/data", False, b"1")]
    placed = Path(folder.place(packed("p", (), content), PIECES))

    assert [(placed / "run.sh").stat().st_mode & 0o777, (placed / "x/data").stat().st_mode & 0o777] == [0o555, 0o444]
    assert [path.name for path in placed.parent.glob(".part-*")] == []


def test_the_least_recently_used_go_and_none_that_is_used(folder: CodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_folder, "CODE_CACHE_ENTRIES", 3)
    root = Path(folder.root)
    held = subprocess.Popen(
        [sys.executable, "-c", _HOLD, folder.root], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert held.stdout is not None
    in_use = Path(held.stdout.readline().strip()).name
    places = []
    for number in range(5):
        user = CodeFolder(folder.root)
        places.append(Path(user.place(parcel(f"m{number}", {f"m{number}.py": ""}), PIECES)))
        for descriptor in user._held.values():
            os.close(descriptor)
        old = time.time_ns() - (100 - number) * 1_000_000_000
        os.utime(str(places[-1]) + ".use", ns=(old, old))

    assert in_use in {path.name for path in root.iterdir()}
    assert [place.exists() for place in places] == [False, False, False, True, True]
    held.communicate("\n", timeout=20)
    assert held.returncode == 0


_HOLD = """
import sys
from gpumesh.runtime.code_folder import CodeFolder
from gpumesh.serialization import cargo
print(CodeFolder(sys.argv[1]).place(cargo.Parcel("held", b"h" * 16, (), ("",), (), ()), {}), flush=True)
sys.stdin.readline()
"""


def test_what_a_killed_process_left_half_written_is_removed(folder: CodeFolder) -> None:
    left = Path(folder.root, ".part-xyz")
    (left / "sub").mkdir(parents=True)
    (left / "sub" / "x.py").write_text("")

    folder.place(parcel("a", {"a.py": ""}), PIECES)

    assert not left.exists()


def test_several_processes_unpack_the_same_at_once(folder: CodeFolder) -> None:
    program = """
import sys
from gpumesh.runtime.code_folder import CodeFolder
from gpumesh.serialization import cargo
files = [cargo.File(b"f%d.py" % n, False, b"x") for n in range(300)]
sys.stdin.readline()
import os
pieces = {b"q" * 16: cargo.pack_files(files)}
place = CodeFolder(sys.argv[1]).place(cargo.Parcel("p", b"p" * 16, (), ("",), (), tuple(pieces)), pieces)
print(len(os.listdir(place)))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program, folder.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate("\n", timeout=30)[0] for process in processes] == ["300\n"] * 4


def test_a_full_disk_is_told_with_what_to_do(folder: CodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rmdir(folder.root)
    Path(folder.root).write_text("a file stands where the folder was")

    with pytest.raises(SerializationError, match=r"the code of m cannot be unpacked on this machine.*GPUMESH_CODE"):
        folder.place(parcel("m", {"m.py": ""}), PIECES)


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUMESH_CODE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    open_to_all = tmp_path / "gpumesh" / "code"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)

    assert CodeFolder().root == str(tmp_path / "temporary" / f"gpumesh-code-{os.geteuid()}")
    open_to_all.chmod(0o755)
    assert CodeFolder().root == str(open_to_all)
