"""What the pools of a worker tell its agent."""

from __future__ import annotations

from typing import Any, List, Tuple

from gpumesh.runtime.runner_processes import OutputTaker


class PoolOwner(OutputTaker):
    """What a pool tells its agent."""

    def on_results(self, results: List[Tuple[int, int, int, Any, float]]) -> None:
        """Attempts have ended."""
        raise AssertionError("overridden by the agent")

    def on_health(self, problem: str) -> None:
        """The pool cannot run tasks ("": it can again)."""
        raise AssertionError("overridden by the agent")

    def on_installing(self, packages: Tuple[Tuple[str, ...], ...]) -> None:
        """Environments of these sets of packages are being built: their tasks cannot run here until that is over."""
        raise AssertionError("overridden by the agent")

    def on_results_heard(self, results: Any) -> None:
        """A runner has told these, and `on_results` what was wanted of them."""
        raise AssertionError("overridden by the agent")

    def on_feeding(self, runner: int, task_id: int, payload: Any) -> None:
        """A task whose inputs lie in the store is sent to this runner next."""
        raise AssertionError("overridden by the agent")

    def on_inputs_free(self, task_id: int) -> None:
        """A task whose inputs lie in the store has ended, or nobody wants it any more."""
        raise AssertionError("overridden by the agent")

    def on_tasks_wait(self, tasks: List[Tuple[int, int]], *, waits: bool) -> None:
        """These, (task id, attempt), wait for others and take no slots; or, with `waits` false, they do again."""
        raise AssertionError("overridden by the agent")

    def on_actor_alive(self, actor: int, attempt: int) -> None:
        """The constructor of an actor has returned."""
        raise AssertionError("overridden by the agent")

    def on_inputs_unwanted(self, tasks: List[Tuple[int, int]]) -> None:
        """Nobody wants these (task id, attempt), whose inputs are not here yet."""
        raise AssertionError("overridden by the agent")

    def on_runner_message(self, runner: int, kind: Any, message: Any) -> None:
        """A runner wants something of the object store."""
        raise AssertionError("overridden by the agent")
