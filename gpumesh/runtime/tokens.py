"""The secrets of one mesh: the full token, what follows from it, and, for a while, those of before.

Promises:

1. A secret of before opens nothing any more once its grace is over; the newest opens always.
2. What a secret grants is looked up in a time that does not depend on how much of it is right.
3. No secret is in the text of these objects.
"""

from __future__ import annotations

import hmac
import logging
import math
import secrets
from typing import Callable, List, Optional, Sequence, Tuple

from gpumesh.protocol import auth
from gpumesh.protocol.messages import RotateToken, TokenRotated

logger = logging.getLogger("gpumesh.coordinator")

TOKEN_BYTES = 32
IN_THE_OPEN = (
    "this connection to the coordinator is not encrypted, and whoever is on the way would read the new token; "
    "rotate it on the coordinator's own machine, or over TLS"
)


class Tokens:
    """See the module's promises.

    Args:
        token: The full token.

    Attributes:
        current: The full token of now.
        own: A secret for the processes that start and end with the coordinator; it grants everything and never changes.
        keep: Told of a new token, it sees to it that the next start uses it; False: it will not.
    """

    def __init__(self, token: str) -> None:
        self.current = token
        self.own = secrets.token_hex(TOKEN_BYTES)
        self.keep: Optional[Callable[[str], bool]] = None
        self._last: Optional[Tuple[bytes, TokenRotated]] = None  # The last order, and its answer.
        self._before: List[Tuple[str, float]] = []  # Secrets of before, and until when they are good.
        self._ours = self._of_now()

    def __repr__(self) -> str:
        return f"<Tokens: one and {len(self._before)} of before>"

    def on_order(self, order: RotateToken, now: float, *, is_private: bool) -> TokenRotated:
        """Carry out what a client wants; its answer. `is_private`: nobody else reads that."""
        problem = "" if is_private else IN_THE_OPEN
        if type(order.key) is not bytes or type(order.grace) not in (int, float) or not 0 <= order.grace < math.inf:
            problem = "this is not an order to rotate the token"
        if problem:
            return TokenRotated(order.number, "", False, problem)
        if self._last is not None and self._last[0] == order.key:
            return self._last[1]._replace(number=order.number)
        token = self.rotate(order.grace, now)
        logger.info("the token was rotated; the one of before opens new connections for %g s more", order.grace)
        answer = TokenRotated(order.number, token, self.keep is not None and self.keep(token), "")
        self._last = (order.key, answer)
        return answer

    def rotate(self, grace: float, now: float) -> str:
        """Draw a new full token; the one of before is good for `grace` seconds more. Returns the new one."""
        self._expire(now)
        if grace > 0:
            self._before.append((self.current, now + grace))
        else:
            self._before.clear()  # Whoever is in such a hurry does not want the ones before that either.
        self.current = secrets.token_hex(TOKEN_BYTES)
        self._ours = self._of_now()
        return self.current

    def grants(self, now: float) -> Sequence[Tuple[str, str]]:
        """The secrets that the mesh lets in, each with what it grants: for `Connection.listen(tokens=...)`."""
        self._expire(now)
        return self._ours

    def grant_of(self, token: str, now: float) -> str:
        """`auth.FULL`, `auth.WORKER`, `auth.METRICS`, or "" for what is none of this mesh's."""
        self._expire(now)
        found = ""
        known = [*self._ours, *((auth.metrics_token(full), auth.METRICS) for full in self._full())]
        for secret, grant in known:
            if hmac.compare_digest(_bytes(secret), _bytes(token)):
                found = grant
        return found

    def _full(self) -> List[str]:
        return [self.current, *(secret for secret, _ in self._before)]

    def _of_now(self) -> List[Tuple[str, str]]:
        return [(self.own, auth.FULL), *(grant for full in self._full() for grant in auth.mesh_grants(full))]

    def _expire(self, now: float) -> None:
        good = [(secret, until) for secret, until in self._before if now < until]
        if len(good) < len(self._before):
            self._before = good
            self._ours = self._of_now()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
