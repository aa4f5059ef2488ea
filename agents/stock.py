"""Stock vLLM as policies: they switch the engine's rules and set nothing.

The allocation they return is the plan's static one; an engine under stock rules ignores it.
"""

from __future__ import annotations

from trimtab.agents.static import StaticPolicy


class StockFcfsPolicy(StaticPolicy):
    """vLLM's `--scheduling-policy fcfs`: in order of arrival, tiers unknown."""

    name = "stock-fcfs"
    summary = "stock vLLM, first come first served"
    engine_rules = "fcfs"


class StockPriorityPolicy(StaticPolicy):
    """vLLM's `--scheduling-policy priority`: the tier's rank in the plan, then arrival."""

    name = "stock-priority"
    summary = "stock vLLM, strict priority in the order of the plan's tiers"
    engine_rules = "priority"
