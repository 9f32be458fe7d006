"""Functions are exported once, seen again when what they captured changes, and refused with a reason."""

from __future__ import annotations

import functools
import gc
import json
import logging
import math
import operator
import sys
import threading
import types
import weakref
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
import pytest

from gpumesh import config
from gpumesh.errors import SerializationError
from gpumesh.serialization import functions
from gpumesh.serialization.functions import Exporter, check_callable, display_name, is_generator_function, load

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def by_value(source: str, name: str = "f") -> Any:
    """What `source` defines, as if it stood in a notebook."""
    namespace: Dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace[name]


def plain(x: int) -> int:
    return x + 1


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return [function(*args)]

    return wrapper


@logged
def decorated(x: int) -> int:
    return x * 3


class Trainer:
    rate = 2

    def __init__(self, base: int) -> None:
        self.base = base

    def fit(self, x: int) -> int:
        return self.base + x

    def __call__(self, x: int) -> int:
        return self.base * x

    @staticmethod
    def static(x: int) -> int:
        return x - 1

    @classmethod
    def of_class(cls, x: int) -> int:
        return cls.rate * x


def ran(function: Any, *args: Any) -> Any:
    loaded, _ = load(Exporter().export(function).body)
    return loaded(*args)


def test_every_kind_of_callable_runs_after_the_journey() -> None:
    fibonacci = by_value("import functools\n@functools.lru_cache(maxsize=7)\ndef f(n): return n if n < 2 else f(n-1) + f(n-2)")
    factorial = by_value("def f(n): return 1 if n == 0 else n * f(n - 1)")
    offset = 10

    assert ran(plain, 1) == 2
    assert ran(lambda x: x + offset, 1) == 11
    assert ran(factorial, 5) == 120
    assert ran(fibonacci, 20) == 6765
    assert ran(functools.partial(plain, 4)) == 5
    assert ran(functools.partial(lambda a, b: a - b, b=1), 4) == 3
    assert ran(Trainer(5), 3) == 15
    assert ran(Trainer(5).fit, 3) == 8
    assert ran(vars(Trainer)["static"], 3) == 2
    assert ran(Trainer.of_class, 3) == 6
    assert ran(math.sqrt, 4.0) == 2.0
    assert ran(operator.itemgetter(1), [1, 2]) == 2
    assert ran(decorated, 2) == [6]
    assert ran(decorated.__wrapped__, 2) == 6  # type: ignore[attr-defined]


def test_a_cached_function_keeps_its_parameters_and_is_one_object_also_inside_itself() -> None:
    fibonacci = by_value("import functools\n@functools.lru_cache(maxsize=7)\ndef f(n): return n if n < 2 else f(n-1) + f(n-2)")

    loaded, _ = load(Exporter().export(fibonacci).body)
    loaded(6)

    assert loaded.cache_parameters() == {"maxsize": 7, "typed": False}  # type: ignore[attr-defined]
    assert loaded.__wrapped__.__globals__["f"] is loaded  # type: ignore[attr-defined]
    assert loaded.cache_info().hits > 0  # type: ignore[attr-defined]


def test_a_coroutine_function_travels() -> None:
    async def answer() -> int:
        return 42

    loaded, _ = load(Exporter().export(answer).body)

    with pytest.raises(StopIteration) as stop:
        loaded().send(None)
    assert stop.value.value == 42


def test_the_exceptions_to_retry_on_travel_with_the_function() -> None:
    exporter = Exporter()
    without, with_two = exporter.export(plain), exporter.export(plain, (OSError, KeyError))

    assert load(without.body)[1] == ()
    assert load(with_two.body)[1] == (OSError, KeyError)
    assert without.digest != with_two.digest
    assert exporter.export(plain) is without
    assert exporter.export(plain, (OSError, KeyError)) is with_two


def test_only_bytecode_binds_a_body_to_a_python_version() -> None:
    exporter = Exporter()

    assert exporter.export(json.dumps).python == ""
    assert exporter.export(plain).python == ""
    assert exporter.export(decorated.__wrapped__).python == ""  # type: ignore[attr-defined]
    assert exporter.export(lambda: 1).python == PYTHON
    assert exporter.export(by_value("class f: pass")).python == PYTHON


def test_digests_name_content() -> None:
    one, other = Exporter().export(json.dumps), Exporter().export(json.dumps)

    assert one.digest == other.digest
    assert len(one.digest) == functions.DIGEST_BYTES
    assert Exporter().export(by_value("def f(): return 1")).digest != Exporter().export(by_value("def f(): return 2")).digest


def test_an_unchanged_function_is_pickled_once() -> None:
    exporter = Exporter()
    f = by_value(
        "import math, logging\nK = 3\nT = (1, 'a')\nL = [1, 2]\nlog = logging.getLogger('x')\ndef g(): return K\n"
        "def f(x, y=(1, 2)): return math.sqrt(x) * K + len(L) + len(T) + g() + (log is None)"
    )

    assert exporter.export(f) is exporter.export(f)


@pytest.mark.parametrize(
    "change",
    [
        "K = 4",
        "def g(): return K * 2",
        "g.__defaults__ = (5,)",
        "g.extra = 1",
        "L.append(3)",
        "L[0] = 9",
        "D['new'] = 1",
        "D['inner'].append(1)",
        "C.rate = 5",
        "C.added = 5",
        "class C: rate = 1",
        "f.__defaults__ = (7,)",
        "later = 5",
        "import json as math",
        "A[0] = 1",
        "O.value = 2",
        "len = max",
    ],
)
def test_a_change_of_what_was_captured_is_seen(change: str) -> None:
    namespace: Dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import math\nimport types\nimport array\nK = 3\nL = [1, 2]\nD = {'inner': [1]}\nA = array.array('d', [0.0])\nO = types.SimpleNamespace(value=1)\n"
        "class C:\n    rate = 1\n    def method(self): return self.rate\n"
        "def g(a=1): return K\n"
        "def f(x=1): return math, K, L, D, C, A, O, g(), len(L), later",
        namespace,
    )
    exporter = Exporter()
    before = exporter.export(namespace["f"])
    assert exporter.export(namespace["f"]).digest == before.digest

    exec(change, namespace)
    after = exporter.export(namespace["f"])

    assert after.digest != before.digest
    assert exporter.export(namespace["f"]).digest == after.digest


def test_a_rebound_closure_variable_is_seen() -> None:
    factor = 2

    def f(x: int) -> int:
        return x * factor

    exporter = Exporter()
    before = exporter.export(f)
    assert exporter.export(f) is before
    factor = 3
    after = exporter.export(f)

    assert load(before.body)[0](1) == 2
    assert load(after.body)[0](1) == 3


def test_a_changed_instance_behind_a_bound_method_is_seen() -> None:
    trainer, exporter = Trainer(1), Exporter()
    before = exporter.export(trainer.fit)

    trainer.base = 2
    after = exporter.export(trainer.fit)

    assert load(before.body)[0](0) == 1
    assert load(after.body)[0](0) == 2


def test_an_exporter_keeps_no_function_alive() -> None:
    exporter = Exporter()
    f = by_value("def f(n): return n and f(n - 1)")
    exporter.export(f)
    gone = weakref.ref(f)

    f.__globals__.clear()
    del f
    gc.collect()

    assert gone() is None
    assert not exporter._entries


def test_a_rebuilt_function_is_not_taken_for_the_dead_one_at_its_address() -> None:
    exporter, seen = Exporter(), set()
    for number in range(50):
        f = by_value(f"def f(): return {number}")
        seen.add(exporter.export(f).digest)
        del f

    assert len(seen) == 50


def test_a_large_capture_is_named_once_and_sent_once(caplog: pytest.LogCaptureFixture) -> None:
    data = np.zeros(config.LARGE_FUNCTION_BYTES // 8 + 1)
    small = [1, 2, 3]

    def train() -> Any:
        return data.sum(), small

    exporter = Exporter()
    with caplog.at_level(logging.WARNING, logger="gpumesh"):
        first = exporter.export(train)
        again = [exporter.export(train) for _ in range(500)]

    assert all(exported is first for exported in again)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "train is sent with 1.0 MB because it captures 'data' (closure)" in message
    assert "pass it as an argument" in message
    assert "mesh.put" in message

    data = np.ones(config.LARGE_FUNCTION_BYTES // 8 + 1)
    with caplog.at_level(logging.WARNING, logger="gpumesh"):
        replaced = exporter.export(train)
    assert replaced.digest != first.digest
    assert len(caplog.records) == 1


def test_a_large_body_is_a_snapshot() -> None:
    data = np.zeros(300_000)
    logging.getLogger("gpumesh").setLevel(logging.ERROR)
    try:
        exported = Exporter().export(lambda: data)
    finally:
        logging.getLogger("gpumesh").setLevel(logging.NOTSET)
    data[:] = 1

    assert load(exported.body)[0]().sum() == 0


def test_a_function_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_FUNCTION_BYTES", 1_000_000)
    data = bytes(2_000_000)

    def train() -> Any:
        return data

    with pytest.raises(
        SerializationError, match=r"train is 2.0 MB, over the limit of 1.0 MB because it captures 'data' \(closure\)"
    ):
        Exporter().export(train)


def test_what_a_function_captured_and_cannot_travel_is_named() -> None:
    class Client:
        def __init__(self) -> None:
            self.handlers = [{"lock": threading.Lock()}]

        def fit(self) -> None: ...

    client = Client()

    def closure() -> Any:
        return client

    def default(x: Any = client) -> Any:
        return x

    namespace: Dict[str, Any] = {"__name__": "__main__", "client": client}
    exec("def helper(): return client\ndef train(): return helper()", namespace)
    cases = [
        (
            closure,
            "closure captures 'client' (closure): client.handlers[0]['lock']: a _thread.lock cannot be pickled; create it",
        ),
        (default, "default captures 'x' (default): x.handlers[0]['lock']: a _thread.lock cannot be pickled"),
        (client.fit, "Client.fit captures 'self' (bound method): self.handlers[0]['lock']: a _thread.lock cannot be pickled"),
        (
            namespace["train"],
            "train captures 'helper' (global) captures 'client' (global): client.handlers[0]['lock']: a _thread.lock",
        ),
        (functools.partial(print, client), "print.args[0].handlers[0]['lock']: a _thread.lock cannot be pickled"),
    ]
    for function, text in cases:
        with pytest.raises(SerializationError) as caught:
            Exporter().export(function)
        assert text in str(caught.value)


def test_generator_functions_are_known_as_such() -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)

    async def stream() -> Any:
        yield 1

    class Source:
        def __call__(self) -> Iterator[int]:
            yield 1

        def items(self) -> Iterator[int]:
            yield 1

    for function in (
        numbers,
        stream,
        functools.partial(numbers),
        functools.lru_cache(numbers),
        Source(),
        Source().items,
        staticmethod(numbers),
    ):
        check_callable(function)
        assert is_generator_function(function)
    rebuilt, _ = load(Exporter().export(numbers).body)
    assert list(rebuilt()) == [0, 1, 2]
    with pytest.raises(SerializationError, match="3 is not callable"):
        check_callable(3)
    for fine in (plain, list, len, print, Trainer, Trainer(1), functools.partial(plain, 1), decorated, lambda: 1):
        check_callable(fine)
        assert not is_generator_function(fine)


def test_names_are_those_that_people_use() -> None:
    def inner() -> None: ...

    assert display_name(plain) == "plain"
    assert display_name(inner) == "test_names_are_those_that_people_use.inner"
    assert display_name(Trainer.fit) == "Trainer.fit"
    assert display_name(Trainer(1)) == "Trainer"
    assert display_name(functools.partial(plain, 1)) == "plain"
    assert display_name(vars(Trainer)["static"]) == "Trainer.static"


class Hooked:
    """Stands for an accelerated function: it says itself how it travels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.lock = threading.Lock()
        self.asked: List[bool] = []

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)  # type: ignore[attr-defined]

    def __gpumesh_reduce__(self, by_value: bool) -> Any:
        self.asked.append(by_value)
        return (Hooked, (self.__wrapped__,)) if by_value else self.__qualname__  # type: ignore[attr-defined]


@Hooked
def hooked(x: int) -> int:
    return -x


def test_objects_with_a_hook_of_their_own_are_asked() -> None:
    assert isinstance(hooked, Hooked)
    hooked.asked.clear()
    local = Hooked(lambda x: x * 2)

    assert load(Exporter().export(hooked).body)[0] is hooked
    assert ran(local, 4) == 8
    assert ran(lambda x: local(x) + 1, 4) == 9
    assert (hooked.asked, local.asked) == ([False], [True, True])
    assert load(Exporter().export(hooked.__wrapped__).body)[0] is hooked.__wrapped__  # type: ignore[attr-defined]


def test_a_captured_hooked_object_needs_no_second_look() -> None:
    f = by_value("def f(x): return helper(x)")
    f.__globals__["helper"] = Hooked(lambda x: x)
    exporter = Exporter()

    assert exporter.export(f) is exporter.export(f)


def test_a_dynamic_module_is_watched_by_pickling_again() -> None:
    module = types.ModuleType("made_up")
    module.value = 1  # type: ignore[attr-defined]
    f = by_value("def f(): return m.value")
    f.__globals__["m"] = module
    exporter = Exporter()
    before = exporter.export(f)

    module.value = 2  # type: ignore[attr-defined]

    assert exporter.export(f).digest != before.digest


def test_captured_references_are_known_and_not_kept() -> None:
    from gpumesh.serialization.refs import ObjectRef

    exporter = Exporter()

    def export() -> Any:
        first, second = ObjectRef(7, 1), ObjectRef(8, 1)

        def use() -> Any:
            return first, second

        exported = exporter.export(use)
        assert [weak() for weak in exported.refs] == [first, second]
        assert exporter.export(use) is exported  # References never change: no second look.
        return exported

    exported = export()
    gc.collect()
    assert [weak() for weak in exported.refs] == [None, None]
