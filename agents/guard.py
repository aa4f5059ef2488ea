"""The guard: a policy around a policy that lets through only what cannot do much harm.

What-if and the daemon use this same object. It is pure: its clock is the telemetry's. It is not the
last line: the engine holds allocations to the plan's bounds and falls back when their lease ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.policy import Policy
from trimtab.agents.reach import KNOBS, between, distance, within_reach
from trimtab.agents.recovery import Recovery
from trimtab.agents.signs import Actuation, Freshness, Novelty
from trimtab.agents.slo_watch import SloWatch
from trimtab.agents.verdict import GuardMode, GuardReason, GuardTally, Verdict
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry

_APPLYING = (GuardMode.CANARY, GuardMode.ACTIVE)
_TRIPS = (
    GuardReason.POLICY_FAILED,
    GuardReason.NON_FINITE,
    GuardReason.SLO_REGRESSION,
    GuardReason.ACTUATION_MISMATCH,
)
"""Faults of the policy or the engine: they count. Old data and novel traffic are nobody's."""
_ALARMS = frozenset({*_TRIPS, GuardReason.STALE, GuardReason.OUT_OF_ENVELOPE})
_OF_PROPOSAL = frozenset(
    {
        GuardReason.POLICY_FAILED,
        GuardReason.NON_FINITE,
        GuardReason.OUT_OF_ENVELOPE,
        GuardReason.FLOORS_AND_TOTALS,
    }
)
"""What does not matter while the operator holds."""


class Guard(Policy):
    """Any policy, guarded; in what-if it stands where the policy would.

    Each interval it checks, in the order of `GuardReason`: the policy's answer, the age of the
    data, the policy's envelope, reach and bounds, change, the promises, the read-back. What fails
    makes it the static plan at once; then a probation or cool-down, then a ramp.
    """

    name = "guarded"
    summary = "a policy behind the guard"

    def __init__(
        self,
        policy: Policy,
        settings: GuardSettings | None = None,
        *,
        mode: GuardMode = GuardMode.ACTIVE,
    ) -> None:
        """Wrap a policy.

        Args:
            policy: Whom to guard. It gets the name, the summary and the engine's rules.
            settings: What is tolerated; None for the defaults.
            mode: The mode that every run begins in.
        """
        self.policy = policy
        self.settings = settings or GuardSettings()
        self.name = policy.name
        self.summary = policy.summary
        self.engine_rules = policy.engine_rules
        self._first_mode = mode
        self._mode = mode

    def _reset(self, plan: Plan, seed: int) -> None:
        self.policy.reset(plan, seed)
        self._static = Allocation.static(plan)
        self._mode = self._before_hold = self._first_mode
        self._counts = dict.fromkeys(GuardReason, 0)
        self._intervals = self._fell_back = 0
        self._verdict: Verdict | None = None
        self._now_s = 0.0
        self._was_interrupted = False
        self._recovery = Recovery(self.settings)
        self._freshness = Freshness(plan.controller.interval_s)
        self._begin(plan, 0.0)

    def _begin(self, plan: Plan, now_s: float) -> None:
        """Begin to judge: at the run's start, and again when the engine was restarted."""
        settings = self.settings
        self._asked: Allocation | None = None
        self._recovery.restart(now_s)
        self._novelty = Novelty(
            fraction=settings.novel_fraction,
            intervals=settings.novel_intervals,
            window=settings.novel_window,
        )
        self._actuation = Actuation(
            intervals=settings.mismatch_intervals,
            tolerance=settings.mismatch_tolerance,
            interval_s=plan.controller.interval_s,
        )
        self._watch = SloWatch(
            plan, drift=settings.loss_drift, slow_wait_fraction=settings.slow_wait_fraction
        )
        self._measuring = False

    @property
    def mode(self) -> GuardMode:
        """The mode in force."""
        return self._mode

    @property
    def latched(self) -> bool:
        """Whether so many trips came that only `release` lets the policy act again."""
        return self._recovery.latched

    @property
    def tally(self) -> GuardTally:
        """What the guard did since `reset`."""
        return GuardTally(
            intervals=self._intervals,
            fell_back=self._fell_back,
            trips=self._recovery.trips,
            latched=self._recovery.latched,
            reasons=dict(self._counts),
        )

    @property
    def counts(self) -> dict[GuardReason, int]:
        """Verdicts by reason since `reset`; every reason has an entry."""
        return dict(self._counts)

    def set_mode(self, mode: GuardMode) -> None:
        """Change the mode until `reset`; a policy that may act again begins with a probation."""
        if mode is GuardMode.HOLD:
            self.hold()
            return
        if mode in _APPLYING and self._mode not in _APPLYING:
            self._recovery.postpone(self._now_s, None)
        self._mode = mode

    def hold(self) -> None:
        """Operator: keep what was applied last, until `release` or `reset`."""
        if self._mode is not GuardMode.HOLD:
            self._before_hold = self._mode
            self._mode = GuardMode.HOLD

    def release(self) -> None:
        """Operator: end a hold, forget all trips, begin with a probation."""
        if self._mode is GuardMode.HOLD:
            self._mode = self._before_hold
        self._recovery.release(self._now_s)

    def interrupted(self) -> None:
        """The engine was out of reach for longer than its lease, so it went back to static.

        What was asked for holds no more, and what came meanwhile was judged by nobody: begin with
        a probation. Nothing counts as a trip, and a hold is a hold of the static plan from now on.
        """
        self._asked = None
        self._was_interrupted = True

    def decide(self, telemetry: Telemetry) -> Verdict:
        """The verdict for the next interval; `act` is the same and answers `verdict.apply`.

        Raises:
            AllocationError: the telemetry has other tiers than the plan.
        """
        self.act(telemetry)
        assert self._verdict is not None
        return self._verdict

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        verdict = self._judge(telemetry, plan)
        self._verdict = verdict
        self._asked = verdict.apply
        self._intervals += 1
        self._fell_back += verdict.fell_back
        for reason in verdict.reasons:
            self._counts[reason] += 1
        return verdict.apply

    def _judge(self, telemetry: Telemetry, plan: Plan) -> Verdict:
        age = self._freshness.see(telemetry)
        if self._freshness.restarted:
            self._begin(plan, telemetry.time_s - telemetry.interval_s)
        if math.isfinite(telemetry.time_s):
            self._now_s = telemetry.time_s
        if self._was_interrupted:
            # Only now is it known how late it is.
            self._was_interrupted = False
            self._recovery.postpone(self._now_s, None)
        found: set[GuardReason] = set()
        proposal = None
        if age > self.settings.hold_after_intervals:
            found.add(GuardReason.STALE)
            if age <= self.settings.static_after_intervals:
                return self._held(found, None)
        else:
            self._watch_promises(telemetry, found)
            if self._mode is not GuardMode.STATIC:
                proposal = self._ask(telemetry, plan, found)
        if self._actuation.see(self._asked, telemetry):
            found.add(GuardReason.ACTUATION_MISMATCH)
        self._fall_back_on(found)
        if self._mode is GuardMode.HOLD:
            return self._held(found, proposal)
        return self._apply(telemetry, plan, proposal, found)

    def _watch_promises(self, telemetry: Telemetry, found: set[GuardReason]) -> None:
        """Book the interval that has ended, as the allocation in it was."""
        if not self._freshness.new or not telemetry.interval_s > 0:
            return
        self._watch.learn(telemetry)
        away = distance(telemetry.applied, self._static, self.settings.reach)
        measuring = self._recovery.in_probation(telemetry.time_s - telemetry.interval_s)
        if away > 0:
            self._watch.account(telemetry, away)
        elif measuring:
            if not self._measuring:
                self._watch.begin_reference()
            self._watch.measure_reference(telemetry)
        self._measuring = measuring
        if self._watch.lost_s > self.settings.loss_allowance_s:
            found.add(GuardReason.SLO_REGRESSION)
            self._watch.forgive()
        elif (
            self._recovery.age_s(telemetry.time_s) > self.settings.reference_s
            and self._watch.kept_fraction < self.settings.fair_reference
            and self._mode in _APPLYING
        ):
            self._recovery.postpone(telemetry.time_s, None)

    def _ask(self, telemetry: Telemetry, plan: Plan, found: set[GuardReason]) -> Allocation | None:
        """The policy's proposal inside the reach; None if there is none that could be applied."""
        try:
            proposal = self.policy.act(telemetry)
            proposal.check_shape(plan)
        except Exception:
            # Whatever a policy raises, the engine must be served: the verdict says that it failed.
            found.add(GuardReason.POLICY_FAILED)
            return None
        if self._novelty.see(self.policy.outside_fraction):
            found.add(GuardReason.OUT_OF_ENVELOPE)
        if not _all_finite(proposal):
            found.add(GuardReason.NON_FINITE)
            return None
        lawful = within_reach(proposal, self._static, self.settings.reach)
        if lawful != proposal:
            found.add(GuardReason.FLOORS_AND_TOTALS)
        return lawful

    def _fall_back_on(self, found: set[GuardReason]) -> None:
        """Send the policy out for what was found, if it acted: into a cool-down, or a probation."""
        alarms = found & _ALARMS
        if self._mode is GuardMode.HOLD:
            alarms -= _OF_PROPOSAL
        cause = next((reason for reason in GuardReason if reason in alarms), None)
        if cause is None:
            return
        fault = next((reason for reason in _TRIPS if reason in alarms), None)
        acted = self._asked is not None and not _static_knobs(self._asked, self._static)
        if acted and fault is not None:
            self._recovery.trip(self._now_s, fault)
        else:
            self._recovery.postpone(self._now_s, cause)

    def _apply(
        self,
        telemetry: Telemetry,
        plan: Plan,
        proposal: Allocation | None,
        found: set[GuardReason],
    ) -> Verdict:
        """The verdict of the modes in which the policy acts, or would."""
        applying = self._mode in _APPLYING
        exposure = 0.0
        if applying and proposal is not None:
            exposure = self._recovery.exposure(self._now_s, telemetry.interval_s)
        if applying and self._recovery.cause is not None:
            found.add(self._recovery.cause)
        if self._mode is GuardMode.CANARY:
            exposure *= self.settings.canary_fraction
        proposed = applied = None
        if proposal is not None:
            whole = limits.project(proposal, telemetry.applied, plan)
            proposed = whole.allocation
            if exposure > 0:
                part = between(self._static, proposal, exposure)
                held = whole if exposure >= 1 else limits.project(part, telemetry.applied, plan)
                applied = held.allocation
                found |= _reasons_of(held)
            elif self._mode is GuardMode.SHADOW:
                found |= _reasons_of(whole)
        return Verdict(
            apply=self._static if applied is None else applied,
            proposed=proposed,
            reasons=_ordered(found),
            mode=self._mode,
            exposure=exposure,
            fell_back=applying and exposure == 0 and bool(found & _ALARMS),
        )

    def _held(self, found: set[GuardReason], proposal: Allocation | None) -> Verdict:
        """The verdict that keeps what was asked for last, unless something found forbids it."""
        if self._mode is GuardMode.HOLD:
            found = (found - _OF_PROPOSAL) | {GuardReason.OPERATOR_HOLD}
        out = self._recovery.cause is not None or self._mode not in (*_APPLYING, GuardMode.HOLD)
        kept = self._static if out or self._asked is None else self._asked
        if self._recovery.cause is not None:
            found = found | {self._recovery.cause}
        return Verdict(
            apply=kept,
            proposed=proposal,
            reasons=_ordered(found),
            mode=self._mode,
            exposure=0.0 if out else self._last_exposure(),
            fell_back=self._recovery.cause is not None,
        )

    def _last_exposure(self) -> float:
        return 0.0 if self._verdict is None else self._verdict.exposure


def _reasons_of(projection: limits.Projection) -> set[GuardReason]:
    return {
        GuardReason.SLEW if reason is limits.LimitReason.CHANGE else GuardReason.FLOORS_AND_TOTALS
        for reason in projection.reasons
    }


def _ordered(found: Iterable[GuardReason]) -> tuple[GuardReason, ...]:
    return tuple(reason for reason in GuardReason if reason in set(found))


def _static_knobs(allocation: Allocation, static: Allocation) -> bool:
    return replace(allocation, version=static.version) == static


def _all_finite(allocation: Allocation) -> bool:
    knobs = [getattr(allocation, knob) for knob in KNOBS]
    return all(
        _is_finite(value)
        for knob in knobs
        for value in (knob if isinstance(knob, tuple) else (knob,))
    )


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False
