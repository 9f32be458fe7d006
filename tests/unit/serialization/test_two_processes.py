"""F04: what a script defines in `__main__` keeps its identity on the way through other processes, and its latest definition."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

WORKER = """
import pickle, sys
from gpumesh.serialization import exceptions, functions, values
known = {}
while True:
    try:
        digest, body, call = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    if body is not None:
        known[digest] = functions.load(body)[0]
    args, kwargs = values.loads_call(call)
    try:
        answer = (True, values.dumps(known[digest](*args, **kwargs)))
    except BaseException as error:
        answer = (False, exceptions.dump_exception(error))
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""

DRIVER = f"""
import enum, pickle, subprocess, sys
from dataclasses import dataclass
from gpumesh.serialization import exceptions, functions, values

class Worker:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.sent = set()
        self.exporter = functions.Exporter()

    def run(self, function, *args, **kwargs):
        exported = self.exporter.export(function)
        body = None if exported.digest in self.sent else exported.body
        self.sent.add(exported.digest)
        pickle.dump((exported.digest, body, values.dumps_call(args, kwargs)), self.process.stdin)
        self.process.stdin.flush()
        ok, answer = pickle.load(self.process.stdout)
        if ok:
            return values.loads(answer)
        raise exceptions.load_exception(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()

one, two = Worker(), Worker()
"""


def drive(tmp_path: Path, script: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(DRIVER + textwrap.dedent(script) + "\none.close()\ntwo.close()\n")
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        check=False,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.returncode == 0, result.stderr


def test_f04_an_enum_of_main_comes_back_as_the_member_it_was(tmp_path: Path) -> None:
    drive(
        tmp_path,
        """
        class Color(enum.Enum):
            RED = 1
            GREEN = 2

        def pick(): return Color.GREEN
        def same(c): return c is Color.GREEN, c

        for worker in (one, two, one):
            assert worker.run(pick) is Color.GREEN
            assert {Color.GREEN: 1}[worker.run(pick)] == 1
            assert isinstance(worker.run(pick), Color)
            inside, back = worker.run(same, Color.GREEN)
            assert inside and back is Color.GREEN
        """,
    )


def test_f04_after_a_cell_is_run_again_the_new_definition_counts(tmp_path: Path) -> None:
    drive(
        tmp_path,
        """
        def pick(): return Color.BLUE, list(Color)
        def build(): return Point(1)

        class Color(enum.Enum):
            BLUE = 1
        @dataclass
        class Point:
            x: int
            def double(self): return 2 * self.x

        assert one.run(pick) == (Color.BLUE, [Color.BLUE])
        old = one.run(build)
        assert type(old) is Point and old.double() == 2

        class Color(enum.Enum):
            BLUE = 3
            GREEN = 4
        @dataclass
        class Point:
            x: int
            y: int = 5
            def double(self): return 20 * self.x

        for worker in (one, two):
            assert worker.run(pick) == (Color.BLUE, [Color.BLUE, Color.GREEN])
            new = worker.run(build)
            assert type(new) is Point and new.y == 5 and new.double() == 20
        assert old.double() == 2
        """,
    )


def test_a_class_that_comes_home_does_not_disturb_its_definition_here(tmp_path: Path) -> None:
    drive(
        tmp_path,
        """
        calls = 0
        class Counter:
            shared = []
            def count(self):
                global calls
                calls += 1
                return calls

        def build(): return Counter()

        shared, method = Counter.shared, Counter.count
        counter = one.run(build)
        Counter.shared.append(1)
        one.run(build)

        assert type(counter) is Counter
        assert Counter.shared is shared and Counter.count is method
        assert counter.count() == 1 and calls == 1
        """,
    )


def test_a_class_changed_here_is_changed_there(tmp_path: Path) -> None:
    drive(
        tmp_path,
        """
        class Model:
            rate = 1
        def rate(model): return model.rate, Model.rate

        assert one.run(rate, Model()) == (1, 1)
        Model.rate = 2
        assert one.run(rate, Model()) == (2, 2)
        """,
    )


def test_f01_an_exception_class_of_main_is_caught_by_its_own_name(tmp_path: Path) -> None:
    drive(
        tmp_path,
        """
        class E(Exception):
            def __init__(self, code, url):
                super().__init__(f'{code}')
                self.code, self.url = code, url
        def fail(): raise E(503, 'x')

        for worker in (one, two):
            try:
                worker.run(fail)
            except E as error:
                assert (error.code, error.url) == (503, 'x')
                assert 'in fail' in str(error.__cause__)
            else:
                raise AssertionError('it did not raise')
        """,
    )


def test_f01_an_exception_class_known_only_there_arrives_as_its_text(tmp_path: Path) -> None:
    drive(
        tmp_path,
        """
        from gpumesh.errors import RemoteTaskError
        def fail():
            import sys, types
            module = types.ModuleType('only_there')
            sys.modules['only_there'] = module
            exec('class E(Exception): pass', module.__dict__)
            raise module.E('the reason')

        try:
            one.run(fail)
        except RemoteTaskError as error:
            assert error.type_name == 'only_there.E' and error.remote_message == 'the reason'
            assert 'in fail' in error.remote_traceback
        else:
            raise AssertionError('it did not raise')
        """,
    )
