"""Task ids: unique, ordered by client, readable."""

from __future__ import annotations

import pytest

from gpumesh.model.ids import CLIENT_LIMIT, SEQUENCE_LIMIT, ClientNumber, client_of, make_task_id, show_task


@pytest.mark.parametrize("client", [0, 1, 0x1A2B3C4D, CLIENT_LIMIT - 1])
@pytest.mark.parametrize("sequence", [0, 17, SEQUENCE_LIMIT - 1])
def test_an_id_tells_whose_task_it_is_and_fits_a_machine_word(client: int, sequence: int) -> None:
    task = make_task_id(ClientNumber(client), sequence)

    assert client_of(task) == client
    assert 0 <= task < 1 << 63
    assert task & (SEQUENCE_LIMIT - 1) == sequence


def test_an_id_is_shown_as_people_type_it() -> None:
    assert show_task(make_task_id(ClientNumber(0x1A2B3C4D), 17)) == "t-1a2b3c4d-17"
    assert show_task(make_task_id(ClientNumber(1), SEQUENCE_LIMIT - 1)) == "t-00000001-4294967295"
