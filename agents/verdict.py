"""What the guard says of one interval: the allocation to apply, and why it is not the proposed one.

Values only: `trimtab.agents.guard` decides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.engine_bridge.allocation import Allocation


class GuardReason(enum.StrEnum):
    """Why something else than the proposal is applied; a closed set, fit for a metric's label.

    The order is the order of the checks.
    """

    POLICY_FAILED = "policy_failed"
    """The policy raised, or what it returned is no allocation for the plan."""
    NON_FINITE = "non_finite"
    """An entry of the proposal is no finite number."""
    STALE = "stale"
    """The telemetry is too old to act on."""
    OUT_OF_ENVELOPE = "out_of_envelope"
    """The policy sees what it was not trained on."""
    FLOORS_AND_TOTALS = "floors_and_totals"
    """The proposal lay outside the guard's reach or the plan's bounds and was moved inside."""
    SLEW = "slew"
    """The proposal went as far as one interval allows."""
    SLO_REGRESSION = "slo_regression"
    """The promises are kept worse than under the static plan."""
    ACTUATION_MISMATCH = "actuation_mismatch"
    """The engine keeps to another allocation than it was asked for."""
    OPERATOR_HOLD = "operator_hold"
    """The operator holds the allocation."""


class GuardMode(enum.StrEnum):
    """What the guard lets a policy do."""

    STATIC = "static"
    """The static plan; the policy is not asked."""
    SHADOW = "shadow"
    """The policy is asked and the verdict shows what it would do; the static plan is applied."""
    CANARY = "canary"
    """A part of the policy's residual on the static plan is applied."""
    ACTIVE = "active"
    """The policy's whole residual is applied."""
    HOLD = "hold"
    """What was applied last stays; the policy is asked only to keep its memory."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The guard's answer for one interval."""

    apply: Allocation
    """What to ask the engine for: lawful after what it applies now."""
    proposed: Allocation | None
    """What would be applied at full exposure, all checks of the proposal passed; None where the
    policy was not asked or gave nothing that could be applied."""
    reasons: tuple[GuardReason, ...]
    """Why `apply` is not what the policy asked for, in the order of `GuardReason`; ramp and
    probation are no reasons."""
    mode: GuardMode
    """The mode in force."""
    exposure: float
    """Part of the proposal's residual that is applied, in [0, 1]."""
    fell_back: bool
    """Whether a reason, and not the mode, made it the static plan."""


@dataclass(frozen=True, kw_only=True)
class GuardTally:
    """What a guard did in a run."""

    intervals: int
    """Verdicts given."""
    fell_back: int
    """Verdicts that fell back to static, cool-downs included."""
    trips: int
    """Times that the policy was sent into a cool-down."""
    latched: bool
    """Whether the static plan was latched at the end."""
    reasons: Mapping[GuardReason, int]
    """Verdicts by reason; every reason has an entry."""
