"""Modules that travel, as bytes: a list of parcels, and the pieces that they consist of. Knows no disk and no import system.

list  = msgpack [FORMAT, [[name, digest, claims, roots, shown, digests of pieces], ...]]
piece = zlib of msgpack [[name, is executable, bytes], ...]

Pieces are what is not sent again while it stays the same: each large file, and handfuls of the small ones.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import Any, Iterable, List, Tuple

import msgpack

from gpumesh.config import MAX_CODE_BYTES
from gpumesh.errors import SerializationError
from gpumesh.model.payloads import OutOfBand
from gpumesh.model.records import NamedTuple

DIGEST_BYTES = 16
LARGE_FILE_BYTES = 64 * 1024  # A piece of its own.
SMALL_FILES = 64  # In one piece, on average.
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
        pieces: Digests.
    """

    name: str
    digest: bytes
    claims: Tuple[str, ...]
    roots: Tuple[str, ...]
    shown: Tuple[Tuple[str, str], ...]
    pieces: Tuple[bytes, ...]


def in_pieces(files: List[File]) -> List[List[File]]:
    """Files, in order of their names, as pieces, one at least. A change of one file leaves all pieces without it as they are."""
    pieces: List[List[File]] = [[]]
    for file in files:
        if len(file.data) >= LARGE_FILE_BYTES:
            pieces.insert(0, [file])
            continue
        pieces[-1].append(file)
        if zlib.crc32(file.name) % SMALL_FILES == 0:
            pieces.append([])
    return [piece for piece in pieces if piece] or [[]]


def digest_of_parcel(pieces: Iterable[bytes]) -> bytes:
    """What a parcel's content is known by."""
    return blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).digest()


def digest_of(files: List[File]) -> bytes:
    """What a piece is known by; the files are in order of their names."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name, is_executable, data in files:
        digest.update(b"%d %d %d " % (len(name), is_executable, len(data)))
        digest.update(name)
        digest.update(data)
    return digest.digest()


def pack_files(files: List[File]) -> bytes:
    """One piece as bytes."""
    packer = msgpack.Packer(use_bin_type=True)
    squeeze = zlib.compressobj(_LEVEL)
    parts = [squeeze.compress(packer.pack_array_header(len(files)))]
    for file in files:
        parts.append(squeeze.compress(packer.pack(tuple(file))))
    parts.append(squeeze.flush())
    return b"".join(parts)


def unpack_files(data: Any) -> List[File]:
    """The files again, with names that stay inside the folder they are written to.

    Raises:
        SerializationError: These are not packed files, or they are larger than what may travel.
    """
    limit = MAX_CODE_BYTES + _OVERHEAD_BYTES
    try:
        expand = zlib.decompressobj()
        raw = expand.decompress(_plain(data), limit)
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
    """The list of parcels as bytes."""
    return bytes(msgpack.packb([_FORMAT, [tuple(parcel) for parcel in parcels]], use_bin_type=True))


def unpack(archive: Any) -> List[Parcel]:
    """The parcels of a list.

    Raises:
        SerializationError: This is none, or one of another version.
    """
    try:
        version, parcels = _unpack(_plain(archive))
        if version != _FORMAT:
            raise SerializationError(f"shipped code has format {version}, this side knows {_FORMAT}; bring both to one version")
        return [
            Parcel(str(name), bytes(digest), tuple(claims), tuple(roots), tuple(tuple(pair) for pair in shown), tuple(pieces))
            for name, digest, claims, roots, shown, pieces in parcels
        ]
    except (ValueError, TypeError) as error:
        raise SerializationError(f"shipped code cannot be unpacked: {error}") from None


def _plain(payload: Any) -> Any:
    return payload.parts[0] if type(payload) is OutOfBand else payload


def _unpack(data: Any) -> Any:
    return msgpack.unpackb(data, raw=False, use_list=False, max_bin_len=2**31 - 1)
