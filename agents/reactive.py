"""The honest hand-written rival of a learned policy: feedback on the measured SLO errors.

It predicts nothing and remembers one smoothed error a tier.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trimtab.agents.policy import Policy
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.envs.features import SloErrors, slo_errors

FloatArray = npt.NDArray[np.float64]

_SMOOTHING = 0.3
_WEIGHT_GAIN = 2.0
_BACK_OFF = 0.75
_ADD_FRACTION = 0.0625
_MOST_BUDGET = 1.5
_KV_GAIN = 0.05
_KV_RETURN = 0.1
_KV_FULL = 0.9


class ReactivePolicy(Policy):
    """Proportional on weights, AIMD on the prefill budget, a slow hand on the KV fractions.

    With e_i the tier's attainment error of the interval (`SloErrors.attainment`: target minus
    measured, shrunk for few samples; no data leaves it out), every control interval does:

    * error:    E_i <- E_i + 0.3 (e_i - E_i)
    * weights:  w_i = w_i(static) exp(-2 M_i), M_i = max(0, E_j of the tiers of more value than i):
                tiers give way to those above them that miss; without errors exactly the static ones
    * budget:   B <- 0.75 B                       if a protected tier's P99 TPOT is over its target,
                B <- min(1.5 B(static), B + s)    else if some tier's P99 TTFT is over its target,
                B <- B(static), by at most s      else; s = B(static) / 16
    * KV:       f_p <- f_p + 0.05 (E_p - mean E), E_p the largest error of the pool's tiers, at
                least 0, if the cache is over 90 % in use or requests were preempted (otherwise
                memory is not what they miss by); else f_p <- f_p + 0.1 (f_p(static) - f_p)

    B and f are those that the engine applied, so that a refused change is not counted twice. The
    result is held to the plan's limits. An interval without any data leaves the allocation as is.
    """

    name = "reactive"
    summary = "feedback on SLO errors: proportional weights, AIMD on the prefill budget"

    def _reset(self, plan: Plan, seed: int) -> None:
        self._errors = np.zeros(len(plan.tiers))

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        errors = slo_errors(telemetry, plan)
        applied = telemetry.applied
        if not errors.known:
            return limits.project(applied, applied, plan).allocation
        seen = np.where(np.isfinite(errors.attainment), errors.attainment, self._errors)
        self._errors = self._errors + _SMOOTHING * (seen - self._errors)
        missing = np.maximum(self._errors, 0.0)
        yielding = np.exp(-_WEIGHT_GAIN * _missing_above(missing, plan))
        static = Allocation.static(plan)
        proposed = replace(
            applied,
            weights=tuple(float(w) for w in np.array(static.weights) * yielding),
            prefill_budget_tokens=_budget(
                applied.prefill_budget_tokens, static.prefill_budget_tokens, errors, plan
            ),
            kv_fractions=_kv_fractions(applied, static, missing, telemetry, plan),
        )
        return limits.project(proposed, applied, plan).allocation


def _missing_above(missing: FloatArray, plan: Plan) -> FloatArray:
    """For each tier the largest error among the tiers of more value, 0 without any."""
    values = np.array([tier.value for tier in plan.tiers.values()])
    above = values[None, :] > values[:, None]
    return np.asarray(np.max(np.where(above, missing[None, :], 0.0), axis=1))


def _budget(applied_tokens: int, static_tokens: int, errors: SloErrors, plan: Plan) -> int:
    protected = np.array([tier.protected for tier in plan.tiers.values()])
    # A comparison with NaN is false: a tier without data neither pushes nor pulls.
    if np.any(protected & (errors.tpot > 0)):
        return max(1, int(_BACK_OFF * applied_tokens))
    step = max(1, round(_ADD_FRACTION * static_tokens))
    late = bool(np.any(errors.ttft > 0))
    goal = int(_MOST_BUDGET * static_tokens) if late else static_tokens
    return min(max(goal, applied_tokens - step), applied_tokens + step)


def _kv_fractions(
    applied: Allocation, static: Allocation, missing: FloatArray, telemetry: Telemetry, plan: Plan
) -> tuple[float, ...]:
    now, home = np.array(applied.kv_fractions), np.array(static.kv_fractions)
    preempted = sum(tier.preemptions for tier in telemetry.tiers) > 0
    if telemetry.kv_use_fraction > _KV_FULL or preempted:
        wants = np.zeros(len(plan.pools))
        np.maximum.at(wants, np.array(plan.pool_of_tier), missing)
        moved = now + _KV_GAIN * (wants - wants.mean())
    elif np.array_equal(now, home):
        return applied.kv_fractions
    else:
        moved = now + _KV_RETURN * (home - now)
    kept = np.maximum(moved, 0.0)
    return tuple(float(f) for f in kept / kept.sum())
