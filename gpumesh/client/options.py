"""What a user may say about how a function runs, checked when it is said. Becomes a TaskSpec when the function is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Type, Union

from gpumesh.config import DEFAULT_RETRIES, PLACEMENT_TIMEOUT_SECONDS
from gpumesh.model.records import NamedTuple
from gpumesh.model.resources import make_requirement
from gpumesh.model.tasks import TaskSpec

if TYPE_CHECKING:
    from typing import TypedDict

    class TaskOptions(TypedDict, total=False):
        """Keyword arguments of `accelerate`, `.options` and `mesh.distribute`; `Options` says what each means."""

        gpu: Union[None, str, int, float, bool]
        cores: Optional[int]
        memory: Union[None, str, int, float]
        tags: Optional[Mapping[str, str]]
        device: Optional[str]
        timeout: Optional[float]
        retries: int
        retry_on: Union[Type[BaseException], Tuple[Type[BaseException], ...]]
        backoff: float
        idempotent: bool
        name: Optional[str]
        priority: int
        cost: Optional[float]
        placement_timeout: Optional[float]
        place: bool
        packages: Optional[Sequence[str]]


class Options(NamedTuple):
    """How a function runs.

    Attributes:
        gpu: A kind ("cuda"), a model ("A100") or a number of GPUs, fractions allowed.
        cores: CPU cores.
        memory: "16GB", "512MiB" or bytes: of the GPU when one is asked for, of the host otherwise.
        tags: What the worker's tags must contain.
        device: What `.to(...)` bound it to.
        timeout: Seconds of run time; None for no limit.
        retries: Lost processes and machines survived; 0: at most once.
        retry_on: Exceptions of the function on which it is run again, too; they count among the `retries`.
        backoff: Seconds from a failed attempt to the next, doubled after each further one, up to 60; 0: at once.
        idempotent: It may run twice at the same time.
        name: For people; the function's own by default.
        priority: Higher goes first.
        cost: Relative length, if known.
        placement_timeout: Seconds to wait for a worker that can run it at all; None for ever.
        place: Move torch modules and tensors among the arguments to the task's device, and results back.
        packages: Requirements ("scikit-learn==1.5.*") of an environment of their own, which workers build when they first need it.
    """

    gpu: Union[None, str, int, float, bool] = None
    cores: Optional[int] = None
    memory: Union[None, str, int, float] = None
    tags: Optional[Mapping[str, str]] = None
    device: Optional[str] = None
    timeout: Optional[float] = None
    retries: int = DEFAULT_RETRIES
    retry_on: Tuple[Type[BaseException], ...] = ()
    backoff: float = 0.0
    idempotent: bool = False
    name: Optional[str] = None
    priority: int = 0
    cost: Optional[float] = None
    placement_timeout: Optional[float] = PLACEMENT_TIMEOUT_SECONDS
    place: bool = True
    packages: Tuple[str, ...] = ()

    def spec(self, *, function: bytes, name: str, python: str) -> TaskSpec:
        """These options for one function body.

        Args:
            function: Digest of the body.
            name: What people call the function.
            python: "3.11" when only that version can run it.
        """
        return TaskSpec(
            function=function,
            name=self.name or name,
            requirement=make_requirement(
                gpu=self.gpu, memory=self.memory, cores=self.cores, tags=self.tags, device=self.device, python=python
            ),
            timeout=self.timeout or 0.0,
            retries=self.retries,
            priority=self.priority,
            cost=self.cost or 0.0,
            idempotent=self.idempotent,
            placement_timeout=-1.0 if self.placement_timeout is None else self.placement_timeout,
            packages=self.packages,
            place=self.place,
            backoff=self.backoff,
        )

    def __str__(self) -> str:
        """Only what differs from the defaults."""
        said = [f"{name}={value!r}" for name, value in zip(self._fields, self) if value != self._field_defaults[name]]
        return ", ".join(said)


DEFAULTS = Options()


def make_options(given: Mapping[str, Any], *, base: Options = DEFAULTS) -> Options:
    """`base` with what was given, checked.

    Raises:
        TypeError: There is no such option, or its value is of the wrong type.
        ValueError: Its value makes no sense. Both messages name the option.
    """
    if not given:
        return base
    checked: Dict[str, Any] = {}
    for name, value in given.items():
        if name not in Options._fields:
            raise TypeError(_no_such_option(name))
        check = _CHECKS.get(name)
        checked[name] = check(name, value) if check is not None else value
    options = base._replace(**checked)
    if isinstance(options.gpu, str) and options.gpu.strip().replace(".", "", 1).isdecimal():
        raise ValueError(f"gpu={options.gpu!r} is text; write gpu={options.gpu.strip()} for a number of GPUs")
    requirement = make_requirement(
        gpu=options.gpu, memory=options.memory, cores=options.cores, tags=options.tags, device=options.device
    )
    gpus = requirement.gpus
    if gpus > 1 and not gpus.is_integer():
        raise ValueError(f"gpu={options.gpu!r} is neither a part of one GPU nor a whole number of them")
    if gpus > 1 and ":" in requirement.device:
        raise ValueError(
            f"gpu={options.gpu!r} is more than the one device {requirement.device!r}; ask for a kind, such as 'cuda'"
        )
    if options.device is not None and isinstance(options.gpu, str) and options.gpu.strip():
        raise ValueError(f"gpu={options.gpu!r} and to({options.device!r}) both name a device; give one of them")
    if requirement.device == "cpu" and gpus:
        raise ValueError(f"gpu={options.gpu!r} asks for a GPU, and to({options.device!r}) for none")
    return options


def bound_to(device: str, *, base: Options) -> Options:
    """Options for `.to(device)`: what it says of the device replaces what `gpu` said; a number of GPUs stays where it makes sense.

    Raises:
        TypeError, ValueError: It does not name a device.
    """
    if not isinstance(device, str):
        raise TypeError(f"to({device!r}) must name a device: 'cuda', 'cuda:1', 'mps', 'cpu' or a model such as 'RTX 3080'")
    is_number = isinstance(base.gpu, (int, float)) and not isinstance(base.gpu, bool)
    named = make_requirement(device=device)
    keeps_number = is_number and named.needs_gpu and (":" not in named.device or (base.gpu or 0) <= 1)  # type: ignore[operator]
    return make_options({"device": device, "gpu": base.gpu if keeps_number else None}, base=base)


def _no_such_option(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, Options._fields, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(Options._fields)}"
    return f"there is no option {name!r}; {hint}"


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise TypeError(f"{name}={value!r} must be a number")
    return float(value)


def _check_timeout(name: str, value: Any) -> Optional[float]:
    if value is None:
        return None
    seconds = _number(name, value)
    if seconds <= 0:
        raise ValueError(f"{name}={value!r} must be more than 0 seconds; None means no limit")
    return None if math.isinf(seconds) else seconds


def _check_placement_timeout(name: str, value: Any) -> Optional[float]:
    if value is None:
        return None
    seconds = _number(name, value)
    if seconds < 0:
        raise ValueError(f"{name}={value!r} must be 0 or more seconds; None waits for ever")
    return None if math.isinf(seconds) else seconds


def _check_backoff(name: str, value: Any) -> float:
    seconds = _number(name, value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name}={value!r} must be 0 or more seconds, and finite; 0 means that it is tried again at once")
    return seconds


def _check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number")
    if not 0 <= value < 2**31:
        raise ValueError(f"{name}={value!r} must be between 0 and 2**31")
    return value


def _check_priority(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number; higher goes first")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name}={value!r} must be between -2**31 and 2**31")
    return value


def _check_cost(name: str, value: Any) -> Optional[float]:
    if value is None:
        return None
    cost = _number(name, value)
    if not 0 < cost < math.inf:
        raise ValueError(f"{name}={value!r} must be more than 0 and finite; None means unknown")
    return cost


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")
    return value


def _check_name(name: str, value: Any) -> Optional[str]:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be text")
    return value or None


def _check_retry_on(name: str, value: Any) -> Tuple[Type[BaseException], ...]:
    classes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for class_ in classes:
        if not (isinstance(class_, type) and issubclass(class_, BaseException)):
            raise TypeError(f"{name}={value!r} must be an exception class, or a tuple of them")
    return classes


def _check_tags(name: str, value: Any) -> Optional[Mapping[str, str]]:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r} must be a dict such as {{'room': 'lab'}}")
    return {str(key): str(word) for key, word in value.items()}


def _check_device(name: str, value: Any) -> Optional[str]:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be text such as 'cuda', 'cuda:1' or 'RTX 3080'")
    return value


def _check_packages(name: str, value: Any) -> Tuple[str, ...]:
    """Sorted, each once: the same set is the same environment, however it is written."""
    if value is None:
        return ()
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a list of requirements; write {name}=[{value!r}]")
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(f"{name}={value!r} must be a list of requirements such as ['scikit-learn==1.5.*']")
    for package in value:
        if not isinstance(package, str):
            raise TypeError(f"{name}={value!r} holds {package!r}, which is not text such as 'scikit-learn==1.5.*'")
        if not package.strip() or "\n" in package:
            raise ValueError(f"{name}={value!r} holds {package!r}, which names no package")
        if package.lstrip().startswith("-"):
            raise ValueError(
                f"{name}={value!r} holds {package!r}: options of an installer belong into its settings on the workers"
            )
    return tuple(sorted({package.strip() for package in value}))


_CHECKS: Dict[str, Callable[[str, Any], Any]] = {
    "tags": _check_tags,
    "device": _check_device,
    "timeout": _check_timeout,
    "retries": _check_count,
    "retry_on": _check_retry_on,
    "backoff": _check_backoff,
    "idempotent": _check_flag,
    "name": _check_name,
    "priority": _check_priority,
    "cost": _check_cost,
    "placement_timeout": _check_placement_timeout,
    "place": _check_flag,
    "packages": _check_packages,
}
