"""Where requests wait while none of their engines can be used.

In the order of their coming, so many of each tier at most: a tier's crowd does not fill the others'
places. Who has been woken looks for an engine and may wait again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping


class NoEngineError(Exception):
    """No engine came back while the request waited, or too many wait already."""


class WaitingRoom:
    """One gateway's waiting requests."""

    def __init__(self, most: int, *, monotonic_s: Callable[[], float]) -> None:
        """Begin empty.

        Args:
            most: Most requests of a tier that wait at once.
            monotonic_s: Seconds that only grow.
        """
        self.most = most
        self._monotonic_s = monotonic_s
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    @property
    def lengths(self) -> Mapping[str, int]:
        """Requests that wait, by tier."""
        return {tier: len(waiters) for tier, waiters in self._waiting.items()}

    async def wait(self, tier: str, ends_s: float) -> None:
        """Wait until an engine may have come back.

        Args:
            tier: The request's.
            ends_s: When to give up, by the clock of this room.

        Raises:
            NoEngineError: it is late, or too many wait already.
        """
        waiters = self._waiting.setdefault(tier, {})
        if len(waiters) >= self.most:
            raise NoEngineError
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters[back] = None
        try:
            async with asyncio.timeout(ends_s - self._monotonic_s()):
                await back
        except TimeoutError:
            raise NoEngineError from None
        finally:
            del waiters[back]

    def wake(self) -> None:
        """Let all look for an engine, the first that came first."""
        for waiters in self._waiting.values():
            for back in waiters:
                if not back.done():
                    back.set_result(None)
