"""The plan: what an operator promises to each tier, and the static shares to fall back on."""

from trimtab.engine_bridge.plan.bounds import AnyBounds, Controller, KnobBounds
from trimtab.engine_bridge.plan.consistency import SUM_TOLERANCE
from trimtab.engine_bridge.plan.load import SHIPPED, load_plan, plan_from_yaml, with_values
from trimtab.engine_bridge.plan.retention import Retention, RetentionClass
from trimtab.engine_bridge.plan.schema import MAX_TIERS, Plan, Rules
from trimtab.engine_bridge.plan.tiers import Shed, Targets, Tenant, Tier

__all__ = [
    "MAX_TIERS",
    "SHIPPED",
    "SUM_TOLERANCE",
    "AnyBounds",
    "Controller",
    "KnobBounds",
    "Plan",
    "Retention",
    "RetentionClass",
    "Rules",
    "Shed",
    "Targets",
    "Tenant",
    "Tier",
    "load_plan",
    "plan_from_yaml",
    "with_values",
]
