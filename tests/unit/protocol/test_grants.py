"""What a listener lets whom do: one proof, several secrets."""

from __future__ import annotations

import pytest

from gpumesh.errors import AuthenticationError, MeshUnavailableError
from gpumesh.protocol import auth
from gpumesh.protocol.connection import Connection, State
from tests.unit.protocol.talk import LISTENER_FACTS, LISTENER_NONCE, MESH, TOKEN, dial, listen, listen_to, pump

LENT = auth.worker_token(TOKEN)
OLD = "the one of before"


@pytest.mark.parametrize(
    ("token", "grant"), [(TOKEN, auth.FULL), (LENT, auth.WORKER), (OLD, auth.FULL), (auth.worker_token(OLD), auth.WORKER)]
)
def test_a_worker_gets_what_its_secret_grants(token: str, grant: str) -> None:
    worker, listener = dial(token=token, role="worker"), listen_to(*auth.mesh_grants(TOKEN), *auth.mesh_grants(OLD))
    assert listener.grant == ""

    pump(worker, listener)

    assert worker.established
    assert listener.established
    assert listener.grant == grant


def test_a_client_with_the_full_token_gets_everything() -> None:
    client, listener = dial(), listen_to(*auth.mesh_grants(TOKEN))

    pump(client, listener)

    assert client.established
    assert listener.grant == auth.FULL


def test_a_client_with_the_worker_token_is_told_what_that_is_for() -> None:
    client, listener = dial(token=LENT), listen_to(*auth.mesh_grants(TOKEN))

    pump(client, listener)

    assert client.state is State.CLOSED
    assert listener.state is State.CLOSED
    assert isinstance(client.error, AuthenticationError)
    assert str(client.error).startswith("this token lends a machine and nothing else; ")
    assert listener.grant == ""
    assert not listener.has_failed_proof  # No guess: it knows the mesh.


@pytest.mark.parametrize("token", ["", auth.metrics_token(TOKEN), auth.worker_token(LENT), auth.worker_token(OLD), "gmw-"])
@pytest.mark.parametrize("role", ["client", "worker"])
def test_any_other_secret_opens_nothing(token: str, role: str) -> None:
    dialer, listener = dial(token=token, role=role), listen_to(*auth.mesh_grants(TOKEN))

    pump(dialer, listener)

    assert isinstance(dialer.error, AuthenticationError)
    assert str(dialer.error).startswith("the token was refused; ")
    assert listener.has_failed_proof
    assert listener.grant == ""


def test_a_lesser_secret_is_bound_to_the_channel_too() -> None:
    worker, listener = (
        dial(token=LENT, role="worker", binding=b"of the one in between"),
        listen_to(*auth.mesh_grants(TOKEN), binding=b"ours"),
    )

    pump(worker, listener)

    assert isinstance(worker.error, AuthenticationError)
    assert listener.has_failed_proof


def test_the_listener_answers_with_the_secret_that_was_proved() -> None:
    """A worker that only knows its own token must be able to check the mesh with it."""
    worker, listener = dial(token=LENT, role="worker"), listen(token=TOKEN)
    pump(worker, listener)
    assert not worker.established

    worker, listener = dial(token=LENT, role="worker"), listen_to((LENT, auth.WORKER))
    pump(worker, listener)
    assert worker.established


@pytest.mark.parametrize("tokens", [(), (("", auth.FULL),), (("a", auth.FULL), ("", auth.WORKER))])
def test_no_mesh_has_an_empty_secret(tokens: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ValueError, match="needs a token that is not empty"):
        Connection.listen(tokens=tokens, nonce=LISTENER_NONCE, mesh=MESH, now=0.0, facts=LISTENER_FACTS)


@pytest.mark.parametrize("reason", ["tls", "later", "busy"])
def test_who_may_come_again_is_told_how(reason: str) -> None:
    client, listener = dial(), listen()
    listener.receive_data(b"".join(client.data_to_send()), 0.0)
    listener.refuse(reason, "not so")

    pump(client, listener)

    assert isinstance(client.error, MeshUnavailableError)
    assert client.error.refusal == reason
    assert str(client.error) == "not so"
