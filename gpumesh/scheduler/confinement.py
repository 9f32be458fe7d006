"""Where a task may be tried again that has ended a process or has gone down with a machine. Changes nothing.

The next attempt is made elsewhere: it may have been that machine. When it fails on a second one as well it is probably the task, and it stays with
those two: so it never tours all workers. Neither rule makes a task wait for somebody who is not there, nor for long for somebody who is busy.
"""

from __future__ import annotations

from typing import Iterable, Sequence, Tuple

from gpumesh.config import ELSEWHERE_LEAST_SECONDS, ELSEWHERE_UNKNOWN_SECONDS
from gpumesh.model.ids import WorkerId
from gpumesh.model.records import NamedTuple
from gpumesh.scheduler.states import Spec, Worker

SUSPECTS = 2  # Workers on which a task must have failed before it is the task rather than they.
DOUBLINGS = 10  # Of the patience with those that are busy.


class Confinement(NamedTuple):
    """Who may run a task: `only` these if there are any, else everybody but those to `avoid`."""

    only: Tuple[WorkerId, ...] = ()
    avoid: Tuple[WorkerId, ...] = ()

    def admits(self, ident: WorkerId) -> bool:
        """Whether this worker may."""
        return ident in self.only if self.only else ident not in self.avoid


ANYWHERE = Confinement()


def confinement(failed_on: Sequence[WorkerId], able: Iterable[Worker]) -> Confinement:
    """Where the next attempt is to be made.

    Args:
        failed_on: The first `SUSPECTS` workers that the task has failed on, each once.
        able: Who could run it now.
    """
    here = {worker.id: None for worker in able}
    known = tuple(ident for ident in failed_on if ident in here)
    if not known:
        return ANYWHERE
    if len(failed_on) >= SUSPECTS:
        return Confinement(only=tuple(sorted(known)))
    return Confinement(avoid=known) if len(here) > len(known) else ANYWHERE


def patience_seconds(spec: Spec, worker: Worker, strikes: int) -> float:
    """How long a task that failed here waits for the others, which may be busy, before it may come back here.

    Twice the time that it takes here; longer after each further failure.
    """
    seconds = 2 * worker.seconds(spec) if spec.function.is_known else ELSEWHERE_UNKNOWN_SECONDS
    return max(ELSEWHERE_LEAST_SECONDS, seconds) * 2.0 ** min(strikes - 1, DOUBLINGS)
