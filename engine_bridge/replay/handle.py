"""One pointer to the replay's memory for compiled code.

Compiled functions that took `layout.State` by value would copy some two hundred words at each call;
through this handle they take one. It adds no state: both sides see the same arrays.
"""

from __future__ import annotations

from typing import Any, cast

from numba import types
from numba.experimental import structref

from trimtab.engine_bridge.compiled import compiled, interpreted
from trimtab.engine_bridge.replay.layout import State


@structref.register
class StateHandleType(types.StructRef):
    """The compiler's type of a handle: the fields of `State`."""

    def preprocess_fields(self, fields: Any) -> Any:
        """Fields hold values, never literals."""
        return tuple((name, types.unliteral(kind)) for name, kind in fields)


class StateHandle(structref.StructRefProxy):
    """A `State` behind a pointer, for compiled code only."""


structref.define_constructor(StateHandle, StateHandleType, list(State._fields))
structref.define_boxing(StateHandleType, StateHandle)


@compiled
def _handle(s: State) -> StateHandle:
    return StateHandle(
        s.engine,
        s.req,
        s.tiers,
        s.tenants,
        s.pools,
        s.items,
        s.item_start,
        s.item_end,
        s.item_ms,
        s.item_content,
        s.encoded,
        s.classes,
        s.lists,
        s.steps,
        s.times,
        s.drafting,
        s.draft_facts,
        s.draft_cost,
        s.coef,
        s.arrival_s,
        s.open_rows,
        s.prefix_ids,
        s.run_blocks,
        s.run_first,
        s.first_item,
        s.maker,
        s.ghost_kind,
        s.ghost_mark,
        s.tables,
        s.free_tables,
        s.due,
        s.pool_refs,
        s.free_items,
        s.class_of,
        s.running,
        s.prefilling,
        s.active,
        s.grow,
        s.tier_grow,
        s.gap_low,
        s.gap_high,
        s.first_log,
        s.done_log,
        s.totals,
        s.step_log,
    )


def handle_of(s: State) -> State:
    """What compiled functions take for this memory; without the compiler, the memory itself."""
    return s if interpreted() else cast(State, _handle(s))
