"""The secrets of a mesh over time."""

from __future__ import annotations

from typing import List

import pytest

from gpumesh.protocol import auth
from gpumesh.protocol.messages import RotateToken
from gpumesh.runtime.tokens import IN_THE_OPEN, Tokens

KEY = bytes(16)


def full(tokens: Tokens, now: float) -> List[str]:
    return [secret for secret, grant in tokens.grants(now) if grant == auth.FULL and secret != tokens.own]


def test_a_mesh_lets_in_its_token_and_the_one_that_lends() -> None:
    tokens = Tokens("t")

    assert set(tokens.grants(0.0)) == {("t", auth.FULL), (auth.worker_token("t"), auth.WORKER), (tokens.own, auth.FULL)}


@pytest.mark.parametrize(
    ("token", "grant"),
    [
        ("t", auth.FULL),
        (auth.worker_token("t"), auth.WORKER),
        (auth.metrics_token("t"), auth.METRICS),
        ("", ""),
        ("T", ""),
        ("t\udcff", ""),
        (auth.metrics_token("other"), ""),
    ],
)
def test_what_a_secret_grants(token: str, grant: str) -> None:
    assert Tokens("t").grant_of(token, 0.0) == grant


def test_the_token_of_before_opens_until_its_grace_is_over_and_so_do_those_that_follow_from_it() -> None:
    tokens = Tokens("old")
    new = tokens.rotate(60.0, now=100.0)

    assert full(tokens, 159.9) == [new, "old"]
    assert tokens.grant_of(auth.worker_token("old"), 159.9) == auth.WORKER
    assert full(tokens, 160.0) == [new]
    for late in ("old", auth.worker_token("old"), auth.metrics_token("old")):
        assert tokens.grant_of(late, 160.0) == ""
    assert tokens.grant_of(auth.metrics_token(new), 160.0) == auth.METRICS


def test_without_a_grace_none_of_before_is_good() -> None:
    tokens = Tokens("first")
    second = tokens.rotate(3600.0, now=0.0)
    third = tokens.rotate(0.0, now=1.0)

    assert full(tokens, 1.0) == [third]
    assert tokens.grant_of(second, 1.0) == ""


def test_each_has_a_grace_of_its_own() -> None:
    tokens = Tokens("first")
    second = tokens.rotate(10.0, now=0.0)
    third = tokens.rotate(100.0, now=5.0)

    assert full(tokens, 9.0) == [third, "first", second]
    assert full(tokens, 11.0) == [third, second]


def test_the_secret_of_the_coordinators_own_processes_stays() -> None:
    tokens = Tokens("t")
    own = tokens.own

    tokens.rotate(0.0, now=0.0)

    assert (own, auth.FULL) in tokens.grants(1.0)


def test_an_order_is_carried_out_once_however_often_it_comes() -> None:
    kept: List[str] = []
    tokens = Tokens("t")
    tokens.keep = lambda token: not kept.append(token)

    first = tokens.on_order(RotateToken(1, KEY, 60.0), 0.0, is_private=True)
    again = tokens.on_order(RotateToken(7, KEY, 60.0), 1.0, is_private=True)
    other = tokens.on_order(RotateToken(8, bytes([1]) * 16, 60.0), 1.0, is_private=True)

    assert first.token == again.token == kept[0]
    assert (first.number, again.number, first.is_kept, first.error) == (1, 7, True, "")
    assert other.token == kept[1] == tokens.current


def test_nobody_keeps_a_token_that_somebody_chose() -> None:
    assert Tokens("t").on_order(RotateToken(1, KEY, 60.0), 0.0, is_private=True).is_kept is False


@pytest.mark.parametrize(
    ("order", "is_private", "problem"),
    [
        (RotateToken(1, KEY, 60.0), False, IN_THE_OPEN),
        (RotateToken(1, KEY, -1.0), True, "not an order"),
        (RotateToken(1, KEY, float("nan")), True, "not an order"),
        (RotateToken(1, KEY, float("inf")), True, "not an order"),
        (RotateToken(1, "key", 60.0), True, "not an order"),  # type: ignore[arg-type]
        (RotateToken(1, KEY, "soon"), True, "not an order"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused_changes_nothing(order: RotateToken, is_private: bool, problem: str) -> None:
    tokens = Tokens("t")

    answer = tokens.on_order(order, 0.0, is_private=is_private)

    assert problem in answer.error
    assert answer.token == ""
    assert tokens.current == "t"


def test_no_secret_is_in_what_is_printed() -> None:
    tokens = Tokens("hush")
    answer = tokens.on_order(RotateToken(1, KEY, 60.0), 0.0, is_private=True)

    for shown in (repr(tokens), str(answer), repr(answer)):
        assert not any(secret in shown for secret in ("hush", tokens.own, tokens.current))
