"""Mutated frames into one side of the wire, guided by the lines that they reach: corpus, mutations and the loop that feeds them.

A case is a list of byte strings: what one connection receives after it was made ready, each most often a whole frame. What a side
is, and what it is made ready for, stands in `fuzz_sides`.
"""

from __future__ import annotations

import gc
import random
import signal
import struct
import time
import traceback
from typing import Any, Awaitable, Callable, Dict, List, Optional, Sequence, Tuple

import msgpack

from benchmarks.fuzz_coverage import Coverage

Case = List[bytes]

HEADER = struct.Struct("<IBBH")
DEADLINE_SECONDS = 5.0  # For one case; a whole one takes less than a millisecond.
FRAMES_PER_CASE = 12
CORPUS_LIMIT = 3000
FRESH_CASES = 8  # Of ten: made from the corpus; the others are samples strung together anew.

NUMBERS = (0, 1, -1, 2, 7, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**31 + 3, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
           -(2**31), -(2**63), 0.0, -0.5, 1e300, float("inf"), float("-inf"), float("nan"))  # fmt: skip
VALUES: Tuple[Any, ...] = (
    None, True, False, "", "x", "../../etc/passwd", "a" * 300, "\x00", "\x1b[2J", b"", b"\x00" * 16, b"y" * 300, [], [[]], [[[[]]]],
    {}, {"a": 1}, {1: 2}, {b"k": []}, [None], [1, 2], [1, 2, 3], ["a", 1], [[1, 2], [3, 4]], msgpack.ExtType(1, b"\x01\x00"),
    msgpack.ExtType(2, b"\x05\x00\x00\x00MKJ\x1a" + b"\x00" * 8), msgpack.ExtType(3, b"\x00" * 8), msgpack.ExtType(42, b"")
)  # fmt: skip
LENGTHS = (0, 1, 4, 7, 4095, 4096, 4097, 2**20, 2**24, 18874368, 18874369, 2**31, 2**32 - 1)


class Hung(BaseException):
    """A case did not end within its deadline."""


class Finding(Exception):
    """What a case has done that it must not; the text says what."""


class Mutator:
    """Makes cases of cases. What it makes follows from its random numbers alone."""

    def __init__(self, chance: random.Random, kinds: Sequence[int]) -> None:
        self._chance = chance
        self._kinds = list(kinds)
        self._frames = (self._structure, self._structure, self._structure, self._bytes, self._header, self._kind, self._cut)

    def mutate(self, case: Case, other: Case) -> Case:
        """A neighbour of `case`, maybe with something of `other`."""
        chance = self._chance
        frames = list(case)
        for _ in range(1 + chance.randrange(3)):
            way = chance.randrange(10)
            at = chance.randrange(len(frames)) if frames else 0
            if not frames or way == 0:
                frames[at:at] = chance.sample(other, min(len(other), 1 + chance.randrange(3)))
            elif way == 1:
                frames.insert(chance.randrange(len(frames) + 1), frames[at])
            elif way == 2 and len(frames) > 1:
                frames.pop(at)
            elif way == 3 and len(frames) > 1:
                to = chance.randrange(len(frames))
                frames[at], frames[to] = frames[to], frames[at]
            else:
                frames[at] = chance.choice(self._frames)(frames[at])
        return frames[:FRAMES_PER_CASE] or [b"\x00"]

    def _structure(self, frame: bytes) -> bytes:
        """Another value somewhere in the body of a frame."""
        try:
            length, kind, flags, buffers = HEADER.unpack_from(frame)
            if flags or buffers or length != len(frame) - 8:
                return self._bytes(frame)
            body = msgpack.unpackb(frame[8:], strict_map_key=False)
            body = msgpack.packb(self._value(body, 0))
        except (ValueError, TypeError, OverflowError, struct.error, msgpack.UnpackException):
            return self._bytes(frame)
        return HEADER.pack(len(body), kind, 0, 0) + body

    def _value(self, value: Any, depth: int) -> Any:
        chance = self._chance
        if isinstance(value, list) and value and depth < 8 and (depth == 0 or chance.random() < 0.8):
            at = chance.randrange(len(value))
            way = chance.randrange(12) if depth else chance.randrange(20)
            if way == 0:
                return value[:at] + value[at + 1 :]
            if way == 1:
                return value[:at] + [value[at]] * (2 + chance.randrange(3)) + value[at + 1 :]
            if way == 2:
                return [*value, chance.choice(VALUES)]
            return [*value[:at], self._value(value[at], depth + 1), *value[at + 1 :]]
        if isinstance(value, dict) and value and chance.random() < 0.8:
            key = chance.choice(list(value))
            return {**value, key: self._value(value[key], depth + 1)}
        if isinstance(value, bool) or value is None or chance.random() < 0.3:
            return chance.choice(VALUES) if chance.random() < 0.6 else chance.choice(NUMBERS)
        if isinstance(value, int):
            return chance.choice((value + 1, value - 1, value ^ (1 << chance.randrange(40)), -value, chance.choice(NUMBERS)))
        if isinstance(value, float):
            return chance.choice((value * 2, -value, int(value) if abs(value) < 1e18 else 0, chance.choice(NUMBERS)))
        if isinstance(value, str):
            return chance.choice((value + "x", value[:-1], value * 3, value.encode(), ""))
        if isinstance(value, bytes):
            return chance.choice((value[:-1], value + b"\x00", value * 2, self._bytes(value or b"\x00"), ""))
        return chance.choice(VALUES)

    def _bytes(self, frame: bytes) -> bytes:
        chance = self._chance
        data = bytearray(frame or b"\x00")
        for _ in range(1 + chance.randrange(4)):
            at = chance.randrange(max(len(data), 1))
            way = chance.randrange(4) if data else 2
            if way == 0:
                data[at] ^= 1 << chance.randrange(8)
            elif way == 1:
                data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xC7, 0xDD, 0xDF, 0xFF))
            elif way == 2:
                data[at:at] = chance.randbytes(1 + chance.randrange(8))
            elif len(data) > 2:
                del data[at : at + 1 + chance.randrange(4)]
        return bytes(data) or b"\x00"

    def _header(self, frame: bytes) -> bytes:
        """Other numbers in a frame's header."""
        if len(frame) < 8:
            return frame + bytes(8)
        chance = self._chance
        length, kind, flags, buffers = HEADER.unpack_from(frame)
        way = chance.randrange(3)
        if way == 0:
            length = chance.choice((*LENGTHS, (length + 1) % 2**32, max(length - 1, 0)))
        elif way == 1:
            flags = chance.choice((0, 1, 2, 3, 0x80, 0xFF))
        else:
            buffers = chance.choice((0, 1, 2, 3, 255, 65535))
        return HEADER.pack(length, kind, flags, buffers) + frame[8:]

    def _kind(self, frame: bytes) -> bytes:
        """The same body as another message."""
        chance = self._chance
        kind = chance.choice(self._kinds) if chance.random() < 0.9 else chance.randrange(256)
        return frame[:4] + bytes((kind,)) + frame[5:]

    def _cut(self, frame: bytes) -> bytes:
        return frame[: self._chance.randrange(len(frame) + 1)] or b"\x00"


class Figures:
    """What one run over one side has done."""

    def __init__(self, side: str, seed: int) -> None:
        self.side = side
        self.seed = seed
        self.frames = 0
        self.cases = 0
        self.seconds = 0.0
        self.lines = 0
        self.corpus = 0
        self.findings: List[Dict[str, Any]] = []
        self.object_growth = 0  # Python objects after the last batch, against those after the warm-up.
        self.resident_growth = 0  # Bytes.
        self.slowest_seconds = 0.0

    def as_dict(self) -> Dict[str, Any]:
        """For a file."""
        return dict(vars(self))


async def fuzz(
    side: Any,
    *,
    frames: int,
    seconds: float,
    seed: int,
    coverage: Coverage,
    batch_frames: int = 20_000,
    on_batch: Callable[[Figures], None] = lambda figures: None,
    most_findings: int = 20,
) -> Figures:
    """Feed mutated cases to `side` until so many frames have gone in or so much time has passed.

    Args:
        batch_frames: After so many, the side must come to rest, serve an honest peer, and hold as much memory as before.
    """
    figures = Figures(side.name, seed)
    chance = random.Random(seed)
    mutator = Mutator(chance, side.kinds)
    corpus: List[Case] = [list(case) for case in side.seeds()]
    samples = [frame for case in corpus for frame in case]
    seen: Dict[str, int] = {}
    started = time.monotonic()
    at_rest: Optional[Tuple[int, int]] = None
    next_batch = batch_frames
    for case in corpus:
        with coverage.watch():
            await _one(side, case, figures, seen)
    while figures.frames < frames and time.monotonic() - started < seconds and len(figures.findings) < most_findings:
        if chance.randrange(10) < FRESH_CASES:
            case = mutator.mutate(chance.choice(corpus), chance.choice(corpus))
        else:
            case = mutator.mutate(chance.choices(samples, k=1 + chance.randrange(6)), samples)
        with coverage.watch():
            await _one(side, case, figures, seen)
        if coverage.has_news() and len(corpus) < CORPUS_LIMIT:
            corpus.append(case)
        if figures.frames >= next_batch:
            next_batch += batch_frames
            at_rest = await _between(side, figures, at_rest)
            on_batch(figures)
    figures.seconds = time.monotonic() - started
    await _between(side, figures, at_rest)
    if hasattr(side, "close"):
        await side.close()
    figures.lines = coverage.lines
    figures.corpus = len(corpus)
    return figures


async def _one(side: Any, case: Case, figures: Figures, seen: Dict[str, int]) -> None:
    began = time.perf_counter()
    problem = await run_one(side, case)
    figures.slowest_seconds = max(figures.slowest_seconds, time.perf_counter() - began)
    figures.frames += len(case)
    figures.cases += 1
    if problem:
        where = problem.rstrip().splitlines()
        key = "\n".join(line for line in where if line.lstrip().startswith("File"))[-400:] or where[-1]
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1:
            figures.findings.append({"side": side.name, "case": [frame.hex() for frame in case], "problem": problem})


async def run_one(side: Any, case: Case) -> str:
    """What is wrong with how `side` takes this; "" if nothing is."""
    previous = signal.signal(signal.SIGALRM, _hung)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_SECONDS)
    try:
        found: Awaitable[List[str]] = side.run(case)
        return "\n".join(await found)
    except Hung:
        return f"no end within {DEADLINE_SECONDS:g} s\n{traceback.format_exc()}"
    except Exception:  # noqa: BLE001  # Whatever it is, it is what this looks for.
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _hung(*_: object) -> None:
    raise Hung


async def _between(side: Any, figures: Figures, at_rest: Optional[Tuple[int, int]]) -> Optional[Tuple[int, int]]:
    """An honest peer is served, and what the others left is gone."""
    try:
        problem = await side.rest()
    except Exception:  # noqa: BLE001  # As above.
        problem = traceback.format_exc()
    if problem:
        figures.findings.append({"side": side.name, "case": [], "problem": f"after {figures.frames} frames: {problem}"})
    gc.collect()
    now = len(gc.get_objects()), resident_bytes()
    if at_rest is None:
        return now
    figures.object_growth = now[0] - at_rest[0]
    figures.resident_growth = now[1] - at_rest[1]
    return at_rest


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
