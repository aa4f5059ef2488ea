"""An allocation by the names of its entries, for people: `weights.T0`, `max_num_seqs`."""

from __future__ import annotations

from trimtab.agents.reach import KNOBS
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.control_values import entry_names


def named_entries(allocation: Allocation, plan: Plan) -> dict[str, float]:
    """Every entry of every knob by name, in the order of `Allocation`; without the version.

    Args:
        allocation: Of the plan's shape.
        plan: The names of tiers, pools and retention classes.
    """
    entries: dict[str, float] = {}
    for knob in KNOBS:
        value = getattr(allocation, knob)
        if isinstance(value, tuple):
            names = entry_names(knob, plan)
            pairs = zip(names, value, strict=True)
            entries.update((f"{knob}.{name}", entry) for name, entry in pairs)
        else:
            entries[knob] = value
    return entries
