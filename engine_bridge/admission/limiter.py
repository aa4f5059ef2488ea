"""What quotas are counted with: the words that `core` and the ledgers share.

A quota holds in every window of its length, not only in windows that begin when it likes. All of a
request's charges are taken together or none is, so a refusal costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

BUCKETS: Final = 60
"""A window is counted in so many pieces; a piece counts until all of it is out of the window. So a
quota is never exceeded, and what was used comes back up to a piece later than it could."""
PLACES: Final = "places"
"""Name in `Short` of the requests at once."""
MICROS: Final = 1_000_000
"""Ledgers count time in whole microseconds, so that a time to come again is exact."""


@dataclass(frozen=True, slots=True)
class Quota:
    """An amount in any window of a length."""

    name: str
    limit: int
    window_s: int

    @property
    def piece_us(self) -> int:
        """Length of a piece of the window, microseconds."""
        return self.window_s * MICROS // BUCKETS


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request takes from a quota; at most the quota's limit."""

    quota: Quota
    amount: int


@dataclass(frozen=True, slots=True)
class Places:
    """What a request takes of the tenant's requests at once."""

    limit: int
    count: int
    lease_s: float
    """They come back by themselves after so long without a renewal, seconds."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken: needed to settle it."""

    tenant: str
    ticket: str
    charges: tuple[Charge, ...]
    pieces: tuple[int, ...]
    """For each charge the number of the window's piece that it is booked in."""
    places: Places | None
    home: str
    """Which ledger it was taken from."""


@dataclass(frozen=True, slots=True)
class Short:
    """Nothing was taken, because something is used up."""

    name: str
    """Of the quota that takes longest, or `PLACES`."""
    wait_s: float
    """Time until all charges would fit if nothing else comes, seconds. It says nothing about
    places: nobody knows when a request will end."""


class Limiter(Protocol):
    """A place where quotas are counted."""

    @property
    def is_instant(self) -> bool:
        """Whether its calls never wait, so that they cannot be cancelled half-way."""
        ...

    @property
    def failures(self) -> int:
        """How often a shared storage has not answered."""
        ...

    async def take(
        self, tenant: str, ticket: str, charges: Sequence[Charge], places: Places | None
    ) -> Taken | Short:
        """Take all or nothing."""
        ...

    async def wait_s(self, tenant: str, charges: Sequence[Charge]) -> float:
        """Time until these would fit if nothing else comes, seconds. Takes nothing."""
        ...

    async def settle(self, taken: Taken, spent: Mapping[str, int]) -> None:
        """Replace what was taken by what was spent, by the quotas' names, and give places back.

        What is not named stands as it was taken. What was spent beyond it is booked now, even
        above the limit.
        """
        ...

    async def renew(self, taken: Sequence[Taken]) -> None:
        """Keep the places of requests that still run."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
