"""Scripts on real runners: what they get, what counts as their result, and that whatever they do nothing of them is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import psutil
import pytest

from gpumesh import GPUMesh
from gpumesh.config import (
    CANCEL_GRACE_SECONDS,
    SCRIPT_GRACE_SECONDS,
    SCRIPT_INTERRUPT_SECONDS,
    SCRIPT_OUTPUT_BURST_BYTES,
    SCRIPT_OUTPUT_RATE_BYTES,
    SCRIPT_OUTPUT_TAIL_BYTES,
    SCRIPT_RESULT_BYTES,
)
from gpumesh.model.outcomes import Status, failure_text
from gpumesh.model.resources import DeviceFacts, Requirement
from gpumesh.runtime.code_folder import FOLDER_VARIABLE
from gpumesh.runtime.embedded import EmbeddedMesh
from gpumesh.runtime.script_folder import WORK
from tests.support.processes import descriptors, named, resident_bytes, session_of, until, until_gone
from tests.support.script_site import ScriptSite, here, ignore_here, set_here
from tests.support.wheels import make_wheel, offline

ECHO = "import json, sys\nprint('hello')\nprint(json.dumps(json.load(sys.stdin)))\n"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptSite]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("unpacked")))
        patch.setenv("GPUMESH_TOKEN", "secret")
        patch.setenv("GPUMESH_RELAY_TOKEN", "secret")
        patch.setenv("PYTHONIOENCODING", "latin-1")
        site = ScriptSite(tmp_path_factory.mktemp("scripts"))
        yield site
        site.close()


@pytest.fixture
def site(worker: ScriptSite, tmp_path: Path) -> ScriptSite:
    worker.folder = tmp_path
    return worker


def runner_of(site: ScriptSite) -> psutil.Process:
    (found,) = named(session_of(site.pids[0]), "gpumesh-runner")
    return found


def said(site: ScriptSite, task: int, text: bytes, stream: int = 1) -> None:
    """Wait until a script has written this."""
    until(lambda: text in site.output(task, stream), 20, what=f"{text!r}, after {site.output(task, stream)[-200:]!r}")


def gone(pid: int) -> None:
    until_gone(lambda: [psutil.Process(pid)] if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" else [])


# --- what it gets, and what it gives


@pytest.mark.parametrize("payload", [{"lr": 0.1, "naïve": "größe\n"}, [1, [2]], 7, "text", None, {"x": "y" * 300_000}])
def test_the_payload_is_standard_input_and_the_last_line_the_result(site: ScriptSite, payload: Any) -> None:
    task = site.start(ECHO, payload)

    assert site.ended(task) == (Status.OK, payload)
    assert site.output(task).startswith(b"hello\n")


def test_a_payload_can_be_read_as_a_line(site: ScriptSite) -> None:
    assert site.result("print(len(input()))", "abc") == 5


def test_numbers_that_are_none_come_back(site: ScriptSite) -> None:
    found = site.result("import json, sys; print(json.dumps([float('nan'), *json.load(sys.stdin)]))", [float("inf")])

    assert str(found) == "[nan, inf]"


@pytest.mark.parametrize("reads", ["", "sys.stdin.read(10)\n", "sys.stdin.close()\nimport os; os.close(0)\n"])
def test_a_script_need_not_read_ten_megabytes(site: ScriptSite, reads: str) -> None:
    assert site.result(f"import sys\n{reads}print(1)", "x" * 10_000_000) == 1


def test_a_script_that_never_reads_may_also_write_much(site: ScriptSite) -> None:
    assert site.result("import sys\nsys.stderr.write('e' * 10**6)\nprint('x' * 10**6)\nprint(2)", "x" * 10_000_000) == 2


def test_a_large_result_arrives_whole(site: ScriptSite) -> None:
    assert site.result("print('\"' + 'y' * 15_000_000 + '\"')") == "y" * 15_000_000


def test_it_is_a_main_program_of_its_own(site: ScriptSite) -> None:
    site.write("WHERE = __file__\n", "helper.py")
    seen = site.result(
        "import json, os, sys, helper\n"
        "print(json.dumps([__name__, sys.argv, __file__, sys.path[0], os.getcwd(), helper.WHERE, sys.executable, os.getppid()]))\n"
    )
    name, argv, file, first, folder, helper, executable, parent = seen

    assert name == "__main__"
    assert argv == [file]
    assert file == os.path.join(folder, "script.py")
    assert helper == os.path.join(folder, "helper.py")
    assert first == folder
    assert executable == sys.executable
    assert parent == runner_of(site).pid


def test_each_runs_in_an_interpreter_of_its_own(site: ScriptSite) -> None:
    source = "import json, os, builtins\nprint(json.dumps([os.getpid(), getattr(builtins, 'mark', 0)]))\nbuiltins.mark = 1\n"

    (one, mark), (two, other_mark) = site.result(source), site.result(source)

    assert one != two
    assert (mark, other_mark) == (0, 0)


def test_its_environment_is_the_runner_s_without_secrets_whatever_functions_have_done(site: ScriptSite) -> None:
    site.call(set_here, "LEFT_BY_A_FUNCTION", "1")
    assert site.call(here, "LEFT_BY_A_FUNCTION") == "1"

    seen = site.result("import json, os\nprint(json.dumps(dict(os.environ)))")

    assert "LEFT_BY_A_FUNCTION" not in seen
    assert not [name for name in seen if "TOKEN" in name]
    assert seen["OMP_NUM_THREADS"] == "4"
    assert (seen["PYTHONUTF8"], seen["PYTHONUNBUFFERED"]) == ("1", "1")


def test_text_is_utf_8_whatever_the_worker_s_locale_says(site: ScriptSite) -> None:
    task = site.start(
        "import sys\nname = sys.stdin.read()[1:-2]\nprint(name, file=sys.stderr)\nprint('\"ß' + name + '\"')", "ü€😀".encode()
    )
    assert site.ended(task)[0] == Status.OK
    assert site.ended(site.start("print(ascii(input()))", "ü".encode()))[1]["reason"].count("\\xfc") == 1

    task = site.start("import sys\nname = input()\nprint(name, file=sys.stderr)\nprint(name)", '"ü€😀"'.encode())

    assert site.ended(task) == (Status.OK, "ü€😀")
    assert site.output(task, 2) == '"ü€😀"\n'.encode()


def test_the_example_of_the_document_does_what_is_shown_there(site: ScriptSite) -> None:
    text = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(# train.py\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    ((payload, shown),) = re.findall(r"^\$ echo '(.*)' \| python train.py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)

    task = site.submit(site.write(source, "train.py"), payload.encode())

    assert site.ended(task)[0] == Status.OK
    assert site.output(task).decode() == shown


# --- its folder


def test_files_beside_it_are_there_by_their_names(site: ScriptSite) -> None:
    site.write("1,2\n", "data.csv")
    site.write("deep", "sub/größe.txt")

    assert (
        site.result("print(repr(open('data.csv').read() + open('sub/größe.txt').read()).replace(\"'\", '\"'))") == "1,2\ndeep"
    )


def test_a_script_in_a_folder_below_runs_there(site: ScriptSite) -> None:
    site.write("", "__init__.py")

    assert site.result("import os; print(len(os.listdir('.')))") == 2


def test_no_task_sees_what_another_has_written(site: ScriptSite) -> None:
    site.write("original", "data.txt")
    source = (
        "import json, os\nbefore = [sorted(os.listdir('.')), open('data.txt').read()]\n"
        "open('data.txt', 'w').write('changed'); open('new.txt', 'w').write('x'); os.makedirs('out/a')\nprint(json.dumps(before))\n"
    )

    assert [site.result(source) for _ in range(3)] == [[["data.txt", "script.py"], "original"]] * 3


def test_nothing_that_a_task_has_made_is_left(site: ScriptSite) -> None:
    folder = Path(site.result("import json, os; open('big', 'w').write('x'); print(json.dumps(os.getcwd()))"))

    assert [path.name for path in folder.iterdir()] == ["script.py"]
    assert folder.parent.parent == Path(os.environ[FOLDER_VARIABLE]) / WORK


def test_a_new_version_of_a_script_is_what_runs(site: ScriptSite) -> None:
    assert [site.result(f"print({number})") for number in range(3)] == [0, 1, 2]


def test_a_script_that_did_not_travel_is_named(site: ScriptSite) -> None:
    details = site.failure("print(1)", script="other/missing.py")

    assert details == {
        "reason": "the script other/missing.py is not among the files that have travelled with it; submit it again"
    }


def test_a_worker_whose_cache_is_cleared_is_sent_the_folder_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "unpacked"))
    site = ScriptSite(tmp_path / "scripts")
    try:
        assert site.result(ECHO, 1) == 1
        shutil.rmtree(tmp_path / "unpacked")

        assert site.ended(site.start(ECHO, 2)) == (Status.NOT_RUN, {})

        assert site.result(ECHO, 2) == 2
    finally:
        site.close()


# --- failures


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import json, sys; json.load(sys.stdin)",
            "script.py printed nothing, and its result is the last line of its standard output",
        ),
        (
            "print('no result')",
            "the last line that script.py printed is not JSON (Expecting value): no result; print it as one line",
        ),
        (
            "import json; print(json.dumps({'a': 1}, indent=2))",
            "is not JSON (Expecting value): }; print it as one line at the end",
        ),
        ("print(1)\nraise SystemExit(3)", "script.py exited with code 3"),
        ("this is no Python", "script.py exited with code 1"),
        (f"print('1' * {SCRIPT_RESULT_BYTES + 1000})", "has 16.8 MB, over the limit of 16.8 MB for a result"),
    ],
)
def test_what_goes_wrong_is_said(site: ScriptSite, source: str, reason: str) -> None:
    assert reason in site.failure(source)["reason"]


def test_an_error_comes_with_the_last_lines_of_standard_error(site: ScriptSite) -> None:
    details = site.failure("import sys\nprint('loading', file=sys.stderr)\n1 / 0")

    assert details["exit"] == 1
    text = failure_text(details)
    assert text.startswith("script.py exited with code 1; its last lines on stderr:\n  loading\n  Traceback")
    assert text.endswith("\n  ZeroDivisionError: division by zero")


def test_death_by_a_signal_is_a_crash_with_what_is_known_of_it(site: ScriptSite) -> None:
    task = site.start(
        "import os, sys\nx = bytearray(300_000_000)\nsys.stderr.write('last words'); print('before', end='')\nos.kill(os.getpid(), 9)"
    )

    status, details = site.ended(task)

    assert status == Status.CRASHED
    assert (site.output(task), site.output(task, 2)) == (b"before", b"last words")
    assert (details["exit"], details["reason"], details["stderr"]) == (-9, "script.py was killed by SIGKILL", "last words")
    assert details["memory_bytes"] > 300_000_000
    assert details["memory_limit_bytes"] > details["memory_bytes"]
    assert not details.get("out_of_memory")
    status, details = site.ended(site.start("import ctypes; ctypes.string_at(0)"))
    assert (status, details["exit"]) == (Status.CRASHED, -11)
    assert "Segmentation fault" in details["stderr"]


def test_the_runner_survives_them_all(site: ScriptSite) -> None:
    before = runner_of(site).pid
    counts = []

    for _ in range(2):  # Code that is new to it costs a descriptor.
        for source in (
            "raise SystemExit(1)",
            "import os; os.kill(os.getpid(), 15)",
            "import os; os.abort()",
            "print('x')",
            ECHO,
        ):
            site.ended(site.start(source, 1))
        counts.append(descriptors(before))

    assert runner_of(site).pid == before
    assert counts[0] == counts[1]
    assert site.call(len, "abc") == 3


def test_a_script_has_nothing_of_the_runner_open(site: ScriptSite) -> None:
    assert (
        site.result(
            "import os; print(len([fd for fd in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + fd)]))"
        )
        == 3
    )


WITHOUT_PIDFD = """
import os, sys
if hasattr(os, "pidfd_open"):
    del os.pidfd_open
from gpumesh.runtime import script_task
words = [0] * 9
for source in ("print(1)", "import sys; sys.exit(2)", "import os; os.close(1); os.close(2)"):
    outcome = script_task._Run(words, 7, "script").run([sys.executable, "-c", source], "/", dict(os.environ), b"")
    print(outcome, words[8], file=sys.stderr)
"""


def test_the_end_of_a_script_is_noticed_where_the_system_does_not_tell() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_PIDFD], capture_output=True, text=True, timeout=30, check=True)

    one, two, three = run.stderr.splitlines()
    assert one == "(0, b'1') 0"
    assert two.startswith("(1, {'reason': 'script exited with code 2'")
    assert "printed nothing" in three


# --- its output


def test_output_is_seen_while_the_script_runs(site: ScriptSite) -> None:
    gate = site.folder / "gate"
    task = site.start(
        "import json, os, sys, time\npath = json.load(sys.stdin)\nprint('step 1'); print('half', end=''); print('warned', file=sys.stderr)\n"
        "while not os.path.exists(path): time.sleep(0.01)\nprint()\nprint(1)\n",
        str(gate),
    )

    said(site, task, b"step 1\nhalf")
    said(site, task, b"warned\n", stream=2)
    gate.touch()

    assert site.ended(task) == (Status.OK, 1)
    assert site.output(task) == b"step 1\nhalf\n1\n"


def test_a_gigabyte_of_output_takes_no_memory_and_its_end_is_kept(site: ScriptSite) -> None:
    source = (
        "import os\nline = b'x' * 1023 + b'\\n'\nfor _ in range({count}): os.write(1, line * 64)\nprint('\\nthe end')\nprint(5)"
    )
    assert site.result(source.format(count=100)) == 5
    before = resident_bytes(runner_of(site).pid)

    started = time.monotonic()
    task = site.start(source.format(count=16_000))
    assert site.ended(task, 60) == (Status.OK, 5)
    seconds = time.monotonic() - started

    assert resident_bytes(runner_of(site).pid) < before + 20_000_000
    output = site.output(task)
    assert len(output) < SCRIPT_OUTPUT_BURST_BYTES + SCRIPT_OUTPUT_TAIL_BYTES + seconds * SCRIPT_OUTPUT_RATE_BYTES + 10_000
    assert b"bytes of output left out]" in output
    assert output.endswith(b"\nthe end\n5\n")


def test_a_gigabyte_without_a_line_end_is_told_as_such(site: ScriptSite) -> None:
    before = resident_bytes(runner_of(site).pid)

    details = site.failure("import os\nblock = b'1' * 2**16\nfor _ in range(16_000): os.write(1, block)")

    assert "has 1048.6 MB, over the limit" in details["reason"]
    assert resident_bytes(runner_of(site).pid) < before + 4 * SCRIPT_RESULT_BYTES


def test_a_script_whose_output_nobody_takes_waits_and_is_cancelled_all_the_same(site: ScriptSite) -> None:
    source = "import os\nfor _ in range(20): os.write(1, b'y' * 60_000 + b'\\n')\nos.write(2, b'written')\nprint(6)"
    site.is_congested = True
    try:
        cancelled = site.start(source)
        time.sleep(0.3)  # It fills the pipes; there is nothing to see of that.
        site.cancel(cancelled)
        assert site.ended(cancelled)[0] == Status.CANCELLED
        waiting = site.start(source)
    finally:
        site.is_congested = False
        site.on_loop(site.pool.resume_output)

    assert site.ended(waiting) == (Status.OK, 6)
    assert site.output(waiting).endswith(b"\n6\n")


# --- its end


def test_a_cancelled_script_gets_an_interrupt_and_can_clean_up(site: ScriptSite) -> None:
    task = site.start("import time\ntry:\n    print('ready'); time.sleep(100)\nfinally:\n    print('cleaned up')\n")
    said(site, task, b"ready")
    runner = runner_of(site).pid
    started = time.monotonic()

    site.cancel(task)

    assert site.ended(task)[0] == Status.CANCELLED
    assert time.monotonic() - started < CANCEL_GRACE_SECONDS
    assert site.output(task).endswith(b"cleaned up\n")
    assert b"KeyboardInterrupt" in site.output(task, 2)
    assert runner_of(site).pid == runner


DEAF: Dict[str, List[str]] = {
    "to the interrupt": ["SIGINT"],
    "to both signals": ["SIGINT", "SIGTERM"],
}


@pytest.mark.parametrize("deaf", DEAF.values(), ids=DEAF.keys())
def test_a_deaf_script_is_killed_with_all_that_it_has_started_and_the_runner_stays(site: ScriptSite, deaf: List[str]) -> None:
    ignore = "".join(f"signal.signal(signal.{name}, signal.SIG_IGN)\n" for name in deaf)
    task = site.start(
        f"import os, signal, subprocess, time\n{ignore}print(subprocess.Popen(['sleep', '1000']).pid); time.sleep(1000)"
    )
    said(site, task, b"\n")
    child = int(site.output(task))
    runner = runner_of(site).pid
    started = time.monotonic()

    site.cancel(task)

    assert site.ended(task)[0] == Status.CANCELLED
    after = SCRIPT_GRACE_SECONDS if len(deaf) == 2 else SCRIPT_INTERRUPT_SECONDS
    assert after <= time.monotonic() - started < CANCEL_GRACE_SECONDS + 1.0
    gone(child)
    assert runner_of(site).pid == runner


def test_a_script_over_its_time_is_ended(site: ScriptSite) -> None:
    status, details = site.ended(site.start("import time; time.sleep(1000)", timeout=0.5))

    assert (status, details) == (Status.TIMED_OUT, {"reason": "it ran longer than its timeout of 0.5 s", "seconds": 0.5})


def test_what_a_script_leaves_running_ends_with_it_and_does_not_hold_up_the_result(site: ScriptSite) -> None:
    started = time.monotonic()
    task = site.start("import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)")

    status, child = site.ended(task)

    assert status == Status.OK
    assert time.monotonic() - started < 10
    gone(child)


def test_who_leaves_the_group_lives_on_and_does_not_hold_up_the_result_either(site: ScriptSite) -> None:
    status, child = site.ended(
        site.start("import subprocess\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"), timeout=10
    )

    assert status == Status.OK
    psutil.Process(child).kill()


@pytest.mark.parametrize("victim", ["runner", "spawner", "pool"])
def test_a_script_and_its_children_end_with_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "unpacked"))
    site = ScriptSite(tmp_path)
    try:
        child = (
            "['sleep', '1000']" if victim != "spawner" else "['true']"
        )  # The kernel tells the script alone of the spawner's death.
        task = site.start(
            f"import json, os, subprocess, time\nprint(json.dumps([os.getpid(), subprocess.Popen({child}).pid])); time.sleep(1000)"
        )
        said(site, task, b"]\n")
        pids = json.loads(site.output(task))
        if victim == "pool":
            site.on_loop(site.pool.close)
        else:
            psutil.Process(site.pids[0] if victim == "spawner" else runner_of(site).pid).kill()

        for pid in pids:
            gone(pid)
        if victim == "runner":
            assert site.ended(task)[0] == Status.CRASHED
            assert site.result(ECHO, 3) == 3
            assert len(os.listdir(tmp_path / "unpacked" / WORK)) == 2, "the dead one's copy is gone"
    finally:
        site.close()


def test_a_script_and_its_children_end_with_the_agent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, subprocess, sys, time\npids = [os.getpid(), subprocess.Popen(['sleep', '1000']).pid]\n"
        "open(json.load(sys.stdin)['path'], 'w').write(json.dumps(pids) + '\\n'); time.sleep(1000)\n"
    )
    mark = tmp_path / "mark"
    with EmbeddedMesh(workers=1, slots=1) as embedded, GPUMesh(embedded.url, token=embedded.token) as mesh:
        mesh.submit(script=script, payloads=[{"path": str(mark)}], retries=0)
        until(lambda: mark.exists() and mark.read_text().endswith("\n"), 20, what="the start of the script")

        psutil.Process(embedded.processes["worker-1"]).kill()

        for pid in json.loads(mark.read_text()):
            gone(pid)


def test_what_functions_have_ignored_a_script_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "unpacked"))
    site = ScriptSite(tmp_path)
    try:
        site.call(ignore_here, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)

        status, details = site.ended(site.start("import os; os.kill(os.getpid(), 15)"))

        assert (status, details["exit"]) == (Status.CRASHED, -15)
        assert site.result("import os; os.kill(os.getpid(), 28); print(1)") == 1
    finally:
        site.close()


# --- cards


def test_a_script_sees_the_cards_of_its_task_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "unpacked"))
    cards = [DeviceFacts("cuda", place, "RTX", 24 * 10**9, 100.0, uuid=f"GPU-{place}") for place in range(2)]
    site = ScriptSite(tmp_path, devices=cards)
    source = "import json, os\nprint(json.dumps([os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('GPUMESH_DEVICE')]))"
    try:
        need = Requirement("gpu", gpus=1.0)

        assert site.result(source, cards=("GPU-1",), requirement=need) == ["GPU-1", "cuda:0"]
        assert site.result(source) == ["", None]
    finally:
        site.close()


# --- packages


def test_a_script_finds_the_packages_of_its_environment_and_behind_them_the_worker_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        **offline(tmp_path / "wheels", tmp_path / "environments"),
        FOLDER_VARIABLE: str(tmp_path / "code"),
    }.items():
        monkeypatch.setenv(name, value)
    make_wheel(tmp_path / "wheels", "tinypkg", "1.0")
    site = ScriptSite(tmp_path / "scripts")
    try:
        source = (
            "import json, os, sys, tinypkg, msgpack, helper\nif __name__ == '__main__':\n"
            "    print(json.dumps([tinypkg.VERSION, helper.X, sys.argv == [__file__], os.path.dirname(__file__) == os.getcwd() == sys.path[0],"
            " sys.executable, sys.stdin.readline()]))\n"
        )
        site.write("X = 3\n", "helper.py")
        while True:
            status, value = site.ended(site.start(source, 8, packages=("tinypkg==1.0",)), 60)
            if status != Status.NOT_RUN:
                break
            time.sleep(0.1)  # It is being built.

        assert status == Status.OK, value
        assert value[:4] == ["1.0", 3, True, True]
        assert value[4].startswith(str(tmp_path / "environments"))
        assert value[5] == "8\n"

        while True:
            status, value = site.ended(site.start("1", packages=("nosuchpkg==7",)), 60)
            if status != Status.NOT_RUN:
                break
            time.sleep(0.1)
        assert status == Status.RAISED
        assert "packages=['nosuchpkg==7'] on here" in value["reason"]
    finally:
        site.close()
