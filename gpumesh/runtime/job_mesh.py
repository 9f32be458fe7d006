"""What runtime.job_service needs of the coordinator, which is a client of its own scheduler for script jobs. No code that acts."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Protocol, Sequence, Tuple

from gpumesh.model.tasks import TaskSpec

Parts = Sequence[Tuple[bytes, Any, Tuple[bytes, ...]]]
"""What DefineCode says of a folder: (digest, archive, needs), in order."""


class Mesh(Protocol):
    """What the jobs need of the coordinator."""

    def answer(self, client: int, number: int, value: Any, error: str = "", kind: str = "") -> None:
        """To a question or order of a client, if it is still there."""

    def run_script_tasks(self, spec: int, rows: Sequence[int], payloads: Sequence[Any], *, again: bool) -> None:
        """Give tasks to the scheduler. `again`: workers may have them from before a restart."""

    def cancel_script_tasks(self, rows: Sequence[int], *, force: bool) -> None:
        """End these. `force`: without giving them time."""

    def define_script(self, number: int, spec: TaskSpec) -> None:
        """Tasks of that number are of this spec from now on; its code has been defined."""

    def define_script_code(self, parts: Parts, functions: Iterable[bytes]) -> None:
        """The folder that scripts are in, and their functions, which have no body."""

    def forget_script_code(self, digests: Iterable[bytes]) -> None:
        """Nothing needs these any more."""

    def no_scripts_left(self) -> None:
        """All jobs have ended: what the scheduler knows of their specs may go."""

    def code_parts(self, digest: bytes) -> Parts:
        """What a client has defined under this digest, with what it needs; () if nothing."""

    def executing_scripts(self) -> Dict[int, Tuple[str, int, float]]:
        """Tasks that workers execute now: (worker, attempt, seconds so far) of each."""

    def unable_scripts(self) -> Sequence[Tuple[Sequence[int], str]]:
        """Tasks that nobody here can run: (their rows, why) of each kind."""

    def script_slots(self) -> int:
        """Slots of all workers."""

    def failed_attempts(self, row: int) -> Sequence[Dict[str, Any]]:
        """Of a task that is tried again."""

    def host_of(self, worker: str) -> str:
        """The host name of a worker; "" if it is not known any more."""

    def results_kept(self, rows: Sequence[int]) -> None:
        """The ends of these tasks are on disk: their workers may forget them."""

    def scripts_submitted_again(self) -> None:
        """After a restart: all that may be running has been given to `run_script_tasks`."""

    def note_job(self, kind: str, text: str, job: str) -> None:
        """An event for people: "accepted", "finished" or "cancelled"."""
