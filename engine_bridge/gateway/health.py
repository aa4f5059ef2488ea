"""Whether an engine can be used: a state machine over probes and requests, told the time.

    UP --(looks or requests fail)--> OUT --(time is up and a look succeeds)--> TRIAL
    TRIAL --(a request or a few looks succeed)--> UP;  --(a failure)--> OUT, for twice as long

It sends nothing; `prober` looks, `proxy` tells how requests went.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HealthState(StrEnum):
    """What an engine may be used for."""

    UNKNOWN = "unknown"
    """Not looked at yet; not used."""
    UP = "up"
    OUT = "out"
    TRIAL = "trial"
    """One request at a time, until it is known how one went."""


@dataclass(frozen=True, kw_only=True)
class HealthRules:
    """When an engine is out and back; docs of `settings.ProbeSettings`."""

    fail_after: int = 3
    eject_after: int = 2
    eject_s: float = 2.0
    longest_eject_s: float = 60.0
    back_after: int = 3


class Health:
    """One engine's state."""

    def __init__(self, rules: HealthRules) -> None:
        """Begin unknown."""
        self.rules = rules
        self.state = HealthState.UNKNOWN
        self.ejections = 0
        """How often it went out since the start."""
        self._failed_looks = self._failed_requests = self._good_looks = 0
        self._out_until_s = 0.0
        self._out_s = rules.eject_s
        self._trials = self._trial = 0

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        up = self.state is HealthState.UP
        return up or (self.state is HealthState.TRIAL and not self._trial)

    def begin(self) -> int:
        """A request is sent; returns which trial it is, for `ended`. 0: none."""
        if self.state is not HealthState.TRIAL:
            return 0
        self._trials += 1
        self._trial = self._trials
        return self._trial

    def answered(self) -> bool:
        """A request got an answer from an engine that works; True: that has brought it back."""
        self._failed_requests = 0
        if self.state is not HealthState.TRIAL:
            return False
        self._up()
        return True

    def unanswered(self, now_s: float) -> None:
        """A request found no engine, or lost it before the first byte."""
        self._failed_requests += 1
        if self.state is HealthState.TRIAL or (
            self.state is HealthState.UP and self._failed_requests >= self.rules.eject_after
        ):
            self._out(now_s)

    def ended(self, trial: int) -> None:
        """A request is over, whatever it told; `trial` as `begin` gave it.

        Only the running trial's own end makes room for the next one: requests from before the
        engine was out may end at any time.
        """
        if trial == self._trial:
            self._trial = 0

    def looked(self, good: bool, now_s: float) -> None:
        """A probe was answered, or was not."""
        if good:
            self._good_look(now_s)
            return
        self._good_looks = 0
        self._failed_looks += 1
        if self.state is HealthState.OUT:
            return
        if self.state is not HealthState.UP or self._failed_looks >= self.rules.fail_after:
            self._out(now_s)

    def _good_look(self, now_s: float) -> None:
        self._failed_looks = 0
        if self.state is HealthState.UNKNOWN:
            self._up()
        elif self.state is HealthState.OUT and now_s >= self._out_until_s:
            self.state = HealthState.TRIAL
            self._good_looks = self._trial = 0
        elif self.state is HealthState.TRIAL:
            self._good_looks += 1
            if self._good_looks >= self.rules.back_after and not self._trial:
                self._up()

    def _up(self) -> None:
        self.state = HealthState.UP
        self._out_s = self.rules.eject_s
        self._failed_looks = self._failed_requests = 0
        self._trial = 0

    def _out(self, now_s: float) -> None:
        if self.state is not HealthState.UNKNOWN:
            self.ejections += 1
        self.state = HealthState.OUT
        self._out_until_s = now_s + self._out_s
        self._out_s = min(2 * self._out_s, self.rules.longest_eject_s)
        self._failed_looks = self._failed_requests = self._good_looks = 0
        self._trial = 0
