"""What a failed handshake is called for people."""

from __future__ import annotations

import pytest

from gpumesh.errors import AuthenticationError
from gpumesh.network.address import Address
from gpumesh.network.connecting import at
from gpumesh.protocol.connection import NOT_A_CLIENT, NOT_KNOWN

BINDING = bytes(range(32))


@pytest.mark.parametrize(("text", "is_suspicious"), [(NOT_KNOWN, True), (NOT_A_CLIENT, False)])
def test_somebody_in_between_is_suspected_only_where_the_proof_was_not_accepted(text: str, is_suspicious: bool) -> None:
    told = at(Address("10.0.0.7", 8000), AuthenticationError(text), "", BINDING)

    assert str(told).startswith(f"10.0.0.7:8000: {text}")
    assert ("somebody stands between" in str(told)) is is_suspicious
