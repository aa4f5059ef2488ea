"""How a policy comes to act, and comes back after a fall-back: probation, ramp, cool-down, latch.

It keeps times only, on the telemetry's clock. Why something trips is the guard's business.
"""

from __future__ import annotations

from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.verdict import GuardReason


class Recovery:
    """The way from the static plan to the policy's whole residual."""

    def __init__(self, settings: GuardSettings) -> None:
        """Begin with a probation at time 0."""
        self._settings = settings
        self._ready_s = settings.probation_s
        self._trips_s: list[float] = []
        self.cause: GuardReason | None = None
        """Why the policy is kept out; None while it is not, and in a probation without fault."""
        self.latched = False
        """Whether only the operator can let the policy act again."""
        self.trips = 0
        """Trips so far."""

    def in_probation(self, start_s: float) -> bool:
        """Whether an interval that began at `start_s` belongs to the probation."""
        begins_s = self._ready_s - self._settings.probation_s
        return not self.latched and begins_s <= start_s < self._ready_s

    def age_s(self, now_s: float) -> float:
        """Time since the last probation ended; negative in it."""
        return now_s - self._ready_s

    def exposure(self, now_s: float, interval_s: float) -> float:
        """Part of the residual that may act in the interval after `now_s`, in [0, 1]."""
        if self.latched or now_s < self._ready_s:
            return 0.0
        self.cause = None
        ramp_s = self._settings.ramp_s
        grown_s = now_s - self._ready_s + interval_s
        return min(1.0, grown_s / ramp_s) if ramp_s > 0 else 1.0

    def trip(self, now_s: float, cause: GuardReason) -> None:
        """Keep the policy out for a cool-down that doubles with each trip remembered."""
        settings = self._settings
        remembered = [at_s for at_s in self._trips_s if at_s > now_s - settings.trip_memory_s]
        self._trips_s = [*remembered, now_s]
        self.trips += 1
        cool_down_s = settings.cool_down_s * 2.0 ** len(remembered)
        self._ready_s = now_s + max(cool_down_s, settings.probation_s)
        self.cause = cause
        self.latched = self.latched or len(self._trips_s) >= settings.most_trips

    def postpone(self, now_s: float, cause: GuardReason | None) -> None:
        """Begin a new probation, without counting a trip; an earlier cause stays."""
        self._ready_s = max(self._ready_s, now_s + self._settings.probation_s)
        self.cause = self.cause or cause

    def restart(self, now_s: float) -> None:
        """Go on with a clock that was set to `now_s`: a probation; all trips remembered count."""
        self._trips_s = [now_s] * len(self._trips_s)
        self._ready_s = now_s + self._settings.probation_s

    def release(self, now_s: float) -> None:
        """Forget all trips and begin with a probation."""
        self._trips_s.clear()
        self.latched = False
        self.cause = None
        self._ready_s = now_s + self._settings.probation_s
