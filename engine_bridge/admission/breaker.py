"""Slows a tenant whose requests keep failing, and it alone.

Closed: it is free. Open: its requests are spaced. After a while one of them is a probe: it ends
well, and the breaker closes; it fails, and the while begins anew. It knows one tenant; `Breakers`
keeps them apart.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from trimtab.engine_bridge.admission.settings import TenantBreaker

MOST_TENANTS: Final = 10_000
"""So many tenants are remembered; the one silent for longest is forgotten first."""
_MINUTE_S: Final = 60.0


class Breaker:
    """One tenant's breaker. Times are seconds of any clock that does not go back."""

    __slots__ = ("_ends", "_failed", "_next_s", "_opened_s", "_probe", "_probed_s")

    def __init__(self) -> None:
        """Start closed."""
        self._ends: deque[bool] = deque()
        self._failed = 0
        self._opened_s: float | None = None
        self._next_s = 0.0
        self._probe: str | None = None
        self._probed_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the tenant is slowed."""
        return self._opened_s is not None

    def free_at_s(self, now_s: float, settings: TenantBreaker) -> float:
        """When its next request may go; at or before now: at once."""
        if self._opened_s is None:
            return now_s
        if self._probe is not None:
            return self._next_s
        return min(self._next_s, self._opened_s + settings.probe_after_s)

    def enter(self, ticket: str, now_s: float, settings: TenantBreaker) -> None:
        """A request goes."""
        if self._opened_s is None:
            return
        # A probe that never ends makes place for another one.
        lost = now_s >= self._probed_s + settings.probe_after_s
        due = now_s >= self._opened_s + settings.probe_after_s
        if due and (self._probe is None or lost):
            self._probe, self._probed_s = ticket, now_s
        self._next_s = now_s + _MINUTE_S / settings.slow_to_per_minute

    def ended(
        self, ticket: str, failed: bool | None, now_s: float, settings: TenantBreaker
    ) -> None:
        """A request has ended.

        Args:
            ticket: Which one.
            failed: None: how it ended says nothing about the tenant.
            now_s: When.
            settings: What holds.
        """
        is_probe = self._probe == ticket
        if is_probe:
            self._probe = None
        if failed is None:
            return
        if self._opened_s is not None:
            if is_probe and not failed:
                self._close()
            elif is_probe:
                self._opened_s = now_s
            return
        self._count(failed, settings.of_last)
        enough = len(self._ends) == settings.of_last
        if enough and self._failed >= settings.failure_fraction * settings.of_last:
            self._opened_s = now_s
            self._next_s = now_s + _MINUTE_S / settings.slow_to_per_minute

    def _count(self, failed: bool, of_last: int) -> None:
        self._ends.append(failed)
        self._failed += failed
        while len(self._ends) > of_last:
            self._failed -= self._ends.popleft()

    def _close(self) -> None:
        self._opened_s = None
        self._ends.clear()
        self._failed = 0


class Breakers:
    """The breakers of all tenants."""

    def __init__(self) -> None:
        """Start with all of them closed."""
        self._of: OrderedDict[str, Breaker] = OrderedDict()

    def of(self, tenant: str) -> Breaker:
        """A tenant's breaker."""
        found = self._of.get(tenant)
        if found is None:
            found = self._of[tenant] = Breaker()
            if len(self._of) > MOST_TENANTS:
                self._of.popitem(last=False)
        else:
            self._of.move_to_end(tenant)
        return found

    @property
    def open_count(self) -> int:
        """Tenants that are slowed."""
        return sum(breaker.is_open for breaker in self._of.values())
