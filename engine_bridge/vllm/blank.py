"""What the books of a live engine begin with: rows and accounts that nobody has yet."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.layout import NONE
from trimtab.engine_bridge.replay.records import REQUEST, records
from trimtab.engine_bridge.trace import Trace

_ROWS: Final = 4096


def blank_request() -> Any:
    """The record of a row that no request has."""
    blank = records(1, REQUEST)
    for name in ("own_item", "list", "next", "prev", "tier_next", "tier_prev", "successor"):
        blank[name][:] = NONE
    blank.slice[:] = NONE
    for name in ("arrived_s", "admitted_s", "first_s", "last_s"):
        blank[name][:] = np.nan
    blank.cancel_after_s[:] = np.inf
    blank.joined_step[:] = NONE
    return blank[0]


def blank_trace(plan: Plan, accounts: int) -> Trace:
    """A trace that makes the state large enough: an account of every tier and tenant."""
    count = len(plan.tiers) * accounts
    rows = max(_ROWS, count)
    place = np.arange(rows) % count
    return Trace.build(
        arrival_s=np.zeros(rows),
        prompt_tokens=np.ones(rows),
        output_tokens=np.ones(rows),
        tier=place // accounts,
        tenant=place % accounts,
        tier_names=tuple(plan.tiers),
        tenant_names=tuple(str(n) for n in range(accounts)),
    )
