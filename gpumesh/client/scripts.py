"""A script, as it is submitted: its folder as cargo, and its place in that. Reads files, sends nothing."""

from __future__ import annotations

import os
from typing import Any, List, Set

from gpumesh.model.records import NamedTuple
from gpumesh.serialization.cargo import File, Parcel, digest_of, digest_of_parcel, in_pieces, pack_files
from gpumesh.serialization.shipping import Cargo, folder_cargo


class PackedScript(NamedTuple):
    """A script and what travels with it.

    Attributes:
        path: Of the script here, absolute.
        name: Its base name.
        script: `TaskSpec.script`: its path in what travels, with "/" between the parts.
        function: `TaskSpec.function`: the same for the same script in the same folder, so that its speed is learned.
        code: `TaskSpec.code`: the digest of the cargo.
        cargo: What travels; `cargo.parts()` is (digest, bytes, digests of what it needs) of each piece, in the order to send them.
    """

    path: str
    name: str
    script: str
    function: bytes
    code: bytes
    cargo: Cargo


def pack_script(path: Any) -> PackedScript:
    """Read a script's folder, as it is now: everything in it but what `gpumesh.serialization.folders` leaves out. Blocks meanwhile.

    The script itself and the modules beside it that it imports travel in any case. Of a folder that holds more than a project (the
    user's home, the temporary folder, the root) only these travel.

    Raises:
        ValueError: There is no such script, or it cannot be read.
        SerializationError: The folder is too large; the message names its largest files.
    """
    found = _find(path)
    folder, name = os.path.split(found)
    needed = _needed(found, folder)
    if _holds_more_than_a_project(folder):
        cargo = _cargo_of(sorted(needed), folder)
        script = name
    else:
        cargo = folder_cargo(folder, name=name, keep=needed)
        (parcel,) = cargo.parcels
        script = "/".join([*filter(None, [parcel.shown[0][0]]), name])
    return PackedScript(found, name, script, _function(script, cargo.digest), cargo.digest, cargo)


def _find(path: Any) -> str:
    found = os.path.abspath(os.path.expanduser(os.fsdecode(path)))
    if os.path.isdir(found):
        raise ValueError(f"{os.fsdecode(path)} is a folder, not a script; name the file in it that is to be run")
    if not os.path.exists(found):
        raise ValueError(f"there is no script {os.fsdecode(path)}; it would be {found}")
    if not os.path.isfile(found) or not os.access(found, os.R_OK):
        raise ValueError(f"the script {found} cannot be read")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the script's name {os.path.basename(found)!r} is not text; rename it") from None
    return found


def _function(script: str, code: bytes) -> bytes:
    from hashlib import blake2b

    return blake2b(b"script\0" + script.encode() + b"\0" + code, digest_size=16).digest()


def _needed(script: str, folder: str) -> Set[str]:
    """The script, and the modules beside it that it imports, and those that they import."""
    from gpumesh.serialization.imports import imported_names

    needed: Set[str] = set()
    waiting = [(script, "")]
    while waiting:
        path, package = waiting.pop()
        if path in needed:
            continue
        needed.add(path)
        try:
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue  # Not for us to say: its interpreter may be another one.
        for name in imported_names(code, package):
            waiting += _beside(name, folder)
    return needed


def _beside(name: str, folder: str) -> List[Any]:
    """Files of a module, and of the packages that it is in, in a folder: each with the package that its imports are relative to."""
    found: List[Any] = []
    path, package = folder, ""
    for part in name.split("."):
        path = os.path.join(path, part)
        if os.path.isfile(path + ".py"):
            return [*found, (path + ".py", package)]
        package = f"{package}.{part}" if package else part
        if os.path.isfile(os.path.join(path, "__init__.py")):
            found.append((os.path.join(path, "__init__.py"), package))
        elif not os.path.isdir(path):
            break
    return found


def _holds_more_than_a_project(folder: str) -> bool:
    import tempfile

    return os.path.realpath(folder) in {
        os.path.realpath(each) for each in (os.path.expanduser("~"), tempfile.gettempdir(), os.sep)
    }


def _cargo_of(paths: List[str], folder: str) -> Cargo:
    files: List[File] = []
    for path in paths:
        with open(path, "rb") as file:
            name = os.fsencode(os.path.relpath(path, folder).replace(os.sep, "/"))
            files.append(File(name, os.access(path, os.X_OK), file.read()))
    files.sort()
    pieces = {digest_of(piece): pack_files(piece) for piece in in_pieces(files)}
    return Cargo([Parcel(folder, digest_of_parcel(pieces), (), ("",), (("", folder),), tuple(pieces))], pieces)
