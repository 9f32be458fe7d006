"""What is said of actors and their calls is checked when it is said."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from gpumesh.client.actor_options import make_actor_options, make_call_options


def test_options_of_tasks_and_of_actors_together() -> None:
    options = make_actor_options(
        {"gpu": 1, "memory": "2GB", "max_restarts": 3, "restart_seconds": 60, "name": "c", "lifetime": "detached", "mailbox": 5}
    )
    assert options.task.gpu == 1
    assert options.task.memory == "2GB"
    assert (options.max_restarts, options.restart_seconds, options.name, options.mailbox) == (3, 60.0, "c", 5)
    assert make_actor_options({"gpu": 2}, base=options).max_restarts == 3
    assert str(make_actor_options({})) == ""
    assert "max_restarts=3" in str(options)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"max_restart": 1}, TypeError, "did you mean 'max_restarts'"),
        ({"timeout": 3}, TypeError, r"handle.method.options\(timeout="),
        ({"retries": 3}, TypeError, "max_restarts says how often"),
        ({"max_restarts": -1}, ValueError, "max_restarts=-1 must be from 0"),
        ({"max_restarts": True}, TypeError, "whole number"),
        ({"max_restarts": 1.5}, TypeError, "whole number"),
        ({"restart_seconds": 0}, ValueError, "more than 0 seconds"),
        ({"max_concurrency": 0}, ValueError, "from 1 to 1000"),
        ({"max_concurrency": 1001}, ValueError, "from 1 to 1000"),
        ({"mailbox": 0}, ValueError, "mailbox=0 must be from 1"),
        ({"call_timeout": -1}, ValueError, "0 or more seconds"),
        ({"call_timeout": "1"}, TypeError, "number of seconds"),
        ({"call_timeout": float("nan")}, TypeError, "number of seconds"),
        ({"name": 3}, TypeError, "must be text"),
        ({"name": "  "}, ValueError, "1 to 200 characters"),
        ({"name": "x" * 201}, ValueError, "1 to 200 characters"),
        ({"name": "a-12"}, ValueError, "looks like the id"),
        ({"lifetime": "forever"}, ValueError, "'detached'"),
        ({"gpu": "1"}, ValueError, "write gpu=1"),
        ({"cores": 0}, ValueError, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given: Dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        make_actor_options(given)


def test_infinite_times_are_none() -> None:
    options = make_actor_options({"call_timeout": float("inf"), "restart_seconds": float("inf")})
    assert options.call_timeout is None
    assert options.restart_seconds is None
    assert make_actor_options({"call_timeout": 0}).call_timeout == 0.0


def test_options_of_calls() -> None:
    options = make_call_options({"timeout": 3, "retries": 2, "retry_on": KeyError})
    assert options == (3.0, 2, (KeyError,), None)
    assert make_call_options({"name": "n"}, base=options).retry_on == (KeyError,)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"timout": 1}, TypeError, "did you mean 'timeout'"),
        ({"gpu": 1}, TypeError, "one of the actor"),
        ({"timeout": 0}, ValueError, "more than 0 seconds"),
        ({"retry_on": KeyError}, ValueError, "retries says how often"),
        ({"retry_on": 3, "retries": 1}, TypeError, "exception class"),
    ],
)
def test_what_makes_no_sense_for_a_call_is_refused(given: Dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        make_call_options(given)
