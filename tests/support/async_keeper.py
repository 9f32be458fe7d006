"""The class of actors of `keeper` with methods that wait."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.keeper import Keeper


class AsyncKeeper(Keeper):
    """The same with methods that wait."""

    async def sleep(self, seconds: float) -> None:  # type: ignore[override]
        await asyncio.sleep(seconds)

    async def put(self, value: Any) -> Any:
        return super().put(value)
