"""Modules that travel, as bytes: a list of parcels, each with its files compressed on their own. Knows no disk and no import system.

archive = msgpack [FORMAT, [[name, digest, claims, roots, shown, files], ...]]
files   = zlib of msgpack [[name, is executable, bytes], ...]
"""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import Any, List, Tuple

import msgpack

from gpumesh.config import MAX_CODE_BYTES
from gpumesh.errors import SerializationError
from gpumesh.model.records import NamedTuple

DIGEST_BYTES = 16
_FORMAT = 1
_LEVEL = 1  # Source shrinks to a third in a third of the time of the default level.
_OVERHEAD_BYTES = 64 * 1024 * 1024  # Names of the most files that there may be.


class File(NamedTuple):
    """One file of a parcel."""

    name: bytes  # Relative, with "/" between the parts, as the sender's file system has it.
    is_executable: bool
    data: bytes


class Parcel(NamedTuple):
    """Files that travel together and are known by their content.

    Attributes:
        name: For people.
        digest: Of the files.
        claims: Modules that this is the code of: "proj" with all below it, "tests.*" what is directly below it.
        roots: Folders in it, relative, that belong on the path of modules.
        shown: (folder in it, where that was at the sender), for tracebacks.
        files: Packed.
    """

    name: str
    digest: bytes
    claims: Tuple[str, ...]
    roots: Tuple[str, ...]
    shown: Tuple[Tuple[str, str], ...]
    files: bytes


def digest_of(files: List[File]) -> bytes:
    """What a parcel's content is known by; the files are in order of their names."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name, is_executable, data in files:
        digest.update(b"%d %d %d " % (len(name), is_executable, len(data)))
        digest.update(name)
        digest.update(data)
    return digest.digest()


def pack_files(files: List[File]) -> bytes:
    """The files of one parcel as bytes."""
    packer = msgpack.Packer(use_bin_type=True)
    squeeze = zlib.compressobj(_LEVEL)
    parts = [squeeze.compress(packer.pack_array_header(len(files)))]
    for file in files:
        parts.append(squeeze.compress(packer.pack(tuple(file))))
    parts.append(squeeze.flush())
    return b"".join(parts)


def unpack_files(data: bytes) -> List[File]:
    """The files again, with names that stay inside the folder they are written to.

    Raises:
        SerializationError: These are not packed files, or they are larger than what may travel.
    """
    limit = MAX_CODE_BYTES + _OVERHEAD_BYTES
    try:
        expand = zlib.decompressobj()
        raw = expand.decompress(data, limit)
        if expand.unconsumed_tail or not expand.eof:
            raise SerializationError(f"shipped code is damaged, or expands to more than {limit / 1e6:.0f} MB")
        files = [File(bytes(name), bool(mode), bytes(content)) for name, mode, content in _unpack(raw)]
    except (zlib.error, ValueError, TypeError) as error:
        raise SerializationError(f"shipped code cannot be unpacked: {error}") from None
    for file in files:
        parts = file.name.split(b"/")
        if not file.name or b"\0" in file.name or b"\\" in file.name or b":" in parts[0] or _UNSAFE.intersection(parts):
            raise SerializationError(f"shipped code has a file named {file.name!r}, which does not stay in its folder")
    return files


_UNSAFE = frozenset({b"", b".", b".."})


def pack(parcels: List[Parcel]) -> bytes:
    """Parcels as one archive."""
    return bytes(msgpack.packb([_FORMAT, [tuple(parcel) for parcel in parcels]], use_bin_type=True))


def unpack(archive: Any) -> List[Parcel]:
    """The parcels of an archive.

    Raises:
        SerializationError: This is none, or one of another version.
    """
    try:
        version, parcels = _unpack(archive)
        if version != _FORMAT:
            raise SerializationError(f"shipped code has format {version}, this side knows {_FORMAT}; bring both to one version")
        return [
            Parcel(str(name), bytes(digest), tuple(claims), tuple(roots), tuple(tuple(pair) for pair in shown), bytes(files))
            for name, digest, claims, roots, shown, files in parcels
        ]
    except (ValueError, TypeError) as error:
        raise SerializationError(f"shipped code cannot be unpacked: {error}") from None


def _unpack(data: Any) -> Any:
    return msgpack.unpackb(data, raw=False, use_list=False, max_bin_len=2**31 - 1)
