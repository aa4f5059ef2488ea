"""A plan with more or less of it reserved for one tier; the others keep their ratios.

What is reserved is a part of three wholes: the KV blocks (the guarantee of the tier's pool, shared
with the pool's other tiers), the step's prefill budget, and the sum of the weights. It runs
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import Plan
from trimtab.training.tuning.space import Changes, Path, changed, value_at

KNOBS: Final = ("kv", "prefill", "weight")
"""What can be reserved."""
LEAST_SHARE: Final = 1e-6
"""A plan knows no share of 0: less than one of a million KV blocks or prefill tokens."""
_WEIGHTS: Final = (1e-6, 1e6)
_BOUNDS: Final = {"kv": "kv_fractions", "prefill": "prefill_shares", "weight": "weights"}


def reserve_of(plan: Plan, tier: str, knob: str) -> float:
    """The part of the whole that the plan reserves for the tier, in [0, 1]."""
    parts, own = _whole(plan, tier, knob)
    return parts[own] / math.fsum(parts.values())


def with_reserve(plan: Plan, tier: str, fraction: float, knobs: Sequence[str]) -> Plan:
    """The plan with this part of each whole reserved for the tier.

    The controller's bounds are widened where the plan would not be lawful otherwise; what is
    measured is the reserve, not what a controller may do about it.

    Args:
        plan: where the others' ratios come from.
        tier: whose reserve.
        fraction: part of the whole, from 0 to 1; at the ends `LEAST_SHARE` stays.
        knobs: which of `KNOBS`.

    Raises:
        PlanError: there is nobody to share with.
    """
    changes: dict[Path, float] = {}
    for knob in knobs:
        parts, own = _whole(plan, tier, knob)
        if len(parts) == 1:
            raise PlanError(
                f"plan {plan.name}",
                key=".".join(own),
                value=parts[own],
                bound="one of several, to reserve more or less of it",
                remedy=f"leave {knob} out of --move",
            )
        changes |= _moved(parts, own, fraction, weights=knob == "weight")
        changes |= _bounds(plan, knob, [changes[path] for path in parts])
    return changed(plan, changes)


def within_bounds(plan: Plan, moved: Plan, tier: str, knobs: Sequence[str]) -> bool:
    """Whether a controller of `plan` could set what `moved` has."""
    for knob in knobs:
        bounds = getattr(plan.controller.bounds, _BOUNDS[knob])
        values = _whole(moved, tier, knob)[0].values()
        if not all(bounds.floor <= value <= bounds.ceiling for value in values):
            return False
    return True


def _whole(plan: Plan, tier: str, knob: str) -> tuple[dict[Path, float], Path]:
    """The parts of a whole by their place in the plan, and the place of the tier's own."""
    if knob == "kv":
        paths: list[Path] = [("pools", pool) for pool in plan.pools]
        own: Path = ("pools", plan.tiers[tier].pool)
    else:
        key = {"prefill": "prefill_share", "weight": "weight"}[knob]
        paths = [("tiers", name, key) for name in plan.tiers]
        own = ("tiers", tier, key)
    return {path: value_at(plan, path) for path in paths}, own


def _moved(parts: Changes, own: Path, fraction: float, *, weights: bool) -> dict[Path, float]:
    others = {path: value for path, value in parts.items() if path != own}
    total = sum(others.values())
    if weights:
        # Only ratios of weights count, so that the others' can stay as they are.
        low, high = _WEIGHTS
        weight = high if fraction >= 1 else total * fraction / (1 - fraction)
        return {path: float(value) for path, value in others.items()} | {
            own: min(max(weight, low), high)
        }
    share = min(max(fraction, LEAST_SHARE), 1 - LEAST_SHARE)
    return {path: value / total * (1 - share) for path, value in others.items()} | {own: share}


def _bounds(plan: Plan, knob: str, values: Sequence[float]) -> dict[Path, float]:
    """Bounds that hold the values, where the plan's do not."""
    name = _BOUNDS[knob]
    bounds = getattr(plan.controller.bounds, name)
    place: Path = ("controller", "bounds", name)
    return {
        (*place, "floor"): min(float(bounds.floor), *values),
        (*place, "ceiling"): max(float(bounds.ceiling), *values),
    }
