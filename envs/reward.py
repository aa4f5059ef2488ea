"""The reward of one control interval, as terms that add up to it.

Pure functions of one interval's figures. It knows no engine and runs none: what the static plan
would have earned comes in from outside (`twin`).

    reward = goodput + floors + preemptions + churn + gap + twin

* goodput:     c_goodput * sum_i value_i * met_i / (1000 * V * interval), met_i the priced tokens
               of tier i that met their targets, V the value that the traffic offers a second. Over
               a whole trace the mean of it is close to the weighted attainment of `score`.
* floors:      -c_floors * sum_i value_i * max(0, g_i) / sum_i value_i over the promised tiers, g_i
               the attainment gap of `features` (target - attainment, little trust in few samples)
* preemptions: -c_preemptions * requests that lost their place
* churn:       -c_churn * ||residual(applied) - residual(applied before)||_1 (`residual`)
* gap:         -c_gap * ||residual(requested) - residual(applied)||_1
* twin:        -(goodput + floors + preemptions) of the static plan on the same traffic in the same
               interval; 0 where nothing can replay it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.envs.features import attainment_gap

VALUE_PER_TOKENS = 1000.0
"""A tier's value is that of so many priced tokens."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """The coefficients; each at least 0."""

    goodput: float = 1.0
    """Worth of serving all that is offered for one interval."""
    floors: float = 1.0
    """Price of an interval in which every promised tier misses by all that it promises."""
    preemptions: float = 0.001
    """Price of one preemption."""
    churn: float = 0.002
    """Price of moving one knob by a factor of 10 (`slack_fraction`: by 1)."""
    gap: float = 0.002
    """Price of asking for one knob a factor of 10 beyond what is applied."""


class RewardTerms(TypedDict):
    """The terms; the reward is their sum."""

    goodput: float
    floors: float
    preemptions: float
    churn: float
    gap: float
    twin: float


class Reward:
    """Prices intervals of one plan."""

    def __init__(self, plan: Plan, settings: RewardSettings) -> None:
        """Read values and promises off the plan."""
        tiers = plan.tiers.values()
        self._settings = settings
        self._interval_s = plan.controller.interval_s
        self._values = [tier.value for tier in tiers]
        self._promised = [
            (number, tier.targets.attainment, tier.value)
            for number, tier in enumerate(tiers)
            if not tier.targets.best_effort
        ]
        self._promised_value = sum(value for _, _, value in self._promised)

    def earned(self, telemetry: Telemetry, offered_value_per_s: float) -> RewardTerms:
        """The terms that any allocation earns: goodput, floors, preemptions; the others are 0.

        Args:
            telemetry: One interval.
            offered_value_per_s: V, value a second; 0 of traffic that offers nothing.
        """
        met = sum(
            value * tier.met_tokens
            for value, tier in zip(self._values, telemetry.tiers, strict=True)
        )
        offered = VALUE_PER_TOKENS * offered_value_per_s * self._interval_s
        settings = self._settings
        return RewardTerms(
            goodput=settings.goodput * met / offered if offered > 0 else 0.0,
            floors=-settings.floors * self._below_floors(telemetry),
            preemptions=-settings.preemptions * sum(t.preemptions for t in telemetry.tiers),
            churn=0.0,
            gap=0.0,
            twin=0.0,
        )

    def terms(
        self,
        telemetry: Telemetry,
        offered_value_per_s: float,
        *,
        moved: float,
        beyond: float,
        twin: float,
    ) -> RewardTerms:
        """All terms of one interval.

        Args:
            telemetry: The interval.
            offered_value_per_s: As for `earned`.
            moved: ||residual(applied) - residual(applied before)||_1.
            beyond: ||residual(requested) - residual(applied)||_1.
            twin: `total` of what the static plan earned in the interval; 0 if it is not known.
        """
        terms = self.earned(telemetry, offered_value_per_s)
        terms["churn"] = -self._settings.churn * moved
        terms["gap"] = -self._settings.gap * beyond
        terms["twin"] = -twin
        return terms

    def _below_floors(self, telemetry: Telemetry) -> float:
        if self._promised_value <= 0:
            return 0.0
        below = 0.0
        for number, target, value in self._promised:
            tier = telemetry.tiers[number]
            gap = attainment_gap(target, tier.attainment, tier.attainment_samples)
            # No data is NaN, of which this is false.
            if gap > 0:
                below += value * gap
        return below / self._promised_value


def total(terms: RewardTerms) -> float:
    """The reward: the sum of the terms, the twin's last, so that equal runs earn exactly 0."""
    own = terms["goodput"] + terms["floors"] + terms["preemptions"] + terms["churn"] + terms["gap"]
    return own + terms["twin"]
