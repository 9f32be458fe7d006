"""`accelerate` in all its forms, without a mesh."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import operator
import pickle
import sys
from typing import Any, Iterator

import cloudpickle
import pytest

from gpumesh import AcceleratedFunction, accelerate
from gpumesh.client.mesh import GPUMesh
from gpumesh.errors import NoSuitableWorkerError, SerializationError, TaskCancelledError
from gpumesh.model.resources import Requirement
from tests.unit.client.fake_session import FakeMesh, FakeSession


def plain(lr: float, epochs: int = 3) -> float:
    """Train a little."""
    return lr * epochs


decorated = accelerate(plain)


@accelerate
def named(value: int) -> int:
    return value + 1


@accelerate(timeout=9, retries=0)
def countdown(value: int) -> int:
    return 0 if value == 0 else 1 + countdown(value - 1)


@accelerate
async def slowly(value: int) -> int:
    await asyncio.sleep(0)
    return value * 2


class Model:
    """Methods of every kind."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @accelerate
    def scale(self, value: int) -> int:
        """Multiply."""
        return self.factor * value

    @accelerate
    @staticmethod
    def outer_static(value: int) -> int:
        return value + 10

    @staticmethod
    @accelerate
    def inner_static(value: int) -> int:
        return value + 20

    @accelerate
    @classmethod
    def outer_class(cls, value: int) -> str:
        return f"{cls.__name__} {value}"


@pytest.fixture
def session() -> Iterator[FakeSession]:
    session = FakeSession()
    accelerate.install(None)
    accelerate._mesh = FakeMesh(session)  # type: ignore[assignment]
    yield session
    accelerate.install(None)


# --- decorating


@pytest.mark.parametrize("decorate", [accelerate, accelerate(), accelerate(GPUMesh("h:1")), accelerate(None, timeout=5)])
def test_every_form_makes_an_accelerated_function(decorate: Any) -> None:
    made = decorate(plain)

    assert isinstance(made, AcceleratedFunction)
    assert made(2.0, epochs=4) == 8.0


def test_it_looks_like_the_function() -> None:
    assert (decorated.__name__, decorated.__doc__, decorated.__module__) == ("plain", "Train a little.", __name__)
    assert decorated.__wrapped__ is plain
    assert inspect.signature(decorated) == inspect.signature(plain)
    assert decorated.__annotations__ == plain.__annotations__
    assert repr(decorated) == "<accelerated plain>"
    assert repr(decorated.options(timeout=5, gpu="A100")) == "<accelerated plain with gpu='A100', timeout=5.0>"


@pytest.mark.parametrize(
    "function",
    [functools.partial(plain, epochs=5), operator.neg, math.sqrt, functools.lru_cache(plain), operator.itemgetter(0)],
)
def test_any_callable_will_do(function: Any, session: FakeSession) -> None:
    argument = [4.0] if isinstance(function, operator.itemgetter) else 4.0

    made = accelerate(function)

    assert made(argument) == function(argument)
    assert made.remote(argument).result() == function(argument)
    assert made.__name__


def test_the_outer_decorator_counts() -> None:
    assert accelerate(None, timeout=5)(accelerate(None, timeout=7)(plain)).task_options.timeout == 5


class _Class:
    pass


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (_Class, "is a class; decorate its methods"),
        ("http://host:8000", "takes a mesh or a function"),
        (17, "takes a mesh or a function"),
    ],
)
def test_what_cannot_run_is_refused_at_once(target: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        accelerate(target)


def test_a_generator_function_called_here_gives_a_plain_generator() -> None:
    @accelerate
    def numbers(count: int) -> Iterator[int]:
        yield from range(count)

    @accelerate
    async def ticks(count: int) -> Any:
        for value in range(count):
            yield value

    async def collect() -> Any:
        return [value async for value in ticks(3)]

    assert inspect.isgenerator(numbers(3))
    assert list(numbers(3)) == [0, 1, 2]
    assert asyncio.run(collect()) == [0, 1, 2]


# --- options


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"retrys": 1}, TypeError, "did you mean 'retries'"),
        ({"colour": 1}, TypeError, "there are gpu, cores"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"timeout": "5"}, TypeError, "timeout='5'"),
        ({"timeout": float("nan")}, TypeError, "timeout=nan"),
        ({"retries": -1}, ValueError, "retries=-1"),
        ({"retries": 1.5}, TypeError, "retries=1.5"),
        ({"retries": True}, TypeError, "retries=True"),
        ({"retry_on": "ValueError"}, TypeError, "retry_on="),
        ({"retry_on": (ValueError, 3)}, TypeError, "retry_on="),
        ({"backoff": "1"}, TypeError, "backoff='1'"),
        ({"backoff": -0.5}, ValueError, "backoff=-0.5"),
        ({"backoff": math.inf}, ValueError, "backoff=inf"),
        ({"idempotent": 1}, TypeError, "idempotent=1"),
        ({"priority": 0.5}, TypeError, "priority=0.5"),
        ({"cost": -2}, ValueError, "cost=-2"),
        ({"cores": 0}, ValueError, "cores=0"),
        ({"memory": "16 apples"}, ValueError, "memory '16 apples'"),
        ({"gpu": []}, ValueError, r"gpu=\[\]"),
        ({"gpu": 1.5}, ValueError, "gpu=1.5"),
        ({"tags": "lab"}, TypeError, "tags='lab'"),
        ({"placement_timeout": -1}, ValueError, "placement_timeout=-1"),
        ({"place": None}, TypeError, "place=None"),
        ({"gpu": "2"}, ValueError, "gpu='2' is text; write gpu=2"),
        ({"gpu": " "}, ValueError, "a device must be named"),
        ({"gpu": -1}, ValueError, "gpu=-1"),
        ({"gpu": math.nan}, ValueError, "gpu=nan"),
        ({"gpu": [1]}, ValueError, r"gpu=\[1\]"),
        ({"gpu": "cuda:x"}, ValueError, "no number after the colon"),
        ({"gpu": 2, "device": "cuda:1"}, ValueError, "more than the one device 'cuda:1'"),
        ({"gpu": "A100", "device": "cuda"}, ValueError, "both name a device"),
        ({"gpu": 1, "device": "cpu"}, ValueError, "asks for a GPU"),
        ({"memory": "16 parsec"}, ValueError, "'16 parsec' is not a size"),
        ({"memory": -1}, ValueError, "memory must be between"),
        ({"cores": 1.5}, ValueError, "cores=1.5"),
        ({"priority": 1.5}, TypeError, "priority=1.5"),
        ({"cost": 0}, ValueError, "cost=0"),
        ({"name": 3}, TypeError, "name=3"),
        ({"packages": "numpy"}, TypeError, r"write packages=\['numpy'\]"),
        ({"packages": {"numpy": 1}}, TypeError, "must be a list of requirements"),
        ({"packages": ["numpy", 3]}, TypeError, "holds 3"),
        ({"packages": ["numpy", " "]}, ValueError, "names no package"),
        ({"packages": ["--index-url=http://elsewhere"]}, ValueError, "options of an installer"),
    ],
)
def test_a_wrong_option_is_named_when_decorating(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        accelerate(None, **options)


def test_options_become_the_spec(session: FakeSession) -> None:
    made = accelerate(
        None, gpu="A100", memory="16GB", cores=2, tags={"room": "lab"}, timeout=300, retries=1, priority=5, cost=2,
        idempotent=True, name="job", placement_timeout=None,
    )(plain)  # fmt: skip

    made.remote(1.0).result()

    (spec,) = session._handles
    assert spec.requirement[:7] == ("gpu", "a100", 0.0, 16 * 10**9, 0, 2, (("room", "lab"),))
    assert spec[3:9] == (300.0, 1, 5, 2.0, True, -1.0)
    assert (spec.name, spec.place) == ("job", True)


@pytest.mark.parametrize(
    ("options", "need"),
    [
        ({}, Requirement()),
        ({"gpu": 1}, Requirement("gpu", "", 1.0)),
        ({"gpu": True}, Requirement("gpu", "", 1.0)),
        ({"gpu": 0}, Requirement()),
        ({"gpu": False}, Requirement()),
        ({"gpu": 0.5}, Requirement("gpu", "", 0.5)),
        ({"gpu": 0.5, "memory": "8GB"}, Requirement("gpu", "", 0.5, 8 * 10**9)),
        ({"gpu": 2, "memory": "512MiB"}, Requirement("gpu", "", 2.0, 512 * 2**20)),
        ({"gpu": "cuda"}, Requirement("cuda", "", 1.0)),
        ({"gpu": "RTX 3080", "memory": 10**9}, Requirement("gpu", "rtx 3080", 0.0, 10**9)),
        ({"gpu": "cpu", "memory": "4GB"}, Requirement("cpu", "", 0.0, 0, 4 * 10**9)),
        ({"memory": "4GB", "cores": 8}, Requirement(memory=4 * 10**9, cores=8)),
    ],
)
def test_resources_become_the_requirement(options: Any, need: Requirement, session: FakeSession) -> None:
    accelerate(None, **options)(operator.neg).remote(1.0).result()

    (spec,) = session._handles
    assert spec.requirement == need


@pytest.mark.parametrize(
    ("device", "base", "need"),
    [
        ("cuda", {}, Requirement("cuda", "", 1.0)),
        ("CUDA:1", {}, Requirement("cuda:1", "", 1.0)),
        ("cuda", {"gpu": 0.25}, Requirement("cuda", "", 0.25)),
        ("cuda", {"gpu": 2}, Requirement("cuda", "", 2.0)),
        ("cuda:1", {"gpu": 2}, Requirement("cuda:1", "", 1.0)),
        ("cuda:1", {"gpu": 0.5}, Requirement("cuda:1", "", 0.5)),
        ("RTX 3080", {"gpu": "A100", "memory": "8GB"}, Requirement("gpu", "rtx 3080", 0.0, 8 * 10**9)),
        ("cpu", {"gpu": 1, "memory": "8GB"}, Requirement("cpu", "", 0.0, 0, 8 * 10**9)),
        ("mps", {}, Requirement("mps", "", 1.0)),
    ],
)
def test_to_names_the_device(device: str, base: Any, need: Requirement, session: FakeSession) -> None:
    accelerate(None, **base)(operator.neg).to(device).remote(1.0).result()

    (spec,) = session._handles
    assert spec.requirement == need


def test_place_travels(session: FakeSession) -> None:
    accelerate(None, place=False)(plain).remote(1.0).result()

    (spec,) = session._handles
    assert spec.place is False


def test_packages_are_sorted_so_that_the_same_set_is_the_same_environment(session: FakeSession) -> None:
    for packages in (["b", "a==1.*", "b"], ("a==1.* ", "b"), {"b", "a==1.*"}):
        accelerate(None, packages=packages)(plain).remote(1.0).result()

    (spec,) = session._handles
    assert spec.packages == ("a==1.*", "b")
    assert accelerate(None, packages=["a"])(plain).options(packages=None).task_options.packages == ()


def test_options_and_to_make_copies() -> None:
    first = accelerate(None, timeout=5, gpu=2)(plain)

    second = first.options(timeout=None, retries=7)
    third = first.to("cuda:1")

    assert (first.task_options.timeout, first.task_options.retries, first.task_options.device) == (5.0, 3, None)
    assert (second.task_options.timeout, second.task_options.retries) == (None, 7)
    assert (third.task_options.device, third.task_options.gpu) == ("cuda:1", None)
    assert first.options(gpu="A100").to("cpu").task_options.gpu is None
    with pytest.raises(TypeError, match="to\\(0\\) must name a device"):
        first.to(0)  # type: ignore[arg-type]


def test_a_function_bound_to_a_device_that_is_not_here_does_not_run_here() -> None:
    assert decorated.to("cpu")(2.0) == 6.0
    with pytest.raises(NoSuitableWorkerError, match=r"bound to 'RTX 9999'.*\.remote"):
        decorated.to("RTX 9999")(2.0)


# --- running


def test_a_call_runs_here_and_remote_runs_there(session: FakeSession) -> None:
    assert named(1) == 2
    assert session.defined == 0
    assert named.remote(1).result() == 2
    assert named.remote(value=5).result() == 6
    assert session.defined == 1


def test_recursion_goes_on_inside_the_task(session: FakeSession) -> None:
    assert countdown.remote(3).result() == 3


def test_async_functions_are_called_as_ever() -> None:
    assert asyncio.run(slowly(4)) == 8


def test_methods_of_every_kind(session: FakeSession) -> None:
    model = Model(3)

    assert (model.scale(2), model.scale.remote(2).result(), Model.scale.remote(model, 2).result()) == (6, 6, 6)
    assert list(model.scale.map([1, (2,), {"value": 3}])) == [3, 6, 9]
    assert (Model.outer_static(1), Model(0).outer_static.remote(1).result()) == (11, 11)
    assert (Model.inner_static(1), Model(0).inner_static.remote(1).result()) == (21, 21)
    assert (Model.outer_class(1), Model.outer_class.remote(1).result(), Model(0).outer_class.remote(2).result()) == (
        "Model 1", "Model 1", "Model 2",
    )  # fmt: skip
    assert list(inspect.signature(model.scale).parameters) == ["value"]
    assert model.scale.__self__ is model
    assert repr(model.scale) == "<accelerated Model.scale of Model object>"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="since Python 3.13 a classmethod no longer passes on what it wraps")
def test_a_class_method_around_an_accelerated_function(session: FakeSession) -> None:
    class Other:
        @classmethod
        @accelerate
        def make(cls, value: int) -> str:
            return f"{cls.__name__} {value}"

    assert Other.make(1) == "Other 1"
    assert Other.make.remote(1).result() == "Other 1"


def test_a_method_always_sees_the_object_as_it_is(session: FakeSession) -> None:
    model = Model(3)
    first = model.scale.remote(1).result()
    model.factor = 5

    assert (first, model.scale.remote(1).result(), session.defined) == (3, 5, 1)


def test_an_argument_that_cannot_travel_is_named_at_the_call(session: FakeSession) -> None:
    with pytest.raises(SerializationError, match="lr"):
        decorated.remote({"lock": __import__("threading").Lock()})


def test_a_function_is_defined_once_while_what_it_captured_stays(session: FakeSession) -> None:
    scale = [2]
    made = accelerate(lambda value: value * scale[0])

    values = [made.remote(3).result(), made.remote(4).result()]
    defined = session.defined
    scale[0] = 10
    values.append(made.remote(3).result())

    assert (values, defined, session.defined) == ([6, 8, 30], 1, 2)


def test_without_a_mesh_the_default_is_made_at_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumesh.client import mesh as mesh_module

    mesh = FakeMesh(FakeSession())
    monkeypatch.setattr(mesh_module, "default_mesh", lambda: mesh)

    assert named.remote(1).result() == 2


def test_install_takes_meshes_only() -> None:
    with pytest.raises(TypeError, match="takes a GPUMesh"):
        accelerate.install("http://host:8000")  # type: ignore[arg-type]


# --- futures as arguments


def test_a_future_as_argument_becomes_its_value(session: FakeSession) -> None:
    session.runs = False
    first = named.remote(1)
    second = named.remote(first)
    third = decorated.remote(first, epochs=second)

    assert len(session.pending) == 3
    session.run()
    session.run()
    session.run()

    assert (second.result(), third.result()) == (3, 6)
    assert second.task_id != 0


def test_large_results_pass_through_unopened(session: FakeSession) -> None:
    np = pytest.importorskip("numpy")
    session.runs = False
    first = accelerate(np.arange).remote(100_000)
    second = accelerate(np.sum).remote(first)

    session.run()
    session.run()

    assert second.result() == 4999950000
    assert first.result().flags.writeable


def test_a_failed_argument_fails_the_call(session: FakeSession) -> None:
    session.runs = False
    first = accelerate(operator.truediv).remote(1, 0)
    second = named.remote(first)
    cancelled = named.remote(1)
    third = named.remote(cancelled)

    session.run(1)
    cancelled.cancel()

    with pytest.raises(ZeroDivisionError):
        second.result()
    with pytest.raises(TaskCancelledError):
        third.result()
    assert not session.pending


def test_a_waiting_call_can_be_cancelled(session: FakeSession) -> None:
    session.runs = False
    first = named.remote(1)
    second = named.remote(first)

    assert second.cancel()
    session.run()

    assert first.result() == 2
    assert not session.pending


def test_arguments_are_taken_as_they_are_at_the_call(session: FakeSession) -> None:
    session.runs = False
    numbers = [1, 2]
    future = accelerate(lambda first, rest: [first, *rest]).remote(named.remote(0), numbers)
    numbers.append(3)

    session.run()
    session.run()

    assert future.result() == [1, 1, 2]


# --- travelling


def test_an_importable_one_travels_by_name() -> None:
    assert pickle.loads(pickle.dumps(named)) is named
    assert pickle.loads(pickle.dumps(Model.scale)) is Model.scale
    assert cloudpickle.loads(cloudpickle.dumps(named)) is named


def test_a_local_one_travels_by_value_with_its_options() -> None:
    def local(value: int) -> int:
        return 1 if value == 0 else value * made(value - 1)

    made = accelerate(None, timeout=7, retry_on=ValueError)(local)

    for dump in (pickle.dumps, cloudpickle.dumps):
        copied = pickle.loads(dump(made))
        assert (copied(5), copied.__name__, copied.task_options) == (120, "local", made.task_options)
        assert copied._recipe.mesh is None


def test_a_bound_one_travels_with_its_object() -> None:
    copied = pickle.loads(pickle.dumps(Model(4).scale))

    assert copied(5) == 20


def test_copies_are_the_same_function() -> None:
    assert copy.deepcopy(named) is named
    assert copy.copy(named)(1) == 2


def test_code_of_main_travels_by_value(session: FakeSession) -> None:
    source = "from gpumesh import accelerate\n@accelerate\ndef double(x):\n    return 2 * x if x < 10 else double.__name__\n"
    namespace = {"__name__": "__main__"}
    exec(source, namespace)
    double: Any = namespace["double"]

    assert double.remote(4).result() == 8
    assert double.remote(40).result() == "double"
