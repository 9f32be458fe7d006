"""The command line: what it understands, what it answers to what it does not, and where a secret comes from."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from gpumesh.cli import console
from gpumesh.cli.demo import QUICK_FOLDS, settings
from gpumesh.cli.join import parse_tags
from gpumesh.cli.main import main
from gpumesh.errors import MeshUnavailableError
from gpumesh.runtime import serving
from gpumesh.runtime import settings as saved
from gpumesh.version import __version__

Answer = Tuple[int, str, str]


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No saved connection, no environment, and a terminal wide enough to show a line as it is."""
    for name in ("GPUMESH_URL", "GPUMESH_TOKEN", "GPUMESH_LOCAL", "GPUMESH_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    logger = logging.getLogger("gpumesh")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    console.set_verbosity(0)
    os.environ.pop("GPUMESH_VERBOSE", None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs one command line in this process: exit code, standard output, standard error."""

    def command(*words: str) -> Answer:
        with pytest.raises(SystemExit) as stopped:
            main(list(words))
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return command


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> List[Dict[str, Any]]:
    """Replaces the coordinator and the worker; what they would have been started with."""
    calls: List[Dict[str, Any]] = []

    def run_coordinator(host: str, port: int, token: str, *, on_ready: Callable[[str], None], **options: Any) -> int:
        calls.append({"host": host, "port": port, "token": token, **options})
        on_ready(serving.own_address(host, port or 4321, options["identity"]).url)
        return 0

    def run_worker(url: str, token: str, *, on_joined: Callable[[Dict[str, Any]], None], **options: Any) -> int:
        calls.append({"url": url, "token": token, **options})
        on_joined({"hostname": "here", "slots": 2, "id": "0123456789abcdef", "certificate": "ab" * 32})
        return 0

    monkeypatch.setattr(serving, "run_coordinator", run_coordinator)
    monkeypatch.setattr(serving, "run_worker", run_worker)
    return calls


def test_version(run: Callable[..., Answer]) -> None:
    assert run("--version") == (0, f"gpumesh {__version__}\n", "")


def test_help_lists_the_commands(run: Callable[..., Answer]) -> None:
    code, out, _ = run("--help")

    assert code == 0
    assert all(command in out for command in ("serve", "join", "workers", "demo"))


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("serve", "--nonsense"),
        ("serve", "--port", "70000"),
        ("serve", "--port", "x"),
        ("serve", "--slots", "0"),
        ("serve", "--slots", "5000"),
        ("serve", "--token", "a", "--token-file", "b"),
        ("serve", "--token", " "),
        ("join", "localhost", "--tag", "lab"),
        ("join", "localhost", "--tag", "=lab"),
        ("join", "localhost", "extra"),
        ("workers", "--token", ""),
    ],
)
def test_what_is_not_understood_is_a_usage_error(words: Tuple[str, ...], run: Callable[..., Answer], served: List[Any]) -> None:
    code, _, err = run(*words)

    assert code == 2
    assert "Traceback" not in err
    assert served == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--score", "0", "--token", "t"), "a score must be a positive finite number"),
        (("serve", "--score", "nan", "--token", "t"), "a score must be a positive finite number"),
        (("join", "host:8000", "--score", "inf", "--token", "t"), "a score must be a positive finite number"),
        (("serve", "--token-file", "/nonexistent/token"), "/nonexistent/token"),
        (("join", "--no-discovery"), "no mesh is known on this machine"),
        (("join", "host:99999", "--token", "t"), "99999"),
        (("join", "host:8000"), "no token for the mesh at host:8000"),
        (("workers",), "no mesh is known on this machine"),
        (("workers", "--url", "host:8000"), "no token for the mesh at host:8000"),
    ],
)
def test_what_goes_wrong_is_one_line(
    words: Tuple[str, ...], message: str, run: Callable[..., Answer], served: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())  # No terminal to ask at.

    code, _, err = run(*words)

    assert code == 1
    assert message in err
    assert err.startswith("gpumesh: ")
    assert err.count("\n") == 1
    assert served == []


def test_verbose_shows_where_it_went_wrong() -> None:
    with pytest.raises(MeshUnavailableError):
        main(["-v", "join", "--no-discovery"])


def test_verbose_reaches_processes_started_from_here(run: Callable[..., Answer], served: List[Any]) -> None:
    run("-vv", "serve", "--token", "t")

    assert os.environ["GPUMESH_VERBOSE"] == "2"
    assert logging.getLogger("gpumesh").level == logging.DEBUG


def test_serve_generates_a_secret_shows_it_on_request_with_the_line_to_join_and_saves_it(
    run: Callable[..., Answer], served: List[Dict[str, Any]]
) -> None:
    code, out, _ = run("serve", "--host", "127.0.0.1", "--show-token")

    assert code == 0
    (call,) = served
    assert (call["host"], call["port"], call["self_worker"], call["slots"], call["score"]) == (
        "127.0.0.1",
        8000,
        True,
        None,
        None,
    )
    assert len(call["token"]) == 64
    assert out.count(call["token"]) == 1
    assert f"gpumesh join http://127.0.0.1:8000 --token {call['token']}" in out
    assert "Only this machine can connect; for others to join too, leave --host out." in out
    assert "TLS" not in out
    assert saved.load_connection() == ("http://127.0.0.1:8000", call["token"])


def test_a_generated_secret_is_not_written_into_a_log(run: Callable[..., Answer], served: List[Dict[str, Any]]) -> None:
    """What is no terminal is a file or a journal, which others read."""
    shown = run("serve")

    assert served[0]["token"] not in "".join(map(str, shown))
    assert "`gpumesh token` on this one shows the token" in shown[1]
    assert run("token")[1] == f"{served[0]['token']}\n"


def test_servers_at_two_addresses_get_two_secrets(run: Callable[..., Answer], served: List[Dict[str, Any]]) -> None:
    for words in (("--port", "8000"), ("--port", "9000"), ("--port", "0"), ("--port", "0")):
        run("serve", *words)

    assert len({call["token"] for call in served}) == 4


def test_a_server_started_again_has_the_secret_that_was_made_up_for_it(
    run: Callable[..., Answer], served: List[Dict[str, Any]]
) -> None:
    run("serve")
    run("join", "http://127.0.0.1:8000")  # Which saves the connection, too.
    _, out, _ = run("serve", "--host", "0.0.0.0", "--show-token")

    first, _, second = (call["token"] for call in served)
    assert first == second
    assert f"--token {first}" in out


def test_a_secret_that_was_given_is_not_used_without_being_given_again(
    run: Callable[..., Answer], served: List[Dict[str, Any]]
) -> None:
    run("serve", "--token", "hush")
    run("serve")

    assert served[1]["token"] != "hush"


def test_a_secret_that_was_given_is_not_shown(
    run: Callable[..., Answer], served: List[Dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("hush-from-file\n")
    shown: Tuple[Any, ...] = ()
    for words in (("--token", "hush-from-flag"), ("--token-file", str(file)), ("--show-token",)):
        monkeypatch.setenv("GPUMESH_TOKEN", "hush-from-environment")
        shown += run("serve", *words)
        assert "GPUMESH_TOKEN" not in os.environ  # Nobody who is started from here has it.

    assert [call["token"] for call in served] == ["hush-from-flag", "hush-from-file", "hush-from-environment"]
    assert "hush" not in "".join(map(str, shown))


def test_an_empty_token_file_is_refused(run: Callable[..., Answer], served: List[Any], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")

    code, _, err = run("serve", "--token-file", str(tmp_path / "token"))

    assert code == 2
    assert "holds no token" in err
    assert served == []


def test_a_token_file_that_cannot_be_read_is_named(run: Callable[..., Answer], served: List[Any], tmp_path: Path) -> None:
    missing, noise = tmp_path / "missing", tmp_path / "noise"
    noise.write_bytes(bytes(range(256)))

    code, _, err = run("serve", "--token-file", str(missing))
    assert (code, err) == (
        1,
        f"gpumesh: cannot read the token file {missing}: No such file or directory; check --token-file\n",
    )
    code, _, err = run("serve", "--token-file", str(noise))
    assert code == 2
    assert "holds no text" in err
    assert served == []


def test_join_takes_slots_score_and_tags(run: Callable[..., Answer], served: List[Dict[str, Any]]) -> None:
    words = ("--slots", "3", "--score", "12.5", "--tag", "room=lab", "--tag", "disk = ssd ", "--token", "hush")
    code, out, _ = run("join", "gpumesh://box", *words)

    assert code == 0
    assert served == [
        {"url": "http://box:8000", "token": "hush", "slots": 3, "score": 12.5, "tags": {"room": "lab", "disk": "ssd"}}
    ]
    assert "here works for http://box:8000 with 2 slots" in out
    assert "hush" not in out
    assert saved.load_connection() == ("http://box:8000", "hush")


def test_join_finds_the_mesh_that_was_saved_here(run: Callable[..., Answer], served: List[Dict[str, Any]]) -> None:
    saved.save_connection("http://box:8000", "kept")

    assert run("join")[0] == 0
    assert run("join", "box")[0] == 0
    assert [(call["url"], call["token"]) for call in served] == [("http://box:8000", "kept")] * 2


def test_a_saved_secret_is_not_offered_to_another_mesh(
    run: Callable[..., Answer], served: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.save_connection("http://box:8000", "kept")
    monkeypatch.setattr("sys.stdin", io.StringIO())

    code, _, err = run("join", "other:8000")

    assert code == 1
    assert "no token" in err
    assert served == []


def test_the_environment_names_the_mesh(
    run: Callable[..., Answer], served: List[Dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.save_connection("http://box:8000", "kept")
    monkeypatch.setenv("GPUMESH_URL", "elsewhere:7000")
    monkeypatch.setenv("GPUMESH_TOKEN", "secret")

    run("join")

    assert [(call["url"], call["token"]) for call in served] == [("http://elsewhere:7000", "secret")]


def test_tags_may_hold_equals_signs() -> None:
    assert parse_tags(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


@pytest.mark.parametrize("quick", [False, True])
def test_the_demo_sweeps_at_least_24_different_settings(quick: bool) -> None:
    sweep = settings(quick=quick)

    assert len({tuple(sorted(setting.items())) for setting in sweep}) == len(sweep) >= 24
    assert (sweep[0]["folds"] == QUICK_FOLDS) is quick


def test_the_demo_without_scikit_learn_says_what_to_install(
    run: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    code, _, err = run("demo")

    assert code == 1
    assert "pip install 'gpumesh[demo]'" in err
