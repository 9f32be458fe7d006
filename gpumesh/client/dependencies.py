"""Futures as arguments: a call is sent when the results it needs are there. Nobody waits, nothing is unpickled on the way.

call ── pickled at once ──> held ── last result arrives ──> submitted ──> its own sink
                             └──── a result is a failure ──> its own sink, with that error
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from gpumesh.client import futures
from gpumesh.client.channel import SpecHandle
from gpumesh.client.futures import MeshFuture
from gpumesh.errors import MeshError
from gpumesh.model.outcomes import Status
from gpumesh.model.payloads import Payload
from gpumesh.serialization.late import Place, fill_in
from gpumesh.serialization.values import dumps, dumps_call

Wanted = List[Tuple[Place, MeshFuture]]


def take_out(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Tuple[Any, ...], Dict[str, Any], Wanted]:
    """The arguments with None in place of each future, and the futures with their places."""
    wanted: Wanted = [(place, value) for place, value in enumerate(args) if type(value) is MeshFuture]
    wanted.extend((place, value) for place, value in kwargs.items() if type(value) is MeshFuture)
    args = tuple([None if type(value) is MeshFuture else value for value in args])
    kwargs = {name: None if type(value) is MeshFuture else value for name, value in kwargs.items()}
    return args, kwargs, wanted


def submit_late(
    session: Any,
    handle: SpecHandle,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    sink: Any,
    *,
    function: Callable[..., Any],
    on_submitted: Callable[[int], None],
    is_wanted: Callable[[], bool],
) -> None:
    """Submit a call as soon as the futures among its arguments are done; returns at once.

    Args:
        sink: Told the end of the task; also of one that was never sent, because a future failed.
        function: For error messages about its parameters.
        on_submitted: Told the task's id.
        is_wanted: Asked before the call is sent: false when it was cancelled meanwhile.

    Raises:
        SerializationError: Another argument cannot be pickled.
    """
    args, kwargs, wanted = take_out(args, kwargs)
    call = dumps_call(args, kwargs, what=handle.name, function=function)
    held = _HeldCall(session, handle, call, wanted, sink, on_submitted, is_wanted)
    for _, future in wanted:
        future.add_done_callback(held.one_is_done)


class _HeldCall:
    """One call on its way to be submitted."""

    def __init__(
        self,
        session: Any,
        handle: SpecHandle,
        call: Payload,
        wanted: Wanted,
        sink: Any,
        on_submitted: Callable[[int], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._session = session
        self._handle = handle
        self._call = call
        self._wanted = wanted
        self._sink = sink
        self._on_submitted = on_submitted
        self._is_wanted = is_wanted
        self._missing = len(wanted)
        self._is_over = False
        self._lock = threading.Lock()

    def one_is_done(self, future: Any) -> None:
        """Called for each future, on the thread that learns of its end."""
        error = _error_of(future)
        with self._lock:
            self._missing -= 1
            if self._is_over or (error is None and self._missing):
                return
            self._is_over = True
        if error is None and self._is_wanted():
            error = self._submit()
        if error is not None:
            self._sink.task_ended(0, int(Status.REFUSED), error, 0.0, "")
        self._wanted = []

    def _submit(self) -> Optional[BaseException]:
        try:
            payload = fill_in(self._call, [(place, _payload_of(future)) for place, future in self._wanted])
            self._on_submitted(self._session.submit(self._handle, payload, self._sink))
        except MeshError as error:
            return error
        return None


def _error_of(future: MeshFuture) -> Optional[BaseException]:
    if future._status == Status.OK:
        return None  # Not unpickled here: that is the business of whoever asks for the value.
    try:
        return future.exception()
    except MeshError as error:  # It was cancelled.
        return error


def _payload_of(future: MeshFuture) -> Payload:
    """The value as it travelled, or pickled again if somebody has asked for it meanwhile."""
    with futures._lock:
        if future._status == Status.OK:
            payload: Payload = future._outcome
            return payload
    return dumps(future.result(), what=f"the result of {future.name}")
