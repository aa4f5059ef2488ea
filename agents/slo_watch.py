"""The watch over the promises: demand lost under a policy, against a reference under static.

It needs no twin: the reference is what the tiers attained while the static plan held. It decides
nothing; the guard reads `lost_s`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry

FloatArray = npt.NDArray[np.float64]

_PROMISE_SAMPLES: Final = 10.0
"""The promise counts as so many samples of a reference: with few requests it is what is asked."""
_USUAL_TOKENS: Final = 1000.0
"""Priced tokens of a request before any was served."""
_RATE_S: Final = 300.0
"""Time constant of the mean arrivals, seconds."""
_SLOW_TARGET_S: Final = 20.0
"""A tier with a longer target is judged by its queue: its misses come too late."""
_MOST: Final = 1e12
"""No interval has so many requests, tokens or seconds: a larger figure is none."""


class SloWatch:
    """Keeps each tier's reference attainment and an account of the demand lost since.

    Per interval, with v the tier's value, p the mean priced tokens of its requests that were
    served, a its mean arrivals per second, n its judged requests, met those within the targets, r
    its reference, and d in [0, 1] the distance of the applied allocation from static:

        loss_s   = d x sum over promised tiers of v p (r n - met) / sum over all tiers of v p a
        lost_s  <- max(0, lost_s + loss_s - drift x interval)

    A tier with a slow target (batch, minutes) is judged by what arrives and how its queue waits:
    n is a x interval, met at most n (1 - (w - f) / (1 - f)) with w the oldest wait over the target
    and f the wait that is still fine. Best-effort tiers promise nothing and are left out.
    """

    def __init__(self, plan: Plan, *, drift: float, slow_wait_fraction: float) -> None:
        """Begin without a reference: the promises stand for it.

        Args:
            plan: The tiers' values, targets and promises.
            drift: Loss that is not counted, part of the demand.
            slow_wait_fraction: f above.
        """
        self._drift = drift
        self._fine_wait = min(slow_wait_fraction, 1.0 - 1e-9)
        tiers = list(plan.tiers.values())
        self._values = np.array([tier.value for tier in tiers])
        self._promise = np.array([tier.targets.attainment for tier in tiers])
        self._promised = np.array([not tier.targets.best_effort for tier in tiers])
        self._target_s = np.array(
            [_target_s(tier.targets.ttft_ms, tier.targets.e2e_ms) for tier in tiers]
        )
        self._slow = np.isfinite(self._target_s) & (self._target_s > _SLOW_TARGET_S)
        self._met_tokens = np.zeros(len(tiers))
        self._met_requests = np.zeros(len(tiers))
        self._arrivals = np.zeros(len(tiers))
        self._arrivals_weight = 0.0
        self.lost_s = 0.0
        """Demand lost, in seconds of all demand."""
        self.begin_reference()

    def begin_reference(self) -> None:
        """Forget the reference, to measure it anew."""
        self._reference_met = np.zeros(len(self._values))
        self._reference_n = np.zeros(len(self._values))

    def forgive(self) -> None:
        """Empty the account."""
        self.lost_s = 0.0

    @property
    def reference(self) -> FloatArray:
        """Reference attainment by tier, shape (tiers,): measured, drawn towards the promise."""
        met = self._reference_met + _PROMISE_SAMPLES * self._promise
        return np.asarray(met / (self._reference_n + _PROMISE_SAMPLES))

    @property
    def kept_fraction(self) -> float:
        """Part of the promises that the reference keeps, weighted by demand, in [0, 1]."""
        demand = np.where(self._promised, self._demand_rate(), 0.0)
        if demand.sum() <= 0:
            return 1.0
        kept = np.minimum(self.reference / self._promise, 1.0)
        return float((demand * kept).sum() / demand.sum())

    def measure_reference(self, telemetry: Telemetry) -> None:
        """Take an interval under the static plan into the reference."""
        n, met = self._judged(telemetry)
        self._reference_n += n
        self._reference_met += met

    def account(self, telemetry: Telemetry, distance: float) -> None:
        """Take an interval under a policy into the account.

        Args:
            telemetry: What happened.
            distance: How far from static the allocation was, in [0, 1].
        """
        demand_rate = self._demand_rate().sum()
        if demand_rate <= 0:
            return
        n, met = self._judged(telemetry)
        missing = self._values * self._tokens() * (self.reference * n - met)
        loss_s = distance * float(missing[self._promised].sum() / demand_rate)
        self.lost_s = max(0.0, self.lost_s + loss_s - self._drift * telemetry.interval_s)

    def learn(self, telemetry: Telemetry) -> None:
        """Take in what requests of each tier are like; once for every interval, before the rest."""
        n, attained = _samples(telemetry)
        self._met_requests += n * attained
        self._met_tokens += _figures(telemetry, "met_tokens")
        keep = float(np.exp(-telemetry.interval_s / _RATE_S))
        self._arrivals = keep * self._arrivals + (1 - keep) * _figures(telemetry, "arrivals")
        self._arrivals_weight = keep * self._arrivals_weight + (1 - keep) * telemetry.interval_s

    def _judged(self, telemetry: Telemetry) -> tuple[FloatArray, FloatArray]:
        """Requests of the interval, and those of them that met or will meet their targets."""
        n, attained = _samples(telemetry)
        wait = _figures(telemetry, "oldest_wait_s") / self._target_s
        health = np.clip(1 - (wait - self._fine_wait) / (1 - self._fine_wait), 0.0, 1.0)
        arriving = self._arrivals_rate() * telemetry.interval_s
        expected = arriving * np.minimum(np.where(n > 0, attained, 1.0), health)
        return np.where(self._slow, arriving, n), np.where(self._slow, expected, n * attained)

    def _tokens(self) -> FloatArray:
        return np.asarray((self._met_tokens + _USUAL_TOKENS) / (self._met_requests + 1))

    def _arrivals_rate(self) -> FloatArray:
        return self._arrivals / max(self._arrivals_weight, 1e-12)

    def _demand_rate(self) -> FloatArray:
        return self._values * self._tokens() * self._arrivals_rate()


def _target_s(ttft_ms: float | None, e2e_ms: float | None) -> float:
    target_ms = ttft_ms if ttft_ms is not None else e2e_ms
    return np.inf if target_ms is None else target_ms / 1e3


def _samples(telemetry: Telemetry) -> tuple[FloatArray, FloatArray]:
    """Judged requests by tier and the part that met the targets; without data 0 of 0."""
    known = [tier.has_attainment for tier in telemetry.tiers]
    n, attained = _figures(telemetry, "attainment_samples"), _figures(telemetry, "attainment")
    return np.where(known, n, 0.0), np.where(known, attained, 0.0)


def _figures(telemetry: Telemetry, name: str) -> FloatArray:
    """One figure by tier; what no engine can have done counts as 0, which accuses nobody."""
    values = np.array([getattr(tier, name) for tier in telemetry.tiers], np.float64)
    return np.where(np.abs(values) <= _MOST, values, 0.0)
