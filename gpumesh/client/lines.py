"""The order of calls of one actor: which have to wait for others made before them, and how they leave. Sends nothing itself.

A call that cannot be sent yet (a future among its arguments is of another mesh, its large arguments are to be stored again) stands in
its actor's line, and so does every call of that actor that is made after it. An actor without such calls has no line.

    made ── nobody stands in line ──> sent
      └── somebody does ──> in line ── all before it have left ──> its turn ──> sent, or it stands there as the first until it can be
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from gpumesh.model.payloads import Later

if TYPE_CHECKING:
    from gpumesh.client.lanes import Lane

Part = Tuple[Any, List[int], List[Any]]
"""Tasks of one lane that become one message or several: lane, ids, payloads."""


class Lines:
    """Calls that are not on their way, by actor, in the order in which they were made, which is that of their ids.

    Under the channel's lock; only whether there are any may be asked without it.
    """

    __slots__ = ("_lines", "_actors", "_called")

    def __init__(self) -> None:
        self._lines: Dict[int, Deque[int]] = {}  # None is empty.
        self._actors: Dict[int, int] = {}  # By call.
        self._called: Set[int] = set()  # Those that have nothing to wait for but their turn.

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __contains__(self, call: int) -> bool:
        return call in self._actors

    def __iter__(self) -> Iterator[int]:
        return iter(self._actors)

    def actor_of(self, call: int) -> int:
        """Whose call it is; 0 if it does not stand in line."""
        return self._actors.get(call, 0)

    def enter(self, actor: int, call: int) -> None:
        """It cannot be sent now, and none of that actor made after it can."""
        self._called.discard(call)
        if call in self._actors:
            return
        self._actors[call] = actor
        line = self._lines.get(actor)
        if line is None:
            line = self._lines[actor] = deque()
        if not line or line[-1] < call:
            line.append(call)
        elif call < line[0]:
            line.appendleft(call)
        else:
            self._lines[actor] = deque(sorted([*line, call]))

    def may_go(self, actor: int, call: int) -> bool:
        """Whether none that was made before it stands in line; else it does, too, until its turn."""
        line = self._lines.get(actor)
        if line is None or line[0] >= call:
            return True
        self.enter(actor, call)
        self._called.add(call)
        return False

    def leave(self, call: int) -> None:
        """It has been sent, or has ended."""
        actor = self._actors.pop(call, 0)
        self._called.discard(call)
        line = self._lines.get(actor)
        if line is None:
            return
        if line[0] == call:
            line.popleft()
        else:
            line.remove(call)
        if not line:
            del self._lines[actor]

    def next_of(self, actor: int) -> Optional[int]:
        """The first in line, if it waits for nothing but its turn: this is it, and said once."""
        line = self._lines.get(actor)
        if line is None or line[0] not in self._called:
            return None
        self._called.discard(line[0])
        return line[0]

    def clear(self) -> None:
        """Nobody stands in line."""
        self._lines, self._actors, self._called = {}, {}, set()


def parts_of(dirty: List[Lane]) -> Iterator[List[Part]]:
    """What lanes hold, which are empty then; each list is to be sent as one.

    Lanes leave in the order given. Calls of one actor leave in the order in which they were made, of whatever methods they are.
    """
    if len(dirty) > 1:
        groups: Dict[int, List[Lane]] = {}
        for lane in dirty:
            groups.setdefault(lane.actor or -lane.handle.number, []).append(lane)
        for lanes in groups.values():
            yield [_taken(lanes[0])] if len(lanes) == 1 else _merged(map(_taken, lanes))
    else:
        for lane in dirty:
            yield [_taken(lane)]


def that_keep_order(ids: List[int], payloads: List[Any]) -> Iterator[Tuple[List[int], List[Any]]]:
    """Calls in portions to be sent as a message each: of one message the coordinator takes those that wait for results last."""
    first = 0
    has_late = False
    for place, payload in enumerate(payloads):
        is_late = isinstance(payload, tuple) and any(type(value) is Later for _, value in payload[1])
        if has_late and not is_late:
            yield ids[first:place], payloads[first:place]
            first = place
        has_late = is_late
    yield ids[first:], payloads[first:]


def _taken(lane: Lane) -> Part:
    ids, lane.ids = lane.ids, []
    payloads, lane.payloads = lane.payloads, []
    return lane, ids, payloads


def _merged(parts: Iterable[Part]) -> List[Part]:
    calls = [(call, lane, payload) for lane, ids, payloads in parts for call, payload in zip(ids, payloads)]
    calls.sort(key=lambda each: each[0])
    merged: List[Part] = []
    last: Any = None
    for call, lane, payload in calls:
        if lane is not last:
            merged.append((lane, [], []))
            last = lane
        merged[-1][1].append(call)
        merged[-1][2].append(payload)
    return merged
