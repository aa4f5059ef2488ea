"""Counts quotas in this process: exact, in microseconds of work, and gone with the process.

Nothing in it waits, so no two requests can interleave inside it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trimtab.engine_bridge.admission.limiter import (
    BUCKETS,
    MICROS,
    PLACES,
    Charge,
    Places,
    Short,
    Taken,
)
from trimtab.engine_bridge.admission.steady_clock import SteadyClock

HOME: Final = "memory"
_FORGOTTEN_AT_ONCE: Final = 2
"""Idle tenants that one request forgets at most: more than it can add."""


class _Window:
    """One quota of one tenant: what was booked in each piece that still counts."""

    __slots__ = ("pieces", "total")

    def __init__(self) -> None:
        self.pieces: deque[list[int]] = deque()
        self.total = 0

    def forget(self, piece: int) -> None:
        """Drop what is out of the window that ends in this piece."""
        while self.pieces and self.pieces[0][0] < piece - BUCKETS:
            self.total -= self.pieces.popleft()[1]

    def book(self, piece: int, amount: int) -> None:
        if not amount:
            return
        if self.pieces and self.pieces[-1][0] == piece:
            self.pieces[-1][1] += amount
        else:
            self.pieces.append([piece, amount])
        self.total += amount

    def give_back(self, piece: int, amount: int) -> None:
        """Undo a booking, if it still counts."""
        for entry in reversed(self.pieces):
            if entry[0] == piece:
                entry[1] -= amount
                self.total -= amount
                return

    def fits_from_us(self, charge: Charge) -> int:
        """When the charge would fit, microseconds of the clock; 0: now."""
        over = self.total + charge.amount - charge.quota.limit
        if over <= 0:
            return 0
        for piece, amount in self.pieces:
            over -= amount
            if over <= 0:
                return (piece + BUCKETS + 1) * charge.quota.piece_us
        raise AssertionError(f"a charge of {charge.amount} is above its quota's limit")


class _Tenant:
    """One tenant's windows by quota, and its places by ticket: how many, until when."""

    __slots__ = ("_first_end_us", "_occupied", "_places", "_windows")

    def __init__(self) -> None:
        self._windows: dict[str, tuple[int, _Window]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._occupied = 0
        self._first_end_us = 0

    def window(self, charge: Charge, now_us: int) -> tuple[_Window, int]:
        """The quota's window as it is now, and the number of its newest piece."""
        name = charge.quota.name
        known = self._windows.get(name)
        if known is None:
            known = self._windows[name] = (charge.quota.piece_us, _Window())
        length_us, window = known
        piece = now_us // length_us
        window.forget(piece)
        return window, piece

    def occupied(self, now_us: int) -> int:
        """Places that are taken and have not run out."""
        if self._places and now_us >= self._first_end_us:
            for ticket, (_, ends_us) in list(self._places.items()):
                if ends_us <= now_us:
                    self.leave(ticket)
            ends = (ends_us for _, ends_us in self._places.values())
            self._first_end_us = min(ends, default=0)
        return self._occupied

    def occupy(self, ticket: str, count: int, ends_us: int) -> None:
        """Take places, or keep those of a ticket that has some."""
        self.leave(ticket)
        self._first_end_us = min(self._first_end_us, ends_us) if self._places else ends_us
        self._places[ticket] = (count, ends_us)
        self._occupied += count

    def leave(self, ticket: str) -> None:
        """Give a ticket's places back, if it has any."""
        self._occupied -= self._places.pop(ticket, (0, 0))[0]

    def is_idle(self, now_us: int) -> bool:
        """Whether nothing of it counts any more."""
        for length_us, window in self._windows.values():
            window.forget(now_us // length_us)
        return not self.occupied(now_us) and not any(w.total for _, w in self._windows.values())


class MemoryLedger:
    """A `Limiter` in this process."""

    is_instant: Final = True
    failures: Final = 0

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        """Start empty.

        Args:
            monotonic_s: A clock, seconds. One that jumps back reopens nothing.
        """
        self._clock = SteadyClock(monotonic_s)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def __len__(self) -> int:
        """Tenants that something is known of."""
        return len(self._tenants)

    async def take(
        self, tenant: str, ticket: str, charges: Sequence[Charge], places: Places | None
    ) -> Taken | Short:
        """Take all or nothing."""
        now_us = self._clock.now_us()
        self._forget_idle(now_us)
        known = self._tenants.get(tenant) or _Tenant()
        full = places is not None and known.occupied(now_us) + places.count > places.limit
        windows = [known.window(charge, now_us) for charge in charges]
        free_us = [w.fits_from_us(c) for (w, _), c in zip(windows, charges, strict=True)]
        latest_us = max(free_us, default=0)
        if full or latest_us:
            name = charges[free_us.index(latest_us)].quota.name if latest_us else PLACES
            return Short(name, max(0, latest_us - now_us) / MICROS)
        for (window, piece), charge in zip(windows, charges, strict=True):
            window.book(piece, charge.amount)
        if places is not None:
            known.occupy(ticket, places.count, now_us + _lease_us(places))
        self._tenants[tenant] = known
        self._tenants.move_to_end(tenant)
        pieces = tuple(piece for _, piece in windows)
        return Taken(tenant, ticket, tuple(charges), pieces, places, HOME)

    async def wait_s(self, tenant: str, charges: Sequence[Charge]) -> float:
        """Time until these would fit if nothing else comes, seconds."""
        known = self._tenants.get(tenant)
        if known is None:
            return 0.0
        now_us = self._clock.now_us()
        free_us = [known.window(charge, now_us)[0].fits_from_us(charge) for charge in charges]
        return max(0, max(free_us, default=0) - now_us) / MICROS

    async def settle(self, taken: Taken, spent: Mapping[str, int]) -> None:
        """Replace what was taken by what was spent, and give the places back."""
        known = self._tenants.get(taken.tenant)
        if known is None:
            known = self._tenants.setdefault(taken.tenant, _Tenant())
        known.leave(taken.ticket)
        now_us = self._clock.now_us()
        for charge, booked_in in zip(taken.charges, taken.pieces, strict=True):
            more = spent.get(charge.quota.name, charge.amount) - charge.amount
            window, piece = known.window(charge, now_us)
            if more > 0:
                window.book(piece, more)
            elif more < 0:
                window.give_back(booked_in, -more)

    async def renew(self, taken: Sequence[Taken]) -> None:
        """Keep the places of requests that still run."""
        now_us = self._clock.now_us()
        for one in taken:
            known = self._tenants.get(one.tenant)
            if one.places is not None and known is not None:
                known.occupy(one.ticket, one.places.count, now_us + _lease_us(one.places))

    async def close(self) -> None:
        """Nothing to let go of."""

    def _forget_idle(self, now_us: int) -> None:
        for _ in range(min(_FORGOTTEN_AT_ONCE, len(self._tenants))):
            tenant, known = next(iter(self._tenants.items()))
            if not known.is_idle(now_us):
                # It must not stand in the way of the idle ones behind it.
                self._tenants.move_to_end(tenant)
            else:
                del self._tenants[tenant]


def _lease_us(places: Places) -> int:
    return round(places.lease_s * MICROS)
