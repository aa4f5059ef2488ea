"""The applied allocation as an engine's gauges show it; the control socket's own answer is better.

It is what there is where the socket does not answer: as old as the other figures.
"""

from __future__ import annotations

import math
from typing import Any

from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.live.lookup import Lookup
from trimtab.engine_bridge.live.series import ALLOCATION_VERSION
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.control_values import entry_names
from trimtab.engine_bridge.vllm.metric_families import ALLOCATION_FIELDS

_WHOLE = frozenset({"prefill_budget_tokens", "draft_tokens", "max_running", "max_num_seqs"})


def allocation_of(lookup: Lookup, plan: Plan) -> Allocation | None:
    """The allocation that the gauges show; None if they are not all there and numbers."""
    values: dict[str, Any] = {}
    for knob, name, _, _ in ALLOCATION_FIELDS:
        found = lookup.find(name)
        entries = entry_names(knob, plan)
        if found is None or any(entry not in found for entry in entries or ("",)):
            return None
        try:
            knobs = tuple(_entry(knob, found[entry]) for entry in entries or ("",))
        except ValueError:
            return None
        values[knob] = knobs if entries else knobs[0]
    version = (lookup.find(ALLOCATION_VERSION) or {}).get("", 0.0)
    return Allocation(**values, version=int(version) if math.isfinite(version) else 0)


def _entry(knob: str, value: float) -> float:
    if value == math.inf:
        return UNLIMITED
    if not math.isfinite(value):
        raise ValueError
    return int(value) if knob in _WHOLE else value
