"""What a user may say about how an actor lives, and about calls of its methods, checked when it is said."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Sequence, Tuple, Type, Union

from gpumesh.client.options import Options, make_options
from gpumesh.config import CALL_TIMEOUT_SECONDS, MAILBOX_CALLS
from gpumesh.model.actors import CONCURRENCY_LIMIT, NAME_CHARACTERS
from gpumesh.model.records import NamedTuple

if TYPE_CHECKING:
    from typing import TypedDict

    class ActorOptionsGiven(TypedDict, total=False):
        """Keyword arguments of `mesh.actor` and of `.options` of what it returns; `ActorOptions` says what each means."""

        gpu: Union[None, str, int, float, bool]
        cores: Optional[int]
        memory: Union[None, str, int, float]
        tags: Optional[Mapping[str, str]]
        device: Optional[str]
        priority: int
        packages: Optional[Sequence[str]]
        place: bool
        placement_timeout: Optional[float]
        name: Optional[str]
        lifetime: Optional[str]
        max_restarts: int
        restart_seconds: Optional[float]
        max_concurrency: int
        mailbox: int
        call_timeout: Optional[float]

    class CallOptionsGiven(TypedDict, total=False):
        """Keyword arguments of `handle.method.options`."""

        timeout: Optional[float]
        retries: int
        retry_on: Union[Type[BaseException], Tuple[Type[BaseException], ...]]
        name: Optional[str]


_OF_TASKS = ("gpu", "cores", "memory", "tags", "device", "priority", "packages", "place", "placement_timeout")
_OF_CALLS = ("timeout", "retries", "retry_on", "name")
_ELSEWHERE = {
    "timeout": "it is one of its methods: handle.method.options(timeout=...)",
    "retries": "it is one of its methods, handle.method.options(retries=...); max_restarts says how often the actor is started again",
    "retry_on": "it is one of its methods: handle.method.options(retry_on=..., retries=...)",
    "backoff": "an actor that dies is started again at once, and after pauses where that happens again",
    "idempotent": "no call of an actor runs twice unless it has retries",
    "cost": "an actor goes where there is most room",
}


class ActorOptions(NamedTuple):
    """How an actor lives.

    Attributes:
        task: What its worker must have (`gpu`, `cores`, `memory`, `tags`, `device`), and `priority`, `packages`, `place` and
            `placement_timeout`; as for functions. GPUs are its own as long as it lives. With `cores` it takes so many slots of its
            worker, without it none.
        name: By which `mesh.get_actor` finds it; one actor at a time has it.
        lifetime: None: it ends when nobody refers to it any more, or its client is gone; "detached": only when it is killed.
        max_restarts: How often it is started again after its process or machine died, with a fresh state.
        restart_seconds: Restarts count for so long; None: for ever.
        max_concurrency: Calls at the same time, of methods that are not `async def`: threads.
        mailbox: Calls that one program may have pending at it.
        call_timeout: Seconds that a further call waits for room; None for ever, 0 not at all.
    """

    task: Options = Options(retries=0)
    name: Optional[str] = None
    lifetime: Optional[str] = None
    max_restarts: int = 0
    restart_seconds: Optional[float] = None
    max_concurrency: int = 1
    mailbox: int = MAILBOX_CALLS
    call_timeout: Optional[float] = CALL_TIMEOUT_SECONDS

    def __str__(self) -> str:
        """Only what differs from the defaults."""
        said = [f"{name}={value!r}" for name, value in zip(self._fields, self) if value != self._field_defaults[name]]
        if self.task != self._field_defaults["task"]:
            said[0] = str(self.task._replace(retries=Options._field_defaults["retries"]))
        return ", ".join(said)


ACTOR_DEFAULTS = ActorOptions()


def make_actor_options(given: Mapping[str, Any], *, base: ActorOptions = ACTOR_DEFAULTS) -> ActorOptions:
    """`base` with what was given, checked.

    Raises:
        TypeError: There is no such option, or its value is of the wrong type.
        ValueError: Its value makes no sense. Both messages name the option.
    """
    of_tasks: Dict[str, Any] = {}
    checked: Dict[str, Any] = {}
    for name, value in given.items():
        if name in _OF_TASKS:
            of_tasks[name] = value
        elif name in _CHECKS:
            checked[name] = _CHECKS[name](name, value)
        else:
            raise TypeError(_no_such_option(name, (*_OF_TASKS, *_CHECKS), of="an actor", elsewhere=_ELSEWHERE))
    return base._replace(task=make_options(of_tasks, base=base.task), **checked)


class CallOptions(NamedTuple):
    """How calls of one method run.

    Attributes:
        timeout: Seconds of run time; None for no limit.
        retries: How often it is run again where the actor died before it returned, and on exceptions that `retry_on` names.
        retry_on: Exceptions on which it is run again.
        name: For people; the method's own by default.
    """

    timeout: Optional[float] = None
    retries: int = 0
    retry_on: Tuple[Type[BaseException], ...] = ()
    name: Optional[str] = None


CALL_DEFAULTS = CallOptions()


def make_call_options(given: Mapping[str, Any], *, base: CallOptions = CALL_DEFAULTS) -> CallOptions:
    """`base` with what was given, checked. Raises as `make_actor_options`."""
    for name in given:
        if name not in _OF_CALLS:
            raise TypeError(_no_such_option(name, _OF_CALLS, of="a call", elsewhere=dict.fromkeys(_OF_TASKS, _OF_ITS_ACTOR)))
    checked = make_options({**base._asdict(), **given})
    options = CallOptions(checked.timeout, checked.retries, checked.retry_on, checked.name)
    if options.retry_on and not options.retries:
        raise ValueError("retry_on names exceptions on which a call is run again, and retries says how often: give it, too")
    return options


_OF_ITS_ACTOR = "it is one of the actor: mesh.actor(Class, ...) or Class.options(...)"


def _no_such_option(name: str, known: Sequence[str], *, of: str, elsewhere: Mapping[str, str]) -> str:
    import difflib

    if name in elsewhere:
        return f"{name} is no option of {of}; {elsewhere[name]}"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    return f"there is no option {name!r} of {of}; {hint}"


def _check_count(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number")
    if not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be from {least} to {most}")
    return value


def _check_restarts(name: str, value: Any) -> int:
    return _check_count(name, value, 0, 2**31 - 1)


def _check_concurrency(name: str, value: Any) -> int:
    return _check_count(name, value, 1, CONCURRENCY_LIMIT)


def _check_mailbox(name: str, value: Any) -> int:
    return _check_count(name, value, 1, 2**31 - 1)


def _seconds(name: str, value: Any) -> Optional[float]:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise TypeError(f"{name}={value!r} must be a number of seconds, or None")
    return None if math.isinf(value) and value > 0 else float(value)


def _check_restart_seconds(name: str, value: Any) -> Optional[float]:
    seconds = _seconds(name, value)
    if seconds is not None and seconds <= 0:
        raise ValueError(f"{name}={value!r} must be more than 0 seconds; None means that restarts count for ever")
    return seconds


def _check_call_timeout(name: str, value: Any) -> Optional[float]:
    seconds = _seconds(name, value)
    if seconds is not None and seconds < 0:
        raise ValueError(f"{name}={value!r} must be 0 or more seconds; None waits for ever")
    return seconds


def _check_name(name: str, value: Any) -> Optional[str]:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be text")
    if not value.strip() or len(value) > NAME_CHARACTERS:
        raise ValueError(f"{name}={value!r:.80} must be a text of 1 to {NAME_CHARACTERS} characters")
    if value.startswith("a-"):
        raise ValueError(f"{name}={value!r} looks like the id of an actor, which begins with 'a-'; choose another")
    return value


def _check_lifetime(name: str, value: Any) -> Optional[str]:
    if value not in (None, "detached"):
        raise ValueError(f"{name}={value!r} must be 'detached' (until it is killed) or None (while anybody refers to it)")
    return value  # type: ignore[no-any-return]


_CHECKS: Dict[str, Any] = {
    "name": _check_name,
    "lifetime": _check_lifetime,
    "max_restarts": _check_restarts,
    "restart_seconds": _check_restart_seconds,
    "max_concurrency": _check_concurrency,
    "mailbox": _check_mailbox,
    "call_timeout": _check_call_timeout,
}
